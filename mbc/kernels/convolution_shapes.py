"""The shapes of a convolution in the form that libraries take."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from mbc.ir.types import TensorType
from mbc.kernels.base import DTYPE_CODES, Call, Request
from mbc.kernels.launch_struct import Struct
from mbc.ops.convolution import Convolution, read_share
from mbc.ops.window import MOST_AXES

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
        return a.is_pointwise and a.groups == 1

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


def as_images(request: Request) -> Request:
    """Return a convolution along one axis as one of images of height 1, which have equal bytes; others unchanged."""
    a = request.attributes
    if not isinstance(a, Convolution) or a.rank != 1:
        return request

    def image(tensor: TensorType) -> TensorType:
        return TensorType((*tensor.shape[:2], 1, *tensor.shape[2:]), tensor.dtype)

    flat = Convolution((1, *a.size), (1, *a.kernel), (1, *a.stride), (0, 0, *a.pad), (1, *a.dilation), a.groups)
    inputs, outputs = tuple(map(image, request.inputs)), tuple(map(image, request.outputs))
    return replace(request, attributes=flat, inputs=inputs, outputs=outputs)


def shapes_of(request: Request) -> Shapes | None:
    """Return the shapes of a convolution along two or three axes, or None for any other request.

    A convolution along one axis is one of images of height 1.
    """
    number, request = PASSES.get(request.kind), as_images(request)
    if number is None or not isinstance(request.attributes, Convolution):
        return None
    operands = (*request.inputs, *request.outputs)
    if len(operands) != 3 or request.attributes.rank > MOST_AXES:
        return None
    order = {0: (0, 1, 2), 1: (2, 1, 0), 2: (0, 2, 1)}[number]
    image, filter_, result = (operands[i] for i in order)
    return Shapes(image, filter_, result, request.attributes)


def library_fields(shapes: Shapes, call: Call) -> dict[str, int]:
    """Return the fields of a `LibraryConvolution`, for the last two axes; calls with an epilogue are forward passes."""
    x, w, y, a = shapes.image, shapes.filter, shapes.result, shapes.attributes
    given = (PASSES.get(call.request.kind, 0), DTYPE_CODES[x.dtype.value], int(call.accumulate), call.workspace_bytes)
    extents = (*x.shape[:2], *x.shape[-2:], w.shape[0], *w.shape[-2:], *y.shape[-2:])
    values = (*given, *extents, *a.stride[-2:], *a.dilation[-2:], a.groups)
    return {field.name: value for field, value in zip(fields(LibraryConvolution), values, strict=True)}
