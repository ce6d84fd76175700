"""Distances between results, computed on the GPU: to download an output takes longer than to run the candidate."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision, TensorType, layout_matters
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda import OWN
from mbc.measure.gpu import Gpu
from mbc.measure.kernel_library import Call, KernelLibrary
from mbc.ops import KINDS
from mbc.ops.base import NoAttributes
from mbc.ops.matrix import Cast
from mbc.runtime.formats import stored_bytes

_FIRST = Layout.CHANNELS_FIRST


class Comparer:
    """Converts layouts and types and computes mean squared differences on the GPU, with mbc's own kernels."""

    def __init__(self, gpu: Gpu, library: KernelLibrary, spec: DeviceSpec, precision: Precision) -> None:
        """Run kernels of `library` on `gpu`."""
        self._gpu = gpu
        self._library = library
        self._spec = spec
        self._precision = precision

    def _call(self, request: Request, pointers: tuple[int, ...], layouts: tuple[Layout, ...] | None = None) -> Call:
        candidate = self._candidate(request, layouts)
        workspace = self._gpu.take(candidate.workspace_bytes) if candidate.workspace_bytes else 0
        return self._library.prepare(candidate, request, pointers, workspace)

    def _candidate(self, request: Request, layouts: tuple[Layout, ...] | None) -> Candidate:
        offered = OWN.candidates(request, self._spec)
        return next(c for c in offered if layouts is None or c.layouts == layouts)

    def relaid(self, address: int, tensor: TensorType, layout: Layout) -> int:
        """Return the address of a canonical tensor in `layout`: the tensor itself, or a copy in the GPU's memory."""
        if layout is _FIRST or not layout_matters(tensor.shape):
            return address
        converted = self._gpu.take(tensor.size_bytes)
        request = Request("convert", NoAttributes(), (tensor,), (tensor,), self._precision)
        self._call(request, (address, converted), (_FIRST, layout)).enqueue()
        return converted

    def distances(self, parts: list[tuple[int, int, int]], dtype: DType, mean_square: float) -> list[float]:
        """Return the normalised L2 distance of each part of a result from its reference.

        The distance is NaN if the candidate left elements of the part unwritten.

        Args:
            parts: (address of the result, address of the reference in fp32, number of elements) of each part.
            dtype: Type of the result.
            mean_square: Mean square of the reference.
        """
        mark = self._gpu.mark()
        try:
            apart = 256  # bytes: each part's mean at an address of its own
            means = self._gpu.take(apart * len(parts))
            for number, (result, wanted, elements) in enumerate(parts):
                self._difference(result, wanted, TensorType((elements,), dtype), means + apart * number)
            self._gpu.synchronize()
            data = self._gpu.download(means, apart * len(parts)).reshape(len(parts), apart)
        finally:
            self._gpu.reset(mark)
        errors = [float(row[:4].view(np.float32)[0]) for row in data]
        return [math.sqrt(mean / mean_square) if mean_square else math.sqrt(mean) for mean in errors]

    def _difference(self, result: int, wanted: int, tensor: TensorType, mean: int) -> None:
        wide = TensorType(tensor.shape, DType.FP32)
        if tensor.dtype is not DType.FP32:
            widened = self._gpu.take(wide.size_bytes)
            cast = Request("cast", Cast(DType.FP32.value), (tensor,), (wide,), self._precision)
            self._call(cast, (result, widened)).enqueue()
            result = widened
        outputs = KINDS["mse"].shape(NoAttributes(), (wide, wide))
        mse = Request("mse", NoAttributes(), (wide, wide), outputs, self._precision)
        self._call(mse, (result, wanted, mean)).enqueue()


def as_fp32(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return canonical values as the bytes of a canonical fp32 buffer."""
    return stored_bytes(values, DType.FP32, _FIRST)


def mean_square(values: NDArray[np.float64]) -> float:
    """Return the mean of the squares, 0 for an empty array."""
    return float(np.vdot(values, values)) / values.size if values.size else 0.0
