"""Selects the ReLUs that store a bit mask for their gradient, where masks were measured to be faster.

`mbc.passes.relu_bit_masks` adds the masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from mbc.ir.graph import Operation
from mbc.ir.types import Layout
from mbc.ops.fused import leading_products, names_of
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.selection.selector import Selector
from mbc.passes.relu_bit_masks import mask_relus, residual_relus
from mbc.plan.model import Mode


def with_relu_masks(selector: Selector) -> Selector | None:
    """Return choices of the same step with bit masks for the ReLUs where they save time; None if they save none.

    The launches that write and read a mask must take less time than those that they replace, both in channels last. All
    have to be measured: a profile without bit masks leaves plans unchanged.
    """
    table = selector.table
    every = table.of(mask_relus(table.graph, residual_relus(table.graph)))
    program = every.graph.train
    masks = [op for op in program if op.kind == "relu_mask"]
    if not any(map(every.timed, masks)):
        return None
    chosen = selector.unlimited
    makers = {value: op.name for op in program for value in op.outputs}
    gradients = {op.inputs[1]: op.name for op in program if op.kind == "relu_backward_masked"}
    plain_launches, masked_launches = _by_name(chosen.train), _by_name(Selector.of(every).fastest_fused().train)
    relus: list[str] = []
    for op in masks:
        relu, backward = makers[op.inputs[0]], gradients[op.outputs[0]]
        names = relu, op.name, backward
        before, after = _running(plain_launches, names), _running(masked_launches, names)
        # A data gradient that one of the two steps computes in a fused launch may have its own in the other.
        launches = *before, *after
        products = [names_of(launch)[: leading_products(launch.attributes)] for launch in launches]
        names = *names, *chain.from_iterable(products)
        before, after = _running(plain_launches, names), _running(masked_launches, names)
        if _members(before) | {op.name} != _members(after):
            continue
        if not all(map(table.timed, before)) or not all(map(every.timed, after)):
            continue
        choices = [chosen.operations[launch.name] for launch in before]
        if not all(Layout.CHANNELS_LAST in choice.layouts for choice in choices):
            continue
        before_us = sum(choice.point.time_us for choice in choices)
        if sum(min(c.time_us for c in every.offered(launch)) for launch in after) < before_us:
            relus.append(relu)
    return Selector.of(table.of(mask_relus(table.graph, relus))) if relus else None


def masks_of_kept(unmasked: Selector, masked: Selector, draft: Draft) -> Selector:
    """Return choices of the same step with those bit masks of `masked` whose ReLU's output is computed once in `draft`.

    Where the launch of its gradient's reductions recomputes the output, that launch has the signs in registers, and a
    mask would only cost bytes and time.

    Args:
        unmasked: Choices of the step without masks.
        masked: Choices of the step with masks.
        draft: A step without masks.
    """
    rows = Counter[str | None]()
    for launch in draft.train.launches:
        for access in launch.accesses:
            if launch.operations and access.mode is Mode.WRITE:
                rows[draft.buffers[access.buffer].value] += access.rows.count
    masks = {op.inputs[0] for op in masked.table.graph.train if op.kind == "relu_mask"}
    kept = {value for value in masks if rows[value] <= unmasked.table.whole.count}
    if kept == masks:
        return masked
    relus = [op.name for op in unmasked.table.graph.train if kept.intersection(op.outputs)]
    table = unmasked.table
    return Selector.of(table.of(mask_relus(table.graph, relus))) if relus else unmasked


def _by_name(program: Sequence[Operation]) -> Mapping[str, list[Operation]]:
    """Return the launches that run each operation."""
    launches: dict[str, list[Operation]] = {}
    for launch in program:
        for name in names_of(launch):
            launches.setdefault(name, []).append(launch)
    return launches


def _running(launches: Mapping[str, list[Operation]], names: Iterable[str]) -> list[Operation]:
    """Return the launches that run one of these operations."""
    return list(dict.fromkeys(launch for name in names for launch in launches.get(name, ())))


def _members(launches: Sequence[Operation]) -> set[str]:
    return {name for launch in launches for name in names_of(launch)}
