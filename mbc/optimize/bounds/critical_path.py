"""Critical-path lower bound of steps with several streams: of kernels, or of kernels and collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from mbc.hardware.streams import Stream
from mbc.kernels.nccl import ALL_REDUCE, latency_us
from mbc.ops.fused import kind_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.horizontal import fuses_horizontally
from mbc.optimize.fusion.match_patterns import live_out
from mbc.optimize.fusion.select_groups import Fusion
from mbc.plan.model import Buffer, Program

KERNEL_STREAMS = (Stream.COMPUTE, Stream.CONCURRENT)


@dataclass(frozen=True, slots=True)
class LaunchOption:
    """A launch that may compute some values from others, and its least time."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time_us: float


def critical_path_us(fusion: Fusion, train: Program, buffers: Sequence[Buffer], fastest_us: float) -> float:
    """Return the critical-path lower bound in microseconds of steps with the same groups and streams.

    No stream does more than its share, and no value is ready before all its operands: the critical path, as in Graham,
    "Bounds on multiprocessing timing anomalies" (1969). Operations in micro-batches may start on a part of their
    operands, so they form no chain. Collectives have a stream of their own.

    Args:
        fusion: Fusion groups of the step.
        train: The training step.
        buffers: Buffers of the step.
        fastest_us: The least time of serial steps.

    Returns:
        The bound, or 0 if `train` runs serially and has no collectives.
    """
    table = fusion.table
    streams = len({launch.stream for launch in train.launches}.intersection(KERNEL_STREAMS))
    summed_us = collectives_us(table)
    if streams < len(KERNEL_STREAMS) and not summed_us:
        return 0.0
    shared_us = max((fastest_us - summed_us) / streams, summed_us)
    if _divided(table, train, buffers):
        return shared_us
    ends_us = earliest_us(tuple(_launch_options(fusion)))
    return max([shared_us, *(ends_us.get(name, 0.0) for name in live_out(table.graph, table.graph.train))])


def collectives_us(table: CandidateTable) -> float:
    """Return the least time of the collectives of a step, all of them in one launch; 0 if there is one rank."""
    ranks = table.graph.ranks
    sums = [operation for operation in table.graph.train if operation.kind == ALL_REDUCE]
    if ranks is None or not sums:
        return 0.0
    added_us = sum(min(candidate.time_us for candidate in table.offered(operation)) for operation in sums)
    return latency_us(table.device, ranks.size) + added_us


def _divided(table: CandidateTable, train: Program, buffers: Sequence[Buffer]) -> bool:
    """Return whether a launch works on some rows only."""
    values = table.graph.values
    accesses = ((access, buffers[access.buffer].value) for launch in train.launches for access in launch.accesses)
    return any(
        value is not None and values[value].per_sample and access.rows.count < table.whole.count
        for access, value in accesses
    )


def _launch_options(fusion: Fusion) -> Iterator[LaunchOption]:
    """Yield every launch that the training step may contain, whatever is selected."""
    table = fusion.table
    launches = [launch for group in fusion.groups[0] for launch in group.launches]
    launches += [fused_remat.operation for fused_remat in fusion.fused_remats]
    for operation in (*table.graph.train, *launches):
        free = kind_of(operation).view or fuses_horizontally(operation)  # fused operations share one launch
        times_us = () if free else tuple(candidate.time_us for candidate in table.offered(operation))
        if free or times_us:
            yield LaunchOption(operation.inputs, operation.outputs, min(times_us, default=0.0))


def earliest_us(options: Sequence[LaunchOption]) -> dict[str, float]:
    """Return the earliest time at which each value can be ready with unlimited concurrency.

    A launch ends at the latest end of its operands plus its own time; a value is ready when the first launch that can
    compute it ends (Knuth, "A generalization of Dijkstra's algorithm", 1977).
    """
    computed = {name for option in options for name in option.outputs}
    lacking = [len(computed.intersection(option.inputs)) for option in options]
    readers: dict[str, list[int]] = {}
    for i, option in enumerate(options):
        for name in computed.intersection(option.inputs):
            readers.setdefault(name, []).append(i)
    ready = sorted((option.time_us, i) for i, option in enumerate(options) if not lacking[i])
    ready_us: dict[str, float] = {}
    while ready:
        end_us, i = heappop(ready)
        for name in options[i].outputs:
            if name in ready_us:
                continue
            ready_us[name] = end_us
            for reader in readers.get(name, ()):
                lacking[reader] -= 1
                if not lacking[reader]:
                    heappush(ready, (end_us + options[reader].time_us, reader))
    return ready_us
