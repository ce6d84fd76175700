"""Live ranges of the arena's bytes, by kind.

A buffer and its aliases are one live range, from the first write to the last read of any of them; at every moment its
bytes count as those of the alias written last. Sizes are rounded up to the alignment, as offsets are. Written
independently of the search, so that the verifier can compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mbc.ir.graph import Role, TrainingGraph
from mbc.plan.model import ALIGNMENT_BYTES, Buffer, Plan, Program, Space


class Kind(StrEnum):
    """What bytes are for. The order is that of tables and pictures."""

    PARAMETERS = "parameters"
    CASTS = "parameter copies"  # parameters in the working type, made anew every step
    STATISTICS = "statistics"
    OPTIMIZER = "optimizer"
    CONTROL = "control"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    WORKSPACE = "workspace"


_OF_ROLE = {
    Role.INPUT: Kind.INPUTS,
    Role.PARAMETER: Kind.PARAMETERS,
    Role.STATISTIC: Kind.STATISTICS,
    Role.OPTIMIZER: Kind.OPTIMIZER,
    Role.GRADIENT: Kind.GRADIENTS,
    Role.CONTROL: Kind.CONTROL,
}


def kinds_of_values(graph: TrainingGraph) -> Mapping[str, Kind]:
    """The kind of every value of both graphs.

    A state's next version is of the kind of the state. Of the rest, what the results (loss, metrics, outputs) are
    computed from is an activation, or a copy of a parameter when it follows from states alone; all others are
    gradients.
    """
    kinds = {name: _OF_ROLE[value.role] for name, value in graph.values.items() if value.role in _OF_ROLE}
    kinds |= {new: kinds[old] for old, new in graph.updates if old in kinds}
    makers = {output: op for op in (*graph.train, *graph.infer) for output in op.outputs}
    forward: set[str] = set()
    pending = [graph.loss, *graph.metrics, *graph.outputs, *graph.infer_outputs]
    while pending:
        name = pending.pop()
        if name in makers and name not in forward:
            # All results of an operation are of one kind: also the index that a pooling stores for its gradient.
            forward.update(makers[name].outputs)
            pending += makers[name].inputs
    # Whether a value follows from states alone.
    sources = {name: value.role in (Role.PARAMETER, Role.STATISTIC) for name, value in graph.values.items()}
    for op in (*graph.train, *graph.infer):
        states_only = all(map(sources.__getitem__, op.inputs))
        sources.update(dict.fromkeys(op.outputs, states_only))
        for name in op.outputs:
            if name not in kinds:
                activation = Kind.CASTS if states_only else Kind.ACTIVATIONS
                kinds[name] = activation if name in forward or states_only else Kind.GRADIENTS
    return kinds


@dataclass(frozen=True, slots=True)
class LiveRange:
    """Bytes that the buffers `members` hold one after another, from launch `start` to before launch `stop`.

    `since[i]` is the launch that first touches `members[i]`, for which the bytes are from then on.
    """

    members: tuple[int, ...]
    since: tuple[int, ...]
    size_bytes: int
    start: int
    stop: int

    @property
    def stays(self) -> Sequence[tuple[int, int, int]]:
        """(member, start, stop): the bytes are those of one member until the next one is written."""
        if len(self.members) == 1:
            return ((self.members[0], self.start, self.stop),)
        ends = (*self.since[1:], self.stop)
        starts = (self.start, *self.since[1:])
        return [stay for stay in zip(self.members, starts, ends, strict=True) if stay[1] < stay[2]]


def lifetimes(program: Program) -> Mapping[int, tuple[int, int]]:
    """[first write, last read + 1) in launch order of every buffer that the program touches."""
    end = max(1, len(program.launches))
    found: dict[int, tuple[int, int]] = dict.fromkeys(program.entry, (0, 1))
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            start, _ = found.get(access.buffer, (i, i))
            found[access.buffer] = (start, i + 1)
    for buffer in program.exit:
        start, _ = found.get(buffer, (end - 1, end))
        found[buffer] = (start, end)
    return found


def rounded(size_bytes: int) -> int:
    """Up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def live_ranges(
    plan: Plan, program: Program, lives: Mapping[int, tuple[int, int]] | None = None
) -> tuple[LiveRange, ...]:
    """The live ranges in the arena during one program. Those of states last for all of it. `lives`: `lifetimes`, where
    these are known."""
    lives = lifetimes(program) if lives is None else lives
    owner = _owners(plan.buffers)
    groups: dict[int, list[int]] = {}
    for buffer in lives:
        if plan.buffers[buffer].space is Space.ARENA:
            groups.setdefault(owner[buffer], []).append(buffer)
    made: list[LiveRange] = []
    end = max(1, len(program.launches))
    entry = frozenset(program.entry)
    for group in groups.values():
        members = group if len(group) == 1 else sorted(group, key=lambda b: (lives[b][0], b))
        value = plan.buffers[members[0]].value
        # A copy of a state in another layout is not live before the program writes it.
        there_before = members[0] in entry
        persistent = there_before and value is not None and plan.graph.values[value].role.persistent
        since = [lives[b][0] for b in members]
        size_bytes = rounded(max([plan.buffers[b].size_bytes for b in members]))
        start, stop = (0, end) if persistent else (since[0], max([lives[b][1] for b in members]))
        made.append(LiveRange(tuple(members), tuple(since), size_bytes, start, stop))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Held:
    """What the arena holds during one program: its live ranges, from the lifetimes of all buffers, and the kinds of the
    values of both programs."""

    lives: Mapping[int, tuple[int, int]]
    ranges: tuple[LiveRange, ...]
    kinds: Mapping[str, Kind]


def held_in(plan: Plan, program: Program, kinds: Mapping[str, Kind] | None = None) -> Held:
    """Of one program. `kinds`: of the plan, where these are known."""
    lives = lifetimes(program)
    return Held(lives, live_ranges(plan, program, lives), kinds_of_values(plan.graph) if kinds is None else kinds)


def _owners(buffers: Sequence[Buffer]) -> list[int]:
    """For each buffer the first one of its chain of aliases."""
    owner: list[int] = []
    for i, buffer in enumerate(buffers):
        # An alias names an earlier buffer; the verifier refuses any other.
        owner.append(i if buffer.alias is None or not 0 <= buffer.alias < i else owner[buffer.alias])
    return owner
