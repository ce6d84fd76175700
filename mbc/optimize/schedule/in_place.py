"""In-place operations: an output aliases an input that nothing reads afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Region
from mbc.plan.model import Buffer, Launch, Mode, Program

# For the operations of a launch: an operand that the launch may overwrite and the output that it writes there, as
# numbers of accesses, and the value of the output. Groups of the same operations may have different outputs.
InPlace = Mapping[tuple[str, ...], Collection[tuple[int, int, str]]]


def alias_in_place(graph: TrainingGraph, draft: Draft, groups: Iterable[Operation] = ()) -> Draft:
    """Return the draft with an alias for every output that can be written in place.

    Args:
        graph: The training graph.
        draft: Launches and buffers.
        groups: Fusion groups that the draft launches.
    """
    operands = in_place_operands(graph, groups)
    return with_aliases(with_aliases(draft, draft.train, operands), draft.infer, operands)


def in_place_operands(graph: TrainingGraph, groups: Iterable[Operation]) -> InPlace:
    """Return the in-place operands of the graph's operations and of fusion groups."""
    operands: dict[tuple[str, ...], dict[tuple[int, int, str], None]] = {}
    for operation in (*graph.train, *graph.infer, *groups):
        if pairs := dict.fromkeys(_pairs(operation)):
            operands.setdefault(names_of(operation), {}).update(pairs)
    return operands


def overwritten(launch: Launch, buffers: Sequence[Buffer], operands: InPlace) -> Iterator[tuple[int, int]]:
    """Yield the buffers that a launch may overwrite, and those that it writes there."""
    for source, output, value in operands.get(launch.operations, ()):
        if output < len(launch.accesses) and buffers[new := launch.accesses[output].buffer].value == value:
            yield launch.accesses[source].buffer, new


def with_aliases(draft: Draft, program: Program, operands: InPlace) -> Draft:
    """Return the draft with the aliases that are possible in one of its programs."""
    buffers = list(draft.buffers)
    reused = {*draft.persistent, *program.entry, *program.exit}
    last_touch: dict[int, int] = {}
    last_write: dict[int, int] = {}
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            last_touch[access.buffer] = i
            if access.mode is not Mode.READ:
                last_write[access.buffer] = i
    for launch in program.launches:
        for old, new in overwritten(launch, buffers, operands):
            read_once = [a.buffer for a in launch.accesses].count(old) == 1
            dies_here = last_touch[old] == last_write[new]
            if read_once and dies_here and old not in reused and _same_bytes(buffers[old], buffers[new]):
                reused.add(old)
                buffers[new] = replace(buffers[new], alias=old)
    return replace(draft, buffers=tuple(buffers))


def in_place(draft: Draft, regions: Sequence[Region], operands: InPlace) -> Iterator[tuple[int, int]]:
    """Yield regions of the training program, by index, and the buffers that each may overwrite once nothing reads them.

    If several buffers are possible for one output, only the first is yielded.
    """
    for i, region in enumerate(regions):
        launch = draft.train.launches[region.start]
        buffers = [a.buffer for a in launch.accesses]
        written: set[int] = set()
        for old, new in overwritten(launch, draft.buffers, operands):
            same = _same_bytes(draft.buffers[old], draft.buffers[new])
            if same and new not in written and buffers.count(old) == 1:
                written.add(new)
                yield i, old


def _pairs(operation: Operation) -> Iterator[tuple[int, int, str]]:
    count = len(operation.inputs)
    for output, source in kind_of(operation).in_place:
        if source < count and output < len(operation.outputs):
            yield source, count + output, operation.outputs[output]


def _same_bytes(old: Buffer, new: Buffer) -> bool:
    return new.alias is None and (old.size_bytes, old.layout, old.dtype, old.rows) == (
        new.size_bytes,
        new.layout,
        new.dtype,
        new.rows,
    )
