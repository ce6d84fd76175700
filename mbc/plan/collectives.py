"""The tensors that a plan of several GPUs sums over its ranks or gathers from them, read from its launches alone."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.hardware.collective_times import CollectiveKind, bus_share
from mbc.kernels.nccl import ALL_REDUCE, BY_COPIES, CTAS, GATHER_PARTS, NAME, REDUCE_SCATTER, bucket_bytes
from mbc.ops.shard import parameters_of_sharded_states
from mbc.plan.model import Kernel, Launch, Mode, Plan, Program


def collective_of(launch: Launch) -> Kernel | None:
    """Return the collective that a launch runs, or None for other launches."""
    return launch.work if isinstance(launch.work, Kernel) and launch.work.provider == NAME else None


def is_collective(launch: Launch) -> bool:
    """Return whether all ranks run the launch together."""
    return collective_of(launch) is not None


def is_bucket(launch: Launch) -> bool:
    """Return whether the launch sums gradients over all ranks."""
    work = collective_of(launch)
    return work is not None and work.name == ALL_REDUCE


def is_scatter(launch: Launch) -> bool:
    """Return whether the launch sums gradients over all ranks and leaves each rank its parts only."""
    work = collective_of(launch)
    return work is not None and work.name == REDUCE_SCATTER


def gathers_parts(launch: Launch) -> bool:
    """Return whether the launch gathers the parts of new parameters."""
    work = collective_of(launch)
    return work is not None and work.name == GATHER_PARTS


def ctas_of(program: Program) -> int | None:
    """Return the number of thread blocks of each collective of a program; None if the program has no collective."""
    works = (collective_of(launch) for launch in program.launches)
    return max((dict(work.settings)[CTAS] for work in works if work is not None), default=None)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One collective of the training program.

    Attributes:
        launch: Index of the launch in the training program.
        tensors: Number of tensors that the collective sums or gathers.
        size_bytes: For an all-reduce, bytes from the start of the first tensor to the end of the last one; for a
            gather, bytes of all ranks' tensors; for a sharded optimizer, bytes of the whole tensors.
        time_us: Time of the collective when nothing else runs.
        measured: Whether the time is from a profile.
        kind: The collective.
    """

    launch: int
    tensors: int
    size_bytes: int
    time_us: float
    measured: bool
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE


@dataclass(frozen=True, slots=True)
class Sharing:
    """How ranks share a mini-batch.

    Attributes:
        rows: Rows of each rank.
        members: The ranks that run this plan.
        ctas: Thread blocks of each collective; 0 if copy engines move the data.
        buckets: All-reduces.
        gathers: All-gathers.
        shards: Collectives of a sharded optimizer: reduce-scatters of gradients and gathers of new parameters.
        state_bytes: Bytes of the sharded optimizer's states on this GPU.
        whole_state_bytes: Bytes of these states on all GPUs together.
    """

    rows: tuple[int, ...]
    members: tuple[int, ...]
    ctas: int
    buckets: tuple[Bucket, ...]
    gathers: tuple[Bucket, ...] = ()
    shards: tuple[Bucket, ...] = ()
    state_bytes: int = 0
    whole_state_bytes: int = 0

    @property
    def all_buckets(self) -> tuple[Bucket, ...]:
        """All-reduces and collectives of a sharded optimizer, in the order of their launches."""
        return tuple(sorted((*self.buckets, *self.shards), key=lambda bucket: bucket.launch))

    @property
    def size_bytes(self) -> int:
        """Bytes that all-reduces sum."""
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def link_bytes(self) -> int:
        """Bytes that a link carries in each direction for `all_buckets`, by the ring algorithm."""
        ranks = len(self.rows)
        return round(sum(bucket.size_bytes * bus_share(bucket.kind, ranks) for bucket in self.all_buckets))

    @property
    def time_us(self) -> float:
        """Time of all all-reduces."""
        return sum(bucket.time_us for bucket in self.buckets)


def sharing_of(plan: Plan) -> Sharing | None:
    """Return how the ranks of a plan share a mini-batch; None for a plan for one GPU."""
    ranks = plan.graph.ranks
    if ranks is None:
        return None
    buckets: list[Bucket] = []
    gathers: list[Bucket] = []
    shards: list[Bucket] = []
    for i, launch in enumerate(plan.train.launches):
        if not is_collective(launch):
            continue
        inputs, outputs = (
            [
                plan.graph.values[plan.buffers[access.buffer].value or ""].type
                for access in launch.accesses
                if (access.mode is Mode.READ) is read and plan.buffers[access.buffer].value is not None
            ]
            for read in (True, False)
        )
        kind = CollectiveKind.ALL_REDUCE
        if is_bucket(launch):
            tensors, size_bytes, collectives = len(inputs), bucket_bytes(inputs), buckets
        elif is_scatter(launch) or gathers_parts(launch):
            kind = CollectiveKind.REDUCE_SCATTER if is_scatter(launch) else CollectiveKind.ALL_GATHER
            whole = inputs if is_scatter(launch) else outputs
            tensors, size_bytes, collectives = len(whole), sum(t.size_bytes for t in whole), shards
        else:
            kind = CollectiveKind.ALL_GATHER
            tensors, size_bytes, collectives = len(inputs), ranks.size * sum(t.size_bytes for t in inputs), gathers
        collectives.append(Bucket(i, tensors, size_bytes, launch.work.time_us, launch.work.measured, kind))
    ctas, sharded = ctas_of(plan.train) or BY_COPIES, parameters_of_sharded_states(plan.graph.train)
    part_bytes, whole_bytes = (
        sum(plan.graph.values[name].type.size_bytes for name in names) for names in (sharded, sharded.values())
    )
    return Sharing(
        ranks.rows, ranks.members, ctas, tuple(buckets), tuple(gathers), tuple(shards), part_bytes, whole_bytes
    )
