"""What a launch runs, as one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mbc.ir.graph import Operation
from mbc.ops.fused import SEPARATOR, join
from mbc.plan.model import Buffer, Launch, Mode, Plan, Space

MOST_NAMED = 6  # members of a group that a message names


def title(operations: Sequence[str]) -> str:
    """What a group is called: its members, of many the first and the last, which distinguish it from others that
    contain the same ones."""
    if len(operations) <= MOST_NAMED:
        return SEPARATOR.join(operations)
    return f"{operations[0]}{SEPARATOR}{len(operations) - 2} more{SEPARATOR}{operations[-1]}"


def rows_of(plan: Plan, launch: Launch) -> int:
    """Rows of the mini-batch that a launch works on; all of them where it has no per-sample operand."""
    for access in launch.accesses:
        value = plan.buffers[access.buffer].value
        if value is not None and plan.graph.values[value].per_sample:
            return access.rows.count
    return plan.graph.batch


def workspace_bytes(plan: Plan, launch: Launch) -> int:
    """What a launch takes in the arena beside its operands."""
    buffers = (plan.buffers[access.buffer] for access in launch.accesses)
    return sum(b.size_bytes for b in buffers if b.value is None and b.space is Space.ARENA)


def launch_name(number: int, launch: Launch) -> str:
    """By which a record says which launch of a program a row is of."""
    return f"{number} {title(launch.operations)}".strip()


def operation_of(launch: Launch, operations: Mapping[str, Operation], buffers: Sequence[Buffer]) -> Operation:
    """The operation of a launch, or its group: what the launch writes is what leaves it. `operations` by name."""
    members = [operations[name] for name in launch.operations]
    if len(members) == 1:
        return members[0]
    written = (buffers[access.buffer].value for access in launch.accesses if access.mode is not Mode.READ)
    return join(members, [name for name in written if name is not None])
