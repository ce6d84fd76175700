"""Requests for a convolution with statistics of its result in the epilogue."""

from __future__ import annotations

from mbc.ir.graph import Operation
from mbc.ir.types import Precision, TensorType
from mbc.kernels.base import Request
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.fused import Fused, join, launch_kind


def grouped(attributes: Convolution, statistics: str = "batch_statistics") -> Operation:
    return join(
        [
            Operation("conv", "convolution", ("a", "w"), ("x",), attributes),
            Operation("statistics", statistics, ("x",), ("mean", "variance"), NoAttributes()),
        ],
        ("x", "mean", "variance"),
    )


def with_statistics(
    image: tuple[int, int, int, int],
    filters: int,
    kernel: int,
    precision: Precision = Precision.FP16,
    stride: int = 1,
    groups: int = 1,
) -> Request:
    """Return a request with such padding that only the stride makes the result smaller."""
    pad = kernel // 2
    a = Convolution(image[2:], (kernel, kernel), (stride, stride), (pad, pad, pad, pad), groups=groups)
    group = grouped(a)
    assert isinstance(group.attributes, Fused)
    shapes = (image, (filters, image[1] // groups, kernel, kernel))
    inputs = tuple(TensorType(shape, precision.working) for shape in shapes)
    outputs = launch_kind(group.kind, group.attributes).shape(group.attributes, inputs)
    return Request(group.kind, group.attributes, inputs, outputs, precision)
