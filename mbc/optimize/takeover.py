"""Let outputs take over the bytes of an input that nobody reads afterwards, where the operation works in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.order import Draft
from mbc.optimize.runs import Run
from mbc.plan.model import Buffer, Launch, Mode, Program


def take_over(graph: TrainingGraph, draft: Draft, groups: Iterable[Operation] = ()) -> Draft:
    """The same launches, with an alias for every output that can lie where an input lay. `groups`: operations that
    stand for several of the graph."""
    buffers = list(draft.buffers)
    operations = {names_of(operation): operation for operation in (*graph.train, *graph.infer, *groups)}
    for program in (draft.train, draft.infer):
        pinned = frozenset((*draft.persistent, *program.entry, *program.exit))
        last_touch, last_write = _last(program)
        taken = set(pinned)
        for launch in program.launches:
            if not launch.operations:
                continue
            for old, new in _pairs(operations.get(launch.operations), launch):
                read_once = [a.buffer for a in launch.accesses].count(old) == 1
                dies_here = last_touch[old] == last_write[new]
                if read_once and dies_here and old not in taken and _same_bytes(buffers[old], buffers[new]):
                    taken.add(old)
                    buffers[new] = replace(buffers[new], alias=old)
    return replace(draft, buffers=tuple(buffers))


def in_place(
    graph: TrainingGraph, draft: Draft, runs: Sequence[Run], groups: Iterable[Operation] = ()
) -> Iterator[tuple[int, int]]:
    """Runs of the training program, by index, and the buffers that each writes over where nobody reads them any more;
    of several for one output the first."""
    operations = {names_of(operation): operation for operation in (*graph.train, *graph.infer, *groups)}
    for i, run in enumerate(runs):
        launch = draft.train.launches[run.start]
        if launch.operations:
            buffers = [a.buffer for a in launch.accesses]
            written: set[int] = set()
            for old, new in _pairs(operations.get(launch.operations), launch):
                same = _same_bytes(draft.buffers[old], draft.buffers[new])
                if same and new not in written and buffers.count(old) == 1:
                    written.add(new)
                    yield i, old


def _pairs(operation: Operation | None, launch: Launch) -> Iterator[tuple[int, int]]:
    """What a launch may write over, and what it writes there. None: a piece of a launch (`mbc.optimize.pieces`), which
    writes over its states only."""
    if operation is None:
        return
    count = len(operation.inputs)
    for output, source in kind_of(operation).in_place:
        if source < count and output < len(operation.outputs):
            yield launch.accesses[source].buffer, launch.accesses[count + output].buffer


def _last(program: Program) -> tuple[dict[int, int], dict[int, int]]:
    """For each buffer the last launch that touches it, and the last that writes it."""
    touch: dict[int, int] = {}
    write: dict[int, int] = {}
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            touch[access.buffer] = i
            if access.mode is not Mode.READ:
                write[access.buffer] = i
    return touch, write


def _same_bytes(old: Buffer, new: Buffer) -> bool:
    return new.alias is None and (old.size_bytes, old.layout, old.dtype, old.rows) == (
        new.size_bytes,
        new.layout,
        new.dtype,
        new.rows,
    )
