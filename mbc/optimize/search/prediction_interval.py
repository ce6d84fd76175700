"""The prediction interval of a program's time, where not all of it is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation, TrainingGraph
from mbc.kernels.calibration import INTERPOLATED, UNCOMPARED, Spread, calibration, group
from mbc.kernels.cudnn_estimates import least_bytes
from mbc.optimize.candidates.scaled_times import OtherSizes, is_of
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.simulate import simulate
from mbc.optimize.search.profiling_requests import is_numbered, launched_request
from mbc.plan.model import Buffer, Copy, Kernel, Launch, Program


def time_range_us(
    program: Program,
    graph: TrainingGraph,
    buffers: Sequence[Buffer],
    device: DeviceSpec,
    other_sizes: OtherSizes | None = None,
    operations: Sequence[Operation] = (),
) -> tuple[float, float]:
    """Return the time of a program with every estimated launch at the lower, and at the upper, end of its interval.

    The interval of a kind of work contains eight in ten of its estimates. All estimates of a program are assumed to be
    off in the same direction, since their errors have common causes: where they cancel out, the interval is too wide.

    Args:
        program: The program.
        graph: Its training graph.
        buffers: Its buffers.
        device: The GPU.
        other_sizes: Measured sizes from which times of some launches are scaled.
        operations: Operations of the program.
    """
    errors = calibration()
    by_name = {operation.name: operation for operation in operations}
    low_us: list[float] = []
    high_us: list[float] = []
    for launch in program.launches:
        if (other := _of_similar_gpu(launch, graph, buffers, other_sizes, by_name)) is not None:
            low, high = other
        else:
            spread = _scaled(launch, graph, buffers, other_sizes, by_name) or _spread(launch, graph, buffers)
            low, high = (1.0, 1.0) if spread is None else errors.factors(spread, device)
        low_us.append(launch.work.time_us * low)
        high_us.append(launch.work.time_us * high)
    disturbed = contention(program, graph, buffers, device)
    low, high = simulate(program, low_us, disturbed), simulate(program, high_us, disturbed)
    if disturbed is None:
        return low, high
    # Copies that start earlier may slow down other launches, so shorter launches can make a longer step.
    own = simulate(program, None, disturbed)
    return min(low, own), max(high, own)


def _scaled(
    launch: Launch,
    graph: TrainingGraph,
    buffers: Sequence[Buffer],
    other_sizes: OtherSizes | None,
    operations: Mapping[str, Operation],
) -> Spread | None:
    """Return the error spread of a launch whose time is scaled from another size; None for other launches."""
    work = launch.work
    if work.measured or isinstance(work, Copy) or not launch.operations or other_sizes is None:
        return None
    return other_sizes.spread(launched_request(graph, launch, operations, buffers), work)


def _of_similar_gpu(
    launch: Launch,
    graph: TrainingGraph,
    buffers: Sequence[Buffer],
    other_sizes: OtherSizes | None,
    operations: Mapping[str, Operation],
) -> tuple[float, float] | None:
    """Return the range of a launch whose time is scaled from another GPU; None for other launches.

    `mbc.profile.other_gpu` scales such times.
    """
    work = launch.work
    if other_sizes is None or work.measured or isinstance(work, Copy) or not launch.operations:
        return None
    other = other_sizes.of_similar_gpu or other_sizes
    if other.profile.scaling is None:
        return None
    request = launched_request(graph, launch, operations, buffers)
    if not any(is_of(work, candidate) for candidate in other.nearest(request)):
        return None
    spread, of_sizes = other.profile.scaling.spread(graph.precision), other.spread(request, work)
    low, high = (1.0, 1.0) if of_sizes is None else calibration().factors(of_sizes, other.device)
    return spread.low * low, spread.high * high


def similar_gpu(
    program: Program,
    graph: TrainingGraph,
    buffers: Sequence[Buffer],
    other_sizes: OtherSizes | None,
    operations: Sequence[Operation],
) -> str:
    """Return the GPU from whose measurements times of some launches are scaled; empty if there is none.

    Args:
        program: The program.
        graph: Its training graph.
        buffers: Its buffers.
        other_sizes: Measured sizes from which times of some launches are scaled.
        operations: Operations of the program.
    """
    similar = other_sizes.profile.similar if other_sizes is not None else None
    by_name = {operation.name: operation for operation in operations}
    if similar is None or all(
        _of_similar_gpu(x, graph, buffers, other_sizes, by_name) is None for x in program.launches
    ):
        return ""
    return similar.identity.gpu


def _spread(launch: Launch, graph: TrainingGraph, buffers: Sequence[Buffer]) -> Spread | None:
    """Return the error spread of a launch's time; None if it was measured."""
    work = launch.work
    if work.measured:
        return None
    if isinstance(work, Copy):
        return UNCOMPARED
    errors = calibration()
    if is_numbered(work):
        return errors.spreads.get(INTERPOLATED, UNCOMPARED)
    return errors.spread(group(work.provider, work.name, graph.precision), _is_bare(launch, work, graph, buffers))


def _is_bare(launch: Launch, work: Kernel, graph: TrainingGraph, buffers: Sequence[Buffer]) -> bool:
    """Return whether a library call has no workspace. A filter gradient takes some for itself."""
    touched = [buffers[access.buffer] for access in launch.accesses]
    given_bytes = sum(b.size_bytes for b in touched if b.value is None)
    if work.provider == "cudnn" and work.name == "convolution_backward_filter":
        result = next(b.value for b in reversed(touched) if b.value is not None)
        given_bytes -= least_bytes(graph.values[result].type, graph.precision.working)
    return work.provider != "mbc" and given_bytes <= 0
