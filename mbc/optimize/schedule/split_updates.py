"""Split updates: a launch of many operations (all parameter updates, all casts) is split into several, each as early as
its operands are ready.

One launch that updates all parameters waits for the last gradient, and one that casts them all comes before the first
layer. Split, most of them can run concurrently with the launches in between, and gradients are freed earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation
from mbc.ops.fused import join
from mbc.optimize import effort
from mbc.optimize.fusion.horizontal import splits
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.liveness import owners
from mbc.plan.group import operation_of
from mbc.plan.model import Access, Buffer, Kernel, Launch, Mode


@dataclass(frozen=True, slots=True)
class _Member:
    """One operation of a launch. `ready`: the earliest position in the program at which it can run; `needed`: that of
    the next launch that touches what it writes or overwrites what it reads."""

    operation: Operation
    touched_bytes: int
    ready: int
    needed: int


def divisible_us(draft: Draft, operations: Mapping[str, Operation]) -> float:
    """Time of the launches that may be split."""
    return sum(launch.work.time_us for launch in draft.train.launches if divides(launch, operations))


def split_into(draft: Draft, count: int, operations: Mapping[str, Operation], device: DeviceSpec) -> Draft:
    """The training program with every launch that may be split as up to `count` launches of about the same bytes, whole
    where it has too few operations. `operations` by name."""
    divisible = (i for i, launch in enumerate(draft.train.launches) if divides(launch, operations))
    return _split(draft, dict.fromkeys(divisible, count), operations, device, merge=False)


def split_within(draft: Draft, available_bytes: int, operations: Mapping[str, Operation], device: DeviceSpec) -> Draft:
    """The training program with those launches split whose operands keep a large share of the available bytes live
    until the last of them is ready."""
    persistent = frozenset(draft.persistent)
    counts: dict[int, int] = {}
    for i, launch in enumerate(draft.train.launches):
        if divides(launch, operations):
            read = {a.buffer for a in launch.accesses if a.mode is Mode.READ} - persistent
            held_bytes = sum(draft.buffers[buffer].size_bytes for buffer in read)
            counts[i] = min(
                effort.UPDATE_MAX_SPLITS, max(1, int(held_bytes / (effort.UPDATE_HELD_SHARE * available_bytes)))
            )
    return _split(draft, counts, operations, device, merge=True)


def split_by(
    launch: Launch,
    parts: Sequence[Sequence[str]],
    operations: Mapping[str, Operation],
    buffers: Sequence[Buffer],
    device: DeviceSpec,
) -> tuple[Launch, ...]:
    """A launch that may be split as one launch for each of `parts`, the names of its operations in the order of the
    launches; a part of a single operation goes with the one behind it, or the last with the one before."""
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


def _split(
    draft: Draft, counts: Mapping[int, int], operations: Mapping[str, Operation], device: DeviceSpec, merge: bool
) -> Draft:
    """`merge`: parts that are ready at the same position are merged."""
    launches = draft.train.launches
    owner = owners(draft.buffers)
    before: dict[int, list[Launch]] = {}  # by the position in front of which they come
    stays = set(range(len(launches)))
    for i, count in counts.items():
        launch = launches[i]
        accesses = _by_value(launch, operations, draft.buffers)
        parts = _cut(_members(i, accesses, launches, draft.buffers, owner, operations), count)
        parts = _merged(parts) if merge else parts
        if len(parts) == 1:
            continue
        stays.remove(i)
        all_bytes = sum(member.touched_bytes for part in parts for member in part)
        for part in parts:
            share = sum(member.touched_bytes for member in part) / all_bytes
            ready = max(member.ready for member in part)
            before.setdefault(ready, []).append(_launch(launch, part, accesses, share, device))
    order = (
        launch for i, whole in enumerate(launches) for launch in (*before.get(i, ()), *((whole,) if i in stays else ()))
    )
    return replace(draft, train=replace(draft.train, launches=tuple(order)))


def divides(launch: Launch, operations: Mapping[str, Operation]) -> bool:
    """Whether it is long enough, and of many independent operations."""
    return (
        len(launch.operations) > 1
        and isinstance(launch.work, Kernel)
        and launch.work.time_us >= effort.UPDATE_SPLIT_MIN_US
        and all(splits(operations[name]) for name in launch.operations)
    )


def _members(
    at: int, accesses: Mapping[str, Access], launches: Sequence[Launch], buffers: Sequence[Buffer],
    owner: Sequence[int], operations: Mapping[str, Operation],
) -> list[_Member]:  # fmt: skip
    """The members of the launch at `at`, sorted by when they are ready, then by when they are needed."""
    read: dict[int, list[int]] = {}
    written: dict[int, list[int]] = {}
    for i, launch in enumerate(launches):
        for access in launch.accesses:
            (read if access.mode is Mode.READ else written).setdefault(owner[access.buffer], []).append(i)
    found: list[_Member] = []
    for name in launches[at].operations:
        own = [accesses[value] for value in (*operations[name].inputs, *operations[name].outputs)]
        others: set[int] = set()
        for access in own:
            there = owner[access.buffer]
            others.update(written.get(there, ()))
            if access.mode is not Mode.READ:
                others.update(read.get(there, ()))
        found.append(
            _Member(
                operations[name],
                _touched_bytes(operations[name], accesses, buffers),
                max((i + 1 for i in others if i < at), default=0),
                min((i for i in others if i > at), default=len(launches)),
            )
        )
    return sorted(found, key=lambda member: (member.ready, member.needed))


def _by_value(
    launch: Launch, operations: Mapping[str, Operation], buffers: Sequence[Buffer]
) -> Mapping[str, Access]:  # fmt: skip
    joined = operation_of(launch, operations, buffers)
    return dict(zip((*joined.inputs, *joined.outputs), launch.accesses, strict=True))


def _cut(members: Sequence[_Member], count: int) -> list[list[_Member]]:
    """Members in order, in parts of about the same bytes and of at least two members, since a single operation is no
    group: a part of one is merged with a neighbour."""
    behind = list(accumulate(member.touched_bytes for member in members))
    found: dict[int, list[_Member]] = {}
    for member, end in zip(members, behind, strict=True):
        middle = end - member.touched_bytes / 2
        found.setdefault(min(count - 1, int(middle * count / behind[-1])), []).append(member)
    parts: list[list[_Member]] = []
    for part in found.values():
        if parts and (len(part) == 1 or len(parts[-1]) == 1):
            parts[-1] += part
        else:
            parts.append(part)
    return parts


def _merged(parts: Sequence[list[_Member]]) -> list[list[_Member]]:
    """Parts merged that are ready at the same position."""
    found: dict[int, list[_Member]] = {}
    for part in parts:
        found.setdefault(max(member.ready for member in part), []).extend(part)
    return list(found.values())


def _launch(
    whole: Launch, part: Sequence[_Member], accesses: Mapping[str, Access], share: float, device: DeviceSpec
) -> Launch:
    """The launch of a part: its time is estimated by its share of the bytes."""
    members = [member.operation for member in part]
    joined = join(members, [name for operation in members for name in operation.outputs])
    moving_us = max(0.0, whole.work.time_us - device.launch_us)
    return replace(
        whole,
        work=replace(whole.work, time_us=device.launch_us + share * moving_us, measured=False),
        operations=tuple(operation.name for operation in members),
        accesses=tuple(accesses[value] for value in (*joined.inputs, *joined.outputs)),
    )
