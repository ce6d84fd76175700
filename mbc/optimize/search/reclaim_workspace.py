"""Reclaims the bytes between placed values for workspaces, in a step whose values are decided.

It assigns addresses to both. Every operation may use the bytes that are free when it runs. But workspaces are of any
size and live for one launch, so the free bytes may be fragmented. Where placing all of them fails, values are placed
first, whose sizes are mostly multiples of one another, and each operation gets the widest gap between them when it
runs. Then the workspaces of the operations that lose most time by that are placed together with the values, as long as
all of these still fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mbc.hardware.streams import aligned
from mbc.ops.fused import SEPARATOR, kind_of
from mbc.optimize import effort
from mbc.optimize.candidates.pareto import MicroBatch
from mbc.optimize.placement.assign_addresses import assign_addresses
from mbc.optimize.placement.place_blocks import fit_within
from mbc.optimize.remat.optimizer_offload import persistent_bytes
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.liveness import Block, blocks_to_place
from mbc.optimize.search.replace_micro_batches import replace_micro_batches
from mbc.optimize.search.solution import Problem, Solution, free_bytes
from mbc.optimize.selection.select import Choices
from mbc.options import UNLIMITED_BYTES
from mbc.plan.model import Launch, Mode


@dataclass(frozen=True, slots=True)
class Decided:
    """A step whose values are decided.

    Attributes:
        problem: The step and its available bytes.
        draft: Launches and buffers, with the workspaces of `choices`.
        choices: Kernels, layouts and divisions.
        divided: Operations in depth-first groups, which keep their division.
    """

    problem: Problem
    draft: Draft
    choices: Choices
    divided: Collection[str]

    def placed(self, spared_bytes: int) -> tuple[Solution, bool]:
        """Return the step with workspaces and addresses, and whether its kernels are as fast as with all free bytes.

        If no placement within the available bytes is found, the step exceeds them.

        Args:
            spared_bytes: Available bytes that workspaces should not use.
        """
        problem, available_bytes = self.problem, self.problem.available_bytes
        whole = self._with_workspaces(free_bytes(self.draft, available_bytes - spared_bytes))
        for candidate in self._placements(whole):
            placed = assign_addresses(candidate.draft, available_bytes, fixed=candidate.offsets)
            if placed.arena_bytes <= available_bytes:
                as_fast = candidate.kernels_us <= (1 + effort.RECLAIM_NEGLIGIBLE) * _kernels_us(whole)
                return Solution(candidate.draft, placed, problem.selector), as_fast
        return Solution(whole, assign_addresses(whole, available_bytes), problem.selector), False

    def _placements(self, whole: Draft) -> Iterator[_Placed]:
        """Yield candidate placements, the fastest first."""
        together = self._placed_with(whole, None, {})
        if together is not None:
            yield together
        free = free_bytes(self.draft, self.problem.available_bytes)
        between = self._placed_with(self._with_workspaces(free), frozenset(), free)
        if between is not None:
            yield self._with_workspaces_placed(between, free)

    def _with_workspaces_placed(self, between: _Placed, free: Mapping[str, int]) -> _Placed:
        """Return a placement with the workspaces that save most time placed together with values, as many as fit."""
        whole = self._with_workspaces(free)
        placed_first: frozenset[str] = frozenset()
        best = between
        slower = _slower(between.draft, whole)
        count = len(slower)
        for _ in range(min(effort.RECLAIM_MAX_TRIALS, effort.RECLAIM_WORK // len(whole.train.launches))):
            count = min(count, len(slower))
            if not count or best.kernels_us <= (1 + effort.RECLAIM_NEGLIGIBLE) * _kernels_us(whole):
                break
            wanted = placed_first.union(slower[:count])
            tried = self._placed_with(whole, wanted, free)
            if tried is None:
                count //= 2
                continue
            placed_first, slower = wanted, _slower(tried.draft, whole)
            best = min(best, tried, key=lambda between: between.kernels_us)
        return best

    def _placed_with(
        self, whole: Draft, placed_first: frozenset[str] | None, free: Mapping[str, int]
    ) -> _Placed | None:
        """Return the values and some workspaces placed within the available bytes; None if that fails quickly.

        Operations of `placed_first` get their workspace of `whole` (None: all operations do). Other operations get the
        gaps, at most the bytes that are `free`.
        """
        left_bytes = self.problem.available_bytes - persistent_bytes(whole)
        placed = _blocks(whole, placed_first)
        offsets = fit_within(placed, left_bytes)
        if offsets is None:
            return None
        draft = whole
        if placed_first is not None:
            widest = _widest(whole, placed, offsets, left_bytes)
            limits = {name: min(widest[name], free[name]) for name in widest.keys() - placed_first}
            draft = self._with_workspaces({**free, **limits})
        # Other workspaces and divisions change neither the order of the rest nor the values that are live together.
        offsets_ = {
            block.buffers[0]: offset for block, offset in zip(_blocks(draft, placed_first), offsets, strict=True)
        }
        return _Placed(draft, offsets_)

    def _with_workspaces(self, free: Mapping[str, int]) -> Draft:
        """Return the draft where every operation gets the workspace that is free where it runs.

        Recomputations get theirs, too. Decisions and layouts do not change.
        """
        table, workspace_limits = self.problem.table, self.problem.workspace_limits
        micro_batches: dict[str, Sequence[MicroBatch]] = {}
        operations = {op.name: op for op in (*self.choices.train, *self.choices.infer) if not kind_of(op).view}
        producers = _producers(self.draft)
        for name, operation in operations.items():
            if name in self.divided or name not in workspace_limits:  # horizontally fused operations need no workspace
                continue
            if any(len(producers.get(value, ())) > 1 for value in operation.outputs):
                continue  # another kernel recomputes the value, and it matches only this kernel bit by bit
            choice = self.choices.operations[name]
            limit = min(workspace_limits[name], free.get(name, workspace_limits[name]))
            front = table.fronts(operation)[choice.layouts]
            # The smallest point is taken where none is small enough.
            point = ([point for point in front if aligned(point.workspace_bytes) <= limit] or front[:1])[-1]
            if point is not choice.point:
                micro_batches[name] = point.micro_batches
        return replace_micro_batches(table, self.draft, operations, micro_batches)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A draft whose blocks are placed.

    Attributes:
        draft: Launches and buffers.
        offsets: Offsets of placed blocks above the persistent buffers, by owner.
    """

    draft: Draft
    offsets: Mapping[int, int]

    @property
    def kernels_us(self) -> float:
        return _kernels_us(self.draft)


def _producers(draft: Draft) -> Mapping[str, Collection[tuple[str, ...]]]:
    """Return the launches that write each value of a step, by their operations."""
    producers: dict[str, set[tuple[str, ...]]] = {}
    for launch in draft.train.launches:
        for access in launch.accesses if launch.operations else ():
            value = draft.buffers[access.buffer].value
            if value is not None and access.mode is not Mode.READ:
                producers.setdefault(value, set()).add(launch.operations)
    return producers


def _kernels_us(draft: Draft) -> float:
    return sum(_times_us(draft).values())


def _slower(draft: Draft, than: Draft) -> list[str]:
    """Return the operations that take longer than in another draft, the largest loss first."""
    known_us = _times_us(than)
    more_us = {name: time_us - known_us[name] for name, time_us in _times_us(draft).items()}
    return sorted((name for name in more_us if more_us[name] > 0), key=lambda name: (-more_us[name], name))


def _times_us(draft: Draft) -> Mapping[str, float]:
    """Return the time of the launches of each operation in a step, by name."""
    times_us: dict[str, float] = {}
    for launch in draft.train.launches:
        times_us[_name(launch)] = times_us.get(_name(launch), 0.0) + launch.work.time_us
    return times_us


def _blocks(draft: Draft, operations: frozenset[str] | None) -> tuple[Block, ...]:
    """Return the blocks of values in a step, and of the workspaces of these operations; None: of all."""

    def is_wanted(block: Block) -> bool:
        holds_value = draft.buffers[block.buffers[0]].value is not None
        return holds_value or operations is None or _name(draft.train.launches[block.start]) in operations

    return tuple(filter(is_wanted, blocks_to_place(draft.train, draft.buffers, frozenset(draft.persistent))))


def _widest(draft: Draft, placed: Sequence[Block], offsets: Sequence[int], available_bytes: int) -> Mapping[str, int]:
    """Return the widest gap between blocks while each operation of a step runs, by name."""
    columns = [(offset, offset + b.size_bytes, b.start, b.stop) for offset, b in zip(offsets, placed, strict=True)]
    low, high, start, stop = np.array(sorted(columns), np.int64).reshape(-1, 4).T
    widest: dict[str, int] = {}
    for i, launch in enumerate(draft.train.launches):
        if launch.operations:
            there = (start <= i) & (stop > i)
            gap_bytes = np.append(low[there], available_bytes) - np.append(0, high[there])
            widest[_name(launch)] = min(widest.get(_name(launch), UNLIMITED_BYTES), int(gap_bytes.max()))
    return widest


def _name(launch: Launch) -> str:
    return SEPARATOR.join(launch.operations)
