"""What a plan of several GPUs sums over its ranks and gathers from them, read from its launches alone."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.kernels.nccl import BY_COPIES, bucket_bytes, ctas_of, is_bucket, is_collective
from mbc.plan.model import Mode, Plan


@dataclass(frozen=True, slots=True)
class Bucket:
    """One collective: the `launch` of the training program, the number of tensors that it sums or gathers, and their
    bytes: of a sum from the first to the last, of a gather those of all ranks. `time_us`: by itself."""

    launch: int
    tensors: int
    size_bytes: int
    time_us: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Sharing:
    """How ranks share a mini-batch. `rows`: of each rank; `members`: the ranks that run this plan. `ctas`: thread
    blocks of each collective; 0: copy engines move the data. `buckets` are summed, `gathers` gathered."""

    rows: tuple[int, ...]
    members: tuple[int, ...]
    ctas: int
    buckets: tuple[Bucket, ...]
    gathers: tuple[Bucket, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def time_us(self) -> float:
        return sum(bucket.time_us for bucket in self.buckets)


def sharing_of(plan: Plan) -> Sharing | None:
    """None of a plan for one GPU."""
    ranks = plan.graph.ranks
    if ranks is None:
        return None
    buckets: list[Bucket] = []
    gathers: list[Bucket] = []
    for i, launch in enumerate(plan.train.launches):
        if is_collective(launch):
            read = [plan.buffers[a.buffer].value or "" for a in launch.accesses if a.mode is Mode.READ]
            types = [plan.graph.values[name].type for name in read]
            if is_bucket(launch):
                size_bytes, found = bucket_bytes(types), buckets
            else:
                size_bytes, found = ranks.size * sum(t.size_bytes for t in types), gathers
            found.append(Bucket(i, len(read), size_bytes, launch.work.time_us, launch.work.measured))
    return Sharing(ranks.rows, ranks.members, ctas_of(plan.train) or BY_COPIES, tuple(buckets), tuple(gathers))
