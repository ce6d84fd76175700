"""The prediction interval of a program's time, where not all of it is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation, TrainingGraph
from mbc.kernels.base import Request
from mbc.kernels.calibration import INTERPOLATED, OTHER_GPU_STEP, UNCOMPARED, WIDEST_STEP, Spread, calibration, group
from mbc.kernels.cudnn_estimates import least_bytes
from mbc.optimize.candidates.scaled_times import OtherSizes, is_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.simulate import measured_share, simulate
from mbc.optimize.search.profiling_requests import is_numbered, launched_request
from mbc.plan.model import Buffer, Copy, Kernel, Launch, Program


@dataclass(frozen=True, slots=True)
class Timing:
    """Everything that the times of a program's launches were taken from.

    Attributes:
        graph: The training graph.
        buffers: Buffers of the program.
        other_sizes: Measured sizes from which times of some launches are scaled.
        operations: Operations of the program, by name.
    """

    graph: TrainingGraph
    buffers: Sequence[Buffer]
    other_sizes: OtherSizes | None = None
    operations: Mapping[str, Operation] = field(default_factory=dict[str, Operation])

    @staticmethod
    def of(table: CandidateTable, buffers: Sequence[Buffer], operations: Sequence[Operation]) -> Timing:
        """Return what the times of a program with these operations were taken from."""
        return Timing(table.graph, buffers, table.other_sizes, {operation.name: operation for operation in operations})

    def request(self, launch: Launch) -> Request:
        """Return the request of a launch."""
        return launched_request(self.graph, launch, self.operations, self.buffers)


def time_range_us(program: Program, timing: Timing, device: DeviceSpec) -> tuple[float, float]:
    """Return the time of a program with every estimated launch at the lower, and at the upper, end of its interval.

    The interval of a kind of work contains eight in ten of its estimates. All estimates of a program are assumed to be
    off in the same direction, since their errors have common causes: where they cancel out, the interval is too wide.

    On a GPU on which nothing was measured, the interval is that of a whole step (`_unmeasured_range_us`).

    Args:
        program: The program.
        timing: The sources of the launches' times.
        device: The GPU.
    """
    errors = calibration()
    low_us: list[float] = []
    high_us: list[float] = []
    if device.name != errors.gpu and not measured_share(program) and timing.other_sizes is None:
        return _unmeasured_range_us(program, timing, device)
    for launch in program.launches:
        if (other := _of_similar_gpu(launch, timing)) is not None:
            low, high = other
        else:
            spread = _scaled(launch, timing) or _spread(launch, timing, device)
            low, high = (1.0, 1.0) if spread is None else errors.factors(spread, device)
        low_us.append(launch.work.time_us * low)
        high_us.append(launch.work.time_us * high)
    disturbed = contention(program, timing.graph, timing.buffers, device)
    low, high = simulate(program, low_us, disturbed), simulate(program, high_us, disturbed)
    if disturbed is None:
        return low, high
    # Copies that start earlier may slow down other launches, so shorter launches can make a longer step.
    own = simulate(program, None, disturbed)
    return min(low, own), max(high, own)


def _unmeasured_range_us(program: Program, timing: Timing, device: DeviceSpec) -> tuple[float, float]:
    """Return the interval of a step on a GPU on which nothing was measured, at most WIDEST_STEP wide.

    Estimates of one kind of kernel are off in the same direction, those of different kinds independently. On top of
    this, all of them may be off by OTHER_GPU_STEP.
    """
    errors_us: dict[str, list[float]] = {}
    for launch in program.launches:
        spread = _spread(launch, timing, device)
        if spread is not None:
            work = launch.work
            name = "copy" if isinstance(work, Copy) else f"{work.provider} {work.name}"
            kind = errors_us.setdefault(name, [0.0, 0.0])
            low, high = calibration().factors(spread, device, elsewhere=1.0)
            kind[0] += work.time_us * (1 - low)
            kind[1] += work.time_us * (high - 1)
    own_us = simulate(program, None, contention(program, timing.graph, timing.buffers, device))
    all_us = sum(launch.work.time_us for launch in program.launches) or 1.0
    below, above = (math.hypot(*(kind[end] for kind in errors_us.values())) / all_us for end in (0, 1))
    low, high = (1 - below) / OTHER_GPU_STEP, (1 + above) * OTHER_GPU_STEP
    narrower = min(1.0, math.log(WIDEST_STEP) / math.log(high / low))
    return own_us * low**narrower, own_us * high**narrower


def _scaled(launch: Launch, timing: Timing) -> Spread | None:
    """Return the error spread of a launch whose time is scaled from another size; None for other launches."""
    work, other_sizes = launch.work, timing.other_sizes
    if work.measured or isinstance(work, Copy) or not launch.operations or other_sizes is None:
        return None
    return other_sizes.spread(timing.request(launch), work)


def _of_similar_gpu(launch: Launch, timing: Timing) -> tuple[float, float] | None:
    """Return the range of a launch whose time is scaled from another GPU; None for other launches.

    `mbc.profile.other_gpu` scales such times.
    """
    work, other_sizes = launch.work, timing.other_sizes
    if other_sizes is None or work.measured or isinstance(work, Copy) or not launch.operations:
        return None
    other = other_sizes.of_similar_gpu or other_sizes
    if other.profile.scaling is None:
        return None
    request = timing.request(launch)
    if not any(is_of(work, candidate) for candidate in other.nearest(request)):
        return None
    spread, of_sizes = other.profile.scaling.spread(timing.graph.precision), other.spread(request, work)
    low, high = (1.0, 1.0) if of_sizes is None else calibration().factors(of_sizes, other.device)
    return spread.low * low, spread.high * high


def similar_gpu(program: Program, timing: Timing) -> str:
    """Return the GPU from whose measurements times of some launches are scaled; empty if there is none."""
    other_sizes = timing.other_sizes
    similar = other_sizes.profile.similar if other_sizes is not None else None
    if similar is None or all(_of_similar_gpu(launch, timing) is None for launch in program.launches):
        return ""
    return similar.identity.gpu


def _spread(launch: Launch, timing: Timing, device: DeviceSpec) -> Spread | None:
    """Return the error spread of a launch's time; None if it was measured."""
    work = launch.work
    if work.measured:
        return None
    if isinstance(work, Copy):
        return UNCOMPARED
    errors = calibration()
    if is_numbered(work):
        return errors.spreads.get(INTERPOLATED, UNCOMPARED)
    of_work = group(work.provider, work.name, timing.graph.precision, device)
    return errors.spread(of_work, _is_bare(launch, work, timing))


def _is_bare(launch: Launch, work: Kernel, timing: Timing) -> bool:
    """Return whether a library call has no workspace. A filter gradient takes some for itself."""
    graph = timing.graph
    touched = [timing.buffers[access.buffer] for access in launch.accesses]
    given_bytes = sum(b.size_bytes for b in touched if b.value is None)
    if work.provider == "cudnn" and work.name == "convolution_backward_filter":
        result = next(b.value for b in reversed(touched) if b.value is not None)
        given_bytes -= least_bytes(graph.values[result].type, graph.precision.working)
    return work.provider != "mbc" and given_bytes <= 0
