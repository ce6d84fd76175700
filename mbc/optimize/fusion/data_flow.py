"""Fusion groups of pointwise operations that follow from data flow, without a pattern.

A cluster grows in the order of the program: an operation joins the clusters of its operands' producers, or of other
readers of its operands, as long as one launch can run all of them. A cluster of the backward pass may also recompute
values of the forward pass from what these were computed from. The number of groups is linear in that of operations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mbc.ir.graph import Operation, TrainingGraph
from mbc.kernels.base import Request
from mbc.kernels.cuda.generated.lowering import expression_of, lower
from mbc.ops import KINDS
from mbc.ops.fused import join
from mbc.optimize import effort
from mbc.optimize.fusion.fusion_group import Group


@dataclass(frozen=True)
class Cluster:
    """Pointwise operations that one launch may run.

    Attributes:
        members: Positions in the program of the operations that the launch replaces.
        recomputed: Positions of operations that keep launches of their own, whose results this launch recomputes.
    """

    members: frozenset[int]
    recomputed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Flow:
    """Data flow of one program of a graph.

    Attributes:
        graph: The graph.
        program: Its operations in order.
        results: Values that are read after the end of the program.
        readers: Positions of the operations that read each value.
    """

    graph: TrainingGraph
    program: Sequence[Operation]
    results: frozenset[str]
    readers: Mapping[str, Sequence[int]]

    @staticmethod
    def of(graph: TrainingGraph, program: Sequence[Operation], results: Collection[str]) -> Flow:
        """Return the data flow of a program."""
        readers: dict[str, list[int]] = {}
        for position, operation in enumerate(program):
            for name in dict.fromkeys(operation.inputs):
                readers.setdefault(name, []).append(position)
        return Flow(graph, program, frozenset(results), readers)

    @cached_property
    def producers(self) -> Mapping[str, int]:
        """Positions of the operations that compute each value."""
        return {name: position for position, o in enumerate(self.program) for name in o.outputs}

    @cached_property
    def pointwise(self) -> frozenset[int]:
        """Positions of the operations that a generated kernel can run."""
        return frozenset(
            position for position, o in enumerate(self.program) if KINDS[o.kind].device and lower(self._request(o))
        )

    @cached_property
    def updates(self) -> Sequence[int]:
        """Positions of the operations that update a state."""
        return tuple(position for position, o in enumerate(self.program) if KINDS[o.kind].updates)

    def size_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes of some values."""
        return sum(self.graph.values[name].type.size_bytes for name in names)

    def elements(self, name: str) -> int:
        """Return the number of a value's elements."""
        return self.graph.values[name].type.elements

    def outputs(self, positions: Iterable[int]) -> list[str]:
        """Return the values that some operations compute, in order."""
        return [name for position in sorted(positions) for name in self.program[position].outputs]

    def inputs(self, positions: Collection[int]) -> list[str]:
        """Return the values that some operations read and none of them computes, in order."""
        names = (name for position in sorted(positions) for name in self.program[position].inputs)
        inside = set(self.outputs(positions))
        return [name for name in dict.fromkeys(names) if name not in inside]

    def is_read_outside(self, value: str, positions: Collection[int]) -> bool:
        """Return whether other operations read a value, or the value is read after the end of the program."""
        return value in self.results or any(reader not in positions for reader in self.readers.get(value, ()))

    def launch(self, cluster: Cluster) -> Operation | None:
        """Return the launch of a cluster; None if there can be none."""
        positions = cluster.members | cluster.recomputed
        if not 2 <= len(positions) <= effort.FUSION_MEMBERS:
            return None
        stored = self.stored(cluster)
        following = bisect_left(self.updates, min(positions))
        updates = self.updates[following : following + 1]
        if not self.in_time(cluster, stored) or (updates and updates[0] <= max(cluster.members)):
            return None
        return self.joined(positions, stored)

    def stored(self, cluster: Cluster) -> list[str]:
        """Return the values that a cluster's launch stores: those that are read elsewhere, and sums that end it."""
        values = self.outputs(cluster.members)
        return [name for name in values if self._ends_launch(name) or self.is_read_outside(name, cluster.members)]

    def _ends_launch(self, value: str) -> bool:
        """Return whether a value is a sum that no member of its launch may read."""
        expression = expression_of(self.program[self.producers[value]])
        return bool(expression.sums) and not expression.inside

    def is_by_sample(self, cluster: Cluster) -> bool:
        """Return whether a member of a cluster normalises each sample by itself."""
        return any(expression_of(self.program[position]).by_sample for position in cluster.members)

    def reduces(self, position: int) -> bool:
        """Return whether a pointwise operation ends in sums."""
        return bool(expression_of(self.program[position]).sums)

    def in_time(self, cluster: Cluster, stored: Iterable[str]) -> bool:
        """Return whether the launch of a cluster precedes all readers of the values that it stores."""
        last = max(cluster.members)
        readers = (reader for name in stored for reader in self.readers.get(name, ()))
        return all(reader > last for reader in readers if reader not in cluster.members)

    def joined(self, positions: Collection[int], stored: Sequence[str]) -> Operation | None:
        """Return a launch of these operations that stores some of their values; None if no kernel can run it."""
        if not stored:
            return None
        launch = join([self.program[position] for position in sorted(positions)], stored)
        return launch if lower(self._request(launch)) is not None else None

    def _request(self, operation: Operation) -> Request:
        types = [self.graph.values[name].type for name in (*operation.inputs, *operation.outputs)]
        count = len(operation.inputs)
        return Request(
            operation.kind, operation.attributes, tuple(types[:count]), tuple(types[count:]), self.graph.precision
        )

    def group(self, cluster: Cluster, launch: Operation) -> Group:
        """Return the group of a cluster whose launch is `launch`."""
        unstored = frozenset(self.outputs(cluster.members)) - set(launch.outputs)
        replaced = frozenset(self.program[position].name for position in cluster.members)
        return Group((launch,), (max(cluster.members),), replaced, unstored)


def data_flow_groups(flow: Flow, matches: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups that follow from data flow, beside the `matches` of patterns."""
    clusters = _clusters(flow, flow.pointwise)
    matched = {name for group in matches for name in group.replaces}
    left = frozenset(position for position in flow.pointwise if flow.program[position].name not in matched)
    clusters += [cluster for cluster in _clusters(flow, left) if cluster not in clusters]
    singles = [Cluster(frozenset((position,))) for position in sorted(flow.pointwise - _covered(clusters))]
    groups = [
        *(group for cluster in clusters for group in _recomputing(flow, cluster)),
        *(group for cluster in singles for group in _recomputing(flow, cluster)),
        *(flow.group(cluster, launch) for cluster in clusters if (launch := flow.launch(cluster)) is not None),
    ]
    groups += _without_spared(flow, clusters, [*matches, *groups])
    matched_launches = {launch for group in matches if not group.measured for launch in group.launches}
    return tuple(group for group in dict.fromkeys(groups) if matched_launches.isdisjoint(group.launches))


def _covered(clusters: Iterable[Cluster]) -> set[int]:
    return {position for cluster in clusters for position in cluster.members}


def _clusters(flow: Flow, pointwise: frozenset[int]) -> list[Cluster]:
    """Return clusters of two or more operations, of which none can join another."""
    growing = _Growing(flow, pointwise)
    for position in sorted(pointwise):
        growing.add(position)
    return [cluster for cluster in dict.fromkeys(growing.of.values()) if len(cluster.members) > 1]


@dataclass
class _Growing:
    """Clusters while they grow.

    Attributes:
        of: The cluster of each position so far.
    """

    flow: Flow
    pointwise: frozenset[int]
    of: dict[int, Cluster] = field(default_factory=dict[int, Cluster])

    def add(self, position: int) -> None:
        """Let an operation join other clusters."""
        self.of[position] = Cluster(frozenset((position,)))
        for other in self._near(position):
            cluster = self.of[position]
            if other in cluster.members:
                continue
            both = Cluster(cluster.members | self.of[other].members)
            if self.flow.launch(both) is not None:
                self.of.update(dict.fromkeys(both.members, both))

    def _near(self, position: int) -> list[int]:
        """Return earlier operations whose clusters the operation may join, those that save most bytes first."""
        operation = self.flow.program[position]
        saved: dict[int, int] = {}
        for name in dict.fromkeys(operation.inputs):
            size_bytes = self.flow.size_bytes((name,))
            near = [(self.flow.producers[name], 2 * size_bytes)] if name in self.flow.producers else []
            near += [(reader, size_bytes) for reader in self.flow.readers[name] if reader < position]
            for other, gain in near:
                if other in self.of:
                    saved[other] = saved.get(other, 0) + gain
        return sorted(saved, key=lambda other: (-saved[other], -other))[: effort.FUSION_TRIES]


def _recomputing(flow: Flow, cluster: Cluster) -> Iterator[Group]:
    """Yield the group of a cluster that recomputes values rather than reading them, if that can save bytes."""
    recomputed: frozenset[int] = frozenset()
    largest = max(map(flow.elements, (*flow.inputs(cluster.members), *flow.outputs(cluster.members))))
    for value in flow.inputs(cluster.members):
        # A launch computes a repeated value once for each element. That pays only if the value's first reader comes
        # before the cluster: it may recompute the value too, so that nobody stores it.
        if flow.elements(value) < largest and flow.readers[value][0] >= min(cluster.members):
            continue
        # Batch normalisation has patterns for this.
        for through_stored in (False, True) if flow.is_by_sample(cluster) else (False,):
            more = recomputed | _upstream(flow, value, cluster, recomputed, through_stored)
            if more != recomputed and _saved_bytes(flow, cluster, recomputed, more) > 0:
                recomputed = more
    if recomputed:
        recomputing = replace(cluster, recomputed=recomputed)
        launch = flow.launch(recomputing)
        if launch is not None:
            spared = set(flow.inputs(cluster.members)) - set(launch.inputs)
            yield replace(flow.group(recomputing, launch), spares_bytes=flow.size_bytes(spared))


def _upstream(
    flow: Flow, value: str, cluster: Cluster, recomputed: frozenset[int], through_stored: bool
) -> frozenset[int]:
    """Return the operations that compute a value from values that are stored in any case.

    With `through_stored` they compute stored values as well: an activation's output from what the launch reads anyway.
    """
    positions: set[int] = set()
    have = {*flow.inputs(cluster.members | recomputed)} - {value}
    pending = [value]
    while pending and len(positions) < effort.FUSION_MEMBERS:
        name = pending.pop()
        producer = flow.producers.get(name)
        if producer is None or producer not in flow.pointwise or name in have:
            continue
        if _is_stored(flow, name) and not through_stored:
            continue
        if flow.reduces(producer):
            continue
        positions.add(producer)
        pending += flow.program[producer].inputs
    return frozenset(positions)


def _is_stored(flow: Flow, value: str) -> bool:
    """Return whether an operation that is not pointwise reads a value, or it is read after the end of the program."""
    return value in flow.results or any(reader not in flow.pointwise for reader in flow.readers.get(value, ()))


def _saved_bytes(flow: Flow, cluster: Cluster, before: frozenset[int], after: frozenset[int]) -> int:
    """Return the bytes that are not read, or need not be stored, if more is recomputed."""
    old, new = (flow.inputs(cluster.members | recomputed) for recomputed in (before, after))
    return flow.size_bytes(old) - flow.size_bytes(new) + flow.size_bytes(set(old) - set(new))


def _without_spared(flow: Flow, clusters: Sequence[Cluster], groups: Sequence[Group]) -> Iterator[Group]:
    """Yield groups that do not store values which other groups recompute."""
    spared = spared_reads(flow.program, groups)
    names = [operation.name for operation in flow.program]
    readers = {
        value: [reader for reader in readers if (names[reader], value) not in spared]
        for value, readers in flow.readers.items()
    }
    fewer = replace(flow, readers=readers)
    for cluster in dict.fromkeys((*clusters, *_clusters(fewer, flow.pointwise))):
        stored = fewer.stored(cluster)
        launch = (
            flow.joined(cluster.members, stored)
            if stored != flow.stored(cluster) and flow.in_time(cluster, stored)
            else None
        )
        if launch is not None:
            yield replace(flow.group(cluster, launch), late=True)
            if flow.is_by_sample(cluster):
                yield from (replace(group, late=True) for group in _recomputing(fewer, cluster))


def spared_reads(program: Sequence[Operation], groups: Iterable[Group]) -> set[tuple[str, str]]:
    """Return pairs of an operation and an operand, where some group runs the operation without reading the operand."""
    by_name = {operation.name: operation for operation in program}
    return {
        (name, value)
        for group in groups
        for name in group.replaces
        for value in by_name[name].inputs
        if value not in group.reads
    }
