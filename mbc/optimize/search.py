"""The only loop of the compiler: choose, order, place; where the result misses the budget, choose again with less
workspace an operation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mbc
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.ops import KINDS
from mbc.optimize.bounds import fastest_us, floor_bytes
from mbc.optimize.candidates import CandidateTable, Limits
from mbc.optimize.choose import Division, choose
from mbc.optimize.lifetimes import aligned, blocks, owners, peak_bytes
from mbc.optimize.order import Draft, order
from mbc.optimize.place import place
from mbc.optimize.simulate import measured_share, simulate
from mbc.optimize.synchronise import synchronise
from mbc.plan.model import Bounds, Kernel, Plan, Predictions, Program, Rows, Target
from mbc.units import show_size

# Reserved for the context, libraries and modules of a GPU on which they were never measured.
UNMEASURED_OVERHEAD_BYTES = 600_000_000


@dataclass(frozen=True, slots=True)
class _Placed:
    offsets: tuple[int, ...]
    arena_bytes: int
    live_bytes: int


def search(table: CandidateTable, limits: Limits, division: Division, budget_bytes: int) -> Plan:
    """The fastest plan found within the budget.

    Raises MBC203 where no plan of this graph can fit and MBC204 where none was found.
    """
    overhead_bytes = table.device.overhead_bytes or UNMEASURED_OVERHEAD_BYTES
    if table.graph.precision is Precision.FP64:
        overhead_bytes = 0  # runs on the CPU only, where no context or library takes of the budget
    floor, floor_operation = floor_bytes(table)
    if floor + overhead_bytes > budget_bytes:
        # Where the overhead alone is too much, no smaller batch helps.
        smaller = "lower the batch, or " if overhead_bytes < budget_bytes else ""
        raise MbcError(
            "MBC203",
            f"'{table.graph.name}' cannot fit {show_size(budget_bytes)}: '{floor_operation.name}' "
            f"({floor_operation.kind}) alone needs {show_size(floor)} with the states, "
            f"and {show_size(overhead_bytes)} are reserved for the GPU's context and libraries",
            f"{smaller}raise memory.device to at least {floor + overhead_bytes} B",
            floor_operation.span,
        )
    workspace_bytes = limits.workspace_bytes
    while True:
        draft = order(table, choose(table, Limits(workspace_bytes, limits.deterministic), division))
        placed = _place(draft)
        if placed.arena_bytes + overhead_bytes <= budget_bytes:
            break
        needed = placed.arena_bytes + overhead_bytes
        # Less workspace can save at most what the largest one takes.
        largest = max((b.size_bytes for b in draft.buffers if b.value is None), default=0)
        least = _least_workspace(table, limits)
        if largest <= least or needed - largest > budget_bytes:
            raise MbcError(
                "MBC204",
                f"the best plan of '{table.graph.name}' that was found takes {show_size(needed)} "
                f"({show_size(overhead_bytes)} of it outside the arena), the budget is {show_size(budget_bytes)}",
                f"lower the batch, or raise memory.device to {needed} B; this version neither recomputes nor offloads",
            )
        workspace_bytes = max(least, largest // 2)
    bounds = Bounds(floor, floor_operation.name, placed.live_bytes, fastest_us(table))
    return _plan(table, draft, placed, bounds, budget_bytes, overhead_bytes)


def _least_workspace(table: CandidateTable, limits: Limits) -> int:
    """The least limit under which every operation still has a candidate."""
    unlimited = replace(limits, workspace_bytes=1 << 62)
    whole = Rows(0, table.graph.batch)
    return max(
        min(c.workspace_bytes for c in table.admitted(op, whole, unlimited))
        for op in (*table.graph.train, *table.graph.infer)
        if not KINDS[op.kind].view
    )


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
        Target(device.name, device.architecture, device.multiprocessors, device.memory_bytes, cudnn),
        budget_bytes,
        draft.buffers,
        placed.offsets,
        train,
        infer,
        Predictions(
            simulate(train),
            simulate(infer),
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
