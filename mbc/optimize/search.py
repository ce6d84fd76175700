"""The only loop of the compiler: choose, order, place; where the result misses the budget, choose again with what the
budget leaves free at each operation's moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mbc
from mbc.errors import MbcError
from mbc.ir.graph import Operation
from mbc.ir.types import Precision
from mbc.ops.fused import SEPARATOR
from mbc.optimize.bounds import floor_bytes
from mbc.optimize.candidates import CandidateTable
from mbc.optimize.choose import check_limit, choose
from mbc.optimize.fuse import Programs, fuse, plain
from mbc.optimize.lifetimes import aligned, blocks, live_bytes, owners, peak_bytes
from mbc.optimize.order import Draft, order
from mbc.optimize.place import place
from mbc.optimize.ranges import time_range_us
from mbc.optimize.share import share
from mbc.optimize.simulate import measured_share, simulate
from mbc.optimize.synchronise import synchronise
from mbc.plan.model import Bounds, Kernel, Plan, Predictions, Program, Target
from mbc.units import show_size

# Reserved for the context, libraries and modules of a GPU on which they were never measured.
UNMEASURED_OVERHEAD_BYTES = 600_000_000
UNLIMITED_BYTES = 1 << 62
MOST_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Of workspace, beside the budget's: for one operation, and for all of a program together (None: no limit)."""

    operation_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Placed:
    offsets: tuple[int, ...]
    arena_bytes: int
    live_bytes: int


def search(table: CandidateTable, limits: Limits, budget_bytes: int) -> Plan:
    """The fastest plan found within the budget.

    An operation may use the workspace that the budget leaves free at its moment: what is kept does not depend on it, so
    that every operation takes its best for itself. Raises MBC201 where a limit is too small for an operation, MBC203
    where no plan of this graph can fit and MBC204 where none was found.
    """
    overhead_bytes = table.device.overhead_bytes or UNMEASURED_OVERHEAD_BYTES
    if table.graph.precision is Precision.FP64:
        overhead_bytes = 0  # runs on the CPU only, where no context or library takes of the budget
    floor, floor_operation = floor_bytes(table)
    if floor + overhead_bytes > budget_bytes:
        raise _cannot_fit(table, floor, floor_operation, overhead_bytes, budget_bytes)
    room_bytes = budget_bytes - overhead_bytes
    fused = fuse(table, limits.operation_bytes)
    unlimited = choose(table, {}, fused if limits.operation_bytes is None else None)
    draft, placed = _fit(table, fused, _most(table, limits, fused), room_bytes)
    if placed.arena_bytes > room_bytes:
        # A launch of several operations needs more at once than each of them alone.
        single = plain(table.graph)
        draft, placed = min(
            (draft, placed),
            _fit(table, single, _most(table, limits, single), room_bytes),
            key=lambda found: found[1].arena_bytes,
        )
    if placed.arena_bytes + overhead_bytes > budget_bytes:
        needed = placed.arena_bytes + overhead_bytes
        raise MbcError(
            "MBC204",
            f"the best plan of '{table.graph.name}' that was found takes {show_size(needed)} "
            f"({show_size(overhead_bytes)} of it outside the arena), the budget is {show_size(budget_bytes)}",
            f"lower the batch, or raise memory.device to {needed} B; this version neither recomputes nor offloads",
        )
    any_us = choose(table.without_determinism(), {}).train_us if table.rules.deterministic else 0.0
    bounds = Bounds(floor, floor_operation.name, placed.live_bytes, unlimited.train_us, any_us)
    return _plan(table, draft, placed, bounds, budget_bytes, overhead_bytes)


def _cannot_fit(
    table: CandidateTable, floor: int, operation: Operation, overhead_bytes: int, budget_bytes: int
) -> MbcError:
    # Where the overhead alone is too much, no smaller batch helps.
    smaller = "lower the batch, or " if overhead_bytes < budget_bytes else ""
    return MbcError(
        "MBC203",
        f"'{table.graph.name}' cannot fit {show_size(budget_bytes)}: '{operation.name}' "
        f"({operation.kind}) alone needs {show_size(floor)} with the states, "
        f"and {show_size(overhead_bytes)} are reserved for the GPU's context and libraries",
        f"{smaller}raise memory.device to at least {floor + overhead_bytes} B",
        operation.span,
    )


def _most(table: CandidateTable, limits: Limits, programs: Programs) -> Mapping[str, int]:
    """The most workspace of each operation by name, whatever the budget leaves free."""
    most_bytes = UNLIMITED_BYTES
    if limits.operation_bytes is not None:
        most_bytes = limits.operation_bytes
        check_limit(table, most_bytes)
    graph = table.graph
    most = {operation.name: most_bytes for operation in (*programs.train, *programs.infer)}
    if limits.total_bytes is not None:
        parts = dict(share(table, programs.train, graph.inputs, limits.total_bytes))
        parts |= share(table, programs.infer, graph.infer_inputs, limits.total_bytes)
        most |= {name: min(part, most[name]) for name, part in parts.items()}
    return most


def _fit(table: CandidateTable, programs: Programs, most: Mapping[str, int], room_bytes: int) -> tuple[Draft, _Placed]:
    """The fastest choice under `most` that fits the room; where none does, the smallest that was found."""
    limits = most
    spared_bytes = 0  # of the room: what placing leaves unused between buffers
    smallest: tuple[Draft, _Placed] | None = None
    for _ in range(MOST_ROUNDS):
        draft = order(table, choose(table, limits, programs))
        placed = _place(draft)
        if placed.arena_bytes <= room_bytes:
            return draft, placed
        if smallest is None or placed.arena_bytes < smallest[1].arena_bytes:
            smallest = draft, placed
        if placed.live_bytes <= room_bytes:
            spared_bytes += placed.arena_bytes - room_bytes
        free = _free(draft, room_bytes - spared_bytes)
        # Where what is kept alone is too much, no workspace is small enough.
        tighter = {name: min(limit, max(0, free.get(name, limit))) for name, limit in most.items()}
        if tighter == limits or min(free.values()) < 0:
            break
        limits = tighter
    assert smallest is not None
    return smallest


def _free(draft: Draft, room_bytes: int) -> Mapping[str, int]:
    """Bytes that each operation finds free beside all that is kept while it runs; below zero where that is too much."""
    persistent = frozenset(draft.persistent)
    room_bytes -= sum(aligned(draft.buffers[buffer].size_bytes) for buffer in draft.persistent)
    found: dict[str, int] = {}
    for program in (draft.train, draft.infer):
        kept = [b for b in blocks(program, draft.buffers, persistent) if draft.buffers[b.buffers[0]].value is not None]
        live = live_bytes(kept, len(program.launches))
        for launch, taken_bytes in zip(program.launches, live, strict=True):
            if launch.operations:
                name = SEPARATOR.join(launch.operations)
                found[name] = min(found.get(name, UNLIMITED_BYTES), room_bytes - taken_bytes)
    return found


def _place(draft: Draft) -> _Placed:
    """Persistent buffers at the bottom, above them the two programs, which never run at the same time."""
    offsets = [0] * len(draft.buffers)
    base = 0
    for buffer in draft.persistent:
        offsets[buffer] = base
        base += aligned(draft.buffers[buffer].size_bytes)
    top = live = 0
    persistent = frozenset(draft.persistent)
    for program in (draft.train, draft.infer):
        program_blocks = blocks(program, draft.buffers, persistent)
        places, height = place(program_blocks)
        for block, offset in zip(program_blocks, places, strict=True):
            offsets[block.buffers[0]] = base + offset
        top, live = max(top, height), max(live, peak_bytes(program_blocks)[0])
    for buffer, owner in enumerate(owners(draft.buffers)):
        offsets[buffer] = offsets[owner]
    return _Placed(tuple(offsets), base + top, base + live)


def _plan(
    table: CandidateTable, draft: Draft, placed: _Placed, bounds: Bounds, budget_bytes: int, overhead_bytes: int
) -> Plan:
    def finish(program: Program) -> Program:
        return replace(program, waits=synchronise(program, draft.buffers, placed.offsets))

    train, infer = finish(draft.train), finish(draft.infer)
    device = table.device
    pinned = any(key == "engine" and value >= 0 for p in (train, infer) for key, value in _settings(p))
    cudnn = table.profile.cudnn if pinned and table.profile else 0
    return Plan(
        mbc.__version__,
        table.graph,
        Target(
            device.name,
            device.architecture,
            device.multiprocessors,
            device.memory_bytes,
            cudnn,
            table.profile.origin if table.profile else "",
        ),
        budget_bytes,
        draft.buffers,
        placed.offsets,
        train,
        infer,
        Predictions(
            simulate(train),
            *time_range_us(train, table.graph, draft.buffers, device),
            simulate(infer),
            *time_range_us(infer, table.graph, draft.buffers, device),
            measured_share(train),
            placed.arena_bytes,
            overhead_bytes,
            device.overhead_bytes > 0,
            0,
        ),
        bounds,
    )


def _settings(program: Program) -> list[tuple[str, int]]:
    return [pair for launch in program.launches if isinstance(launch.work, Kernel) for pair in launch.work.settings]
