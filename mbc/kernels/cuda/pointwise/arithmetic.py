"""Operators between tensors with broadcasting, and the gradients of sums, which repeat elements: in any layout."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, type_code
from mbc.kernels.cuda.strided import Axis, memory_order, merged, strides, trailing
from mbc.kernels.launch_struct import Struct
from mbc.ops.arithmetic import Broadcast
from mbc.ops.comparison import Select
from mbc.ops.reduce import Expand

FILE = "pointwise/arithmetic.cu"
COMPARISON_FILE = "pointwise/comparison.cu"
# Operators in the order of their numbers in these files.
OPERATORS = {
    "broadcast": ("add", "sub", "mul", "div", "rsub", "rdiv", "prelu", "prelu_slope"),
    "select": ("maximum", "minimum", "fill", "keep", "rfill", "rkeep"),
    "relation": ("eq", "ne", "lt", "le", "gt", "ge", "max_share", "rmax_share"),
}


@dataclass(frozen=True, slots=True)
class ArithmeticArguments(Struct):
    """Integer arguments of a launch of an operator between tensors."""

    type: int
    operation: int
    elements: int


@dataclass(frozen=True, slots=True)
class ExpandArguments(Struct):
    """Integer arguments of a launch that repeats elements."""

    type: int
    elements: int


def _repeated(x: TensorType, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Return the strides of an operand along the axes of the result; 0 along axes where it is repeated.

    `shape` is the shape of the operand with as many axes as the result has.
    """
    own = iter(step for step, size in zip(strides(x, layout), x.shape, strict=True) if size != 1)
    return tuple(0 if size == 1 else next(own) for size in shape)


def _axes(request: Request, layout: Layout) -> list[Axis]:
    y = request.outputs[0]
    a = request.attributes
    if isinstance(a, Broadcast):
        shapes = [a.aligned(x.shape, len(y.shape)) for x in request.inputs]
    else:
        assert isinstance(a, Expand)
        shapes = [tuple(1 if axis in a.axes else size for axis, size in enumerate(y.shape))]
    steps = [_repeated(x, s, layout) for x, s in zip(request.inputs, shapes, strict=True)]
    return merged((y.shape[axis], *(s[axis] for s in steps)) for axis in memory_order(y, layout))


def _broadcast(at: Slice) -> ArithmeticArguments:
    a, y = at.request.attributes, at.request.outputs[0]
    assert isinstance(a, Broadcast)
    return ArithmeticArguments(type_code(y), OPERATORS[at.request.kind].index(a.operator), y.elements)


def _expand(at: Slice) -> ExpandArguments:
    y = at.request.outputs[0]
    return ExpandArguments(type_code(y), y.elements)


def _factor(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Expand)
    return (a.factor,)


def _filled(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Select)
    return (a.filled,)


def _trailing(at: Slice) -> tuple[int, ...]:
    return trailing(_axes(at.request, at.layout), len(at.request.inputs))


KERNELS = (
    OwnKernel("broadcast", FILE, ArithmeticArguments, _broadcast, trailing=_trailing),
    OwnKernel("select", COMPARISON_FILE, ArithmeticArguments, _broadcast, _filled, trailing=_trailing),
    OwnKernel("relation", COMPARISON_FILE, ArithmeticArguments, _broadcast, trailing=_trailing),
    OwnKernel("expand", FILE, ExpandArguments, _expand, _factor, trailing=_trailing),
)
