"""The operands of a pass of a convolution, whichever pass it is."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import TensorType
from mbc.kernels.base import Request
from mbc.ops.convolution import Convolution


@dataclass(frozen=True, slots=True)
class Sides:
    """The image side, the feature side and the filter of one pass."""

    image: TensorType
    features: TensorType
    weight: TensorType

    @staticmethod
    def of(request: Request) -> Sides:
        (a, b), c = request.inputs, request.outputs[0]
        if request.kind == "convolution":
            return Sides(a, c, b)
        return Sides(c, a, b) if request.kind == "convolution_backward_data" else Sides(a, b, c)


def attributes(request: Request) -> Convolution:
    a = request.attributes
    assert isinstance(a, Convolution)
    return a
