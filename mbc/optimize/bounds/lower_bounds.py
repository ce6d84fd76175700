"""Lower bounds of all plans: the critical path of concurrent steps, and the bytes of the most demanding operation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from mbc.ir.graph import Operation, Role
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.candidates.table import CandidateTable, least_workspace_bytes
from mbc.optimize.fusion.horizontal import fuses_horizontally
from mbc.optimize.fusion.select_groups import all_groups, groups_of, kept, possible_groups
from mbc.optimize.remat.fused_remat import fused_remats_of
from mbc.plan.model import Buffer, Program, Stream, aligned

KERNEL_STREAMS = (Stream.COMPUTE, Stream.CONCURRENT)


@dataclass(frozen=True, slots=True)
class LaunchOption:
    """A launch that may compute some values from others, and its least time."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time_us: float


def critical_path_us(table: CandidateTable, train: Program, buffers: Sequence[Buffer], fastest_us: float) -> float:
    """Critical-path lower bound in microseconds of steps with the same groups and two streams of kernels; 0 where
    `train` runs serially. `fastest_us`: the least time of serial steps.

    No stream does more than its share, and no value is ready before all its operands: the critical path, as in Graham,
    "Bounds on multiprocessing timing anomalies" (1969). Operations in micro-batches may start on a part of their
    operands, so they form no chain.
    """
    if all(launch.stream is not Stream.CONCURRENT for launch in train.launches):
        return 0.0
    shared_us = fastest_us / len(KERNEL_STREAMS)
    if _divided(table, train, buffers):
        return shared_us
    ends_us = earliest_us(tuple(_launch_options(table)))
    return max([shared_us, *(ends_us.get(name, 0.0) for name in kept(table.graph, table.graph.train))])


def _divided(table: CandidateTable, train: Program, buffers: Sequence[Buffer]) -> bool:
    """Whether a launch works on some rows only."""
    values = table.graph.values
    accesses = ((access, buffers[access.buffer].value) for launch in train.launches for access in launch.accesses)
    return any(
        value is not None and values[value].per_sample and access.rows.count < table.whole.count
        for access, value in accesses
    )


def _launch_options(table: CandidateTable) -> Iterator[LaunchOption]:
    """Every launch that the training step may contain, whatever is selected."""
    launches = [launch for group in groups_of(table)[0] for launch in group.launches]
    launches += [fused_remat.operation for fused_remat in fused_remats_of(table)]
    for operation in (*table.graph.train, *launches):
        free = kind_of(operation).view or fuses_horizontally(operation)  # the latter share a launch with many others
        times_us = () if free else tuple(candidate.time_us for candidate in table.offered(operation))
        if free or times_us:
            yield LaunchOption(operation.inputs, operation.outputs, min(times_us, default=0.0))


def earliest_us(options: Sequence[LaunchOption]) -> dict[str, float]:
    """The earliest time at which each value can be ready with unlimited concurrency: the least, over the launches that
    can compute it, of the latest of their operands plus their time. (Knuth, "A generalization of Dijkstra's algorithm",
    1977.)"""
    made = {name for option in options for name in option.outputs}
    lacking = [len(made.intersection(option.inputs)) for option in options]
    readers: dict[str, list[int]] = {}
    for i, option in enumerate(options):
        for name in made.intersection(option.inputs):
            readers.setdefault(name, []).append(i)
    ready = sorted((option.time_us, i) for i, option in enumerate(options) if not lacking[i])
    found: dict[str, float] = {}
    while ready:
        end_us, i = heappop(ready)
        for name in options[i].outputs:
            if name in found:
                continue
            found[name] = end_us
            for reader in readers.get(name, ()):
                lacking[reader] -= 1
                if not lacking[reader]:
                    heappush(ready, (end_us + options[reader].time_us, reader))
    return found


def floor_bytes(
    table: CandidateTable, host_bytes: int = 0, split: bool = False, workspaces: bool = True
) -> tuple[int, Operation]:
    """States + inputs, outputs and smallest workspace of the most demanding operation, and that operation.

    A lower bound of all plans: whatever is recomputed or offloaded, each operation needs its operands together, or
    those of the least demanding launch that covers it. Of the optimizer's states as much as `host_bytes` may be in host
    memory when no operation needs them. `split`: operations may run row by row, and need one row of their operands
    only. Without `workspaces` the bound depends on shapes alone, and holds for any profile.
    """
    graph = table.graph
    sizes, movable = _states(table)
    movable_bytes = sum(sizes[name] for name in movable)
    offloaded = min(host_bytes, movable_bytes)
    states = sum(sizes.values()) - offloaded
    fused: dict[str, int] = {}
    for group in all_groups(table) if workspaces else itertools.chain(*possible_groups(table)):
        for launch in group.launches:
            if table.offered(launch):
                taken = operands_bytes(table, launch, split, workspaces)
                fused |= {name: min(taken, fused.get(name, taken)) for name in names_of(launch)}
    worst = -1
    where = graph.train[0]
    for operation in (*graph.train, *graph.infer):
        if kind_of(operation).view:
            continue
        taken = operands_bytes(table, operation, split, workspaces)
        taken = min(taken, fused.get(operation.name, taken))
        # Of the movable states those that it needs are in the arena while it runs, and those for which host memory does
        # not suffice.
        needed = sum(sizes[name] for name in set(operation.inputs) & movable)
        taken += max(0, needed - (movable_bytes - offloaded))
        if taken > worst:
            worst, where = taken, operation
    return states + worst, where


def start_bytes(table: CandidateTable, host_bytes: int = 0) -> int:
    """States + inputs: what is in the arena when a step starts, as `floor_bytes` counts states."""
    values = table.graph.values
    sizes, movable = _states(table)
    offloaded = min(host_bytes, sum(sizes[name] for name in movable))
    return sum(sizes.values()) - offloaded + sum(aligned(values[name].type.size_bytes) for name in table.graph.inputs)


def _states(table: CandidateTable) -> tuple[dict[str, int], set[str]]:
    """Bytes of the states by name, and those of the optimizer, which may be in host memory."""
    values = table.graph.values
    sizes = {state.value: aligned(values[state.value].type.size_bytes) for state in table.graph.states}
    return sizes, {name for name in sizes if values[name].role is Role.OPTIMIZER}


def operands_bytes(table: CandidateTable, operation: Operation, split: bool, workspace: bool = True) -> int:
    """The bytes that an operation needs besides the states: its operands and its smallest `workspace`. `split`: of one
    row, where it works row by row."""
    graph = table.graph
    kind = kind_of(operation)
    shared = {output for output, _ in (*kind.updates, *kind.in_place)}
    names = dict.fromkeys(operation.inputs)
    names |= dict.fromkeys(name for i, name in enumerate(operation.outputs) if i not in shared)
    by_rows = split and kind.divisible
    taken = 0
    for name in names:
        value = graph.values[name]
        if value.role.persistent:
            continue
        rows = graph.batch if by_rows and value.per_sample else 1
        taken += aligned(value.type.size_bytes // rows)
    return taken + (0 if by_rows or not workspace else least_workspace_bytes(table.fronts(operation)))
