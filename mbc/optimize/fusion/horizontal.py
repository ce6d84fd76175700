"""Horizontal fusion: small independent operations of one kind in one multi-tensor launch.

The updates of all parameters, their casts and the running statistics are fused. This saves launches, of which a deep
network has hundreds. Layouts are chosen before. Such a launch is elementwise, so an operation that changes the layout,
as a cast may, keeps a launch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import Layout
from mbc.ops import KINDS
from mbc.ops.fused import join, names_of
from mbc.ops.layerwise import RATIOS
from mbc.optimize import effort
from mbc.optimize.candidates.pareto import MicroBatch, Point
from mbc.optimize.candidates.table import CandidateTable

_OF_STATES = RATIOS | {
    "sgd_update", "adamw_update", "sgd_update_part", "adamw_update_part", "lars_update", "lamb_update", "ema_update",
    "accumulate",
}  # fmt: skip
_KINDS = _OF_STATES | {"cast", "update_running"}  # kinds that have multi-tensor kernels
_ALIKE = _OF_STATES | {"cast"}  # kinds whose operations must have equal attributes as well

_Key = tuple[str, Attributes | None, bool]


@dataclass(frozen=True, slots=True)
class Choice:
    """The selected way to run one operation: the layouts of its operands, and its micro-batches in order."""

    layouts: tuple[Layout, ...]
    point: Point

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """Kernel calls in order."""
        return self.point.micro_batches


@dataclass(frozen=True, slots=True)
class HorizontallyFused:
    """A program with horizontally fused launches, its choices, and the time that this saves."""

    program: tuple[Operation, ...]
    choices: Mapping[str, Choice]
    saved_us: float


def fuses_horizontally(operation: Operation) -> bool:
    """Return whether the operation may be fused horizontally."""
    return operation.kind in _KINDS


def splits(operation: Operation) -> bool:
    """Return whether a horizontally fused launch of such operations may run as several launches."""
    return operation.kind in _KINDS - RATIOS


def bundles(
    program: Sequence[Operation], table: CandidateTable, updates: bool = True
) -> tuple[tuple[Operation, ...], ...]:
    """Return groups of operations that one launch may run.

    No operation reads their results before the last of the group, or all their operands are defined before the first.

    Args:
        program: Operations in order.
        table: Candidates of the program's graph.
        updates: Whether updates of the optimizer's states are included.
    """
    groups: dict[_Key, list[Operation]] = {}
    values = table.graph.values
    outputs = {output for operation in program for output in operation.outputs}
    for operation in program:
        if operation.kind not in (_KINDS if updates else _KINDS - _OF_STATES) or any(
            values[name].per_sample for name in operation.outputs
        ):
            continue
        early = outputs.isdisjoint(operation.inputs)
        key = operation.kind, operation.attributes if operation.kind in _ALIKE else None, early
        groups.setdefault(key, []).append(operation)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1 and _position(program, group) is not None)


def fuse_horizontally(
    table: CandidateTable, program: tuple[Operation, ...], choices: Mapping[str, Choice], updates: bool = True
) -> HorizontallyFused:
    """Return `program` with every bundle (`bundles`) fused that is faster as a single launch.

    The launch must take less time than its operations one by one. It must take less than half of it where only one of
    the two times was measured and the other one is not left to its estimate.

    Args:
        table: Candidates of the program's graph.
        program: Operations in order.
        choices: Layouts and micro-batches of each operation, by name.
        updates: Whether updates of the optimizer's states are included.
    """
    saved_us = 0.0
    chosen = dict(choices)
    for bundle in bundles(program, table, updates):
        group = tuple(o for o in bundle if _has_one_layout(table, o, choices[o.name].layouts))
        if len(group) < 2 or _position(program, group) is None:
            continue
        joined = join(group, [name for operation in group for name in operation.outputs])
        offered = table.offered(joined)
        if not offered:
            continue
        best = min(offered, key=lambda candidate: candidate.time_us)
        singly_us = sum(choices[operation.name].point.time_us for operation in group)
        measured = all(s.candidate.measured for o in group for s in choices[o.name].micro_batches)
        layouts = _layouts(joined, group, choices)
        comparable = best.measured == measured or any(map(table.compares_estimate, (joined, *group)))
        margin = 1.0 if comparable else effort.CLEARLY_FASTER
        if best.time_us * margin >= singly_us or layouts is None:
            continue
        best = replace(best, layouts=layouts)
        point = Point(best.workspace_bytes, best.time_us, (MicroBatch(table.whole.count, best),))
        chosen[joined.name] = Choice(layouts, point)
        saved_us += singly_us - best.time_us
        program = _rewritten(program, group, joined)
    return HorizontallyFused(program, chosen, saved_us)


def _position(program: Sequence[Operation], group: Sequence[Operation]) -> int | None:
    """Return the position at which one launch can replace the group: that of its last operation, or of its first.

    Return None if neither is possible.
    """
    positions = {operation.name: position for position, operation in enumerate(program)}
    first, last = positions[group[0].name], positions[group[-1].name]
    outputs = {name for operation in group for name in operation.outputs}
    inputs = {name for operation in group for name in operation.inputs}
    if not outputs.isdisjoint(inputs):
        return None
    between = program[first : last + 1]
    if all(outputs.isdisjoint(operation.inputs) for operation in between):
        return last
    producers = {name for operation in between for name in operation.outputs}
    updates = any(KINDS[operation.kind].updates for operation in group)
    return first if producers.isdisjoint(inputs) and not updates else None


def _has_one_layout(table: CandidateTable, operation: Operation, layouts: Sequence[Layout]) -> bool:
    """Return whether all operands of an operation for which the layout matters have one layout."""
    names = (*operation.inputs, *operation.outputs)
    values = table.graph.values
    return len({layout for name, layout in zip(names, layouts, strict=True) if values[name].type.ordered}) < 2


def _layouts(joined: Operation, group: Sequence[Operation], choices: Mapping[str, Choice]) -> tuple[Layout, ...] | None:
    """Return the layouts of every operand; None if operations read one operand in two layouts."""
    by_name: dict[str, Layout] = {}
    for operation in group:
        names = (*operation.inputs, *operation.outputs)
        for name, layout in zip(names, choices[operation.name].layouts, strict=True):
            if by_name.setdefault(name, layout) is not layout:
                return None
    return tuple(by_name[name] for name in (*joined.inputs, *joined.outputs))


def _rewritten(program: tuple[Operation, ...], group: Sequence[Operation], joined: Operation) -> tuple[Operation, ...]:
    position = _position(program, group)
    replaced = frozenset(names_of(joined))
    rewritten: list[Operation] = []
    for at, operation in enumerate(program):
        if at == position:
            rewritten.append(joined)
        if operation.name not in replaced:
            rewritten.append(operation)
    return tuple(rewritten)
