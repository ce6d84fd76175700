"""One convolution request made ready to be tried on a GPU: random operands, a reference result, and the comparison.

Rows repeat with a short period, so that a float64 reference of a few rows tells the result of all of them: rows of a
forward pass or a data gradient repeat alike, and a filter gradient is the period's, as many times as it fits, plus
that of the rest. Different addresses hold equal bytes, which no cache can know, so times are not changed by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mbc.device.cudnn import ConvolutionGraph, CudnnRefusal, refusal
from mbc.device.gpu import Gpu
from mbc.errors import MbcError
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.runtime.formats import loaded, stored_bytes

MOST_PERIOD_ROWS = 4
PERIOD_ELEMENTS = 1 << 21  # of the larger operand: keeps what the host does per request to some milliseconds
POOL_ELEMENTS = (1 << 22) + 61  # odd, so that no two tensors cut from it are alike
CHECKED_ROWS = 3

# Normalised L2 distance from float64 that a result may have: rounding of operands and of the result, each about a
# third of a unit in the last place, and for fp32 the sum over up to millions of terms.
TOLERANCES = {
    Precision.FP64: 1e-12,
    Precision.FP32: 5e-6,
    Precision.TF32: 2e-3,
    Precision.BF16: 5e-3,
    Precision.FP16: 1e-3,
}

Floats = NDArray[np.float32] | NDArray[np.float64]


def is_filter(request: Request, operand: int) -> bool:
    """Whether the operand (inputs in order, then the output) is the filter, and so has no rows."""
    return operand == (2 if request.kind == "convolution_backward_filter" else 1)


def period_rows(request: Request) -> int:
    """After how many rows the operands repeat."""
    types = (*request.inputs, *request.outputs)
    largest = max(t.elements // t.shape[0] for i, t in enumerate(types) if not is_filter(request, i))
    return max(1, min(MOST_PERIOD_ROWS, request.inputs[0].shape[0], PERIOD_ELEMENTS // largest))


def with_rows(request: Request, rows: int) -> Request:
    """The request for another number of rows, its filter unchanged."""
    types = (*request.inputs, *request.outputs)
    resized = tuple(t if is_filter(request, i) else t.with_rows(rows) for i, t in enumerate(types))
    return replace(request, inputs=resized[:2], outputs=resized[2:])


def in_double(request: Request) -> Request:
    """The same convolution of float64 operands."""

    def doubled(types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        return tuple(TensorType(t.shape, DType.FP64) for t in types)

    return replace(request, inputs=doubled(request.inputs), outputs=doubled(request.outputs), precision=Precision.FP64)


@dataclass(frozen=True)
class Trial:
    """Operands of one period (canonical, as their type rounds them) and the float64 result that they must give."""

    request: Request
    period: int
    operands: tuple[Floats, ...]
    reference: NDArray[np.float64]


class Trials:
    """Makes trials. The reference is cuDNN's float64 convolution on the same GPU, by an engine of its own."""

    def __init__(self, gpu: Gpu, seed: int = 0) -> None:
        self._gpu = gpu
        self._pool = np.random.default_rng(seed).standard_normal(POOL_ELEMENTS, np.float32)

    def make(self, request: Request) -> Trial:
        """MBC077 where not even float64 has an engine for this convolution."""
        period = period_rows(request)
        short = with_rows(request, period)
        operands = tuple(self._random(tensor, index, _scale(request)) for index, tensor in enumerate(short.inputs))
        rows = request.inputs[0].shape[0]
        if request.kind != "convolution_backward_filter":
            return Trial(request, period, operands, self._double(short, operands))
        reference = self._double(short, operands) * (rows // period)
        if rest := rows % period:
            reference = reference + self._double(with_rows(request, rest), [o[:rest] for o in operands])
        return Trial(request, period, operands, reference)

    def _random(self, tensor: TensorType, index: int, scale: float) -> Floats:
        start = (index * 1_000_003) % POOL_ELEMENTS
        pool = np.resize(np.roll(self._pool, -start), tensor.elements).reshape(tensor.shape) * np.float32(scale)
        # Rounded to storage and back: the reference has to see what the kernel sees.
        data = stored_bytes(pool, tensor.dtype, Layout.CHANNELS_FIRST)
        return loaded(data, tensor.shape, tensor.dtype, Layout.CHANNELS_FIRST)

    def _double(self, request: Request, operands: Sequence[Floats]) -> NDArray[np.float64]:
        double = in_double(request)
        output = double.outputs[0]
        mark = self._gpu.mark()
        try:
            pointers: list[int] = []
            for tensor, operand in zip(double.inputs, operands, strict=True):
                pointers.append(self._gpu.take(tensor.size_bytes))
                data = stored_bytes(operand.astype(np.float64), DType.FP64, Layout.CHANNELS_FIRST)
                self._gpu.upload(pointers[-1], data)
            pointers.append(self._gpu.take(output.size_bytes))
            self._gpu.fill(pointers[-1], 0xFF, output.size_bytes)
            self._run_double(double, pointers)
            data = self._gpu.download(pointers[-1], output.size_bytes)
        finally:
            self._gpu.reset(mark)
        result = loaded(data, output.shape, DType.FP64, Layout.CHANNELS_FIRST)
        if not np.isfinite(result).all():
            raise MbcError("MBC077", "the float64 reference left elements unwritten")
        return result

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
        raise MbcError("MBC077", "cuDNN has no float64 engine for this convolution to compare with")


def _scale(request: Request) -> float:
    """A power of two for both operands that keeps results near 1, so that no fp16 overflows."""
    output = request.outputs[0]
    if request.kind == "convolution_backward_filter":
        features = request.inputs[1]
        terms = features.elements // features.shape[1]
        # Equal rows add up in step, unlike random ones.
        spread = math.sqrt(terms * features.shape[0] / period_rows(request))
    else:
        weight = request.inputs[1]
        terms = weight.elements // (weight.shape[0] if request.kind == "convolution" else output.shape[1])
        spread = math.sqrt(max(1, terms))
    return 2.0 ** -round(math.log2(max(1.0, spread)) / 2)


def distance(trial: Trial, rows: Sequence[int], result: Floats) -> float:
    """Normalised L2 distance of `result` (those rows, or a whole filter) from the reference; NaN: unwritten."""
    expected = trial.reference
    if trial.request.kind != "convolution_backward_filter":
        expected = expected[[row % trial.period for row in rows]]
    norm = float(np.linalg.norm(expected))
    return float(np.linalg.norm(result.astype(np.float64) - expected)) / norm if norm else 0.0


def checked_rows(request: Request) -> tuple[int, ...]:
    """Rows that are compared: the ends and the middle. A filter gradient is compared whole."""
    rows = request.inputs[0].shape[0]
    return tuple(sorted({0, rows // 2, rows - 1}))[:CHECKED_ROWS]
