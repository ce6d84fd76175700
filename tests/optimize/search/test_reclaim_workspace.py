"""Workspace that is left beside decided values: all that live bytes allow, or all that addresses allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mbc.optimize.placement.place_blocks import fit_within
from mbc.optimize.remat.optimizer_offload import persistent_bytes
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.schedule.liveness import Block, blocks, peak_bytes
from mbc.optimize.search import reclaim_workspace
from mbc.optimize.search.reclaim_workspace import Decided
from mbc.optimize.search.solution import Problem
from mbc.plan.verify import verify_plan
from tests.optimize.planned import FASTER, kept_plan, plan_of, roomy_problem

NETWORK = "residual"


def decided(available_bytes: int) -> Decided:
    """Return a draft that keeps every value, without workspace."""
    problem = roomy_problem(NETWORK, available_bytes)
    choices = problem.choose(dict.fromkeys(problem.workspace_limits, 0))
    graph = problem.table.graph
    return Decided(problem, alias_in_place(graph, emit_launches(problem.table, choices)), choices, ())


def train_blocks(draft: Draft) -> tuple[Block, ...]:
    return blocks(draft.train, draft.buffers, frozenset(draft.persistent))


def least_bytes() -> int:
    """Return the bytes that the values alone take."""
    draft = decided(0).draft
    return persistent_bytes(draft) + peak_bytes(train_blocks(draft))[0]


def kernels_us(draft: Draft) -> float:
    return sum(launch.work.time_us for launch in draft.train.launches)


def test_with_enough_memory_kernels_are_the_fastest() -> None:
    step = decided(1 << 40)
    solution, as_fast = step.placed(0)
    assert as_fast
    kernels = [launch for launch in solution.draft.train.launches if launch.operations]
    held = {solution.draft.buffers[a.buffer].size_bytes for launch in kernels for a in launch.accesses[-1:]}
    assert held == {FASTER[-1][0]}


@pytest.mark.parametrize("more_bytes", [0, 4096, 8192])
def test_workspaces_are_placed_between_values(more_bytes: int) -> None:
    available_bytes = least_bytes() + more_bytes
    step = decided(available_bytes)
    by_counting = Problem(step.problem.selector, step.problem.workspace_limits, 1 << 40)
    whole, _ = replace(step, problem=by_counting).placed((1 << 40) - available_bytes)
    assert whole.placed.arena_bytes > available_bytes  # free memory is fragmented
    solution, _ = step.placed(0)
    assert solution.placed.arena_bytes <= available_bytes
    assert kernels_us(whole.draft) <= kernels_us(solution.draft) < kernels_us(step.draft)
    verify_plan(plan_of(kept_plan(NETWORK), solution.draft))
    assert not overlapping(solution.draft, solution.placed.offsets)


def test_workspaces_that_matter_most_are_placed_with_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    step = decided(least_bytes() + 4096)
    values = len(train_blocks(step.draft))
    asked: list[int] = []

    def fits(placed: Sequence[Block], left_bytes: int) -> list[int] | None:
        asked.append(len(placed) - values)
        return fit_within(placed, left_bytes) if len(placed) <= values + 1 else None

    monkeypatch.setattr(reclaim_workspace, "fit_within", fits)
    monkeypatch.setattr(reclaim_workspace, "_widest", lambda draft, *_: dict.fromkeys(named(draft), 0))
    solution, as_fast = step.placed(0)
    assert not as_fast
    assert kernels_us(solution.draft) < kernels_us(step.draft)
    assert 1 in asked


def named(draft: Draft) -> list[str]:
    return [launch.operations[0] for launch in draft.train.launches if launch.operations]


def overlapping(draft: Draft, offsets: Sequence[int]) -> list[tuple[Block, Block]]:
    value_blocks = train_blocks(draft)
    places = [(offsets[block.buffers[0]], block) for block in value_blocks]
    return [
        (a, b)
        for i, (at, a) in enumerate(places)
        for other, b in places[:i]
        if a.start < b.stop and b.start < a.stop and at < other + b.size_bytes and other < at + a.size_bytes
    ]
