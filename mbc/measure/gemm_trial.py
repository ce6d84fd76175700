"""Random operands and reference results of convolutions and linear layers, for their harness.

Rows repeat with a short period, so that a float64 reference of a few rows gives the result of all rows. In a forward
pass or a data gradient the result repeats as its input does. A filter gradient is a multiple of one period's gradient
plus that of the remaining rows. So one reference serves every slice of an operation. Equal rows do not change times,
because caches work by address, not by value.

If all rows were equal, their sums would always be rounded to the same side, and rounding errors would add up. So the
gradients of some periods are negative (`period_signs`): sums over rows grow and round like those of random rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.statistics import convolution_of
from mbc.measure.cudnn_engines import refusal
from mbc.measure.cudnn_graph import ConvolutionGraph
from mbc.measure.cudnn_library import CudnnRefusal
from mbc.measure.cudnn_passes import CONVOLUTION_KINDS
from mbc.measure.gpu import Gpu
from mbc.measure.random_pool import MOST_ELEMENTS, numbers, stored_numbers
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.runtime.formats import stored_bytes

MOST_PERIOD_ROWS = 4
PERIOD_ELEMENTS = 1 << 21  # of the larger operand, so that the host needs only milliseconds per operation

# Largest allowed normalised L2 distance of a result from float64: rounding of operands and of the result, each about a
# third of a unit in the last place, and for fp32 the sum over up to millions of terms.
TOLERANCES = {
    Precision.FP64: 1e-12,
    Precision.FP32: 5e-6,
    Precision.TF32: 2e-3,
    Precision.BF16: 5e-3,
    Precision.FP16: 1e-3,
}

LINEAR_KINDS = {"linear": 0, "linear_backward_data": 1, "linear_backward_filter": 2}
PRODUCT_KINDS = frozenset((*CONVOLUTION_KINDS, *LINEAR_KINDS))

Floats = NDArray[np.float32] | NDArray[np.float64]


def as_convolution(request: Request) -> Request:
    """Return a linear layer as a convolution of one-pixel images with the same bytes; return convolutions unchanged.

    A request that combines a convolution with other operations gives the convolution alone.
    """
    number = LINEAR_KINDS.get(request.kind)
    if number is None:
        return convolution_of(request)
    assert isinstance(request.attributes, Linear)

    def pixels(types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        return tuple(TensorType((t.shape[0], math.prod(t.shape[1:]), 1, 1), t.dtype) for t in types)

    return Request(
        CONVOLUTION_KINDS[number],
        Convolution((1, 1), (1, 1)),
        pixels(request.inputs),
        pixels(request.outputs),
        request.precision,
    )


def is_filter(request: Request, operand: int) -> bool:
    """Return whether the operand (inputs in order, then the output) is the filter, which has no rows."""
    return operand == (2 if request.kind == "convolution_backward_filter" else 1)


def period_rows(request: Request) -> int:
    """Return the number of rows after which the operands repeat."""
    types = (*request.inputs, *request.outputs)
    largest = max(t.elements // t.shape[0] for i, t in enumerate(types) if not is_filter(request, i))
    return max(1, min(MOST_PERIOD_ROWS, request.inputs[0].shape[0], PERIOD_ELEMENTS // largest))


def with_rows(request: Request, rows: int) -> Request:
    """Return the request for another number of rows, with its filter unchanged."""
    types = (*request.inputs, *request.outputs)
    resized = tuple(t if is_filter(request, i) else t.with_rows(rows) for i, t in enumerate(types))
    return replace(request, inputs=resized[:2], outputs=resized[2:])


def in_double(request: Request) -> Request:
    """Return the same convolution with float64 operands."""

    def doubled(types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        return tuple(TensorType(t.shape, DType.FP64) for t in types)

    return replace(request, inputs=doubled(request.inputs), outputs=doubled(request.outputs), precision=Precision.FP64)


@dataclass(frozen=True, slots=True)
class Operand:
    """Random elements of a tensor: the elements of the pool in order, repeated in tensors that are larger.

    Attributes:
        tensor: Shape and type; the elements are rounded to this type.
        index: Number of the operand, which selects its place in the pool.
        scale: Factor of all elements.
    """

    tensor: TensorType
    index: int
    scale: float

    def values(self) -> Floats:
        """Return all elements in canonical order, in the shape of the tensor."""
        tensor = self.tensor
        return numbers(tensor.dtype, tensor.elements, self.index, scale=self.scale).reshape(tensor.shape)

    def first_bytes(self, dtype: DType, sign: int = 1) -> NDArray[np.uint8]:
        """Return the elements up to where they repeat, times `sign`, as the bytes of a buffer of `dtype`."""
        rounded, count = self.tensor.dtype, min(MOST_ELEMENTS, self.tensor.elements)
        if dtype is rounded:
            return stored_numbers(dtype, count, self.index, scale=sign * self.scale)
        few = numbers(rounded, count, self.index, scale=sign * self.scale)
        return stored_bytes(few.astype(np.float64), dtype, Layout.CHANNELS_FIRST)


@dataclass(frozen=True)
class Trial:
    """The largest request of an operation, as a convolution, with operands of one period.

    `expected` returns the reference for a slice of the operation.
    """

    trials: Trials = field(repr=False)
    request: Request
    period: int
    operands: tuple[Operand, ...]
    _parts: dict[int, NDArray[np.float64]] = field(default_factory=dict[int, NDArray[np.float64]], repr=False)

    @property
    def adds_up(self) -> bool:
        """True if the result is a sum over rows."""
        return self.request.kind == "convolution_backward_filter"

    @property
    def signs(self) -> tuple[int, ...]:
        """Signs of the gradients of one period after another."""
        return period_signs(-(-self.request.inputs[0].shape[0] // self.period))

    def expected(self, rows: int) -> NDArray[np.float64]:
        """Return the whole filter gradient of `rows` rows.

        For other kinds, return the result of one period, which repeats.

        Raises:
            MbcError: MBC087, cuDNN has no float64 engine for this convolution.
        """
        if not self.adds_up:
            return self._part(self.period)
        whole, rest = divmod(rows, self.period)
        last = self._part(rest) * self.signs[whole] if rest else 0.0
        return self._part(self.period) * sum(self.signs[:whole]) + last if whole else self._part(rest)

    def _part(self, rows: int) -> NDArray[np.float64]:
        result = self._parts.get(rows)
        if result is None:
            part = with_rows(self.request, rows)
            operands = [replace(o, tensor=tensor) for o, tensor in zip(self.operands, part.inputs, strict=True)]
            result = self._parts[rows] = self.trials.in_double(part, operands)
        return result


def period_signs(count: int) -> tuple[int, ...]:
    """Return the signs of `count` periods: the sum of the first n is about the square root of n, and never 0."""
    signs: list[int] = []
    total = 0
    for number in range(count):
        signs.append(1 if total < math.sqrt(number + 1) else -1)
        total += signs[-1]
    return tuple(signs)


class Trials:
    """Creates trials; the reference is cuDNN's float64 convolution on the same GPU, by a separate engine."""

    def __init__(self, gpu: Gpu) -> None:
        """Compute references on `gpu`."""
        self._gpu = gpu

    def make(self, request: Request) -> Trial:
        """Return a trial of a convolution or linear layer; `request` is its largest size."""
        whole = as_convolution(request)
        period = period_rows(whole)
        short = with_rows(whole, period)
        scale = _scale(whole)
        return Trial(self, whole, period, tuple(Operand(t, i, scale) for i, t in enumerate(short.inputs)))

    def in_double(self, request: Request, operands: Sequence[Operand]) -> NDArray[np.float64]:
        """Return the canonical result of the convolution of `operands` in float64."""
        double = in_double(request)
        output = double.outputs[0]
        mark = self._gpu.mark()
        try:
            pointers: list[int] = []
            for tensor, operand in zip(double.inputs, operands, strict=True):
                pointers.append(self._gpu.take(tensor.size_bytes))
                data = operand.first_bytes(DType.FP64)
                self._gpu.upload(pointers[-1], data)
                self._gpu.repeat(pointers[-1], data.size, tensor.size_bytes)
            pointers.append(self._gpu.take(output.size_bytes))
            self._gpu.fill(pointers[-1], 0xFF, output.size_bytes)
            self._run_double(double, pointers)
            data = self._gpu.download(pointers[-1], output.size_bytes)
        finally:
            self._gpu.reset(mark)
        result = data.view(np.float64)
        if not math.isfinite(float(np.dot(result, result))):  # not finite if an element is not
            raise MbcError("MBC077", "the float64 reference left elements unwritten")
        return result.reshape(output.shape)

    def _run_double(self, request: Request, pointers: Sequence[int]) -> None:
        layouts = (Layout.CHANNELS_FIRST,) * len(pointers)
        graph = ConvolutionGraph(self._gpu.device, request, layouts)
        for configuration in graph.configurations():
            if refusal(configuration, Precision.FP64, deterministic=True) is None:
                try:
                    plan = graph.plan(configuration)
                except CudnnRefusal:
                    continue
                workspace = self._gpu.take(plan.workspace_bytes) if plan.workspace_bytes else 0
                plan.execute(plan.bind(pointers, workspace))
                self._gpu.synchronize()
                return
        raise MbcError("MBC087", "cuDNN has no float64 engine for this convolution, so its results cannot be checked")


def _scale(request: Request) -> float:
    """Return a power of two for both operands that keeps results near 1, so that fp16 does not overflow."""
    output = request.outputs[0]
    if request.kind == "convolution_backward_filter":
        features = request.inputs[1]
        terms = features.elements // features.shape[1]
    else:
        weight = request.inputs[1]
        terms = weight.elements // (weight.shape[0] if request.kind == "convolution" else output.shape[1])
    spread = math.sqrt(max(1, terms))
    return 2.0 ** -round(math.log2(max(1.0, spread)) / 2)
