"""Let outputs take over the bytes of an input that nobody reads afterwards, where the operation works in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.order import Draft
from mbc.plan.model import Buffer, Mode, Program


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
            operation = operations[launch.operations]
            count = len(operation.inputs)
            for output, source in kind_of(operation).in_place:
                if source >= count or output >= len(operation.outputs):
                    continue
                new, old = launch.accesses[count + output].buffer, launch.accesses[source].buffer
                read_once = [a.buffer for a in launch.accesses].count(old) == 1
                dies_here = last_touch[old] == last_write[new]
                if read_once and dies_here and old not in taken and _same_bytes(buffers[old], buffers[new]):
                    taken.add(old)
                    buffers[new] = replace(buffers[new], alias=old)
    return replace(draft, buffers=tuple(buffers))


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
