"""Contention: how much copies slow down concurrent kernels, by the kind of each kernel, and how much kernels of two
streams slow down each other."""

from __future__ import annotations

from collections.abc import Sequence

from mbc.analysis.roofline import flops_of
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.transfers import Slowdown
from mbc.ir.graph import TrainingGraph
from mbc.ir.types import Precision
from mbc.kernels.calibration import peak_tflops
from mbc.optimize.schedule.simulate import Contention
from mbc.plan.model import Buffer, Copy, Launch, Program, Stream

# A kernel that takes over so many times as long as moving its bytes does not wait for memory.
COMPUTING = 2.0
# A kernel that reaches this share of what the GPU can do at most fills it: no other kernel runs concurrently. And the
# cost of a wait for the other stream's kernel. Both as they predict six steps of ResNet-18 and 50 of batches 1 to 32
# best, within 5 % (decision 019).
FILLING = 0.6
WAIT_US = 5.0
# Cost of a wait between a kernel and a copy, for a kernel at either end of it: as gaps between the kernels of three
# steps of ResNet-50 show it, captured into graphs (decision 020).
COPY_WAIT_US = 7.0
_ALONE = Slowdown()


def contention(
    program: Program, graph: TrainingGraph, buffers: Sequence[Buffer], device: DeviceSpec
) -> Contention | None:
    """How the launches of a program slow down each other on `device`; None where all run serially."""
    if all(launch.stream is Stream.COMPUTE for launch in program.launches):
        return None
    link = device.host_link
    beside = any(launch.stream is Stream.CONCURRENT for launch in program.launches)
    return Contention(
        tuple(
            _ALONE if isinstance(launch.work, Copy) else _slowdown(launch, buffers, device)
            for launch in program.launches
        ),
        link.to_host_gb_s / link.to_host_both_gb_s,
        link.to_device_gb_s / link.to_device_both_gb_s,
        _fills(program, graph, buffers, device) if beside else (0.0,) * len(program.launches),
        WAIT_US,
        COPY_WAIT_US,
    )


def _fills(program: Program, graph: TrainingGraph, buffers: Sequence[Buffer], device: DeviceSpec) -> tuple[float, ...]:
    """The share of the GPU that each launch fills, 0 to 1: the least time that its bytes and its arithmetic could take
    (Williams et al.'s roofline) over its own, where `FILLING` of that is as much as kernels reach. 0 for copies."""
    if graph.precision is Precision.FP64:
        return (1.0,) * len(program.launches)  # which runs on no GPU
    bytes_per_us = device.copy_gb_s * 1e3
    # Of its own kind of arithmetic: FFMA kernels fill a GPU whose tensor cores would be faster.
    flops_per_us = peak_tflops(device, graph.precision) * 1e6
    operations = {op.name: op for op in (*graph.train, *graph.infer)}
    found: list[float] = []
    for launch in program.launches:
        flops = sum(flops_of(launch, operations[name], graph, buffers) for name in launch.operations)
        least_us = max(_touched_bytes(launch, buffers) / bytes_per_us, flops / flops_per_us)
        busy_us = max(launch.work.time_us - device.launch_us, 1e-3)
        found.append(0.0 if isinstance(launch.work, Copy) else min(1.0, least_us / (FILLING * busy_us)))
    return tuple(found)


def _touched_bytes(launch: Launch, buffers: Sequence[Buffer]) -> int:
    touched = 0
    for access in launch.accesses:
        buffer = buffers[access.buffer]
        touched += buffer.size_bytes * access.rows.count // buffer.rows.count
    return touched


def _slowdown(launch: Launch, buffers: Sequence[Buffer], device: DeviceSpec) -> Slowdown:
    """By its kind, told from its time and its bytes: what is slow for its bytes computes; of the rest, what fits in the
    L2 cache is taken to lie there, since what ran before has just written it."""
    touched = _touched_bytes(launch, buffers)
    link = device.host_link
    if launch.work.time_us > device.launch_us + COMPUTING * touched / (device.copy_gb_s * 1e3):
        return link.computing
    return link.cached if touched <= device.l2_bytes else link.streaming
