"""Values that are needed in two layouts, long after they were converted: one layout is kept, and converted back.

A conversion keeps its operand where another launch reads it later. Where the converted value is read before that
launch, the converted value is live anyway. It then gives the first layout back when that is needed. This takes a pass
over the value, whereas recomputing the value would take the operation that computed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.emit_launches import Draft, conversion, renumbered
from mbc.plan.model import Buffer, Kernel, Launch, Mode, Program


def convert_back(table: CandidateTable, draft: Draft, least_bytes: int) -> Draft:
    """Return the draft with large values converted back before their next reader.

    Values are converted back that are read in the other layout first. The draft is unchanged if there is none.

    Args:
        table: Candidates of the graph.
        draft: Launches and buffers.
        least_bytes: Size from which on a value is converted back.
    """
    program, buffers = draft.train, draft.buffers
    fixed = {*draft.persistent, *program.entry, *program.exit, *(b.alias for b in buffers)}
    reads: dict[int, list[int]] = {}
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            if access.mode is Mode.READ:
                reads.setdefault(access.buffer, []).append(i)
    conversions: dict[int, list[tuple[int, int]]] = {}  # by the launch that they precede: (source, target)
    for i, launch in enumerate(program.launches):
        if not is_conversion(launch, buffers):
            continue
        source, target = (access.buffer for access in launch.accesses)
        if fixed.isdisjoint((source, target)) and buffers[source].size_bytes >= least_bytes:
            before = _read_first_in_the_other(reads[source], reads.get(target, ()), i)
            if before is not None:
                conversions.setdefault(before, []).append((target, source))
    return _rewritten(table, draft, conversions) if conversions else draft


def is_conversion(launch: Launch, buffers: Sequence[Buffer]) -> bool:
    """Return whether a launch changes the layout of a whole value and nothing else."""
    if launch.operations or not isinstance(launch.work, Kernel) or len(launch.accesses) != 2:
        return False
    source, target = (buffers[access.buffer] for access in launch.accesses)
    return source.value == target.value and (source.rows, source.dtype) == (target.rows, target.dtype)


def _read_first_in_the_other(reads: Sequence[int], others: Sequence[int], converted_at: int) -> int | None:
    """Return the first reader of a value after its conversion before which the converted value is read; None if none.

    The converted value must be read between that reader and the reader before. A single read between the conversion and
    the first reader does not count.
    """
    used = converted_at
    for reader in (r for r in reads if r > converted_at):
        between = [other for other in others if used < other < reader]
        if len(between) > 1 or (between and used != converted_at):
            return reader
        used = reader
    return None


def _rewritten(table: CandidateTable, draft: Draft, conversions: Mapping[int, Sequence[tuple[int, int]]]) -> Draft:
    buffers, launches = list(draft.buffers), list[Launch]()
    now: dict[int, int] = {}  # the buffer that a value is read from
    for i, launch in enumerate(draft.train.launches):
        for source, target in conversions.get(i, ()):
            now[target] = len(buffers)
            buffers.append(buffers[target])
            launches.append(conversion(table, buffers, source, now[target]))
        accesses = tuple([replace(a, buffer=now.get(a.buffer, a.buffer)) for a in launch.accesses])
        launches.append(replace(launch, accesses=accesses))
    train = Program(tuple(launches), draft.train.waits, draft.train.entry, draft.train.exit)
    # Workspaces are numbered last, as `emit_launches` does.
    numbers = sorted(range(len(buffers)), key=lambda b: buffers[b].value is None)
    return renumbered(replace(draft, buffers=tuple(buffers), train=train), numbers)
