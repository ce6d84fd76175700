"""The benchmark harness of convolutions with statistics in the epilogue: the result is checked as that of any
convolution, mean and variance against the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbc.ir.types import DType, Layout
from mbc.kernels.base import Candidate, Request
from mbc.measure.gemm_harness import ProductHarness
from mbc.measure.gemm_trial import TOLERANCES
from mbc.measure.gpu import Gpu
from mbc.measure.harness import Checker
from mbc.measure.kernel_library import Call
from mbc.measure.offers import Offer
from mbc.measure.operand_buffers import Pointers
from mbc.measure.own_kernel_harness import TOLERANCES as STORED
from mbc.runtime.formats import loaded


class StatisticsHarness(ProductHarness):
    """Of the whole mini-batch only."""

    def checker(self, request: Request, offered: Sequence[Offer]) -> Checker:
        period = self._trial.expected(request.inputs[0].shape[0])
        return _StatisticsChecker(self.gpu, super().checker(request, offered), request, period)


class _StatisticsChecker:
    def __init__(self, gpu: Gpu, product: Checker, request: Request, period: NDArray[np.float64]) -> None:
        self._gpu = gpu
        self._product = product
        self._request = request
        self._wanted = moments(period, request.inputs[0].shape[0])
        self._allowed = allowed(request, len(period))

    def wrong(self, candidate: Candidate, at: Pointers) -> tuple[str, float]:
        wrong, error = self._product.wrong(candidate, at)
        if wrong:
            return wrong, error
        mean, variance = (
            loaded(self._gpu.download(address, t.size_bytes), t.shape, t.dtype, Layout.CHANNELS_FIRST)
            for address, t in zip(at.outputs[1:], self._request.outputs[1:], strict=True)
        )
        found = distances(mean, variance, *self._wanted)
        for name, off, most in zip(("mean", "variance"), found, self._allowed, strict=True):
            if not off <= most:
                # No number: it was left unwritten.
                off_by = off if math.isfinite(off) else -1.0
                return f"its {name} is {off:.2e} off, {most:.0e} is allowed", off_by
        return "", error

    def adds(self, candidate: Candidate, at: Pointers, call: Call) -> bool:
        return False


def moments(period: NDArray[np.float64], rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and variance of every channel of so many rows, of which each is as the one a period before."""
    weights = np.bincount(np.arange(rows) % len(period), minlength=len(period)) / rows
    mean = np.einsum("n,nchw->c", weights, period) / math.prod(period.shape[2:])
    squares = np.square(period - mean[:, None, None])
    return mean, np.einsum("n,nchw->c", weights, squares) / math.prod(period.shape[2:])


def distances(
    mean: NDArray[np.floating],
    variance: NDArray[np.floating],
    wanted_mean: NDArray[np.float64],
    wanted_variance: NDArray[np.float64],
) -> tuple[float, float]:
    """Normalised L2 of both. A mean counts by how far the elements lie from zero: random ones have a mean of next to
    nothing, in which rounding is all that is left."""
    spread = float(np.linalg.norm(np.sqrt(wanted_variance + np.square(wanted_mean)))) or 1.0
    size = float(np.linalg.norm(wanted_variance)) or 1.0
    return float(np.linalg.norm(mean - wanted_mean)) / spread, float(np.linalg.norm(variance - wanted_variance)) / size


def allowed(request: Request, period: int) -> tuple[float, float]:
    """How far mean and variance may be off: as of statistics in a launch of their own, and by what the rounding of the
    result changes, for an engine may sum up what it stores, rounded alike in every period. Squares, of which a variance
    is made, change twice as much as elements."""
    rounding = TOLERANCES[request.precision] / math.sqrt(period * math.prod(request.outputs[0].shape[2:]))
    return STORED[DType.FP32] + rounding, STORED[DType.FP32] + 2 * rounding
