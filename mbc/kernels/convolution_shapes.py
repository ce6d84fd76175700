"""The shapes of a convolution in the form that libraries take."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mbc.ir.types import TensorType
from mbc.kernels.base import DTYPE_CODES, Call, Request
from mbc.kernels.launch_struct import Struct
from mbc.ops.convolution import Convolution, read_share

PASSES = {"convolution": 0, "convolution_backward_data": 1, "convolution_backward_filter": 2}


@dataclass(frozen=True, slots=True)
class LibraryConvolution(Struct):
    """Integer arguments with which the rows of every library's convolutions begin."""

    pass_: int
    type: int
    accumulate: int
    workspace_bytes: int
    rows: int
    channels: int
    height: int
    width: int
    filters: int
    kernel_height: int
    kernel_width: int
    out_height: int
    out_width: int
    stride_height: int
    stride_width: int
    dilation_height: int
    dilation_width: int
    groups: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """Image, filter and result of one convolution, whichever pass it is."""

    image: TensorType
    filter: TensorType
    result: TensorType
    attributes: Convolution

    @property
    def operations(self) -> int:
        """Number of multiplications and additions of one pass."""
        return 2 * self.result.elements * math.prod(self.filter.shape[1:])

    @property
    def depthwise(self) -> bool:
        """True if there are several groups, and each filter reads one channel."""
        return self.attributes.groups > 1 and self.filter.shape[1] == 1

    @property
    def is_product(self) -> bool:
        """True if the convolution is one GEMM over the pixels without rearranging them."""
        a = self.attributes
        return a.kernel == a.stride == (1, 1) and not any(a.pad) and a.groups == 1

    def product(self, number: int) -> tuple[int, int, int]:
        """Return M, N and K of the implicit GEMM of a pass."""
        filters, *terms = self.filter.shape
        if number == 0:
            return self.result.elements // filters, filters, math.prod(terms)
        if number == 2:
            return filters, math.prod(terms), self.result.elements // filters
        a = self.attributes
        # With a stride, each pixel of the image meets only some positions of the filter.
        positions = max(1, math.prod(a.kernel) // math.prod(a.stride))
        return self.image.elements // self.image.shape[1], self.image.shape[1], filters // a.groups * positions

    def touched_bytes(self, number: int) -> int:
        """Return the bytes of the image that a pass reads or writes.

        A forward pass and a filter gradient read only the pixels that some window covers. A data gradient writes all of
        them, with zeros where no gradient arrives.
        """
        size_bytes = self.image.size_bytes
        return size_bytes if number == 1 else round(size_bytes * read_share(self.attributes))


def shapes_of(request: Request) -> Shapes | None:
    """Return the shapes of a convolution of images, or None for any other request."""
    number = PASSES.get(request.kind)
    if number is None or not isinstance(request.attributes, Convolution):
        return None
    operands = (*request.inputs, *request.outputs)
    if len(operands) != 3 or any(len(t.shape) != 4 for t in operands):
        return None
    order = {0: (0, 1, 2), 1: (2, 1, 0), 2: (0, 2, 1)}[number]
    image, filter_, result = (operands[i] for i in order)
    return Shapes(image, filter_, result, request.attributes)


def library_fields(shapes: Shapes, call: Call) -> dict[str, int]:
    """Return the fields of a `LibraryConvolution`; calls with an epilogue are forward passes."""
    x, w, y, a = shapes.image, shapes.filter, shapes.result, shapes.attributes
    given = (PASSES.get(call.request.kind, 0), DTYPE_CODES[x.dtype.value], int(call.accumulate), call.workspace_bytes)
    extents = (*x.shape, w.shape[0], *w.shape[2:], *y.shape[2:])
    values = (*given, *extents, *a.stride, *a.dilation, a.groups)
    return {field.name: value for field, value in zip(fields(LibraryConvolution), values, strict=True)}
