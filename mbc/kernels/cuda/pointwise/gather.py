"""Moves elements of tensors of any rank, in any layout: permutations, slices, padding, splitting."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.base import DTYPE_CODES, Request
from mbc.kernels.cuda.base import OwnKernel, Slice, touched_us, type_code
from mbc.kernels.cuda.strided import Axis, memory_order, merged, strides, trailing
from mbc.kernels.launch_struct import Struct
from mbc.ops.rearrange import Pad, Rearrange, Split, StridedSlice

FILE = "pointwise/gather.cu"
MODES = ("zero", "replicate", "reflect", "wrap")  # in the order of their numbers in gather.cu


@dataclass(frozen=True, slots=True)
class RearrangeArguments(Struct):
    """Integer arguments of a launch of a permutation."""

    type: int
    elements: int


@dataclass(frozen=True, slots=True)
class GatherArguments(Struct):
    """Integer arguments of a launch of a slice or of padding.

    `plain`: the innermost axis is neither cut nor padded, and may be read by vectors.
    """

    type: int
    elements: int
    mode: int
    plain: int


@dataclass(frozen=True, slots=True)
class SplitArguments(Struct):
    """Integer arguments of a launch that splits a tensor."""

    type: int
    parts: int


def _rearranged(request: Request, layout: Layout) -> list[Axis]:
    """Return the axes of the result with the strides of the input; every factor of an axis has its own stride."""
    (x,), (y,), a = request.inputs, request.outputs, request.attributes
    assert isinstance(a, Rearrange)
    own: list[int] = []
    for step, factors in zip(strides(x, layout)[1:], a.factors, strict=True):
        own += [step * math.prod(factors[i + 1 :]) for i in range(len(factors))]
    moved = iter((a.flat[i], own[i]) for i in a.order)
    axes = [tuple(itertools.islice(moved, count)) for count in a.merged]
    by_axis = {0: ((x.shape[0], strides(x, layout)[0]),), **dict(enumerate(axes, 1))}
    return merged(axis for number in memory_order(y, layout) for axis in by_axis[number])


def _rearrange(at: Slice) -> RearrangeArguments:
    y = at.request.outputs[0]
    return RearrangeArguments(type_code(y), y.elements)


def _rearrange_trailing(at: Slice) -> tuple[int, ...]:
    return trailing(_rearranged(at.request, at.layout), 1)


# The fields of an axis of the result are: extent, stride in the input, extent of the input, start, step and spread.
# Element o is read at (start + step * o) / spread. An axis that is read whole has (extent, stride, extent, *_PLAIN).
_PLAIN = (0, 1, 1)


def _gathered(request: Request, layout: Layout) -> list[Axis]:
    """Return the axes of the result; neighbouring axes that are neither cut nor padded are merged."""
    (x,), (y,), a = request.inputs, request.outputs, request.attributes
    steps = strides(x, layout)
    maps = {0: _PLAIN, **dict(enumerate(_maps(a), 1))}
    axes: list[Axis] = []
    for axis in memory_order(y, layout):
        size, (start, step, spread) = x.shape[axis], maps[axis]
        plain = (start, step, spread) == _PLAIN and size == y.shape[axis]
        if plain and size == 1:
            continue
        if plain and axes and axes[-1][3:] == _PLAIN and axes[-1][0] == axes[-1][2]:
            extent, outer, _, *_ = axes[-1]
            if outer == size * steps[axis]:
                axes[-1] = (extent * size, steps[axis], extent * size, *_PLAIN)
                continue
        axes.append((y.shape[axis], steps[axis], size, start, step, spread))
    return axes


def _maps(a: object) -> list[tuple[int, int, int]]:
    if isinstance(a, Pad):
        return [(-before, 1, 1) for before in a.before]
    assert isinstance(a, StridedSlice)
    return list(zip(a.start, a.step, a.spread, strict=True))


def _gather(at: Slice) -> GatherArguments:
    y, a = at.request.outputs[0], at.request.attributes
    axes = _gathered(at.request, at.layout)
    plain = not axes or (axes[-1][3:] == _PLAIN and axes[-1][0] == axes[-1][2] and axes[-1][1] == 1)
    mode = a.mode if isinstance(a, Pad) else "zero"
    # Class numbers are moved as words, as fp32 is.
    code = DTYPE_CODES["fp32"] if y.dtype is DType.INT32 else type_code(y)
    return GatherArguments(code, y.elements, MODES.index(mode), int(plain))


def _outside(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    return (a.outside if isinstance(a, StridedSlice) else 0.0,)


def _gather_trailing(at: Slice) -> tuple[int, ...]:
    return trailing(_gathered(at.request, at.layout), 5)


def _spread(request: Request, layout: Layout) -> list[Axis]:
    """Return the axes of the input's gradient: extent, stride in dy, elements of padding before and after.

    Neighbouring axes without padding are merged.
    """
    (dy,), (dx,), a = request.inputs, request.outputs, request.attributes
    assert isinstance(a, Pad)
    steps = strides(dy, layout)
    before, after = (0, *a.before), (0, *a.after)
    axes: list[Axis] = []
    for axis in memory_order(dx, layout):
        size, pads = dx.shape[axis], (before[axis], after[axis])
        if pads == (0, 0) and size == 1:
            continue
        if pads == (0, 0) and axes and axes[-1][2:] == (0, 0) and axes[-1][1] == size * steps[axis]:
            axes[-1] = (axes[-1][0] * size, steps[axis], 0, 0)
            continue
        axes.append((size, steps[axis], *pads))
    return axes


def _pad_backward(at: Slice) -> GatherArguments:
    dx, a = at.request.outputs[0], at.request.attributes
    assert isinstance(a, Pad)
    axes = _spread(at.request, at.layout)
    plain = not axes or axes[-1][1:] == (1, 0, 0)
    return GatherArguments(type_code(dx), dx.elements, MODES.index(a.mode), int(plain))


def _pad_backward_trailing(at: Slice) -> tuple[int, ...]:
    return trailing(_spread(at.request, at.layout), 3)


def _part(x: TensorType, y: TensorType, layout: Layout) -> list[Axis]:
    """Return the axes of a part with the strides of the whole.

    A part of one channel has the order of the whole's other axes.
    """
    steps = strides(x, layout)
    return merged((y.shape[axis], steps[axis]) for axis in memory_order(y, layout))


def _split(at: Slice) -> SplitArguments:
    return SplitArguments(type_code(at.request.inputs[0]), len(at.request.outputs))


def _split_trailing(at: Slice) -> tuple[int, ...]:
    """Return, for each part, the number of elements, the position of the first element in the whole, and the axes."""
    (x,), a = at.request.inputs, at.request.attributes
    assert isinstance(a, Split)
    step, first = strides(x, at.layout)[1], 0
    fields: list[int] = []
    for y in at.request.outputs:
        fields += [y.elements, first * step, *trailing(_part(x, y, at.layout), 1)]
        first += y.shape[1]
    return tuple(fields)


KERNELS = (
    OwnKernel("rearrange", FILE, RearrangeArguments, _rearrange, trailing=_rearrange_trailing),
    OwnKernel("strided_slice", FILE, GatherArguments, _gather, _outside, _gather_trailing, time_us=touched_us),
    OwnKernel("pad", FILE, GatherArguments, _gather, _outside, _gather_trailing, launcher="strided_slice", named="pad"),
    OwnKernel("pad_backward", FILE, GatherArguments, _pad_backward, trailing=_pad_backward_trailing),
    OwnKernel("split", FILE, SplitArguments, _split, trailing=_split_trailing, operands="x parts[parts]"),
)
