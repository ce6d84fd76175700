"""The benchmark harness of convolutions with statistics in the epilogue.

The result is checked like that of any convolution, mean and variance, of the batch or of each sample, against the
float64 reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbc.ir.types import DType, Layout
from mbc.kernels.base import Candidate, Request
from mbc.kernels.statistics import WITH_INSTANCE_STATISTICS
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
    """Harness of convolutions with statistics, for the whole mini-batch only."""

    def checker(self, request: Request, offered: Sequence[Offer]) -> Checker:
        """Return a checker of the result, the mean and the variance."""
        period = self._trial.expected(request.inputs[0].shape[0])
        return _StatisticsChecker(self.gpu, super().checker(request, offered), request, period)


class _StatisticsChecker:
    def __init__(self, gpu: Gpu, product: Checker, request: Request, period: NDArray[np.float64]) -> None:
        self._gpu = gpu
        self._product = product
        self._request = request
        self._wanted = moments(period, request.inputs[0].shape[0], request.kind == WITH_INSTANCE_STATISTICS)
        self._allowed = allowed(request, len(period))

    def wrong(self, candidate: Candidate, at: Pointers) -> tuple[str, float]:
        wrong, error = self._product.wrong(candidate, at)
        if wrong:
            return wrong, error
        mean, variance = (
            loaded(self._gpu.download(address, t.size_bytes), t.shape[:2], t.dtype, Layout.CHANNELS_FIRST)
            for address, t in zip(at.outputs[1:], self._request.outputs[1:], strict=True)
        )
        errors = distances(mean, variance, *self._wanted)
        for name, off, most in zip(("mean", "variance"), errors, self._allowed, strict=True):
            if not off <= most:
                # A value that is not finite was left unwritten.
                off_by = off if math.isfinite(off) else -1.0
                return f"its {name} is {off:.2e} off, {most:.0e} is allowed", off_by
        return "", error

    def adds(self, candidate: Candidate, at: Pointers, call: Call) -> bool:
        return False


def moments(
    period: NDArray[np.float64], rows: int, by_sample: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and variance of every channel.

    Args:
        period: The rows of one period, [rows, channels, ...].
        rows: The number of rows, which repeat with the period.
        by_sample: Whether each row has a mean and a variance of its own; otherwise they are of all rows together.
    """
    if by_sample:
        means, variances = zip(*(moments(row[None], 1) for row in period), strict=True)
        places = np.arange(rows) % len(period)
        return np.stack(means)[places], np.stack(variances)[places]
    weights = np.bincount(np.arange(rows) % len(period), minlength=len(period)) / rows
    pixels = period.reshape(*period.shape[:2], -1)
    mean = weights @ pixels.mean(axis=2)
    # One channel at a time, because allocating temporary arrays of the size of a volume takes seconds.
    squares = [[float(np.square(c - m).sum()) for c, m in zip(row, mean, strict=True)] for row in pixels]
    return mean, weights @ np.array(squares) / pixels.shape[2]


def distances(
    mean: NDArray[np.floating],
    variance: NDArray[np.floating],
    wanted_mean: NDArray[np.float64],
    wanted_variance: NDArray[np.float64],
) -> tuple[float, float]:
    """Return the normalised L2 distances of the mean and of the variance.

    The distance of a mean is divided by the root mean square of the elements rather than by the mean: random elements
    have a mean near zero, of which only rounding errors remain.
    """
    spread = float(np.linalg.norm(np.sqrt(wanted_variance + np.square(wanted_mean)))) or 1.0
    size = float(np.linalg.norm(wanted_variance)) or 1.0
    return float(np.linalg.norm(mean - wanted_mean)) / spread, float(np.linalg.norm(variance - wanted_variance)) / size


def allowed(request: Request, period: int) -> tuple[float, float]:
    """Return the allowed distances of mean and variance.

    They are those of statistics in a separate launch plus the effect of rounding the result: an engine may sum the
    stored values, which are rounded alike in every period. For a variance, which sums squares, that effect is twice as
    large.
    """
    rounding = TOLERANCES[request.precision] / math.sqrt(period * math.prod(request.outputs[0].shape[2:]))
    return STORED[DType.FP32] + rounding, STORED[DType.FP32] + 2 * rounding
