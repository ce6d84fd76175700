"""The kernel calls of one operation, taken from a plan so that they can run on other operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import TensorType
from mbc.kernels.base import Candidate, Request
from mbc.plan.model import Kernel, Launch, Mode, Plan, Program, Rows


@dataclass(frozen=True, slots=True)
class SliceCall:
    """One launch.

    `rows` has the rows of each input and then of each output, or (0, 1) for tensors that are not per sample.
    """

    request: Request
    candidate: Candidate
    rows: tuple[Rows, ...]
    accumulate: bool

    @property
    def first_row(self) -> int:
        """The first row of the mini-batch that the launch computes."""
        return max((rows.start for rows in self.rows), default=0)


@dataclass(frozen=True, slots=True)
class Pair:
    """An operation on the whole mini-batch (`request`), divided and undivided. `names` lists all equal operations."""

    names: tuple[str, ...]
    request: Request
    per_sample: tuple[bool, ...]  # for each input, then for each output
    divided: tuple[SliceCall, ...]
    undivided: tuple[SliceCall, ...]

    @property
    def same_algorithm(self) -> bool:
        """True if all calls certainly use one algorithm.

        A call that was not measured may get another algorithm for its number of rows when a module is built.
        """
        calls = (*self.divided, *self.undivided)
        kernels = {(c.candidate.provider, c.candidate.name, c.candidate.settings) for c in calls}
        return len(kernels) == 1 and all(call.candidate.measured for call in calls)


def pairs(divided: Plan, undivided: Plan) -> tuple[Pair, ...]:
    """Return the divided operations of a plan, each with its calls in an undivided plan; equal operations once."""
    pair_by_calls: dict[tuple[object, ...], Pair] = {}
    programs = (
        (divided.graph.train, divided.train, undivided.train),
        (divided.graph.infer, divided.infer, undivided.infer),
    )
    for operations, ours, theirs in programs:
        other = _launches(theirs)
        for operation in operations:
            launches = _launches(ours).get(operation.name, ())
            if len(launches) < 2 or operation.name not in other:
                continue
            parts = tuple(_call(divided, operation, launch) for launch in launches)
            whole = tuple(_call(undivided, operation, launch) for launch in other[operation.name])
            values = [divided.graph.values[name] for name in (*operation.inputs, *operation.outputs)]
            request = _request(divided.graph, operation, [value.type for value in values])
            key = (request, parts, whole)
            names = pair_by_calls[key].names if key in pair_by_calls else ()
            per_sample = tuple(value.per_sample for value in values)
            pair_by_calls[key] = Pair((*names, operation.name), request, per_sample, parts, whole)
    return tuple(pair_by_calls.values())


def _launches(program: Program) -> dict[str, tuple[Launch, ...]]:
    """Return kernel calls by the operation that they run, without fused calls."""
    launches: dict[str, tuple[Launch, ...]] = {}
    for launch in program.launches:
        if isinstance(launch.work, Kernel) and len(launch.operations) == 1:
            name = launch.operations[0]
            launches[name] = (*launches.get(name, ()), launch)
    return launches


def _call(plan: Plan, operation: Operation, launch: Launch) -> SliceCall:
    assert isinstance(launch.work, Kernel)
    kernel, graph = launch.work, plan.graph
    names = (*operation.inputs, *operation.outputs)
    accesses = launch.accesses[: len(names)]
    workspace_bytes = sum(plan.buffers[a.buffer].size_bytes for a in launch.accesses[len(names) :])
    types: list[TensorType] = []
    for name, access in zip(names, accesses, strict=True):
        value = graph.values[name]
        types.append(value.type.with_rows(access.rows.count) if value.per_sample else value.type)
    accumulate = any(access.mode is Mode.ACCUMULATE for access in accesses)
    candidate = Candidate(
        kernel.provider,
        kernel.name,
        kernel.settings,
        tuple(plan.buffers[access.buffer].layout for access in accesses),
        workspace_bytes,
        kernel.time_us,
        kernel.measured,
        accumulates=accumulate,
    )
    return SliceCall(_request(graph, operation, types), candidate, tuple(a.rows for a in accesses), accumulate)


def _request(graph: TrainingGraph, operation: Operation, types: Sequence[TensorType]) -> Request:
    inputs = len(operation.inputs)
    return Request(operation.kind, operation.attributes, tuple(types[:inputs]), tuple(types[inputs:]), graph.precision)
