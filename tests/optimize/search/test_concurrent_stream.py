"""The concurrent stream: its launches, unchanged results, and its waits, which the verifier checks."""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from mbc.cli.compile_command import summary
from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.hardware.streams import Stream
from mbc.optimize import effort
from mbc.optimize.placement.assign_addresses import assign_addresses
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.schedule.simulate import simulate
from mbc.optimize.search import search
from mbc.optimize.search.concurrent_stream import use_concurrent_stream
from mbc.optimize.search.solution import Solution
from mbc.optimize.selection.selector import Selector
from mbc.options import Options
from mbc.plan.model import Copy, Launch, Plan
from mbc.plan.prefetch import input_bytes
from mbc.plan.verify import verify_plan
from mbc.report.tables import totals_text
from mbc.runtime.launch_order import Transfers
from mbc.source import Source
from tests.optimize.planned import draft_of, kept_plan, plan_of, table, trained

ROOT = Path(__file__).parents[3]
ROOM_BYTES = 140 * 10**9
NONE_AND_THIS = (frozenset[str](), frozenset({"concurrent_stream"}))
CASES = [("residual", "fp32"), ("residual", "bf16"), ("dense", "fp16")]


@pytest.fixture(autouse=True, scope="module")
def _room_for_whole_buffers() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """Allow a larger arena for the concurrent stream, because in a small network one buffer is a large share."""
    with patch.object(effort, "CONCURRENT_MAX_ARENA", 1.2):
        yield


def timed(launch: Launch, time_us: float) -> Launch:
    assert not isinstance(launch.work, Copy)
    return replace(launch, work=replace(launch.work, time_us=time_us))


def solution(network: str, precision: str) -> Solution:
    """Return a step whose filter gradients take as long as if they filled the GPU, but do not fill it.

    All updates come last, as those of one multi-tensor launch do. An update directly after its gradient would leave the
    gradient no slack.
    """
    named, draft = functools.partial(kinds, network, precision), draft_of(network, precision)
    launches = (
        timed(launch, 30.0 if "backward_filter" in " ".join(named(launch)) else 20.0)
        for launch in sorted(draft.train.launches, key=lambda x: any(kind.endswith("_update") for kind in named(x)))
    )
    draft = replace(draft, train=replace(draft.train, launches=tuple(launches)))
    draft = alias_in_place(table(network, precision).graph, draft)
    return Solution(draft, assign_addresses(draft), Selector.of(table(network, precision)))


def kinds(network: str, precision: str, launch: Launch) -> list[str]:
    named = {op.name: op.kind for op in table(network, precision).graph.train}
    return [named[name] for name in launch.operations]


@functools.cache
def plans(network: str, precision: str) -> tuple[Plan, Plan]:
    """Return two plans: with one stream, and with a concurrent stream."""
    alone, kept = solution(network, precision), kept_plan(network, precision)
    return plan_of(kept, alone.draft), plan_of(kept, use_concurrent_stream(alone, ROOM_BYTES).draft)


def streams(launches: tuple[Launch, ...]) -> set[Stream]:
    return {launch.stream for launch in launches}


@pytest.mark.parametrize("case", CASES)
def test_filter_gradients_go_to_the_concurrent_stream_where_the_gpu_is_idle(case: tuple[str, str]) -> None:
    alone = solution(*case)
    concurrent = use_concurrent_stream(alone, ROOM_BYTES)
    gone = [launch for launch in concurrent.draft.train.launches if launch.stream is Stream.CONCURRENT]
    assert sum("backward_filter" in kind for launch in gone for kind in kinds(*case, launch)) >= 2
    assert concurrent.placed.live_bytes == alone.placed.live_bytes and concurrent.step_us < alone.step_us
    assert [replace(x, stream=Stream.COMPUTE) for x in concurrent.draft.train.launches] == list(
        alone.draft.train.launches
    )
    assert use_concurrent_stream(alone, alone.placed.live_bytes - 1) is alone  # no room for it


def test_kernels_that_fill_the_gpu_stay() -> None:
    alone = solution("residual", "fp32")
    slow = replace(alone.table.device, copy_gb_s=alone.table.device.copy_gb_s / 1e7)
    alone = replace(alone, selector=Selector.of(replace(alone.table, device=slow)))
    assert use_concurrent_stream(alone, ROOM_BYTES) is alone


@pytest.mark.parametrize("case", CASES)
def test_the_step_is_shorter_and_the_same_to_the_bit(case: tuple[str, str]) -> None:
    plain, concurrent = plans(*case)
    assert streams(plain.train.launches) == {Stream.COMPUTE}
    assert streams(concurrent.train.launches) == {Stream.COMPUTE, Stream.CONCURRENT}
    assert simulate(concurrent.train) < 0.97 * simulate(plain.train)
    verify_plan(concurrent)
    right = trained(plain, Transfers.IN_ORDER)
    for transfers in Transfers:
        assert trained(concurrent, transfers) == right


@pytest.mark.parametrize("case", CASES)
def test_every_wait_is_needed(case: tuple[str, str]) -> None:
    _, concurrent = plans(*case)
    waits = concurrent.train.waits
    assert waits
    for wait in waits:
        fewer = replace(concurrent, train=replace(concurrent.train, waits=tuple(w for w in waits if w != wait)))
        with pytest.raises(MbcError) as caught:
            verify_plan(fewer)
        assert caught.value.code.startswith("MBC1")


def test_inputs_travel_ahead_unless_the_step_saves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = solution("residual", "fp32")
    graph = alone.table.graph
    wide_bytes = alone.placed.arena_bytes + input_bytes(graph)
    rooms: list[int] = []
    saves_us = 0.0

    def use_concurrent_stream(one: Solution, available_bytes: int) -> Solution:
        rooms.append(available_bytes)
        return replace(one) if available_bytes >= needs_bytes else one

    monkeypatch.setattr(search, "use_concurrent_stream", use_concurrent_stream)
    monkeypatch.setattr(Solution, "step_us", property(lambda one: 1e3 - (one is not alone) * saves_us))
    needs_bytes = alone.placed.arena_bytes
    assert search._with_concurrent_stream(alone, wide_bytes) is not alone and rooms == [
        needs_bytes
    ]  # there is room for both
    assert search._with_concurrent_stream(alone, wide_bytes - 1) is not alone and rooms[1:] == [
        wide_bytes - 1
    ]  # inputs have none
    needs_bytes += 1
    assert search._with_concurrent_stream(alone, wide_bytes) is alone
    saves_us = 1.01 * alone.table.device.host_link.copy_us(input_bytes(graph), Stream.TO_DEVICE)
    assert search._with_concurrent_stream(alone, wide_bytes) is not alone


def test_a_small_batch_is_planned_so() -> None:
    source = Source("resnet.mbc", (ROOT / "examples" / "resnet.mbc").read_text())
    settings = (("depth", "18"), ("batch", "8"), ("train.precision", "bf16"))
    asked = Options(gpu="h200", settings=settings)
    concurrent, plain = (compile_plan(source, replace(asked, without=without)) for without in NONE_AND_THIS)
    assert streams(concurrent.train.launches) == {Stream.COMPUTE, Stream.CONCURRENT}
    assert streams(plain.train.launches) == {Stream.COMPUTE}
    assert concurrent.predictions.train_us < 0.95 * plain.predictions.train_us
    bounds = concurrent.bounds
    assert (
        bounds.fastest_us / 2
        < bounds.critical_path_us
        == bounds.least_us
        < concurrent.predictions.train_us
        < bounds.fastest_us
    )
    assert plain.bounds.critical_path_us == 0.0 and plain.bounds.least_us == bounds.fastest_us
    shown = totals_text(concurrent)
    assert "critical-path lower bound" in shown and "best serial schedule" in shown
    assert "critical-path" not in totals_text(plain)
    lines = summary(concurrent)
    assert any(re.search(r"^  bound +\d+\.\d% above the critical-path lower bound$", line) for line in lines)
    assert any(re.search(r"^  serial +\d+\.\d% faster than the best serial schedule$", line) for line in lines)
    assert "  serial     as fast as the best serial schedule" in summary(plain)
    assert "  bound      at the lower bound of serial schedules" in summary(plain)
    slow_us = 0.8 * plain.predictions.train_us
    slow = replace(plain, bounds=replace(plain.bounds, fastest_us=0.9 * slow_us, within_budget_us=slow_us))
    assert "  bound      25.0% above the lower bound of serial schedules within the budget" in summary(slow)
    assert any(
        re.search(r"^  launches +\d+ of the step, \d+ of them on the concurrent stream; ", line) for line in lines
    )
