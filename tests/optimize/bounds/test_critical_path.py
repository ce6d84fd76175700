"""No schedule on two streams is shorter than the critical-path lower bound."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.compiler import compile_plan
from mbc.hardware.collective_times import CollectiveKind
from mbc.hardware.spec import device_specs
from mbc.hardware.streams import Stream
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.bounds.critical_path import LaunchOption, critical_path_us, earliest_us
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.placement.assign_addresses import assign_addresses
from mbc.optimize.schedule.emit_launches import emit_launches
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.schedule.simulate import Contention, simulate
from mbc.optimize.search.solution import Solution
from mbc.optimize.selection.select import choose
from mbc.optimize.selection.selector import Selector
from mbc.options import Options
from mbc.plan.model import Kernel, Launch, Plan, Program
from mbc.source import Source
from tests.optimize.planned import Favouring, draft_of, table
from tests.runtime.nets import SMALL

STREAMS = (Stream.COMPUTE, Stream.CONCURRENT)
NAMES = "abcde"
LAUNCH_US = 3.0  # which weights the loss of a rank by its rows
GROUPED = tuple(Favouring(provider) for provider in PROVIDERS)


@st.composite
def launch_options(draw: st.DrawFn) -> list[LaunchOption]:
    """Draw launches over values: some can be computed in several ways, some together, some from each other."""
    needed, outputs = (st.sets(st.sampled_from(NAMES), min_size=least, max_size=2) for least in (0, 1))
    times = st.integers(0, 9).map(float)
    drawn = draw(st.lists(st.tuples(needed, outputs, times), min_size=1, max_size=9))
    return [LaunchOption(tuple(sorted(inputs)), tuple(sorted(outputs)), time_us) for inputs, outputs, time_us in drawn]


@given(launch_options())
def test_when_values_can_be_there_is_the_least_of_all_derivations(given: list[LaunchOption]) -> None:
    defined = {name for option in given for name in option.outputs}

    def least(name: str, above: frozenset[str]) -> float:
        if name not in defined:
            return 0.0  # it exists from the start
        return min(
            (
                option.time_us + max((least(needed, above | {name}) for needed in option.inputs), default=0.0)
                for option in given
                if name in option.outputs and not (above | {name}) & set(option.inputs)
            ),
            default=float("inf"),
        )

    ready_us = earliest_us(given)
    for name in defined:
        assert ready_us.get(name, float("inf")) == least(name, frozenset())


def orders(reads: Sequence[set[int]]) -> Iterator[tuple[int, ...]]:
    for run in itertools.permutations(range(len(reads))):
        if all(run.index(before) < run.index(i) for i, needed in enumerate(reads) for before in needed):
            yield run


@settings(max_examples=40)
@given(st.data())
def test_no_schedule_of_a_small_program_is_faster(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    reads = [data.draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set[int]() for i in range(count)]
    times_us = [data.draw(st.integers(1, 9)) for _ in range(count)]
    fills = [data.draw(st.sampled_from((0.0, 0.3, 0.8, 1.0))) for _ in range(count)]
    chain = [
        LaunchOption(tuple(NAMES[j] for j in reads[i]), (NAMES[i],), float(time_us))
        for i, time_us in enumerate(times_us)
    ]
    bound_us = max(sum(times_us) / len(STREAMS), *earliest_us(chain).values(), 0.0)
    best_us = float("inf")
    for run in orders(reads):
        for streams in itertools.product(STREAMS, repeat=count):
            launches = tuple(
                Launch(Kernel("", "", (), float(times_us[i]), True), (), streams[place], ())
                for place, i in enumerate(run)
            )
            waits = tuple((run.index(j), place) for place, i in enumerate(run) for j in sorted(reads[i]))
            contention = Contention({}, tuple(fills[i] for i in run))
            best_us = min(best_us, simulate(Program(launches, waits, (), ()), contention=contention))
    assert bound_us * (1 - 1e-9) <= best_us <= sum(times_us) * (1 + 1e-9)


@functools.cache
def tables(network: str, grouped: bool) -> CandidateTable:
    plain = table(network)
    return CandidateTable(plain.graph, plain.device, GROUPED) if grouped else plain


@settings(max_examples=60)
@given(st.sampled_from(("residual", "dense")), st.booleans(), st.booleans(), st.data())
def test_no_choice_and_no_streams_are_faster(network: str, grouped: bool, lean: bool, data: st.DataObject) -> None:
    variant = tables(network, grouped)
    fastest_us = choose(variant, {}, programs=Fusion.of(variant).programs()).train_us
    programs = Fusion.of(variant).programs() if data.draw(st.booleans()) else None
    limits = {op.name: 0 for op in variant.graph.train} if lean else {}
    choices = choose(variant, limits, programs=programs)
    draft = alias_in_place(variant.graph, emit_launches(variant, choices), (*choices.train, *choices.infer))
    gone = data.draw(st.sets(st.integers(0, len(draft.train.launches) - 1), min_size=1))
    launches = tuple(
        replace(launch, stream=Stream.CONCURRENT) if i in gone else launch
        for i, launch in enumerate(draft.train.launches)
    )
    draft = replace(draft, train=replace(draft.train, launches=launches))
    bound_us = critical_path_us(Fusion.of(variant), draft.train, draft.buffers, fastest_us)
    assert 0 < bound_us <= Solution(draft, assign_addresses(draft), Selector.of(variant)).step_us * (1 + 1e-9)


def test_divided_operations_form_no_chain_and_serial_steps_no_bound() -> None:
    for micro_batch, chained in ((0, True), (2, False)):
        candidates, draft = table("residual", "fp32", micro_batch), draft_of("residual", "fp32", micro_batch)
        assert critical_path_us(Fusion.of(candidates), draft.train, draft.buffers, 100.0) == 0.0
        launches = (replace(draft.train.launches[0], stream=Stream.CONCURRENT), *draft.train.launches[1:])
        bound_us = critical_path_us(
            Fusion.of(candidates), replace(draft.train, launches=launches), draft.buffers, 100.0
        )
        assert (bound_us > 50.0) == chained and bound_us >= 50.0


@functools.cache
def shared(gpus: int, each: int) -> Plan:
    settings = (("batch", str(gpus * each)),)
    return compile_plan(Source("small.mbc", SMALL), Options(gpu="h200", gpus=gpus, settings=settings))


@pytest.mark.parametrize("gpus", [2, 8])
def test_collectives_have_a_stream_of_their_own(gpus: int) -> None:
    """The bounds of several GPUs include the time to sum gradients.

    A serial step of several GPUs takes the time of one GPU with its rows, plus the time to sum all gradients. A step
    with several streams takes the time of the kernels, or that of the sums, whichever is longer.
    """
    alone, plan = shared(1, 3), shared(gpus, 3)
    graph, model = plan.graph, device_specs()["h200"].collectives
    sums = [graph.values[name].type.size_bytes for op in graph.train if op.kind == "all_reduce" for name in op.inputs]
    summed_us = model.time_us(CollectiveKind.ALL_REDUCE, sum(sums), gpus, max(model.choices(gpus)))
    bounds = plan.bounds
    assert bounds.fastest_us == pytest.approx(alone.bounds.fastest_us + summed_us, abs=LAUNCH_US)
    streams = len({launch.stream for launch in plan.train.launches} & set(STREAMS))
    assert bounds.critical_path_us >= max(alone.bounds.fastest_us / streams, summed_us) * 0.99
    assert bounds.critical_path_us == bounds.least_us <= plan.predictions.train_us
