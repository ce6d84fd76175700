"""A problem (a step and its available bytes), and its solution: a draft with addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mbc.hardware.streams import Space
from mbc.kernels.nccl import BY_COPIES, GATHERS, SHARDED, divides_among
from mbc.ops.fused import SEPARATOR
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Programs
from mbc.optimize.placement.assign_addresses import Placed
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.optimizer_offload import offload_states, persistent_bytes, states_to_offload
from mbc.optimize.schedule.coalesce_waits import coalesce_waits
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.convert_back import convert_back
from mbc.optimize.schedule.cross_stream_liveness import data_waits_only
from mbc.optimize.schedule.depth_first_micro_batches import depth_first
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.gradient_buckets import Collective, bucketings, with_buckets
from mbc.optimize.schedule.liveness import blocks_to_place, live_bytes, owners
from mbc.optimize.schedule.simulate import simulate
from mbc.optimize.schedule.split_updates import split_within
from mbc.optimize.schedule.synchronise import synchronise
from mbc.optimize.selection.select import Choices, choose
from mbc.plan.model import Copy, Program

NO_LIMIT_BYTES = 1 << 62


@dataclass(slots=True)
class Spent:
    """Work that was spent on a problem. It is mutable: every attempt at the problem counts here."""

    work: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A step and its available bytes.

    Attributes:
        table: Candidates of the graph.
        workspace_limits: Workspace limits of operations by name, independent of the bytes that are free.
        available_bytes: Bytes of the arena that the step may use.
        programs: Programs with fusion groups; None: without fusion.
        fused_updates: Whether one launch updates many parameters. Only otherwise the optimizer's states may be
            offloaded.
        spent: Work that was spent on this step, with all techniques.
    """

    table: CandidateTable
    workspace_limits: Mapping[str, int]
    available_bytes: int
    programs: Programs | None = None
    fused_updates: bool = True
    spent: Spent = field(default_factory=Spent, compare=False)

    @property
    def with_single_updates(self) -> Problem:
        """This step with a launch for every update, so that optimizer states can be offloaded."""
        return replace(self, fused_updates=False)

    @property
    def exhausted(self) -> bool:
        """True if the search should stop where nothing fits yet."""
        operations = len(self.table.graph.train)
        return self.spent.work > max(effort.NOT_FOUND_WORK, effort.NOT_FOUND_WORK_OF_OPERATION * operations)

    def choose(self, limits: Mapping[str, int], rows: Mapping[str, int] | None = None) -> Choices:
        """Return `mbc.optimize.selection.select.choose` of this step."""
        return choose(self.table, limits, rows, self.programs, self.fused_updates)

    @property
    def fastest_us(self) -> float:
        """Time of the step without a limit of memory."""
        return self.choose(self.workspace_limits).train_us

    def fits(self, solution: Solution) -> bool:
        """Return whether a solution fits the available bytes."""
        return solution.placed.arena_bytes <= self.available_bytes

    def best(self, solutions: Sequence[Solution]) -> Solution:
        """Return the fastest solution that fits; if none fits, return the smallest one."""
        fitting = [f for f in solutions if self.fits(f)]
        if fitting:
            return min(fitting, key=lambda f: f.step_us)
        return min(solutions, key=lambda f: f.placed.arena_bytes)


@dataclass(frozen=True)
class Solution:
    """A draft with addresses. It exceeds the available bytes where no solution that fits was found."""

    draft: Draft
    placed: Placed
    table: CandidateTable

    @cached_property
    def step_us(self) -> float:
        """Predicted time of the training step, waits for copies included."""
        return self.finished(self.draft.train)[1]

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


def scheduled_draft(
    table: CandidateTable, choices: Choices, techniques: AllowedTechniques, available_bytes: int | None
) -> Draft:
    """Return the selected kernels as launches.

    Args:
        table: Candidates of the graph.
        choices: The selected kernels.
        techniques: Depth-first execution, conversions and states to offload.
        available_bytes: Bytes of the arena. An update that would keep a large share of them live is split; None: no
            update is split.
    """
    draft = with_collectives(table, emit_launches(table, choices))
    if techniques.division is not None:
        draft = depth_first(table, draft, (*choices.train, *choices.infer), techniques.division)
    if techniques.convert_back and available_bytes is not None:
        draft = convert_back(table, draft, int(effort.CONVERTED_BACK_SHARE * available_bytes))
    if available_bytes is not None:
        by_name = {operation.name: operation for operation in table.graph.train}
        draft = split_within(draft, available_bytes, by_name, table.device)
    states = states_to_offload(table.graph, draft, techniques.states_bytes, techniques.room_bytes, table.device.links)
    if not states:
        return draft
    return offload_states(table.graph, draft, states, table.device.links, techniques.lead)


def with_collectives(table: CandidateTable, draft: Draft) -> Draft:
    """Return the draft with gradients summed over ranks in buckets; unchanged if there is one rank.

    Buckets and thread blocks are chosen for the first draft of a step, and kept: later choices hardly change when
    gradients are ready.
    """
    ranks = table.graph.ranks
    if ranks is None:
        return draft
    if not table.buckets:
        rules = table.rules
        decided = (rules.collectives, rules.ctas) if rules.collectives else _buckets(table, draft)
        table.buckets["chosen"] = decided
    buckets, ctas = table.buckets["chosen"]
    return with_buckets(draft, buckets, ctas, table.graph, table.device)


def _buckets(table: CandidateTable, draft: Draft) -> tuple[tuple[Collective, ...], int]:
    """Return the order of collectives and the number of thread blocks that are predicted to make the step shortest.

    The order is chosen first, then the number of thread blocks.
    """
    ranks = table.graph.ranks
    assert ranks is not None
    # Copies reach the same address in the memory of every rank, so all ranks need one plan; and copies gather nothing.
    gathers = any(operation.kind in (*GATHERS, *SHARDED) for operation in table.graph.train)
    one_plan = len(ranks.members) == ranks.size
    copies = divides_among(ranks.size) and one_plan and not gathers
    choices = [c for c in table.device.collectives.choices(ranks.size) if c != BY_COPIES or copies]

    def step_us(way: tuple[tuple[Collective, ...], int]) -> float:
        bucketed = with_buckets(draft, *way, table.graph, table.device)
        train = data_waits_only(bucketed.train, bucketed.buffers, owners(bucketed.buffers))
        return simulate(train, contention=contention(train, table.graph, bucketed.buffers, table.device))

    # In another rank's plan a bucket may be ready after a gather that it precedes here; but all need the same order.
    ways = tuple(bucketings(draft, held_back=gathers and not one_plan))
    best = min(((buckets, max(choices)) for buckets in ways), key=step_us)
    best = min(((best[0], ctas) for ctas in choices), key=step_us)
    # Buckets that suit one number of thread blocks suit others; copies may need other buckets.
    kept = {best[1], *(c for c in choices if c == BY_COPIES)}
    return min(((buckets, ctas) for ctas in sorted(kept) for buckets in ways), key=step_us)


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
                free[name] = min(free.get(name, NO_LIMIT_BYTES), available_bytes - taken_bytes)
    return free
