"""Compares the time of each operation of a plan with its lower bound.

The bound is the longer of two times: the bytes over the copy bandwidth, and the multiplications and additions over the
peak of the precision (Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009). That peak may be reached by several
products of a shorter type. Both are counted from shapes: each operand once, however often a kernel reads it, and only
the arithmetic of matrix products, because no other operation comes near its peak. An operation can be faster than
either bound. FFT and Winograd need less arithmetic than the definition of a convolution, and a small operand may still
be in the cache although the bound reads it from memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mbc.hardware.collective_times import CollectiveKind
from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.streams import COPY_STREAMS, Space
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Precision
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import PRODUCTS
from mbc.ops import KINDS
from mbc.plan.collectives import Bucket, Sharing, sharing_of
from mbc.plan.model import Buffer, Launch, Mode, Plan, Program
from mbc.plan.require_times import require_predicted_times
from mbc.plan.summary import OperationSummary, grouped, summarise

_VERY_LARGE = 1 << 30  # bytes of a collective whose latency is negligible


class Bound(StrEnum):
    """The limit that determines an operation's lower bound."""

    MEMORY = "memory"
    ARITHMETIC = "arithmetic"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The highest rates of a GPU.

    `bytes_per_us` counts bytes read and written. `flops_per_us` is the rate of convolutions and GEMMs in the plan's
    precision. `launch_us` is the gap between two launches of a graph. `in_halves` is true if matrix products are
    fastest as emulated fp32, with `PRODUCTS` fp16 products on tensor cores for each.
    """

    bytes_per_us: float
    flops_per_us: float
    launch_us: float
    measured: bool
    in_halves: bool

    @staticmethod
    def of(device: DeviceSpec, precision: Precision) -> Ceilings:
        """Return the ceilings of `device` at `precision`."""
        whole = peak_tflops(device, precision)
        splits = precision is Precision.FP32 and device.has(Instruction.WGMMA)
        halves = peak_tflops(device, Precision.FP16) / PRODUCTS if splits else 0.0
        flops_per_us = max(whole, halves) * 1e6
        return Ceilings(device.copy_gb_s * 1e3, flops_per_us, device.launch_us, device.measured, halves > whole)


@dataclass(frozen=True, slots=True)
class Limit:
    """The lower bounds of one operation, fused group, conversion or copy (`summary`).

    `moved_bytes` are bytes of the arena, each operand once. `memory_us` and `arithmetic_us` are the times of these
    bytes and of `flops` at the ceilings. `link_us` is, for a collective, the time of its bytes between GPUs as a part
    of a very large collective; for a copy, the time of its bytes at the rate of its link.
    """

    summary: OperationSummary
    moved_bytes: int
    flops: int
    memory_us: float
    arithmetic_us: float
    link_us: float = 0.0

    @property
    def limit_us(self) -> float:
        """The lower bound of the time."""
        return max(self.memory_us, self.arithmetic_us, self.link_us)

    @property
    def bound(self) -> Bound:
        """The limit that determines `limit_us`."""
        if self.link_us == self.limit_us > 0:
            return Bound.LINK
        return Bound.ARITHMETIC if self.arithmetic_us > self.memory_us else Bound.MEMORY

    @property
    def lost_us(self) -> float:
        """The time beyond the lower bound; negative if the operation is faster."""
        return self.summary.time_us - self.limit_us


def device_of(plan: Plan) -> DeviceSpec:
    """Return the GPU that a plan is for.

    Raises:
        MbcError: MBC196, the plan is in fp64, which no GPU runs.
    """
    require_predicted_times(plan.graph.name, plan.graph.precision, "a roofline")
    return plan.target.device


def ceilings_of(plan: Plan) -> Ceilings:
    """Return the ceilings of the GPU that a plan is for.

    Raises:
        MbcError: MBC196, the plan is in fp64, which no GPU runs.
    """
    return Ceilings.of(device_of(plan), plan.graph.precision)


def limits(
    plan: Plan,
    program: Program,
    ceilings: Ceilings,
    groups: Mapping[str, Sequence[int]] | None = None,
    summaries: Sequence[OperationSummary] | None = None,
) -> tuple[Limit, ...]:
    """Return the limit of each operation, in the order of `summarise`.

    Args:
        plan: The plan.
        program: Its training or inference program.
        ceilings: Rates of the GPU.
        groups: Result of `grouped`; None to compute it.
        summaries: Result of `summarise`; None to compute it.
    """
    operations = {op.name: op for op in (*plan.graph.train, *plan.graph.infer)}
    groups = grouped(plan, program) if groups is None else groups
    sharing = sharing_of(plan)
    link_us = {} if sharing is None else {b.launch: _link_us(plan, sharing, b) for b in sharing.buckets}
    links = device_of(plan).links
    results: list[Limit] = []
    for summary in summarise(plan, program, groups) if summaries is None else summaries:
        group = groups[summary.name]
        members = [operations[name] for name in program.launches[group[0]].operations]
        moved_bytes = _moved_bytes(plan, program, group, members)
        # Rows for which an operation runs again count again.
        launches = [program.launches[i] for i in group]
        flops = sum(flops_of(launch, member, plan.graph, plan.buffers) for launch in launches for member in members)
        over_link_us = link_us.get(group[0], 0.0) if program is plan.train else 0.0
        if summary.stream in COPY_STREAMS:
            over_link_us = moved_bytes / (links.gb_s(summary.stream) * 1e3)
        memory_us, arithmetic_us = moved_bytes / ceilings.bytes_per_us, flops / ceilings.flops_per_us
        results.append(Limit(summary, moved_bytes, flops, memory_us, arithmetic_us, over_link_us))
    return tuple(results)


def _link_us(plan: Plan, sharing: Sharing, bucket: Bucket) -> float:
    model, ranks = device_of(plan).collectives, len(sharing.rows)
    return model.time_us(CollectiveKind.ALL_REDUCE, _VERY_LARGE, ranks, sharing.ctas) * bucket.size_bytes / _VERY_LARGE


def _moved_bytes(plan: Plan, program: Program, group: Sequence[int], members: Sequence[Operation]) -> int:
    """Return the bytes read and written in the arena; workspace does not count, because no operation requires any."""
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
    """Return the share of each value that the operations read. The reader with the largest share counts."""
    by_value: dict[str, float] = {}
    if all(KINDS[operation.kind].reads is None for operation in members):
        return by_value  # all values are read as a whole
    for operation in members:
        share_of = KINDS[operation.kind].reads
        types = tuple(plan.graph.values[name].type for name in operation.inputs)
        shares = [1.0] * len(types) if share_of is None else share_of(operation.attributes, types)
        for name, share in zip(operation.inputs, shares, strict=True):
            by_value[name] = max(share, by_value.get(name, 0.0))
    return by_value


def flops_of(launch: Launch, operation: Operation, graph: TrainingGraph, buffers: Sequence[Buffer]) -> int:
    """Return the floating-point operations of `operation` for the launch's rows; 0 unless it is a matrix product."""
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
