"""Losses that compare two tensors element by element, and their gradients, in any layout."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, type_code
from mbc.kernels.cuda.pointwise.loss import elementwise_parts, partial_bytes
from mbc.kernels.launch_struct import Struct
from mbc.ops.elementwise_loss import (
    Backward,
    BinaryCrossEntropy,
    BinaryCrossEntropyBackward,
    SmoothL1,
    SmoothL1Backward,
)

FILE = "pointwise/elementwise_loss.cu"
LOSSES = ("mse", "l1", "smooth_l1", "binary_cross_entropy", "probability_cross_entropy")


@dataclass(frozen=True, slots=True)
class ElementwiseLossArguments(Struct):
    """Integer arguments of a launch of a loss or its gradient.

    Attributes:
        side: The gradient is that of the prediction (0) or of the target.
    """

    type: int
    elements: int
    parts: int
    side: int


def _arguments(at: Slice) -> ElementwiseLossArguments:
    x, a = at.request.inputs[0], at.request.attributes
    side = a.side if isinstance(a, Backward) else 0
    return ElementwiseLossArguments(type_code(x), x.elements, elementwise_parts(x), side)


def _workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(elementwise_parts(request.inputs[0]))


def _setting(at: Slice) -> tuple[float, ...]:
    match at.request.attributes:
        case SmoothL1(beta) | SmoothL1Backward(beta):
            return (beta,)
        case BinaryCrossEntropy(pos_weight) | BinaryCrossEntropyBackward(pos_weight):
            return (pos_weight,)
        case _:
            return ()


def _factor(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Backward)
    return (a.weight / at.request.inputs[0].elements, *_setting(at))


KERNELS = tuple(
    kernel
    for name in LOSSES
    for kernel in (
        OwnKernel(name, FILE, ElementwiseLossArguments, _arguments, _setting, workspace=_workspace, launches=2),
        OwnKernel(f"{name}_backward", FILE, ElementwiseLossArguments, _arguments, _factor),
    )
)
