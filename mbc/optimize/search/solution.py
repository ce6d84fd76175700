"""A problem (a step and its available bytes), and its solution: a draft with addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mbc.ops.fused import SEPARATOR
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Programs
from mbc.optimize.placement.addresses import Placed
from mbc.optimize.remat.optimizer_offload import offload_states, persistent_bytes, states_to_offload
from mbc.optimize.remat.state import Means
from mbc.optimize.schedule.coalesce_waits import coalesce_waits
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.depth_first_micro_batches import depth_first
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.liveness import blocks, live_bytes
from mbc.optimize.schedule.split_updates import split_within
from mbc.optimize.schedule.synchronise import synchronise
from mbc.optimize.selection.select import Choices, choose
from mbc.plan.model import Copy, Program

UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Problem:
    """A step and its available bytes. `most`: workspace of operations by name, whatever is free. `programs`: what runs
    as a group; None where operations run by themselves. `gathered`: whether one launch updates many parameters; only
    where none does may the optimizer's states be offloaded."""

    table: CandidateTable
    most: Mapping[str, int]
    available_bytes: int
    programs: Programs | None = None
    gathered: bool = True

    @property
    def apart(self) -> Problem:
        """The same step with a launch for every update."""
        return replace(self, gathered=False)

    def choose(self, limits: Mapping[str, int], rows: Mapping[str, int] | None = None) -> Choices:
        """`mbc.optimize.selection.select.choose` of this step."""
        return choose(self.table, limits, rows, self.programs, self.gathered)

    @property
    def fastest_us(self) -> float:
        """The step without a limit of memory."""
        return self.choose(self.most).train_us

    def holds(self, found: Fitted) -> bool:
        return found.placed.arena_bytes <= self.available_bytes

    def best(self, found: Sequence[Fitted]) -> Fitted:
        """The fastest that fits; where none does, the smallest."""
        fitting = [f for f in found if self.holds(f)]
        if fitting:
            return min(fitting, key=lambda f: f.step_us)
        return min(found, key=lambda f: f.placed.arena_bytes)


@dataclass(frozen=True)
class Fitted:
    """A draft with addresses. It exceeds the available bytes where nothing was found that fits."""

    draft: Draft
    placed: Placed
    table: CandidateTable

    @cached_property
    def step_us(self) -> float:
        """Predicted time of the training step, waits for copies included."""
        return self.finished(self.draft.train)[1]

    @property
    def copies(self) -> bool:
        """Whether the step sends anything to the host."""
        return any(isinstance(launch.work, Copy) for launch in self.draft.train.launches)

    def finished(self, program: Program) -> tuple[Program, float]:
        """One of the draft's programs with its waits, and its predicted time."""
        buffers, table = self.draft.buffers, self.table
        program = replace(program, waits=synchronise(program, buffers, self.placed.offsets))
        return coalesce_waits(program, contention(program, table.graph, buffers, table.device))


def ordered(table: CandidateTable, choices: Choices, means: Means, available_bytes: int | None) -> Draft:
    """The launches as they are chosen, depth-first and with states offloaded where `means` says so, updates split where
    whole ones would keep a large share of the available bytes live (None: whole)."""
    draft = emit_launches(table, choices)
    if means.division is not None:
        draft = depth_first(table, draft, (*choices.train, *choices.infer), means.division)
    if available_bytes is not None:
        by_name = {operation.name: operation for operation in table.graph.train}
        draft = split_within(draft, available_bytes, by_name, table.device)
    states = states_to_offload(table.graph, draft, means.states_bytes, means.host_bytes)
    if not states:
        return draft
    return offload_states(table.graph, draft, states, table.device.host_link, means.lead)


def free_bytes(draft: Draft, available_bytes: int) -> Mapping[str, int]:
    """Bytes that are free while each operation runs; below zero where what is kept is too much."""
    persistent = frozenset(draft.persistent)
    available_bytes -= persistent_bytes(draft)
    found: dict[str, int] = {}
    for program in (draft.train, draft.infer):
        kept = [b for b in blocks(program, draft.buffers, persistent) if draft.buffers[b.buffers[0]].value is not None]
        live = live_bytes(kept, len(program.launches))
        for launch, taken_bytes in zip(program.launches, live, strict=True):
            if launch.operations:
                name = SEPARATOR.join(launch.operations)
                found[name] = min(found.get(name, UNLIMITED_BYTES), available_bytes - taken_bytes)
    return found
