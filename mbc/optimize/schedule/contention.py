"""Contention: how much copies slow down concurrent kernels, and how much kernels of two streams slow down each other.

Copies slow down kernels by the kind of each kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from mbc.analysis.roofline import flops_of
from mbc.hardware.collective_times import ConcurrentKernel
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream
from mbc.hardware.transfers import KernelClass, Links, Slowdown
from mbc.ir.graph import TrainingGraph
from mbc.kernels.calibration import peak_tflops
from mbc.ops import KINDS
from mbc.ops.base import OpKind
from mbc.optimize.schedule.simulate import Contention, LinkContention
from mbc.plan.collectives import ctas_of
from mbc.plan.model import Buffer, Copy, Launch, Program

# A kernel that takes longer than this factor times the move of its bytes is not memory-bound.
COMPUTING = 2.0
# FILLING: a kernel that reaches this share of the roofline fills the GPU, so that no other kernel runs concurrently.
# WAIT_US: the cost of a wait for the other stream's kernel. Both are fitted to six steps of ResNet-18 and 50 at batches
# 1 to 32, which they predict within 5 % (decision 019).
FILLING = 0.6
WAIT_US = 5.0
# Cost of a wait between a kernel and a copy, for a kernel at either end of it. It is measured from gaps between the
# kernels of three captured steps of ResNet-50 (decision 020).
COPY_WAIT_US = 7.0
_ALONE = Slowdown()


def contention(
    program: Program, graph: TrainingGraph, buffers: Sequence[Buffer], device: DeviceSpec
) -> Contention | None:
    """Return how the launches of a program slow down one another on `device`, or None if all run serially."""
    if all(launch.stream is Stream.COMPUTE for launch in program.launches):
        return None
    streams = {launch.stream for launch in program.launches}
    spaces = (space for space in STREAM_TO if not streams.isdisjoint((STREAM_TO[space], STREAM_FROM[space])))
    classes = [
        None if isinstance(launch.work, Copy) else _class(launch, buffers, device) for launch in program.launches
    ]
    concurrent = any(launch.stream is Stream.CONCURRENT for launch in program.launches)
    return Contention(
        {space: _of_link(device.links, space, classes) for space in spaces},
        _fills(program, graph, buffers, device) if concurrent else (0.0,) * len(program.launches),
        WAIT_US,
        COPY_WAIT_US,
        *_of_collectives(program, graph, buffers, device),
    )


def _of_link(links: Links, space: Space, classes: Sequence[KernelClass | None]) -> LinkContention:
    """Return the contention of one link, with the class of each launch (None: a copy)."""
    link = links.of(STREAM_TO[space])
    out, back = link.directions
    beside = links.peer.beside_host if space is Space.PEER else links.peer.host_beside
    slowdowns = tuple(_ALONE if kernels is None else link.slowdown(kernels) for kernels in classes)
    return LinkContention(slowdowns, link.slower_both(out), link.slower_both(back), beside)


def _of_collectives(
    program: Program, graph: TrainingGraph, buffers: Sequence[Buffer], device: DeviceSpec
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the slowdown of each launch beside a collective, and that of a collective beside each launch."""
    ctas = ctas_of(program)
    if graph.ranks is None or ctas is None:
        return (), ()
    kinds = {op.name: KINDS[op.kind] for op in (*graph.train, *graph.infer)}
    by_kind: dict[ConcurrentKernel, tuple[float, float]] = {}
    for kind in ConcurrentKernel:
        slowdown = device.collectives.slowdown(kind, graph.ranks.size, ctas)
        by_kind[kind] = slowdown.kernel_ratio, slowdown.collective_ratio
    ratios = [
        (1.0, 1.0)
        if isinstance(launch.work, Copy)
        else by_kind[_beside(launch, [kinds[name] for name in launch.operations], buffers, device)]
        for launch in program.launches
    ]
    return tuple(kernel for kernel, _ in ratios), tuple(collective for _, collective in ratios)


def _beside(launch: Launch, kinds: Sequence[OpKind], buffers: Sequence[Buffer], device: DeviceSpec) -> ConcurrentKernel:
    """Return the kind of kernel that a launch counts as beside a collective."""
    if _class(launch, buffers, device) is KernelClass.COMPUTING:
        convolves = any(kind.name.startswith("conv") for kind in kinds)
        return ConcurrentKernel.CONVOLUTION if convolves else ConcurrentKernel.GEMM
    reduces = any(kind.accumulates or (kind.reduces and not kind.updates) for kind in kinds)
    return ConcurrentKernel.REDUCTION if reduces else ConcurrentKernel.ELEMENTWISE


def _fills(program: Program, graph: TrainingGraph, buffers: Sequence[Buffer], device: DeviceSpec) -> tuple[float, ...]:
    """Return the share of the GPU that each launch fills, 0 to 1; 0 for copies.

    It is the least time that the launch's bytes and arithmetic could take (Williams et al.'s roofline) over its own
    time, relative to `FILLING`, the share that kernels reach.
    """
    if not graph.precision.runs_on_gpus:
        return (1.0,) * len(program.launches)  # fp64 runs on the CPU only
    bytes_per_us = device.copy_gb_s * 1e3
    # The peak is that of the precision's own arithmetic: FFMA kernels fill a GPU although tensor cores would be faster.
    flops_per_us = peak_tflops(device, graph.precision) * 1e6
    operations = {op.name: op for op in (*graph.train, *graph.infer)}
    shares: list[float] = []
    for launch in program.launches:
        flops = sum(flops_of(launch, operations[name], graph, buffers) for name in launch.operations)
        least_us = max(_touched_bytes(launch, buffers) / bytes_per_us, flops / flops_per_us)
        busy_us = max(launch.work.time_us - device.launch_us, 1e-3)
        shares.append(0.0 if isinstance(launch.work, Copy) else min(1.0, least_us / (FILLING * busy_us)))
    return tuple(shares)


def _touched_bytes(launch: Launch, buffers: Sequence[Buffer]) -> int:
    touched = 0
    for access in launch.accesses:
        buffer = buffers[access.buffer]
        touched += buffer.size_bytes * access.rows.count // buffer.rows.count
    return touched


def _class(launch: Launch, buffers: Sequence[Buffer], device: DeviceSpec) -> KernelClass:
    """Return the class of a launch, by which copies slow it down, from its time and bytes.

    A launch that is slow for its bytes is compute-bound. The operands of other launches are assumed to be in the L2
    cache if they fit, since the previous launch has just written them.
    """
    touched = _touched_bytes(launch, buffers)
    if launch.work.time_us > device.launch_us + COMPUTING * touched / (device.copy_gb_s * 1e3):
        return KernelClass.COMPUTING
    return KernelClass.CACHED if touched <= device.l2_bytes else KernelClass.STREAMING
