"""Values that are needed in two layouts again, long after they were converted: one is kept, and converted back.

A conversion keeps its operand where another launch reads that later. Where the converted value is read before it, that
stays anyway, and gives the first layout back when it is needed: a pass over the value, where recomputing it would
take the operation that made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.emit_launches import Draft, conversion, renumbered
from mbc.plan.model import Buffer, Kernel, Launch, Mode, Program


def convert_back(table: CandidateTable, draft: Draft, least_bytes: int) -> Draft:
    """The draft with values of at least so many bytes converted back before their next reader where they are read in
    the other layout first; the same draft where there is none."""
    program, buffers = draft.train, draft.buffers
    fixed = {*draft.persistent, *program.entry, *program.exit, *(b.alias for b in buffers)}
    reads: dict[int, list[int]] = {}
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            if access.mode is Mode.READ:
                reads.setdefault(access.buffer, []).append(i)
    found: dict[int, list[tuple[int, int]]] = {}  # before a launch: what is converted, into what
    for i, launch in enumerate(program.launches):
        if not is_conversion(launch, buffers):
            continue
        source, target = (access.buffer for access in launch.accesses)
        if fixed.isdisjoint((source, target)) and buffers[source].size_bytes >= least_bytes:
            before = _read_first_in_the_other(reads[source], reads.get(target, ()), i)
            if before is not None:
                found.setdefault(before, []).append((target, source))
    return _rewritten(table, draft, found) if found else draft


def is_conversion(launch: Launch, buffers: Sequence[Buffer]) -> bool:
    """Whether a launch changes the layout of a whole value and nothing else."""
    if launch.operations or not isinstance(launch.work, Kernel) or len(launch.accesses) != 2:
        return False
    source, target = (buffers[access.buffer] for access in launch.accesses)
    return source.value == target.value and (source.rows, source.dtype) == (target.rows, target.dtype)


def _read_first_in_the_other(reads: Sequence[int], others: Sequence[int], converted_at: int) -> int | None:
    """The first reader of a value after its conversion between which and the reader before it the converted value is
    read, but for what reads that right after the conversion; None where there is none."""
    used = converted_at
    for reader in (r for r in reads if r > converted_at):
        between = [other for other in others if used < other < reader]
        if len(between) > 1 or (between and used != converted_at):
            return reader
        used = reader
    return None


def _rewritten(table: CandidateTable, draft: Draft, found: Mapping[int, Sequence[tuple[int, int]]]) -> Draft:
    buffers, launches = list(draft.buffers), list[Launch]()
    now: dict[int, int] = {}  # the buffer that a value is read from
    for i, launch in enumerate(draft.train.launches):
        for source, target in found.get(i, ()):
            now[target] = len(buffers)
            buffers.append(buffers[target])
            launches.append(conversion(table, buffers, source, now[target]))
        accesses = tuple([replace(a, buffer=now.get(a.buffer, a.buffer)) for a in launch.accesses])
        launches.append(replace(launch, accesses=accesses))
    train = Program(tuple(launches), draft.train.waits, draft.train.entry, draft.train.exit)
    # As `emit_launches` numbers them: workspaces last.
    numbers = sorted(range(len(buffers)), key=lambda b: buffers[b].value is None)
    return renumbered(replace(draft, buffers=tuple(buffers), train=train), numbers)
