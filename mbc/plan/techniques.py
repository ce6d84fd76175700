"""The techniques by which a program saves memory, read from its launches alone.

They are recomputation, offloading, division, and depth-first execution in micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbc.hardware.streams import Space
from mbc.plan.group import rows_of, title, workspace_bytes
from mbc.plan.live import rounded
from mbc.plan.model import Copy, Launch, Mode, Plan, Program

Launches = tuple[int, int]  # half-open
Recomputation = tuple[int, tuple[int, ...]]  # a launch, and the buffers into which it recomputes values


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One operation, or group, whose values are recomputed.

    Attributes:
        operation: Name of the operation or title of the group.
        outputs: The recomputed values.
        launches: Launches that recompute them.
        time_us: Time of these launches; for a launch that also computes others, its share by the bytes that it touches.
        saved_bytes: Bytes that are not in the arena during `absent`.
        absent: Launches during which the values are not in the arena.
    """

    operation: str
    outputs: tuple[str, ...]
    launches: tuple[int, ...]
    time_us: float
    saved_bytes: int
    absent: Launches


@dataclass(frozen=True, slots=True)
class Offloaded:
    """One live range of a value outside the arena.

    Attributes:
        value: The value.
        launches: The copies.
        time_us: Time of the copies.
        saved_bytes: Bytes that are not in the arena during `absent`.
        absent: Launches from the copy out of the arena to the copy back. A value that is outside at the start is absent
            from the first launch on; one that is not copied back is absent until the end.
        space: Where the value is.
    """

    value: str
    launches: tuple[int, ...]
    time_us: float
    saved_bytes: int
    absent: Launches
    space: Space = Space.HOST


@dataclass(frozen=True, slots=True)
class Divided:
    """One operation that runs in several micro-batches.

    Attributes:
        operation: Name of the operation, or names of a group joined by "+".
        micro_batches: Rows of each launch, in order.
        time_us: Time of all launches.
        workspace_bytes: Largest workspace of one launch.
    """

    operation: str
    micro_batches: tuple[int, ...]
    time_us: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class DepthFirst:
    """One value that no buffer holds as a whole, because its operations execute depth-first in micro-batches.

    Attributes:
        value: The value.
        rows: Most rows of one buffer.
        saved_bytes: Bytes of all rows, less those of the largest buffer.
    """

    value: str
    rows: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class TechniquesUsed:
    """All memory-saving techniques of one program, each in the order of first launches."""

    recomputed: tuple[Recomputed, ...]
    offloaded: tuple[Offloaded, ...]
    divided: tuple[Divided, ...]
    depth_first: tuple[DepthFirst, ...] = ()

    def recomputing(self, groups: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
        """Return the number of recomputing launches of each group that has any.

        Args:
            groups: The launches of each group, as from `summary.grouped`.
        """
        recomputing = {one.operation: set(one.launches) & set(groups.get(one.operation, ())) for one in self.recomputed}
        return {name: len(launches) for name, launches in recomputing.items() if launches}

    def absent_bytes(self, launch: int) -> tuple[int, int]:
        """Return the bytes of recomputed and of offloaded values that are not in the arena at a launch."""
        return (
            sum(r.saved_bytes for r in self.recomputed if r.absent[0] <= launch < r.absent[1]),
            sum(o.saved_bytes for o in self.offloaded if o.absent[0] <= launch < o.absent[1]),
        )


def saves_memory(plan: Plan) -> bool:
    """Return whether the training step spends time to save memory: recomputes, offloads, or executes depth-first."""
    used = techniques(plan, plan.train)
    return bool(used.recomputed or used.offloaded or used.depth_first)


def techniques(plan: Plan, program: Program) -> TechniquesUsed:
    """Return the memory-saving techniques of `program`."""
    touches = _touches(program)
    again = _recomputations(plan, program)
    by_value: dict[str, list[int]] = {}
    for buffer in touches:
        by_value.setdefault(plan.buffers[buffer].value or "", []).append(buffer)
    return TechniquesUsed(
        tuple(_recomputed(plan, program, names, anew, touches, by_value) for names, anew in again.items()),
        _offloaded(plan, program, touches),
        _divided(plan, program, {launch for anew in again.values() for launch, _ in anew}),
        _depth_first_values(plan, by_value),
    )


def _touches(program: Program) -> Mapping[int, list[int]]:
    """Return the launches that touch each buffer."""
    touches: dict[int, list[int]] = {}
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            touches.setdefault(access.buffer, []).append(i)
    return touches


def _recomputations(plan: Plan, program: Program) -> Mapping[tuple[str, ...], list[Recomputation]]:
    """Return the launches that write rows of a value again, into another buffer, with these buffers.

    The keys are the operations of the launch that computed the value first.
    """
    makers: dict[str, tuple[str, ...]] = {}
    written: dict[str, list[tuple[int, int, int]]] = {}
    recomputations: dict[tuple[str, ...], list[Recomputation]] = {}
    for i, launch in enumerate(program.launches):
        if not launch.operations:
            continue  # a conversion or a copy
        anew: dict[tuple[str, ...], list[int]] = {}
        for access in launch.accesses:
            value = plan.buffers[access.buffer].value
            if access.mode is Mode.READ or value is None:
                continue
            maker = makers.setdefault(value, launch.operations)
            before = written.setdefault(value, [])
            start, stop = access.rows.start, access.rows.stop
            if any(buffer != access.buffer and low < stop and start < high for buffer, low, high in before):
                anew.setdefault(maker, []).append(access.buffer)
            before.append((access.buffer, start, stop))
        for maker, buffers in anew.items():
            recomputations.setdefault(maker, []).append((i, tuple(buffers)))
    return recomputations


def _recomputed(
    plan: Plan,
    program: Program,
    operations: tuple[str, ...],
    recomputations: list[Recomputation],
    touches: Mapping[int, list[int]],
    by_value: Mapping[str, list[int]],
) -> Recomputed:
    launches = tuple(i for i, _ in recomputations)
    again = tuple(dict.fromkeys(b for _, buffers in recomputations for b in buffers))
    values = tuple(dict.fromkeys(plan.buffers[b].value or "" for b in again))
    # The values are absent from the last access to their earlier buffers until the first launch recomputes them.
    earlier = (b for value in values for b in by_value[value] if b not in again)
    last = max((i for b in earlier for i in touches[b] if i < launches[0]), default=launches[0] - 1)
    return Recomputed(
        title(operations),
        values,
        launches,
        sum(
            _share(plan, program.launches[i], buffers) * program.launches[i].work.time_us
            for i, buffers in recomputations
        ),
        sum(rounded(plan.buffers[b].size_bytes) for b in again),
        (last + 1, launches[0]),
    )


def _share(plan: Plan, launch: Launch, buffers: tuple[int, ...]) -> float:
    """Return the share of a launch that writing these buffers accounts for: 1 if it writes nothing else."""
    values = [a for a in launch.accesses if plan.buffers[a.buffer].value is not None]
    if all(a.buffer in buffers for a in values if a.mode is not Mode.READ):
        return 1.0
    touched = {a.buffer: plan.buffers[a.buffer].size_bytes for a in values}
    return sum(touched[b] for b in buffers) / sum(touched.values())


def _offloaded(plan: Plan, program: Program, touches: Mapping[int, list[int]]) -> tuple[Offloaded, ...]:
    offloaded: list[Offloaded] = []
    entry = frozenset(program.entry)
    for outside, at in sorted(touches.items(), key=lambda item: item[1][0]):
        buffer = plan.buffers[outside]
        if buffer.space is Space.ARENA:
            continue
        # A value that is outside at the start is absent from the start; a value that is not fetched, until the end.
        writes = [_writes(program.launches[i], outside) for i in at]
        sent = [i for i, sends in zip(at, writes, strict=True) if sends]
        fetched = [i for i, sends in zip(at, writes, strict=True) if not sends]
        start = 0 if outside in entry else sent[0]
        later = [i for i in fetched if i >= start]
        offloaded.append(
            Offloaded(
                buffer.value or "",
                tuple(at),
                sum(program.launches[i].work.time_us for i in at),
                rounded(buffer.size_bytes),
                (start, later[0] if later else len(program.launches)),
                buffer.space,
            )
        )
    return tuple(offloaded)


def _depth_first_values(plan: Plan, by_value: Mapping[str, list[int]]) -> tuple[DepthFirst, ...]:
    values: list[DepthFirst] = []
    for name, buffers in by_value.items():
        if not name or not plan.graph.values[name].per_sample:
            continue
        kept = [plan.buffers[b] for b in buffers if plan.buffers[b].space is Space.ARENA]
        if not kept:
            continue
        largest = max(kept, key=lambda buffer: buffer.rows.count)
        rows = largest.rows.count
        if rows < plan.graph.batch:
            whole_bytes = largest.size_bytes * plan.graph.batch // rows
            values.append(DepthFirst(name, rows, rounded(whole_bytes) - rounded(largest.size_bytes)))
    return tuple(values)


def _writes(launch: Launch, buffer: int) -> bool:
    return any(a.buffer == buffer and a.mode is not Mode.READ for a in launch.accesses)


def _divided(plan: Plan, program: Program, again: set[int]) -> tuple[Divided, ...]:
    groups: dict[tuple[str, ...], list[Launch]] = {}
    for i, launch in enumerate(program.launches):
        if launch.operations and i not in again and not isinstance(launch.work, Copy):
            groups.setdefault(launch.operations, []).append(launch)
    divided: list[Divided] = []
    for operations, launches in groups.items():
        if len(launches) == 1:
            continue
        rows = tuple(rows_of(plan, launch) for launch in launches)
        if sum(rows) <= plan.graph.batch:
            divided.append(
                Divided(
                    "+".join(operations),
                    rows,
                    sum(launch.work.time_us for launch in launches),
                    max(workspace_bytes(plan, launch) for launch in launches),
                )
            )
    return tuple(divided)
