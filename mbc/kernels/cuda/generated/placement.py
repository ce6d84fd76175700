"""How the values of a group lie along the axes of its results, where each may be repeated (broadcast)."""

from __future__ import annotations

from collections.abc import Iterable

from mbc.ir.graph import Attributes
from mbc.ir.types import Layout, TensorType
from mbc.kernels.cuda.strided import Axis, memory_order, merged, strides
from mbc.ops.arithmetic import Broadcast
from mbc.ops.instance_norm import MOST_SAMPLES
from mbc.ops.reduce import Expand

# The axis of the results along which each axis of a value lies; None for axes of one element. The value is repeated
# along all other axes.
Place = tuple[int | None, ...]
LAYOUTS = (Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST)


def whole_place(result: TensorType) -> Place:
    """Return the place of the results themselves."""
    return tuple(axis if size > 1 else None for axis, size in enumerate(result.shape))


def operand_place(attributes: Attributes, operand: TensorType, output: TensorType, place: Place) -> Place:
    """Return the place of an operand of an operation whose output is at `place`."""
    aligned = _aligned(attributes, operand.shape, output.shape)
    axes = iter(place[axis] for axis, size in enumerate(aligned) if size > 1)
    return tuple(next(axes) if size > 1 else None for size in operand.shape)


def _aligned(attributes: Attributes, shape: tuple[int, ...], output: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an operand with as many axes as the output has."""
    rank = len(output)
    if isinstance(attributes, Broadcast):
        return attributes.aligned(shape, rank)
    if isinstance(attributes, Expand):
        return tuple(1 if axis in attributes.axes else size for axis, size in enumerate(output))
    if len(shape) == 1 < rank:  # a vector of one number for each channel
        return tuple(shape[0] if axis == 1 else 1 for axis in range(rank))
    return (*(1,) * (rank - len(shape)), *shape)


def steps(x: TensorType, place: Place, layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the stride of a value along every axis of the results, 0 where the value is repeated."""
    along = dict(zip(place, strides(x, layout), strict=True))
    return tuple(along.get(axis, 0) for axis in range(rank))


def is_whole(x: TensorType, place: Place, result: TensorType) -> bool:
    """Return whether the elements of a value are those of the results, in the same order in both layouts."""
    rank, own = len(result.shape), whole_place(result)
    return x.elements == result.elements and all(
        steps(x, place, layout, rank) == steps(result, own, layout, rank) for layout in LAYOUTS
    )


def is_vector(x: TensorType, place: Place, result: TensorType, by_sample: bool = False) -> bool:
    """Return whether a value has one element for each channel, or for each channel of each sample, of the results."""
    if by_sample and len(x.shape) == len(result.shape) > 2:
        own = whole_place(result)
        return x.shape[:2] == result.shape[:2] and place == (*own[:2], *(None,) * (len(own) - 2)) != own
    return len(x.shape) == 1 < len(result.shape) and x.elements == result.shape[1] and place in ((1,), (None,))


def summed_image(small: TensorType, result: TensorType, layout: Layout) -> tuple[TensorType, Layout] | None:
    """Return the results as an image in which `small` has one element for each channel of each sample.

    Args:
        small: Type of the sums: of as many axes as the results, of one element along each axis that is summed.
        result: Type of the results.
        layout: Layout of the results in memory. The axes of one sum must be adjacent there.

    Returns:
        The type [samples, channels, positions] and the layout of the image; None if there is no such image.
    """
    rows = result.shape[0]
    match axes_of([(small, whole_place(small))], result, layout):
        case [(channels, 1), (positions, 0)]:
            return TensorType((rows, channels // rows, positions), result.dtype), Layout.CHANNELS_FIRST
        case [(positions, 0), (channels, 1)]:
            return TensorType((1, channels, positions), result.dtype), Layout.CHANNELS_LAST
        case [(samples, step), (positions, 0), (channels, 1)] if step == channels and samples <= MOST_SAMPLES:
            return TensorType((samples, channels, positions), result.dtype), Layout.CHANNELS_LAST
        case _:
            return None


def axes_of(repeated: Iterable[tuple[TensorType, Place]], result: TensorType, layout: Layout) -> list[Axis]:
    """Return extents of the results' axes and strides of the repeated operands, with the fewest axes."""
    rank = len(result.shape)
    columns = [steps(x, place, layout, rank) for x, place in repeated]
    return merged((result.shape[axis], *(c[axis] for c in columns)) for axis in memory_order(result, layout))
