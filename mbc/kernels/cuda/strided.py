"""Where the elements of a tensor of any rank lie: extents and strides, with as few axes as say the same.

A launch of a strided kernel has, behind its structure, the number of axes, their extents and for each operand as many
strides, the outermost axis first (templates/kernels/shared/strided.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mbc.ir.types import Layout, TensorType

# As in strided.cuh: of a tensor of eight dimensions, the most in the language, of which two are taken apart into three
# factors each.
MOST_AXES = 12


def strides(x: TensorType, layout: Layout) -> tuple[int, ...]:
    """Of every axis, in elements."""
    axes = memory_order(x, layout)
    found = [0] * len(axes)
    step = 1
    for axis in reversed(axes):
        found[axis] = step
        step *= x.shape[axis]
    return tuple(found)


def memory_order(x: TensorType, layout: Layout) -> tuple[int, ...]:
    """The axes, the outermost in memory first."""
    rank = len(x.shape)
    if layout is Layout.CHANNELS_LAST and x.ordered:
        return (0, *range(2, rank), 1)
    return tuple(range(rank))


Axis = tuple[int, ...]  # an extent, and the stride of each operand


def merged(axes: Iterable[Axis]) -> list[Axis]:
    """The same elements in the same order by fewer axes: neighbours that lie behind each other in all operands are one,
    those of one element none."""
    found: list[Axis] = []
    for extent, *steps in axes:
        if extent == 1:
            continue
        if found:
            outer, *outer_steps = found[-1]
            if all(a == b * extent for a, b in zip(outer_steps, steps, strict=True)):
                found[-1] = (outer * extent, *steps)
                continue
        found.append((extent, *steps))
    return found


def trailing(axes: Sequence[Axis], operands: int) -> tuple[int, ...]:
    """As integers behind a structure."""
    assert len(axes) <= MOST_AXES
    columns = zip(*axes, strict=True) if axes else ((),) * (operands + 1)
    return (len(axes), *(value for column in columns for value in column))
