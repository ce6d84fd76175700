"""Fused rematerialization in reductions: fewer bytes, equal bits, and no value comes too late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.hardware.streams import Stream
from mbc.kernels.providers import PROVIDERS
from mbc.ops.fused import join, names_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.remat.apply_decisions import Decisions, Recompute, rewrite
from mbc.optimize.remat.draft_state import RematState, RematTask
from mbc.optimize.remat.fused_remat import defer_readers, fused_remat_launches
from mbc.optimize.schedule.emit_launches import emit_launches
from mbc.optimize.schedule.regions import regions_of
from mbc.optimize.selection.select import choose
from mbc.options import UNLIMITED_BYTES
from mbc.plan.model import Access, Kernel, Launch, Mode
from tests.optimize.fusion.test_select_groups import graph
from tests.optimize.fusion.test_select_groups import table as favouring
from tests.optimize.fusion.unclustered import UNCLUSTERED
from tests.optimize.remat.test_greedy import RECOMPUTE
from tests.optimize.search.test_fused_within_budget import kept, recomputed_outputs, within


def fused_remat(precision: str, share: float) -> list[Launch]:
    """Return the launches that compute sums and, with them, recompute a value."""
    return [
        launch
        for launch in recomputed_outputs(within(precision, share))
        if launch.operations and "reduce" in launch.operations[-1]
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_launch_of_sums_writes_the_dropped_value(precision: str):
    launches = fused_remat(precision, 0.85)
    assert launches
    assert all(sum(access.mode is not Mode.READ for access in launch.accesses) >= 3 for launch in launches)


def test_nothing_is_recomputed_where_all_fits():
    assert not any(launch.operations for launch in recomputed_outputs(kept("fp32")))  # but for conversions


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_readers_come_behind_the_sums_and_before_who_needs_them(precision: str):
    steps = graph(precision)
    table = CandidateTable(steps, UNCLUSTERED, PROVIDERS)
    before = choose(table, {}, programs=Fusion.of(table).programs())
    choices = defer_readers(Fusion.of(table), before, UNLIMITED_BYTES)
    assert defer_readers(Fusion.of(table), before, 0) is before, "both operands would not fit"
    places = {name: place for place, op in enumerate(choices.train) for name in names_of(op)}
    outputs = {name: place for place, op in enumerate(choices.train) for name in op.outputs}
    for place, operation in enumerate(choices.train):
        assert all(outputs.get(name, -1) < place for name in operation.inputs)
    late = 0
    for remat in Fusion.of(table).fused_remats:
        sums = places[names_of(remat.operation)[-1]]
        if remat.can_replace(choices.train[sums]):
            late += any(remat.value in operation.inputs for operation in choices.train[sums + 1 :])
    assert late


def test_sums_that_write_more_are_not_replaced():
    """Sums that also write ReLU's gradient are not replaced, because its readers would not find it."""
    steps = graph("fp32")
    by_name = {operation.name: operation for operation in steps.train}
    checked = 0
    for remat in Fusion.of(CandidateTable(steps, UNCLUSTERED, PROVIDERS)).fused_remats:
        members = [by_name[name] for name in names_of(remat.operation) if name in remat.reductions]
        between = [name for member in members[:-1] for name in member.outputs]
        wanted = [name for name in remat.operation.outputs if name != remat.value]
        assert remat.can_replace(join(members, wanted))
        if not set(between) <= set(wanted):
            assert not remat.can_replace(join(members, [*between, *wanted]))
            checked += 1
    assert checked


def test_gaps_have_the_time_of_fused_launches_and_gradients_in_another_layout_are_converted_after_the_sums():
    steps = graph("fp32")
    table = favouring(steps, gpu=UNCLUSTERED)
    programs = Fusion.of(table).programs()
    choices = defer_readers(Fusion.of(table), choose(table, {}, programs=programs), UNLIMITED_BYTES)
    draft = emit_launches(table, choices)
    regions = regions_of(steps, draft, draft.train)
    launches = fused_remat_launches(Fusion.of(table), draft, regions, choices.train)
    task = RematTask(steps, draft, UNCLUSTERED.links, RECOMPUTE, 0, fused_remat=launches, regions=regions)
    ledger = RematState(task).ledger
    gaps = {gap for place in range(len(regions)) for gap in ledger.gaps(place)}
    times_us = {(ledger.defined_at[buffer], before): time_us for buffer, before, time_us in gaps}
    both = times_us.keys() & launches.keys()
    assert both and all(times_us[at] == launches[at].more_us for at in both)
    (maker, position), launch = next((at, run) for at, run in launches.items() if at[1] > run.reductions)
    # Whoever reads the value reads a copy of it instead.
    old, other = launch.target, len(draft.buffers)
    rows = draft.buffers[old].rows
    convert = Launch(
        Kernel("mbc", "convert", (), 1.0, False),
        (),
        Stream.COMPUTE,
        (Access(old, rows, Mode.READ), Access(other, rows, Mode.WRITE)),
    )

    def renamed(launch: Launch) -> Launch:
        return replace(
            launch, accesses=tuple(replace(a, buffer=other) if a.buffer == old else a for a in launch.accesses)
        )

    launches = draft.train.launches
    stop = regions[maker].stop
    train = replace(draft.train, launches=(*launches[:stop], convert, *map(renamed, launches[stop:])))
    copied = replace(draft, buffers=(*draft.buffers, replace(draft.buffers[old], alias=None)), train=train)
    regions = regions_of(steps, copied, train)
    fused_remats = fused_remat_launches(Fusion.of(table), copied, regions, choices.train)
    (again,) = (run for (by, at), run in fused_remats.items() if (by, at) == (maker, position + 1))
    decisions = Decisions((Recompute(old, position + 1), Recompute(other, position + 1)))
    written = rewrite(copied, regions, decisions, UNCLUSTERED.links, fused_remats).draft.train.launches
    conversions = [i for i, launch in enumerate(written) if launch.work == convert.work]
    sums = [i for i, launch in enumerate(written) if launch.operations == again.launch.operations]
    assert len(conversions) == 2 and conversions[0] < sums[0] < conversions[1]
    assert len(written) == len(train.launches) + 1
