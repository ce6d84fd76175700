"""The collectives of a plan for several GPUs: their buckets, their cost, and the part of it that kernels hide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mbc.hardware.collective_times import CollectiveKind
from mbc.optimize.bounds.critical_path import KERNEL_STREAMS
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.simulate import Contention, timeline
from mbc.plan.collectives import Sharing, sharing_of
from mbc.plan.model import Plan
from mbc.report.columns import Column, render
from mbc.report.devices import device_of
from mbc.report.tables import time_cell
from mbc.units import show_size, show_time

Interval = tuple[float, float]
_KINDS = {
    CollectiveKind.ALL_REDUCE: "all-reduce, ",
    CollectiveKind.REDUCE_SCATTER: "reduce-scatter, ",
    CollectiveKind.ALL_GATHER: "all-gather, ",
}


@dataclass(frozen=True, slots=True)
class Collectives:
    """The predicted collectives of a step.

    Times are in microseconds, with one element for each bucket, those of a sharded optimizer included.

    Attributes:
        sharing: Buckets and shards of the plan.
        starts_us: Start of each collective in the step.
        times_us: Time of each collective, beside the kernels that run then and after a wait for them.
        exposed_us: Part of that time in which no kernel runs.
        slowed_us: Additional time of the step because kernels are slower beside collectives.
        link_bytes: Bytes that a link carries in each direction, by the ring algorithm.
    """

    sharing: Sharing
    starts_us: tuple[float, ...]
    times_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    slowed_us: float
    link_bytes: int

    @property
    def time_us(self) -> float:
        """Time of all collectives, in microseconds."""
        return sum(self.times_us)

    @property
    def named(self) -> str:
        """Plural noun for these collectives."""
        return "collectives" if self.sharing.shards else "all-reduces"

    @property
    def hidden_us(self) -> float:
        """Time in which kernels run beside collectives, in microseconds."""
        return self.time_us - sum(self.exposed_us)

    @property
    def estimated(self) -> bool:
        """True if a time is estimated rather than measured."""
        return not all(bucket.measured for bucket in self.sharing.all_buckets)


def collectives_of(plan: Plan) -> Collectives | None:
    """Predict the collectives of a step; return None for a plan for one GPU, or for CPUs, which are not timed."""
    sharing = sharing_of(plan)
    if sharing is None or not sharing.all_buckets:
        return None
    slower = _contention(plan)
    times = timeline(plan.train, contention=slower)
    runs = list(zip(times.starts_us, times.ends_us, strict=True))
    kernels = [runs[i] for i, launch in enumerate(plan.train.launches) if launch.stream in KERNEL_STREAMS]
    own = [runs[bucket.launch] for bucket in sharing.all_buckets]
    slowed_us = 0.0
    if slower is not None:
        alone = replace(slower, beside_collective=(1.0,) * len(runs))
        slowed_us = times.total_us - timeline(plan.train, contention=alone).total_us
    return Collectives(
        sharing,
        tuple(start for start, _ in own),
        tuple(end - start for start, end in own),
        tuple(end - start - _covered_us((start, end), kernels) for start, end in own),
        slowed_us,
        sharing.link_bytes,
    )


def _contention(plan: Plan) -> Contention | None:
    """Return the contention that the planner assumes with the profile of this machine; None for an unknown GPU."""
    device = device_of(plan)
    return None if device is None else contention(plan.train, plan.graph, plan.buffers, device)


def _covered_us(whole: Interval, parts: Iterable[Interval]) -> float:
    """Return how much of an interval other intervals cover."""
    covered, at = 0.0, whole[0]
    for start, end in sorted(parts):
        start, end = max(start, at), min(end, whole[1])
        if end > start:
            covered += end - start
            at = end
    return covered


def ranks_text(members: Sequence[int]) -> str:
    """Format ranks as `rank 2`, `ranks 1 and 2`, or `ranks 2 to 7`."""
    if len(members) == 1:
        return f"rank {members[0]}"
    return f"ranks {members[0]} {'and' if len(members) == 2 else 'to'} {members[-1]}"


def collectives_lines(plan: Plan) -> list[str]:
    """Return the lines of `mbc compile` on collectives; none for a plan for one GPU."""
    collectives = collectives_of(plan)
    if collectives is None:
        return []
    sharing, exposed_us = collectives.sharing, sum(collectives.exposed_us)
    count = len(sharing.buckets)
    return [
        *_gather_lines(collectives),
        *_shard_lines(collectives),
        f"  all-reduce {show_size(sharing.size_bytes)} in {count} bucket{'' if count == 1 else 's'}, "
        f"{sharing.ctas} thread blocks",
        f"  links      {show_size(collectives.link_bytes)} a step in each direction",
        *([f"  machines   {links}"] if (links := plan.predictions.links) else []),
        f"  hidden     {show_time(collectives.hidden_us)} of the "
        f"{time_cell(collectives.time_us, collectives.estimated)} that {collectives.named} take in the step",
        f"  exposed    {time_cell(exposed_us, collectives.estimated)}; kernels beside {collectives.named} lose "
        f"{time_cell(collectives.slowed_us, collectives.estimated)}",
    ]


def _gather_lines(collectives: Collectives) -> list[str]:
    """Return the line on the all-gathers of statistics and of operands of gradients."""
    gathers = collectives.sharing.gathers
    if not gathers:
        return []
    sizes_bytes, times_us = sum(g.size_bytes for g in gathers), sum(g.time_us for g in gathers)
    measured = all(g.measured for g in gathers)
    return [f"  all-gather {show_size(sizes_bytes)} in {len(gathers)} calls, {time_cell(times_us, not measured)}"]


def _shard_lines(collectives: Collectives) -> list[str]:
    """Return the lines on a sharded optimizer."""
    sharing = collectives.sharing
    if not sharing.shards:
        return []
    lines = [
        f"  sharded    {show_size(sharing.state_bytes)} of {show_size(sharing.whole_state_bytes)} of optimizer states "
        f"on each of {len(sharing.rows)} GPUs"
    ]
    for kind, what in (
        (CollectiveKind.REDUCE_SCATTER, "reduce-scatter of gradients"),
        (CollectiveKind.ALL_GATHER, "all-gather of parameters"),
    ):
        of_kind = [bucket for bucket in sharing.shards if bucket.kind is kind]
        size_bytes, time_us = sum(b.size_bytes for b in of_kind), sum(b.time_us for b in of_kind)
        count, measured = len(of_kind), all(b.measured for b in of_kind)
        if of_kind:
            lines.append(
                f"             {what} {show_size(size_bytes)} in {count} call{'' if count == 1 else 's'}, "
                f"{time_cell(time_us, not measured)}"
            )
    return lines


def collectives_text(plan: Plan, width: int | None) -> str:
    """Format a table of the buckets; return no text for a plan for one GPU."""
    collectives = collectives_of(plan)
    if collectives is None:
        return ""
    sharing, exposed_us = collectives.sharing, sum(collectives.exposed_us)
    rows = [
        (f"{_KINDS[bucket.kind]}launch {bucket.launch}" if sharing.shards else f"launch {bucket.launch}",
         str(bucket.tensors), show_size(bucket.size_bytes), show_time(start_us),
         time_cell(time_us, not bucket.measured), time_cell(time_us - exposed_us, not bucket.measured),
         time_cell(exposed_us, not bucket.measured))
        for bucket, start_us, time_us, exposed_us in zip(
            sharing.all_buckets, collectives.starts_us, collectives.times_us, collectives.exposed_us, strict=True
        )
    ]  # fmt: skip
    columns = (
        Column("collective" if sharing.shards else "all-reduce"),
        Column("tensors", right=True),
        Column("bytes", right=True),
        Column("starts", right=True),
        Column("in the step", right=True),
        Column("hidden", right=True),
        Column("exposed", right=True),
    )
    rows.append(
        ("all", str(sum(b.tensors for b in sharing.all_buckets)),
         show_size(sum(b.size_bytes for b in sharing.all_buckets)), "",
         time_cell(collectives.time_us, collectives.estimated), time_cell(collectives.hidden_us, collectives.estimated),
         time_cell(exposed_us, collectives.estimated))
    )  # fmt: skip
    network = f" ({plan.predictions.links})" if plan.predictions.links else ""
    return (
        f"{render(columns, rows, width)}\n{collectives.sharing.ctas} thread blocks each; a link carries "
        f"{show_size(collectives.link_bytes)} a step in each direction{network}; kernels beside "
        f"{collectives.named} lose {time_cell(collectives.slowed_us, collectives.estimated)}"
    )


def collectives_document(plan: Plan) -> dict[str, Any] | None:
    """Return the collectives for scripts; None for a plan for one GPU."""
    collectives = collectives_of(plan)
    if collectives is None:
        return None
    buckets = zip(
        collectives.sharing.all_buckets,
        collectives.starts_us,
        collectives.times_us,
        collectives.exposed_us,
        strict=True,
    )
    return {
        "ranks": len(collectives.sharing.rows),
        "rows": list(collectives.sharing.rows),
        "members": list(collectives.sharing.members),
        "thread_blocks": collectives.sharing.ctas,
        "bytes": collectives.sharing.size_bytes,
        "link_bytes": collectives.link_bytes,
        "links": plan.predictions.links,
        "time_us": collectives.time_us,
        "hidden_us": collectives.hidden_us,
        "exposed_us": sum(collectives.exposed_us),
        "slowed_us": collectives.slowed_us,
        "estimated": collectives.estimated,
        "state_bytes": collectives.sharing.state_bytes,
        "whole_state_bytes": collectives.sharing.whole_state_bytes,
        "gathers": [asdict(gather) for gather in collectives.sharing.gathers],
        "buckets": [
            {**asdict(bucket), "start_us": start_us, "beside_kernels_us": time_us, "exposed_us": exposed_us}
            for bucket, start_us, time_us, exposed_us in buckets
        ],
    }
