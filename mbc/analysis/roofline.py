"""How far a plan is from the speed of light: the time of each operation against the least that it could take.

The least is the longer of two: its bytes over the copy bandwidth, its multiplications and additions over the peak of
the precision (Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009), be it reached by several products of a
shorter type. Both are counted from shapes: every operand once, however often a kernel reads it, and only the arithmetic
of matrix products, since nothing else comes near its peak. Either may be beaten: the second counts what the definition
of a convolution says, which FFT and Winograd undercut; the first takes every operand from memory, and a small one may
still lie in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mbc.errors import MbcError
from mbc.hardware.collective_times import CollectiveKind
from mbc.hardware.spec import DeviceSpec, spec_like
from mbc.hardware.streams import COPY_STREAMS, Space
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Precision
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import PRODUCTS
from mbc.ops import KINDS
from mbc.plan.collectives import Bucket, Sharing, sharing_of
from mbc.plan.model import Buffer, Launch, Mode, Plan, Program
from mbc.plan.summary import OperationSummary, grouped, summarise

_VERY_LARGE = 1 << 30  # bytes of a collective whose latency is nothing


class Bound(StrEnum):
    """What an operation cannot outrun."""

    MEMORY = "memory"
    ARITHMETIC = "arithmetic"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a GPU can do at most. `bytes_per_us` are read and written together, `flops_per_us` are of convolutions and
    GEMMs in the plan's precision; `launch_us` is the gap between two launches of a graph. `in_halves`: those are
    fastest as emulated fp32, `PRODUCTS` fp16 tensor-core products each."""

    bytes_per_us: float
    flops_per_us: float
    launch_us: float
    measured: bool
    in_halves: bool

    @staticmethod
    def of(device: DeviceSpec, precision: Precision) -> Ceilings:
        whole = peak_tflops(device, precision)
        splits = precision is Precision.FP32 and device.has_warpgroups
        halves = peak_tflops(device, Precision.FP16) / PRODUCTS if splits else 0.0
        flops_per_us = max(whole, halves) * 1e6
        return Ceilings(device.copy_gb_s * 1e3, flops_per_us, device.launch_us, device.measured, halves > whole)


@dataclass(frozen=True, slots=True)
class Limit:
    """One operation, fused group, conversion or copy (`summary`) against its limit.

    `moved_bytes`: of the arena, each operand once. `memory_us`, `arithmetic_us`: those, and `flops`, at the ceilings.
    `link_us`: of a collective, what its bytes take between GPUs as part of a very large one; of a copy, what they take
    at the rate of its link.
    """

    summary: OperationSummary
    moved_bytes: int
    flops: int
    memory_us: float
    arithmetic_us: float
    link_us: float = 0.0

    @property
    def limit_us(self) -> float:
        return max(self.memory_us, self.arithmetic_us, self.link_us)

    @property
    def bound(self) -> Bound:
        if self.link_us == self.limit_us > 0:
            return Bound.LINK
        return Bound.ARITHMETIC if self.arithmetic_us > self.memory_us else Bound.MEMORY

    @property
    def lost_us(self) -> float:
        """What the operation takes beyond its limit; below zero where it beats it."""
        return self.summary.time_us - self.limit_us


def device_of(plan: Plan) -> DeviceSpec:
    """The GPU that a plan is for. Raises MBC196 for a plan in fp64, which is for no GPU."""
    if plan.graph.precision is Precision.FP64:
        raise MbcError(
            "MBC196",
            f"'{plan.graph.name}' is planned in fp64, which runs on no GPU and has no roofline",
            "choose another precision with --set train.precision=fp32",
        )
    return spec_like(plan.target.gpu, plan.target.architecture)


def ceilings_of(plan: Plan) -> Ceilings:
    """Of the GPU that a plan is for. Raises MBC196 as `device_of`."""
    return Ceilings.of(device_of(plan), plan.graph.precision)


def limits(
    plan: Plan,
    program: Program,
    ceilings: Ceilings,
    groups: Mapping[str, Sequence[int]] | None = None,
    summaries: Sequence[OperationSummary] | None = None,
) -> tuple[Limit, ...]:
    """One an operation, in the order of `summarise`. `groups` and `summaries`: by `grouped` and `summarise`, where
    these are known."""
    operations = {op.name: op for op in (*plan.graph.train, *plan.graph.infer)}
    groups = grouped(plan, program) if groups is None else groups
    sharing = sharing_of(plan)
    link_us = {} if sharing is None else {b.launch: _link_us(plan, sharing, b) for b in sharing.buckets}
    links = device_of(plan).links
    found: list[Limit] = []
    for summary in summarise(plan, program, groups) if summaries is None else summaries:
        group = groups[summary.name]
        members = [operations[name] for name in program.launches[group[0]].operations]
        moved_bytes = _moved_bytes(plan, program, group, members)
        # An operation that is run again for some rows counts them again.
        launches = [program.launches[i] for i in group]
        flops = sum(flops_of(launch, member, plan.graph, plan.buffers) for launch in launches for member in members)
        over_link_us = link_us.get(group[0], 0.0) if program is plan.train else 0.0
        if summary.stream in COPY_STREAMS:
            over_link_us = moved_bytes / (links.gb_s(summary.stream) * 1e3)
        memory_us, arithmetic_us = moved_bytes / ceilings.bytes_per_us, flops / ceilings.flops_per_us
        found.append(Limit(summary, moved_bytes, flops, memory_us, arithmetic_us, over_link_us))
    return tuple(found)


def _link_us(plan: Plan, sharing: Sharing, bucket: Bucket) -> float:
    model, ranks = device_of(plan).collectives, len(sharing.rows)
    return model.time_us(CollectiveKind.ALL_REDUCE, _VERY_LARGE, ranks, sharing.ctas) * bucket.size_bytes / _VERY_LARGE


def _moved_bytes(plan: Plan, program: Program, group: Sequence[int], members: Sequence[Operation]) -> int:
    """Read and written in the arena, workspace left out: no operation needs any."""
    touched: dict[tuple[int, bool, int, int], None] = {}  # rows that are read twice count once
    for i in group:
        for access in program.launches[i].accesses:
            rows = access.rows
            touched[access.buffer, access.mode is Mode.READ, rows.start, rows.stop] = None
    total = 0.0
    shares = _read_shares(plan, members)
    for index, reads, start, stop in touched:
        buffer = plan.buffers[index]
        if buffer.value is not None and buffer.space is Space.ARENA:
            share = shares.get(buffer.value, 1.0) if reads else 1.0
            total += share * buffer.size_bytes * (stop - start) / buffer.rows.count
    return round(total)


def _read_shares(plan: Plan, members: Sequence[Operation]) -> dict[str, float]:
    """How much of each value the operations read that take it: most of what any of them does."""
    found: dict[str, float] = {}
    if all(KINDS[operation.kind].reads is None for operation in members):
        return found  # all of each
    for operation in members:
        share_of = KINDS[operation.kind].reads
        types = tuple(plan.graph.values[name].type for name in operation.inputs)
        shares = [1.0] * len(types) if share_of is None else share_of(operation.attributes, types)
        for name, share in zip(operation.inputs, shares, strict=True):
            found[name] = max(share, found.get(name, 0.0))
    return found


def flops_of(launch: Launch, operation: Operation, graph: TrainingGraph, buffers: Sequence[Buffer]) -> int:
    """Of one of the operations of a launch, for the rows that it runs; 0 of what is no matrix product."""
    flops = KINDS[operation.kind].flops
    if flops is None:
        return 0
    values = graph.values
    of_all = flops(
        operation.attributes,
        tuple(values[name].type for name in operation.inputs),
        tuple(values[name].type for name in operation.outputs),
    )
    sampled = {name for name in (*operation.inputs, *operation.outputs) if values[name].per_sample}
    rows = (a.rows.count for a in launch.accesses if buffers[a.buffer].value in sampled)
    return of_all * next(rows, graph.batch) // graph.batch
