"""Extents and strides of a tensor of any rank, with the fewest axes that describe the same elements.

A launch of a strided kernel reads, after its structure, the number of axes, their extents, and the strides of each
operand. The outermost axis comes first (templates/kernels/shared/strided.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mbc.ir.types import Layout, TensorType

# Equal to the constant in strided.cuh. The language has tensors of up to eight dimensions; a rearrangement may split
# two of them into three factors each.
MOST_AXES = 12


def strides(x: TensorType, layout: Layout) -> tuple[int, ...]:
    """Return the stride of every axis, in elements."""
    axes = memory_order(x, layout)
    steps = [0] * len(axes)
    step = 1
    for axis in reversed(axes):
        steps[axis] = step
        step *= x.shape[axis]
    return tuple(steps)


def memory_order(x: TensorType, layout: Layout) -> tuple[int, ...]:
    """Return the axes in their order in memory, the outermost first."""
    rank = len(x.shape)
    if layout is Layout.CHANNELS_LAST and x.ordered:
        return (0, *range(2, rank), 1)
    return tuple(range(rank))


Axis = tuple[int, ...]  # an extent, and the stride of each operand


def merged(axes: Iterable[Axis]) -> list[Axis]:
    """Return the same elements in the same order with fewer axes.

    Neighbouring axes that are contiguous in all operands become one axis. Axes of one element are dropped.
    """
    remaining: list[Axis] = []
    for extent, *steps in axes:
        if extent == 1:
            continue
        if remaining:
            outer, *outer_steps = remaining[-1]
            if all(a == b * extent for a, b in zip(outer_steps, steps, strict=True)):
                remaining[-1] = (outer * extent, *steps)
                continue
        remaining.append((extent, *steps))
    return remaining


def trailing(axes: Sequence[Axis], operands: int) -> tuple[int, ...]:
    """Return the axes as the integers that follow a structure."""
    assert len(axes) <= MOST_AXES
    columns = zip(*axes, strict=True) if axes else ((),) * (operands + 1)
    return (len(axes), *(value for column in columns for value in column))
