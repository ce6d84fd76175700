"""A problem (a step and its available bytes), and its solution: a draft with addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mbc.hardware.streams import Space
from mbc.ops.fused import SEPARATOR, kind_of
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Programs, plain
from mbc.optimize.placement.assign_addresses import Placed
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.optimizer_offload import offload_states, persistent_bytes, states_to_offload
from mbc.optimize.schedule.choose_buckets import Buckets
from mbc.optimize.schedule.coalesce_waits import coalesce_waits
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.convert_back import convert_back
from mbc.optimize.schedule.depth_first_micro_batches import depth_first
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.liveness import blocks_to_place, live_bytes
from mbc.optimize.schedule.split_updates import split_within
from mbc.optimize.schedule.synchronise import synchronise
from mbc.optimize.selection.select import Choices
from mbc.optimize.selection.selector import Selector
from mbc.options import UNLIMITED_BYTES
from mbc.plan.model import Copy, Program


@dataclass(slots=True)
class Spent:
    """Work that was spent on a problem. It is mutable: every attempt at the problem counts here.

    Attributes:
        work: Launches of rewritten programs.
        searches: Sets of techniques that were searched.
    """

    work: int = 0
    searches: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A step and its available bytes.

    Attributes:
        selector: Choices for the graph.
        workspace_limits: Workspace limits of operations by name, independent of the bytes that are free.
        available_bytes: Bytes of the arena that the step may use.
        programs: Programs with fusion groups; None: without fusion.
        fused_updates: Whether one launch updates many parameters. Only otherwise the optimizer's states may be
            offloaded.
        buckets: Gradient buckets; None if there is one rank.
        spent: Work that was spent on this step, with all techniques.
    """

    selector: Selector
    workspace_limits: Mapping[str, int]
    available_bytes: int
    programs: Programs | None = None
    fused_updates: bool = True
    buckets: Buckets | None = None
    spent: Spent = field(default_factory=Spent, compare=False)

    @property
    def table(self) -> CandidateTable:
        """Candidates of the graph."""
        return self.selector.table

    @property
    def with_single_updates(self) -> Problem:
        """This step with a launch for every update, so that optimizer states can be offloaded."""
        return replace(self, fused_updates=False)

    @property
    def exhausted(self) -> bool:
        """True if the search should stop where nothing fits yet."""
        operations = len(self.table.graph.train)
        return self.spent.work > max(effort.NOT_FOUND_WORK, effort.NOT_FOUND_WORK_OF_OPERATION * operations)

    def tries_more(self, solutions: Sequence[Solution]) -> bool:
        """Return whether to try techniques that are usually tried only if nothing fits.

        They are tried while no solution fits and is about as fast as the step without a limit (`is_good`), and while
        the work so far is small: the square of the number of operations, times the number of searches.
        """
        work = (1 + self.spent.searches) * len(self.table.graph.train) ** 2
        return work <= effort.SLOW_STEP_WORK and not any(map(self.is_good, solutions))

    @property
    def most_workspace_bytes(self) -> int:
        """The most workspace that any candidate of an undivided operation needs."""
        programs, table = self.programs or plain(self.table.graph), self.table
        operations = (op for op in (*programs.train, *programs.infer) if not kind_of(op).view)
        return max(front[-1].workspace_bytes for op in operations for front in table.fronts(op).values())

    def choose(self, limits: Mapping[str, int], rows: Mapping[str, int] | None = None) -> Choices:
        """Return the choices of this step."""
        return self.selector.choose(limits, rows, self.programs, self.fused_updates)

    @property
    def fastest_us(self) -> float:
        """Time of the step without a limit of memory."""
        return self.choose(self.workspace_limits).train_us

    def fits(self, solution: Solution) -> bool:
        """Return whether a solution fits the available bytes."""
        return solution.fits(self.available_bytes)

    def is_good(self, solution: Solution) -> bool:
        """Return whether a solution fits, and is about as fast as the step without a limit."""
        return self.fits(solution) and solution.step_us <= effort.FIT_GOOD_ENOUGH * self.fastest_us

    def best(self, solutions: Sequence[Solution]) -> Solution:
        """Return the fastest solution that fits; if none fits, return the smallest one."""
        return best_within(self.available_bytes, solutions)


@dataclass(frozen=True)
class Solution:
    """A draft with addresses. It exceeds the available bytes where no solution that fits was found.

    Attributes:
        draft: The step's launches and buffers.
        placed: Their addresses.
        selector: Choices for the graph.
        origin: The problem and the techniques by which a search found the step; None where no search did.
    """

    draft: Draft
    placed: Placed
    selector: Selector
    origin: tuple[Problem, AllowedTechniques] | None = field(default=None, compare=False)

    @property
    def table(self) -> CandidateTable:
        """Candidates of the graph."""
        return self.selector.table

    @cached_property
    def timed_train(self) -> tuple[Program, float]:
        """The training step with its waits, and its predicted time."""
        return self.finished(self.draft.train)

    @property
    def step_us(self) -> float:
        """Predicted time of the training step, waits for copies included."""
        return self.timed_train[1]

    def fits(self, available_bytes: int) -> bool:
        """Return whether the solution takes no more of the arena."""
        return self.placed.arena_bytes <= available_bytes

    @property
    def links_used(self) -> int:
        """Number of links that carry copies of the step. There are two links: to the host, and to a peer."""
        return len({buffer.space for buffer in self.draft.buffers} - {Space.ARENA})

    @property
    def copies(self) -> bool:
        """True if the step offloads anything."""
        return any(isinstance(launch.work, Copy) for launch in self.draft.train.launches)

    def finished(self, program: Program) -> tuple[Program, float]:
        """Return one of the draft's programs with its waits and its predicted time."""
        buffers, table = self.draft.buffers, self.table
        program = replace(program, waits=synchronise(program, buffers, self.placed.offsets))
        return coalesce_waits(program, contention(program, table.graph, buffers, table.device))


def best_within(available_bytes: int, solutions: Sequence[Solution]) -> Solution:
    """Return the fastest solution that fits; if none fits, return the smallest one."""
    fitting = [solution for solution in solutions if solution.fits(available_bytes)]
    if fitting:
        return min(fitting, key=lambda solution: solution.step_us)
    return min(solutions, key=lambda solution: solution.placed.arena_bytes)


def scheduled_draft(
    problem: Problem, choices: Choices, techniques: AllowedTechniques, available_bytes: int | None
) -> Draft:
    """Return the selected kernels as launches.

    Args:
        problem: The step, and its gradient buckets.
        choices: The selected kernels.
        techniques: Depth-first execution, conversions and states to offload.
        available_bytes: Bytes of the arena. An update that would keep a large share of them live is split; None: no
            update is split.
    """
    table, draft = problem.table, emit_launches(problem.table, choices)
    if problem.buckets is not None:
        draft = problem.buckets.applied(table, draft)
    if techniques.division is not None:
        draft = depth_first(table, draft, (*choices.train, *choices.infer), techniques.division)
    if techniques.convert_back and available_bytes is not None:
        draft = convert_back(table, draft, int(effort.CONVERTED_BACK_SHARE * available_bytes))
    if available_bytes is not None:
        draft = split_within(draft, available_bytes, table)
    states = states_to_offload(table.graph, draft, techniques.states_bytes, techniques.room_bytes, table.device.links)
    if not states:
        return draft
    return offload_states(table.graph, draft, states, table.device.links, techniques.lead)


def free_bytes(draft: Draft, available_bytes: int) -> Mapping[str, int]:
    """Return the bytes that are free while each operation runs; below zero if values alone exceed the arena."""
    persistent = frozenset(draft.persistent)
    available_bytes -= persistent_bytes(draft)
    free: dict[str, int] = {}
    for program in (draft.train, draft.infer):
        found_blocks = blocks_to_place(program, draft.buffers, persistent)
        kept = [block for block in found_blocks if draft.buffers[block.buffers[0]].value is not None]
        live = live_bytes(kept, len(program.launches))
        for launch, taken_bytes in zip(program.launches, live, strict=True):
            if launch.operations:
                name = SEPARATOR.join(launch.operations)
                free[name] = min(free.get(name, UNLIMITED_BYTES), available_bytes - taken_bytes)
    return free
