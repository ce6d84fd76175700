"""Estimated times of kernels that were not measured: a roofline whose shares were fitted to a measured GPU.

    time = launch x (starts) + arithmetic / (share of the peak) + memory / (share of the bandwidth)

`launch` is the gap between two nodes of a CUDA graph. `starts` is the number of such gaps that one call takes; it is
fitted, and so includes the time in which kernels fill and drain the GPU. `arithmetic` is the call's operations divided
by the peak rate of its precision, on as many multiprocessors as its tiles keep busy. `memory` is the call's bytes, each
counted once, divided by the copy bandwidth. The two are added, because kernels overlap them only in part; a share above
1 is the gain of that overlap. Operations have common shares if their `group` (provider, kind, precision) and their
`variant` (layouts, with or without workspace) are equal.

Kernels of mbc that declare arithmetic and bytes separately overlap them, so the longer of the two counts. All such
kernels with the same instructions are a `family`, to whose shares each kernel adds one factor. The peak is that of
these instructions (`mma_sync_tflops`). So a family that was measured on one GPU, which may pose as an older one, gives
estimates for all GPUs with its instructions. A pass of a library with too few measured layers has the shares of all
passes together.

`benchmarks/calibrate.py` fits the shares to half of the layers of a profile and computes the errors on the other half;
estimates.json holds both. On a GPU other than that of the profile the same shares are applied to that GPU's own peaks,
and the factor `OTHER_GPU` widens the range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Precision
from mbc.resources import data_text

ESTIMATES_FILE = "estimates.json"
OTHER_GPU = 1.5  # by judgement, not by measurement: one GPU was measured
# By judgement: the factor by which the estimate of a whole step on another GPU is off in either direction, and the
# largest ratio of the ends of its interval. Errors of many kernels partly cancel out, so that a step is less uncertain
# than its kernels (decision 084).
OTHER_GPU_STEP, WIDEST_STEP = 1.3, 2.0
_TILE = 64  # rows and columns of the GEMM tile that one multiprocessor computes
_DEPTH = 1024  # a GEMM with a smaller K does not split K
_LEAST_BUSY = 0.02  # smaller tiles spread small GEMMs over the GPU

OWN_PROVIDER = "mbc"  # the provider of mbc's own kernels
WITHOUT_WORKSPACE = "no_workspace"  # the variant of candidates without workspace
ALL = "all"  # the spread over every group of candidates with workspace
INTERPOLATED = "interpolated"  # the spread of times interpolated between two measured sizes of a profile
SCALED = "scaled"  # the spread of times scaled from a larger measured size (`mbc.profile.other_rows`)


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the arithmetic peak and of the copy bandwidth, and the number of launch gaps that one call takes."""

    arithmetic: float
    memory: float
    starts: float = 1.0


@dataclass(frozen=True, slots=True)
class Effort:
    """Times of one call at the ceilings of a GPU, in microseconds."""

    group: str
    variant: str
    launch_us: float
    arithmetic_us: float
    memory_us: float
    family: str = ""  # instructions of kernels that overlap arithmetic and memory
    least_us: float = 0.0  # lower limit, whatever the shares are: bytes that the cache cannot hold, or the peak

    @property
    def key(self) -> str:
        """Name of the call's group and variant in `Calibration.shares`."""
        return f"{self.group} {self.variant}".rstrip()

    @property
    def common(self) -> str:
        """Name of the variant in all passes of a library together; the provider of mbc's own kernels."""
        provider, *_, precision = self.group.split()
        return provider if provider == OWN_PROVIDER else f"{provider} {precision} {self.variant}"

    def time_us(self, shares: Shares) -> float:
        """Return the estimated time of the call with these shares of the ceilings."""
        start_us = self.launch_us * shares.starts
        arithmetic_us, memory_us = self.arithmetic_us / shares.arithmetic, self.memory_us / shares.memory
        if self.family:
            return start_us + max(arithmetic_us, memory_us, self.least_us)
        # Each sum begins with `start_us`: another order changes the last bit, and with it plans of equal steps.
        return max(start_us + arithmetic_us + memory_us, start_us + self.least_us)


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of measured times divided by estimated times, over `count` requests.

    `low` and `high` are the 10th and the 90th percentile. `error` and `error_high` are the median and the 90th
    percentile of the distance from 1.
    """

    count: int
    median: float
    low: float
    high: float
    error: float
    error_high: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Spread:
        """Return the spread of at least one ratio."""
        ordered, errors = sorted(ratios), sorted(abs(ratio - 1) for ratio in ratios)
        median, low, high = (quantile(ordered, share) for share in (0.5, 0.1, 0.9))
        return Spread(len(ordered), median, low, high, quantile(errors, 0.5), quantile(errors, 0.9))


UNCOMPARED = Spread(0, 1.0, 0.5, 2.0, 0.5, 1.0)  # by judgement, for work that no profile has


@dataclass(frozen=True)
class Calibration:
    """Shares and spreads fitted to one profile.

    Attributes:
        gpu: GPU of the profile.
        driver: Driver version of the profile.
        cudnn: cuDNN version of the profile.
        measured: Date of the profile.
        fitted: Date of the fit.
        requests: Number of requests that the fit used.
        shares: Fitted shares by `Effort.key`, by group, or by provider.
        spreads: Spreads by group (with ` no_workspace` for candidates without workspace) and by `scaled_group`.
        posed: GPU and date of the profile, measured in posing, to which kernels for older GPUs were fitted; empty if
            their shares are judgements.
    """

    gpu: str
    driver: str
    cudnn: int
    measured: str
    fitted: str
    requests: int
    shares: Mapping[str, Shares]
    spreads: Mapping[str, Spread]
    posed: str = ""

    def estimate_us(self, effort: Effort) -> float:
        """Return the estimated time of a call by the fitted shares."""
        return effort.time_us(shares_of(self.shares, effort))

    def spread(self, group: str, bare: bool) -> Spread:
        """Return the spread of the estimates of a group on the GPU of the profile."""
        return self.spreads.get(f"{group} {WITHOUT_WORKSPACE}" if bare else group, UNCOMPARED)

    def scaled(self, provider: str, times: int) -> Spread:
        """Return the spread of times that were scaled from a measurement with up to `times` times as many rows."""
        return self.spreads.get(scaled_group(provider, times), UNCOMPARED)

    def factors(self, spread: Spread, device: DeviceSpec, elsewhere: float = OTHER_GPU) -> tuple[float, float]:
        """Return the factors from an estimated time to the lower and to the upper end of its range.

        The range always contains the estimate itself. It is wider by `elsewhere` on another GPU than the profile's.
        """
        wider = 1.0 if device.name == self.gpu else elsewhere
        return min(1.0, spread.low / wider), max(1.0, spread.high * wider)


def shares_of(shares: Mapping[str, Shares], effort: Effort) -> Shares:
    """Return the shares fitted to the work's variant, its group or its family, or unfitted shares if there are none.

    Groups of mbc's own kernels are named after the kernel. All of them are the family of those without one. The family
    of a library's pass is the variant in all passes.
    """
    fitted = (shares.get(key) for key in (effort.key, effort.group, effort.family or effort.common))
    return next((share for share in fitted if share is not None), None) or unfitted(effort)


def unfitted(effort: Effort) -> Shares:
    """Return shares chosen by judgement, for work that no profile contains."""
    if effort.family:
        return Shares(0.6, 0.85, 1.7)
    if effort.group.startswith(f"{OWN_PROVIDER} "):
        return Shares(1.0, 0.85, 2.0)
    if not effort.variant.startswith(WITHOUT_WORKSPACE):
        # Where channels do not fill a load, engines copy them to a padded tensor, which is mostly zeros.
        grouped = effort.variant.startswith("grouped")
        if effort.variant == "unaligned" or (grouped and effort.group.endswith("tf32")):
            return Shares(0.1, 0.2, 6.0)
        if grouped and effort.group.endswith("fp32"):
            return Shares(0.4, 0.2, 6.0)  # data gradients of three layers on an H200: 0.32 to 0.47 of the peak
        # A stride costs two thirds of the speed: 33 and 13, 76 and 24, 112 and 40 TFLOP/s on an H100.
        return Shares(0.15, 0.5, 6.0) if effort.variant == "grouped strided" else Shares(0.5, 0.5, 6.0)
    # Without workspace a direct engine may be the only one. On an H200 the filter gradient of ResNet-50's stem at batch
    # 256 in bf16 took 342 ms with such an engine, and 0.5 ms with workspace.
    if effort.group.startswith("cublaslt "):
        return Shares(0.4, 0.5, 6.0)
    if "backward_filter" in effort.group:
        return Shares(0.003, 0.1, 6.0)
    return Shares(0.01 if "backward_data" in effort.group else 0.1, 0.1, 6.0)


@cache
def calibration() -> Calibration:
    """Return the calibration that is part of mbc."""
    return read_calibration(data_text(ESTIMATES_FILE))


def read_calibration(text: str) -> Calibration:
    """Return the calibration that a JSON text (estimates.json) describes."""
    document: dict[str, Any] = json.loads(text)
    shares = {key: Shares(*row) for key, row in document.pop("shares").items()}
    spreads = {key: Spread(*row) for key, row in document.pop("spreads").items()}
    return Calibration(**document, shares=shares, spreads=spreads)


def estimate_us(effort: Effort) -> float:
    """Return the estimated time of a call by the calibration that is part of mbc."""
    return calibration().estimate_us(effort)


def group(provider: str, kind: str, precision: Precision, device: DeviceSpec) -> str:
    """Return the name of the group of calls that have common shares on a GPU.

    bf16 and fp16 run at one speed. mbc's own kernels are bound by memory in every precision.
    """
    if provider == OWN_PROVIDER:
        return f"{OWN_PROVIDER} {kind}"
    half = precision in (Precision.BF16, Precision.FP16)
    return f"{provider} {kind} {'half' if half else library_precision(device, precision).value}"


def scaled_group(provider: str, times: int) -> str:
    """Return the name of the spread of times scaled from up to `times` times the rows; `times` is a power of two."""
    return f"{SCALED} {provider} {times}"


def library_precision(device: DeviceSpec, precision: Precision) -> Precision:
    """Return the precision in which cuDNN and cuBLASLt compute the products of a plan in `precision`.

    For a plan in tf32 it is fp32 before compute capability 8.0, where tensor cores lack tf32. A GPU that poses as such
    an older one is treated alike, although its libraries do not pose and still compute in tf32.
    """
    return Precision.FP32 if precision is Precision.TF32 and not device.has_bf16_and_tf32 else precision


def peak_tflops(device: DeviceSpec, precision: Precision) -> float:
    """Return the peak rate of GEMMs in `precision`.

    Raises:
        KeyError: `precision` is fp64, which runs on no GPU here.
    """
    return {
        Precision.FP32: device.fp32_tflops,
        Precision.TF32: device.tf32_tflops,
        Precision.BF16: device.bf16_tflops,
        Precision.FP16: device.fp16_tflops,
    }[precision]


def mma_sync_tflops(device: DeviceSpec, precision: Precision) -> float:
    """Return the peak rate of GEMMs in `precision` by mma.sync, which newer instructions of a GPU may exceed.

    Raises:
        KeyError: `precision` is fp64, which runs on no GPU here.
    """
    peak, halved = peak_tflops(device, precision), precision is Precision.TF32
    return min(peak, device.mma_sync_tflops / (1 + halved)) if device.mma_sync_tflops else peak


def busy(height: int, width: int, depth: int, device: DeviceSpec) -> float:
    """Return the share of the multiprocessors that a GEMM of this size keeps busy.

    Tiles run in waves, and the last wave is not full. `depth` is K if the GEMM may split K, and 0 if it may not.
    """
    tiles = math.ceil(height / _TILE) * math.ceil(width / _TILE) * max(1, math.ceil(depth / _DEPTH))
    waves = math.ceil(tiles / device.multiprocessors)
    return max(_LEAST_BUSY, tiles / (waves * device.multiprocessors))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, linear between neighbours."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
