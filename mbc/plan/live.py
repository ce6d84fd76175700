"""Live ranges of the bytes of the arena, by kind.

A buffer and its aliases are one live range, from the first write to the last read of any of them. At every moment the
bytes belong to the alias written last. Sizes are rounded up to the alignment of offsets. This file shares no code with
the search, so that the verifier can compare the results of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mbc.hardware.streams import ALIGNMENT_BYTES, Space
from mbc.ir.graph import Role, TrainingGraph
from mbc.plan.model import Buffer, Plan, Program


class Kind(StrEnum):
    """Kinds of bytes. Their order is that of tables and pictures."""

    PARAMETERS = "parameters"
    CASTS = "parameter copies"  # parameters in the working type, computed again in every step
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
    """Return the kind of every value of both programs.

    The next version of a state has the kind of the state. The other values that the results (loss, metrics, outputs)
    are computed from are activations, or copies of parameters if they depend on states alone. All others are gradients.
    """
    kinds = {name: _OF_ROLE[value.role] for name, value in graph.values.items() if value.role in _OF_ROLE}
    kinds |= {new: kinds[old] for old, new in graph.updates if old in kinds}
    makers = {output: op for op in (*graph.train, *graph.infer) for output in op.outputs}
    forward: set[str] = set()
    pending = [graph.loss, *graph.metrics, *graph.outputs, *graph.infer_outputs]
    while pending:
        name = pending.pop()
        if name in makers and name not in forward:
            # All results of an operation have one kind, also the index that a pooling stores for its gradient.
            forward.update(makers[name].outputs)
            pending += makers[name].inputs
    # By value: whether it depends on states alone.
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

    `since[i]` is the first launch that touches `members[i]`; from then on, the bytes belong to this member.
    """

    members: tuple[int, ...]
    since: tuple[int, ...]
    size_bytes: int
    start: int
    stop: int

    @property
    def stays(self) -> Sequence[tuple[int, int, int]]:
        """Triples (member, start, stop): the bytes belong to one member until the next one is written."""
        if len(self.members) == 1:
            return ((self.members[0], self.start, self.stop),)
        ends = (*self.since[1:], self.stop)
        starts = (self.start, *self.since[1:])
        return [stay for stay in zip(self.members, starts, ends, strict=True) if stay[1] < stay[2]]


def lifetimes(program: Program) -> Mapping[int, tuple[int, int]]:
    """Return [first write, last read + 1), in launch order, of every buffer that the program touches."""
    end = max(1, len(program.launches))
    lives: dict[int, tuple[int, int]] = dict.fromkeys(program.entry, (0, 1))
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            start, _ = lives.get(access.buffer, (i, i))
            lives[access.buffer] = (start, i + 1)
    for buffer in program.exit:
        start, _ = lives.get(buffer, (end - 1, end))
        lives[buffer] = (start, end)
    return lives


def rounded(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def live_ranges(
    plan: Plan, program: Program, lives: Mapping[int, tuple[int, int]] | None = None
) -> tuple[LiveRange, ...]:
    """Return the live ranges in the arena during one program; those of states last for the whole program.

    Args:
        plan: The plan.
        program: One of its programs.
        lives: The result of `lifetimes(program)`, if the caller has it.
    """
    lives = lifetimes(program) if lives is None else lives
    owner = _owners(plan.buffers)
    groups: dict[int, list[int]] = {}
    for buffer in lives:
        if plan.buffers[buffer].space is Space.ARENA:
            groups.setdefault(owner[buffer], []).append(buffer)
    ranges: list[LiveRange] = []
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
        ranges.append(LiveRange(tuple(members), tuple(since), size_bytes, start, stop))
    return tuple(ranges)


@dataclass(frozen=True, slots=True)
class Held:
    """Contents of the arena during one program.

    Attributes:
        lives: Lifetimes of all buffers.
        ranges: Live ranges in the arena.
        kinds: Kinds of the values of both programs.
    """

    lives: Mapping[int, tuple[int, int]]
    ranges: tuple[LiveRange, ...]
    kinds: Mapping[str, Kind]


def held_in(plan: Plan, program: Program, kinds: Mapping[str, Kind] | None = None) -> Held:
    """Return the contents of the arena during one program.

    Args:
        plan: The plan.
        program: One of its programs.
        kinds: The result of `kinds_of_values(plan.graph)`, if the caller has it.
    """
    lives = lifetimes(program)
    return Held(lives, live_ranges(plan, program, lives), kinds_of_values(plan.graph) if kinds is None else kinds)


def _owners(buffers: Sequence[Buffer]) -> list[int]:
    """Return the first buffer of the chain of aliases of each buffer."""
    owner: list[int] = []
    for i, buffer in enumerate(buffers):
        # An alias names an earlier buffer; the verifier refuses any other.
        owner.append(i if buffer.alias is None or not 0 <= buffer.alias < i else owner[buffer.alias])
    return owner
