"""Gradient buckets: sums over ranks in few launches, each of gradients at consecutive addresses.

The launches run on a stream of their own as soon as the last gradient of their bucket is ready. Values that are
gathered from all ranks use the same stream, where the graph has them: a communicator runs one collective at a time. A
bucket may be held back until the last gather, so that no gather waits for it.

Operations that depend on the sums (the guard, updates) follow when their bucket should have been summed. A launch that
updates many parameters is split by the buckets of their gradients, so that most updates run while the last buckets are
summed.

Gradients for a sharded optimizer are in buckets, too. Each rank keeps its parts of them; they need not have consecutive
addresses. One launch gathers the parameters that one launch has updated, while later gradients are computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mbc.hardware.spec import DeviceSpec
from mbc.hardware.streams import Stream
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.nccl import (
    ALL_GATHER,
    ALL_REDUCE,
    BY_COPIES,
    CTAS,
    GATHER_PARTS,
    NAME,
    REDUCE_SCATTER,
    all_gather_cost,
    all_reduce_cost,
    bucket_bytes,
    parts_bytes,
    shard_cost,
)
from mbc.ops.collective import AllGather, AllReduce
from mbc.ops.shard import UPDATES_OF_PARTS, ReduceScatter
from mbc.optimize import effort
from mbc.optimize.schedule.emit_launches import WHOLE, Draft
from mbc.optimize.schedule.liveness import owners
from mbc.optimize.schedule.split_updates import divides, split_by
from mbc.plan.collectives import gathers_parts, is_bucket, is_collective, is_scatter
from mbc.plan.model import Access, Buffer, Kernel, Launch, Mode, Program

Collective = tuple[str, ...]  # operations of one launch; each operation of a bucket sums one gradient


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """Return the collectives of a program that has buckets, in order."""
    return tuple(launch.operations for launch in program.launches if is_collective(launch))


def _is_sum(launch: Launch) -> bool:
    """Return whether a launch sums gradients over the ranks, whole or in parts."""
    return is_bucket(launch) or is_scatter(launch)


def sum_layouts(program: Program, buffers: Sequence[Buffer]) -> Iterator[tuple[str, Layout]]:
    """Yield the layout of the operand of each sum over ranks, by the operation's name."""
    for launch in filter(is_bucket, program.launches):
        for name, access in zip(launch.operations, launch.accesses, strict=False):
            yield name, buffers[access.buffer].layout


def bucketings(draft: Draft, held_back: bool = False) -> Iterator[tuple[Collective, ...]]:
    """Yield several orders of the training program's collectives, each with sums in buckets.

    Sums are in 1, 2, 4 … buckets of about the same bytes, in the order in which their last gradients are ready. The
    last bucket is cut again, so that little is left to sum at the end of the step. Each bucket runs as soon as it is
    ready, or after everything that is gathered; if `held_back`, only the latter.
    """
    ready = _Ready(draft)
    gathers = tuple(sorted(ready.gathers, key=ready.of))
    tried: set[tuple[Collective, ...]] = set()
    for count in effort.BUCKET_COUNTS:
        for cuts in effort.LAST_BUCKET_CUTS:
            cut = (_cut(draft, kind, count, cuts) for kind in (is_bucket, is_scatter))
            buckets = tuple(sorted((bucket for of_kind in cut for bucket in of_kind), key=ready.of))
            behind = (*gathers, *buckets)
            for order in (behind,) if held_back else (tuple(sorted(behind, key=ready.of)), behind):
                if order not in tried:
                    tried.add(order)
                    yield order


def _cut(draft: Draft, is_kind: Callable[[Launch], bool], count: int, cuts: int) -> tuple[Collective, ...]:
    """Return sums of one kind in `count` buckets, the last of which is halved `cuts` times."""
    launches = [launch for launch in draft.train.launches if is_kind(launch)]
    sums = [name for launch in launches for name in launch.operations]
    sizes = [draft.buffers[launch.accesses[0].buffer].size_bytes for launch in launches]
    total = sum(sizes)
    ends = [total * (n + 1) / count for n in range(count)]
    for _ in range(cuts):
        ends[-1:] = [ends[-1] - (ends[-1] - (ends[-2] if len(ends) > 1 else 0)) / 2, ends[-1]]
    buckets: list[list[str]] = [[] for _ in ends]
    before, bucket = 0, 0
    for name, size in zip(sums, sizes, strict=True):
        while bucket + 1 < len(ends) and before + size / 2 > ends[bucket]:
            bucket += 1
        buckets[bucket].append(name)
        before += size
    return tuple(tuple(members) for members in buckets if members)


def with_buckets(
    draft: Draft, order: Sequence[Collective], ctas: int, graph: TrainingGraph, device: DeviceSpec
) -> Draft:
    """Return the draft with these collectives, in this order, as launches of `ctas` thread blocks each.

    Operations that depend on sums follow their buckets.
    """
    return _Writer(draft, graph, ctas, device).written(order)


class _Ready:
    """The positions at which collectives can run, in a draft with a launch for each sum.

    Attributes:
        sums: The launches of sums, by operation.
        gathers: Positions of the other collectives, except those that depend on sums, which follow them.
    """

    def __init__(self, draft: Draft) -> None:
        """Find the sums and the other collectives of a draft."""
        launches = draft.train.launches
        self.sums = {name: launch for launch in launches if _is_sum(launch) for name in launch.operations}
        self.gathers: dict[Collective, int] = {}
        dependent: set[int] = set()
        for i, launch in enumerate(launches):
            depends = not dependent.isdisjoint(access.buffer for access in launch.accesses)
            if _is_sum(launch) or depends:
                dependent.update(access.buffer for access in launch.accesses if access.mode is not Mode.READ)
            elif is_collective(launch):
                self.gathers[launch.operations] = i
        self._after = {a.buffer: i + 1 for i, w in enumerate(launches) if not _is_sum(w) for a in w.accesses}

    def of(self, collective: Collective) -> int:
        """Return the first position at which a collective can run.

        A gather runs after its launch. A bucket runs where all its gradients are ready and nothing reads them except
        their sums: these overwrite the gradients, and batch normalisation's backward pass reads the gradients of scale
        and shift.
        """
        if collective in self.gathers:
            return self.gathers[collective] + 1
        return max(self._after[self.sums[name].accesses[0].buffer] for name in collective)


@dataclass
class _Writer:
    """Writes the training program with buckets.

    Attributes:
        draft: The draft with a launch for each sum.
        graph: The training graph.
        ctas: Thread blocks of each collective.
        device: The GPU.
    """

    draft: Draft
    graph: TrainingGraph
    ctas: int
    device: DeviceSpec

    def written(self, order: Sequence[Collective]) -> Draft:
        launches = self.draft.train.launches
        operations = {operation.name: operation for operation in self.graph.train}
        # Every rank has the given order: no collective runs before the one in front of it.
        ready = _Ready(self.draft)
        buckets = [
            (at, self._bucket([ready.sums[name] for name in collective], operations))
            for at, collective in zip(accumulate(map(ready.of, order), max), order, strict=True)
            if collective not in ready.gathers
        ]
        summed = {launch.accesses[1].buffer: launch.accesses[0].buffer for launch in launches if is_bucket(launch)}
        summed |= self._updated_in_place(operations)
        buffers = tuple(
            replace(buffer, alias=summed[i]) if i in summed else buffer for i, buffer in enumerate(self.draft.buffers)
        )
        self.draft = replace(self.draft, buffers=buffers)
        train = replace(self.draft.train, launches=tuple(self._ordered(buckets, operations)))
        return replace(self.draft, train=train)

    def _updated_in_place(self, operations: Mapping[str, Operation]) -> Iterator[tuple[int, int]]:
        """Yield this rank's parts of new parameters, each with the gradient's part that it overwrites."""
        for launch in self.draft.train.launches:
            by_value = {self.draft.buffers[access.buffer].value: access.buffer for access in launch.accesses}
            for operation in (operations[name] for name in launch.operations):
                if operation.kind in UPDATES_OF_PARTS:
                    gradient, part = operation.inputs[1], operation.outputs[0]
                    if self.graph.values[gradient].type == self.graph.values[part].type:
                        yield by_value[part], by_value[gradient]

    def _bucket(self, sums: Sequence[Launch], operations: Mapping[str, Operation]) -> Launch:
        """Return one launch for several launches of one gradient each."""
        bucket = tuple(name for launch in sums for name in launch.operations)
        first = operations[bucket[0]].attributes
        if isinstance(first, ReduceScatter):
            return self._sharded(REDUCE_SCATTER, sums, operations)
        assert isinstance(first, AllReduce)
        types = [self.graph.values[operations[name].inputs[0]].type for name in bucket]
        size_bytes = bucket_bytes(types)
        cost = all_reduce_cost(self.device, size_bytes, first.ranks, self.ctas)
        workspace = self._workspace(types) if self.ctas == BY_COPIES else ()
        return Launch(
            Kernel(NAME, ALL_REDUCE, ((CTAS, self.ctas),), cost.time_us, cost.measured),
            bucket,
            Stream.COLLECTIVE,
            (*(launch.accesses[0] for launch in sums), *(launch.accesses[1] for launch in sums), *workspace),
        )

    def _sharded(self, name: str, launches: Sequence[Launch], operations: Mapping[str, Operation]) -> Launch:
        """Return one launch for several launches of one tensor each, which is cut into parts or gathered from them."""
        members = [operations[launch.operations[0]] for launch in launches]
        attributes = members[0].attributes
        assert isinstance(attributes, AllGather | ReduceScatter)
        wholes = (member.inputs[0] if name == REDUCE_SCATTER else member.outputs[0] for member in members)
        size_bytes = sum(self.graph.values[whole].type.size_bytes for whole in wholes)
        cost = shard_cost(self.device, name, size_bytes, attributes.ranks, self.ctas)
        return Launch(
            Kernel(NAME, name, ((CTAS, self.ctas),), cost.time_us, cost.measured),
            tuple(member.name for member in members),
            Stream.COLLECTIVE,
            (*(a for w in launches for a in w.accesses[:-1]), *(w.accesses[-1] for w in launches)),
        )

    def _gather(self, launch: Launch, operations: Mapping[str, Operation]) -> Launch:
        """Return a gather on the stream of collectives, by the thread blocks that all collectives have."""
        operation = operations[launch.operations[0]]
        assert isinstance(operation.attributes, AllGather)
        types = [self.graph.values[name].type for name in operation.inputs]
        cost = all_gather_cost(self.device, types, operation.attributes.ranks, self.ctas)
        work = Kernel(NAME, ALL_GATHER, ((CTAS, self.ctas),), cost.time_us, cost.measured)
        return replace(launch, work=work, stream=Stream.COLLECTIVE)

    def _workspace(self, members: Sequence[TensorType]) -> tuple[Access, ...]:
        size_bytes = parts_bytes(members)
        workspace = Buffer(None, WHOLE, Layout.CHANNELS_FIRST, DType.UINT8, size_bytes)
        self.draft = replace(self.draft, buffers=(*self.draft.buffers, workspace))
        return (Access(len(self.draft.buffers) - 1, WHOLE, Mode.WRITE),)

    def _ordered(self, buckets: Sequence[tuple[int, Launch]], operations: Mapping[str, Operation]) -> Iterator[Launch]:
        """Yield all launches in the new order.

        Buckets run as soon as they are ready, and launches that depend on them once they should be summed. All other
        launches keep their order.
        """
        launches = self.draft.train.launches
        starts_us = [0.0, *accumulate(0.0 if _is_sum(launch) else launch.work.time_us for launch in launches)]
        before: dict[int, list[Launch]] = {}
        there: dict[int, int] = {}  # by buffer: the position from which on a value that depends on a sum is ready
        of_bucket: dict[int, int] = {}
        end_us = 0.0
        for number, (ready, bucket) in enumerate(buckets):
            before.setdefault(ready, []).append(bucket)
            end_us = max(end_us, starts_us[ready]) + bucket.work.time_us
            at = _behind_micro_batches(launches, max(ready, bisect_left(starts_us, end_us, hi=len(launches))))
            for access in bucket.accesses:
                if access.mode is Mode.READ or self.draft.buffers[access.buffer].value is None:
                    continue
                there[access.buffer], of_bucket[access.buffer] = at, number
        after: list[tuple[int, Launch]] = []
        last = _LastTouch(self.draft, _is_sum)
        for i, launch in enumerate(launches):
            if _is_sum(launch) or there.keys().isdisjoint(access.buffer for access in launch.accesses):
                continue
            for part in self._parts(launch, of_bucket, operations):
                at = max([last.before(part, i), *(there.get(access.buffer, 0) for access in part.accesses)])
                at = _behind_micro_batches(launches, at)
                there |= {access.buffer: at for access in part.accesses if access.mode is not Mode.READ}
                after.append((at, part))
            last.moved.add(i)
        for at, part in sorted(self._gathered(after, operations), key=_position):
            before.setdefault(at, []).append(part)
        for i, launch in enumerate((*launches, None)):
            yield from before.get(i, ())
            if launch is not None and not _is_sum(launch) and i not in last.moved:
                yield self._gather(launch, operations) if is_collective(launch) else launch

    def _gathered(
        self, launches: Sequence[tuple[int, Launch]], operations: Mapping[str, Operation]
    ) -> Iterator[tuple[int, Launch]]:
        """Yield the launches that follow sums, each with its position.

        Parts of new parameters that are ready together are gathered together, after all updates and before their
        readers; other gathers run in their order.
        """
        parts: dict[int, list[Launch]] = {}
        gathered: set[int] = set()
        readers: list[tuple[int, Launch]] = []
        for at, launch in launches:
            if gathers_parts(launch):
                parts.setdefault(at, []).append(launch)
                gathered.update(access.buffer for access in launch.accesses if access.mode is not Mode.READ)
            elif not gathered.isdisjoint(access.buffer for access in launch.accesses):
                readers.append((at, launch))
            else:
                yield at, self._gather(launch, operations) if is_collective(launch) else launch
        yield from ((at, self._sharded(GATHER_PARTS, together, operations)) for at, together in parts.items())
        yield from readers

    def _parts(
        self, launch: Launch, of_bucket: Mapping[int, int], operations: Mapping[str, Operation]
    ) -> tuple[Launch, ...]:
        """Return a launch of many updates, split by the buckets of their gradients."""
        if not divides(launch, operations):
            return (launch,)
        buckets = {self.draft.buffers[buffer].value: bucket for buffer, bucket in of_bucket.items()}
        numbers = [max((buckets.get(v, 0) for v in operations[name].inputs), default=0) for name in launch.operations]
        parts = [
            [name for name, number in zip(launch.operations, numbers, strict=True) if number == bucket]
            for bucket in sorted(set(numbers))
        ]
        return split_by(launch, parts, operations, self.draft.buffers, self.device)


def _behind_micro_batches(launches: Sequence[Launch], at: int) -> int:
    """Return the first position from `at` on that is not between micro-batches of one operation."""
    while 0 < at < len(launches) and launches[at].operations and launches[at].operations == launches[at - 1].operations:
        at += 1
    return at


def _position(pair: tuple[int, Launch]) -> int:
    return pair[0]


class _LastTouch:
    """The last launches that write or read the bytes that a launch needs. `moved` are launches that go elsewhere."""

    def __init__(self, draft: Draft, skipped: Callable[[Launch], bool]) -> None:
        """Find the launches that write or read each buffer, except for those that `skipped` selects."""
        self.moved: set[int] = set()
        self._owner = owners(draft.buffers)
        self._written: dict[int, list[int]] = {}
        self._touched: dict[int, list[int]] = {}
        for i, launch in enumerate(draft.train.launches):
            for access in () if skipped(launch) else launch.accesses:
                root = self._owner[access.buffer]
                self._touched.setdefault(root, []).append(i)
                if access.mode is not Mode.READ:
                    self._written.setdefault(root, []).append(i)

    def before(self, launch: Launch, at: int) -> int:
        """Return the first position after all launches before `at` that the launch must follow."""
        position = 0
        for access in launch.accesses:
            touches = self._written if access.mode is Mode.READ else self._touched
            earlier = (i for i in touches.get(self._owner[access.buffer], ()) if i < at and i not in self.moved)
            position = max(position, 1 + max(earlier, default=-1))
        return position
