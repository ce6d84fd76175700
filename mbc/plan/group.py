"""The operations of a launch as one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mbc.hardware.streams import Space
from mbc.ir.graph import Operation
from mbc.ops.fused import SEPARATOR, join
from mbc.plan.model import Buffer, Launch, Mode, Plan

MOST_NAMED = 6  # members of a group that a message names


def title(operations: Sequence[str]) -> str:
    """Return the title of a group: its members joined by "+"; of many members, the first, their number and the last.

    The first and the last member distinguish the group from other groups that contain the same operations.
    """
    if len(operations) <= MOST_NAMED:
        return SEPARATOR.join(operations)
    return f"{operations[0]}{SEPARATOR}{len(operations) - 2} more{SEPARATOR}{operations[-1]}"


def rows_of(plan: Plan, launch: Launch) -> int:
    """Return the number of rows that a launch works on; the batch size if the launch has no per-sample operand."""
    for access in launch.accesses:
        value = plan.buffers[access.buffer].value
        if value is not None and plan.graph.values[value].per_sample:
            return access.rows.count
    return plan.graph.batch


def workspace_bytes(plan: Plan, launch: Launch) -> int:
    """Return the bytes of the arena that a launch uses as workspace."""
    buffers = (plan.buffers[access.buffer] for access in launch.accesses)
    return sum(b.size_bytes for b in buffers if b.value is None and b.space is Space.ARENA)


def launch_name(number: int, launch: Launch) -> str:
    """Return the name by which a record refers to a launch: its number in the program and its title."""
    return f"{number} {title(launch.operations)}".strip()


def operation_of(launch: Launch, operations: Mapping[str, Operation], buffers: Sequence[Buffer]) -> Operation:
    """Return the operation of a launch; for a group, one fused operation whose outputs are the values that are written.

    Args:
        launch: The launch.
        operations: The operations of its program by name.
        buffers: The buffers of the plan.
    """
    members = [operations[name] for name in launch.operations]
    if len(members) == 1:
        return members[0]
    written = (buffers[access.buffer].value for access in launch.accesses if access.mode is not Mode.READ)
    return join(members, [name for name in written if name is not None])
