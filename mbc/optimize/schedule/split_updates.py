"""Split updates: a launch of many operations is split into several, each as early as its operands are ready.

Such a launch runs all parameter updates, or all casts. One launch that updates all parameters waits for the last
gradient, and one that casts them all comes before the first layer. Split, most of them can run concurrently with the
launches in between, and gradients are freed earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation
from mbc.ops.fused import join
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.horizontal import splits
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.liveness import owners
from mbc.plan.group import operation_of
from mbc.plan.model import Access, Buffer, Kernel, Launch, Mode


@dataclass(frozen=True, slots=True)
class _Member:
    """One operation of a launch.

    Attributes:
        operation: The operation.
        touched_bytes: Bytes of its operands.
        ready: The earliest position in the program at which it can run.
        needed: Position of the next launch that touches its outputs or overwrites its inputs.
    """

    operation: Operation
    touched_bytes: int
    ready: int
    needed: int


def divisible_us(draft: Draft, table: CandidateTable) -> float:
    """Return the time of the launches that may be split."""
    operations = _by_name(table)
    return sum(launch.work.time_us for launch in draft.train.launches if divides(launch, operations))


def split_into(draft: Draft, count: int, table: CandidateTable) -> Draft:
    """Return the draft with every launch that may be split as up to `count` launches of about the same bytes.

    Args:
        draft: Launches and buffers.
        count: Launches to split each launch into.
        table: Candidates of the graph.
    """
    return _split(draft, lambda _: 1 / count, table)


def split_within(draft: Draft, available_bytes: int, table: CandidateTable) -> Draft:
    """Return the draft with those launches split whose operands occupy much memory until the last of them is ready.

    A part ends when the operands that wait for it exceed a share of the arena. So an update with a large gradient runs
    directly after its gradient, and small ones share a launch.

    Args:
        draft: Launches and buffers.
        available_bytes: Bytes of the arena.
        table: Candidates of the graph.
    """
    persistent = frozenset(draft.persistent)

    def share(launch: Launch) -> float:
        read = {a.buffer for a in launch.accesses if a.mode is Mode.READ} - persistent
        held_bytes = sum(draft.buffers[buffer].size_bytes for buffer in read)
        return effort.UPDATE_HELD_SHARE * available_bytes / max(held_bytes, 1)

    return _split(draft, share, table)


def split_by(
    launch: Launch,
    parts: Sequence[Sequence[str]],
    operations: Mapping[str, Operation],
    buffers: Sequence[Buffer],
    device: DeviceSpec,
) -> tuple[Launch, ...]:
    """Return a launch that may be split as one launch for each of `parts`.

    A part of a single operation is merged with the next part; the last part with the previous one.

    Args:
        launch: The launch.
        parts: Names of operations, in the order of the launches.
        operations: Operations by name.
        buffers: Buffers of the program.
        device: The GPU.
    """
    accesses = _by_value(launch, operations, buffers)
    joined: list[list[str]] = []
    for part in parts:
        if joined and len(joined[-1]) == 1:
            joined[-1] += part
        else:
            joined.append([*part])
    if len(joined) > 1 and len(joined[-1]) == 1:
        joined[-2:] = [joined[-2] + joined[-1]]
    if len(joined) == 1:
        return (launch,)
    members = [
        [_Member(operations[name], _touched_bytes(operations[name], accesses, buffers), 0, 0) for name in part]
        for part in joined
    ]
    all_bytes = sum(member.touched_bytes for part in members for member in part)
    return tuple(
        _launch(launch, part, accesses, sum(member.touched_bytes for member in part) / all_bytes, device)
        for part in members
    )


def _touched_bytes(operation: Operation, accesses: Mapping[str, Access], buffers: Sequence[Buffer]) -> int:
    return sum(buffers[accesses[value].buffer].size_bytes for value in (*operation.inputs, *operation.outputs))


def _split(draft: Draft, least_share: Callable[[Launch], float], table: CandidateTable) -> Draft:
    """Return the draft with launches split into parts, each of at least a share of the launch's bytes.

    Args:
        draft: Launches and buffers.
        least_share: Returns the share of a launch that may be split.
        table: Candidates of the graph.
    """
    launches, operations = draft.train.launches, _by_name(table)
    owner = owners(draft.buffers)
    before: dict[int, list[Launch]] = {}  # by the position that they precede
    stays = set(range(len(launches)))
    for i, launch in enumerate(launches):
        if not divides(launch, operations):
            continue
        share = max(least_share(launch), effort.UPDATE_PART_MIN_US / launch.work.time_us)
        parts = _cut(_members(draft, i, owner, operations), share) if share < 1 else []
        if len(parts) < 2:
            continue
        stays.remove(i)
        accesses = _by_value(launch, operations, draft.buffers)
        all_bytes = sum(member.touched_bytes for part in parts for member in part)
        for part in parts:
            part_share = sum(member.touched_bytes for member in part) / all_bytes
            ready = max(member.ready for member in part)
            small = _launch(launch, part, accesses, part_share, table.device)
            if len(part) == 1:
                small = replace(small, work=_alone(part[0].operation, small, draft.buffers, table))
            before.setdefault(ready, []).append(small)
    order = (
        launch for i, whole in enumerate(launches) for launch in (*before.get(i, ()), *((whole,) if i in stays else ()))
    )
    return replace(draft, train=replace(draft.train, launches=tuple(order)))


def divides(launch: Launch, operations: Mapping[str, Operation]) -> bool:
    """Return whether a launch is long enough to be split, and has several independent operations."""
    return (
        len(launch.operations) > 1
        and isinstance(launch.work, Kernel)
        and launch.work.time_us >= 2 * effort.UPDATE_PART_MIN_US
        and all(splits(operations[name]) for name in launch.operations)
    )


def _members(draft: Draft, at: int, owner: Sequence[int], operations: Mapping[str, Operation]) -> list[_Member]:
    """Return the members of the launch at `at`, sorted by when they are ready, then by when they are needed."""
    launches, buffers = draft.train.launches, draft.buffers
    accesses = _by_value(launches[at], operations, buffers)
    read: dict[int, list[int]] = {}
    written: dict[int, list[int]] = {}
    for i, launch in enumerate(launches):
        for access in launch.accesses:
            (read if access.mode is Mode.READ else written).setdefault(owner[access.buffer], []).append(i)
    members: list[_Member] = []
    for name in launches[at].operations:
        own = [accesses[value] for value in (*operations[name].inputs, *operations[name].outputs)]
        others: set[int] = set()
        for access in own:
            there = owner[access.buffer]
            others.update(written.get(there, ()))
            if access.mode is not Mode.READ:
                others.update(read.get(there, ()))
        members.append(
            _Member(
                operations[name],
                _touched_bytes(operations[name], accesses, buffers),
                max((i + 1 for i in others if i < at), default=0),
                min((i for i in others if i > at), default=len(launches)),
            )
        )
    return sorted(members, key=lambda member: (member.ready, member.needed))


def _by_value(
    launch: Launch, operations: Mapping[str, Operation], buffers: Sequence[Buffer]
) -> Mapping[str, Access]:  # fmt: skip
    joined = operation_of(launch, operations, buffers)
    return dict(zip((*joined.inputs, *joined.outputs), launch.accesses, strict=True))


def _cut(members: Sequence[_Member], least_share: float) -> list[list[_Member]]:
    """Return members in order, in parts of at least a share of all bytes; the last part may have less.

    Members that are ready at one position are in one part.
    """
    least_bytes = least_share * sum(member.touched_bytes for member in members)
    parts: list[list[_Member]] = []
    part_bytes = math.inf
    for member in members:
        if part_bytes < least_bytes or (parts and parts[-1][-1].ready == member.ready):
            parts[-1].append(member)
        else:
            parts.append([member])
            part_bytes = 0
        part_bytes += member.touched_bytes
    return parts


def _launch(
    whole: Launch, part: Sequence[_Member], accesses: Mapping[str, Access], share: float, device: DeviceSpec
) -> Launch:
    """Return the launch of a part, whose time is estimated by its share of the bytes."""
    members = [member.operation for member in part]
    joined = join(members, [name for operation in members for name in operation.outputs])
    moving_us = max(0.0, whole.work.time_us - device.launch_us)
    return replace(
        whole,
        work=replace(whole.work, time_us=device.launch_us + share * moving_us, measured=False),
        operations=tuple(operation.name for operation in members),
        accesses=tuple(accesses[value] for value in (*joined.inputs, *joined.outputs)),
    )


def _alone(operation: Operation, launch: Launch, buffers: Sequence[Buffer], table: CandidateTable) -> Kernel:
    """Return the kernel of a launch of one operation, which is no group, with the time of the launch."""
    layouts = tuple(buffers[access.buffer].layout for access in launch.accesses)
    offered = (c for c in table.offered(operation) if c.layouts == layouts and not c.workspace_bytes)
    best = min(offered, key=lambda candidate: candidate.time_us)
    return Kernel(best.provider, best.name, best.settings, launch.work.time_us, measured=False)


def _by_name(table: CandidateTable) -> Mapping[str, Operation]:
    return {operation.name: operation for operation in table.graph.train}
