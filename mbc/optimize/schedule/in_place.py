"""In-place operations: an output takes over the bytes of an input that nothing reads afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Run
from mbc.plan.model import Buffer, Mode, Program

# By the operations of a launch: the operands that it may write over, and what it writes there, as numbers of accesses.
InPlace = Mapping[tuple[str, ...], Sequence[tuple[int, int]]]


def take_over(graph: TrainingGraph, draft: Draft, groups: Iterable[Operation] = ()) -> Draft:
    """The same launches, with an alias for every output that can lie where an input lay. `groups`: operations that
    stand for several of the graph."""
    works = works_in_place(graph, groups)
    return taken_over(taken_over(draft, draft.train, works), draft.infer, works)


def works_in_place(graph: TrainingGraph, groups: Iterable[Operation]) -> InPlace:
    """Of operations of the graph and of others that stand for several of them."""
    found = {names_of(operation): tuple(_pairs(operation)) for operation in (*graph.train, *graph.infer, *groups)}
    return {names: pairs for names, pairs in found.items() if pairs}


def taken_over(draft: Draft, program: Program, works: InPlace) -> Draft:
    """The draft with what one of its programs can take over."""
    buffers = list(draft.buffers)
    taken = {*draft.persistent, *program.entry, *program.exit}
    last_touch = {access.buffer: i for i, launch in enumerate(program.launches) for access in launch.accesses}
    last_write = {
        access.buffer: i
        for i, launch in enumerate(program.launches)
        for access in launch.accesses
        if access.mode is not Mode.READ
    }
    for launch in program.launches:
        for source, output in works.get(launch.operations, ()):
            old, new = launch.accesses[source].buffer, launch.accesses[output].buffer
            read_once = [a.buffer for a in launch.accesses].count(old) == 1
            dies_here = last_touch[old] == last_write[new]
            if read_once and dies_here and old not in taken and _same_bytes(buffers[old], buffers[new]):
                taken.add(old)
                buffers[new] = replace(buffers[new], alias=old)
    return replace(draft, buffers=tuple(buffers))


def in_place(draft: Draft, runs: Sequence[Run], works: InPlace) -> Iterator[tuple[int, int]]:
    """Runs of the training program, by index, and the buffers that each writes over where nobody reads them any more;
    of several for one output the first."""
    for i, run in enumerate(runs):
        launch = draft.train.launches[run.start]
        buffers = [a.buffer for a in launch.accesses]
        written: set[int] = set()
        for source, output in works.get(launch.operations, ()):
            old, new = buffers[source], buffers[output]
            same = _same_bytes(draft.buffers[old], draft.buffers[new])
            if same and new not in written and buffers.count(old) == 1:
                written.add(new)
                yield i, old


def _pairs(operation: Operation) -> Iterator[tuple[int, int]]:
    count = len(operation.inputs)
    for output, source in kind_of(operation).in_place:
        if source < count and output < len(operation.outputs):
            yield source, count + output


def _same_bytes(old: Buffer, new: Buffer) -> bool:
    return new.alias is None and (old.size_bytes, old.layout, old.dtype, old.rows) == (
        new.size_bytes,
        new.layout,
        new.dtype,
        new.rows,
    )
