"""Times that nobody measured: a roofline whose shares were fitted to a GPU that was.

    time = launch x (starts) + arithmetic / (share of the peak) + memory / (share of the bandwidth)

`launch` is the gap between the nodes of a graph; how many of them a call takes, fitted too, has in it that kernels fill
and drain. `arithmetic` is its operations over the peak of its precision, on as many multiprocessors as its tiles keep
busy; `memory` is its bytes, each counted once, over the copy bandwidth. The two are added, since kernels overlap them
only in part: a share above 1 says how well they do. Which operations have shares in common is their `group` (provider,
kind, precision) and `variant` (how the operands lie, whether there is workspace).

`benchmarks/calibrate.py` fits the shares to half of the layers of a profile and compares with the other half how far
off they are; estimates.json holds both. On another GPU than that of the profile the same shares are taken of its own
peaks, and what is not known of it widens the range by `OTHER_GPU`.
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
_TILE = 64  # rows and columns of the GEMM tile that one multiprocessor computes
_DEPTH = 1024  # K under which it is not split
_LEAST_BUSY = 0.02  # small GEMMs still spread over the machine by smaller tiles

WITHOUT_WORKSPACE = "no_workspace"  # the variant of candidates that take none
ALL = "all"  # the spread over every group of candidates that have the workspace they want
INTERPOLATED = "interpolated"  # between two measured sizes of a profile
SCALED = "scaled"  # from a larger one (`mbc.profile.scale`)


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the arithmetic peak and of the copy bandwidth; and how many gaps between launches a launch takes."""

    arithmetic: float
    memory: float
    starts: float = 1.0


@dataclass(frozen=True, slots=True)
class Effort:
    """What one call takes at the ceilings of a GPU, in microseconds."""

    group: str
    variant: str
    launch_us: float
    arithmetic_us: float
    memory_us: float

    @property
    def key(self) -> str:
        return f"{self.group} {self.variant}".rstrip()

    def time_us(self, shares: Shares) -> float:
        return self.launch_us * shares.starts + self.arithmetic_us / shares.arithmetic + self.memory_us / shares.memory


@dataclass(frozen=True, slots=True)
class Spread:
    """Measured over estimated times: `median`, and `low` and `high` at 10 % and 90 % of the requests compared. Of the
    distance from 1 the median (`error`) and the 90th percentile (`error_high`)."""

    count: int
    median: float
    low: float
    high: float
    error: float
    error_high: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Spread:
        """Of at least one ratio."""
        ordered, errors = sorted(ratios), sorted(abs(ratio - 1) for ratio in ratios)
        return Spread(
            len(ordered),
            quantile(ordered, 0.5),
            quantile(ordered, 0.1),
            quantile(ordered, 0.9),
            quantile(errors, 0.5),
            quantile(errors, 0.9),
        )


UNCOMPARED = Spread(0, 1.0, 0.5, 2.0, 0.5, 1.0)  # by judgement, for work that no profile has


@dataclass(frozen=True)
class Calibration:
    """`shares` by `Effort.key`, `spreads` by group (with ` no_workspace` for candidates without workspace) and by
    `scaled_group`.

    `gpu`, `driver`, `cudnn` and `measured` are those of the profile, `fitted` is the date of fitting.
    """

    gpu: str
    driver: str
    cudnn: int
    measured: str
    fitted: str
    requests: int
    shares: Mapping[str, Shares]
    spreads: Mapping[str, Spread]

    def estimate_us(self, effort: Effort) -> float:
        return effort.time_us(shares_of(self.shares, effort))

    def spread(self, group: str, bare: bool) -> Spread:
        """How far estimates of a group are off on the GPU of the profile."""
        return self.spreads.get(f"{group} {WITHOUT_WORKSPACE}" if bare else group, UNCOMPARED)

    def scaled(self, provider: str, times: int) -> Spread:
        """How far times are off that are from a size of up to so many times the rows."""
        return self.spreads.get(scaled_group(provider, times), UNCOMPARED)

    def factors(self, spread: Spread, device: DeviceSpec) -> tuple[float, float]:
        """What estimated times are multiplied by for the lower and the upper end of their range. Never beyond the
        estimate itself."""
        wider = 1.0 if device.name == self.gpu else OTHER_GPU
        return min(1.0, spread.low / wider), max(1.0, spread.high * wider)


def shares_of(shares: Mapping[str, Shares], effort: Effort) -> Shares:
    """Those fitted to the work, else for mbc's own kernels those fitted to the kernel or to all of them, else by
    judgement."""
    provider = effort.group.split()[0]
    found = (shares.get(key) for key in (effort.key, effort.group, provider))
    return next((share for share in found if share is not None), None) or unfitted(effort)


def unfitted(effort: Effort) -> Shares:
    """By judgement, for work that no profile has."""
    if effort.group.startswith("mbc "):
        return Shares(1.0, 0.85, 2.0)
    if not effort.variant.startswith(WITHOUT_WORKSPACE):
        # Channels that fill no load are copied into more of them, and the copies are mostly zeros.
        grouped = effort.variant.startswith("grouped")
        if effort.variant == "unaligned" or (grouped and effort.group.endswith("tf32")):
            return Shares(0.1, 0.2, 6.0)
        if grouped and effort.group.endswith("fp32"):
            return Shares(0.4, 0.2, 6.0)  # data gradients of three layers on an H200: 0.32 to 0.47 of the peak
        # A third of the speed without a stride: 33 and 13, 76 and 24, 112 and 40 TFLOP/s on an H100.
        return Shares(0.15, 0.5, 6.0) if effort.variant == "grouped strided" else Shares(0.5, 0.5, 6.0)
    # Without workspace there may be no engine but a direct one. Measured on an H200, ResNet-50's stem at batch 256 in
    # bf16 took 342 ms for its filter gradient, where engines with workspace take 0.5.
    if effort.group.startswith("cublaslt "):
        return Shares(0.4, 0.5, 6.0)
    if "backward_filter" in effort.group:
        return Shares(0.003, 0.1, 6.0)
    return Shares(0.01 if "backward_data" in effort.group else 0.1, 0.1, 6.0)


@cache
def calibration() -> Calibration:
    """What comes with mbc."""
    return read_calibration(data_text(ESTIMATES_FILE))


def read_calibration(text: str) -> Calibration:
    document: dict[str, Any] = json.loads(text)
    shares = {key: Shares(*row) for key, row in document.pop("shares").items()}
    spreads = {key: Spread(*row) for key, row in document.pop("spreads").items()}
    return Calibration(**document, shares=shares, spreads=spreads)


def estimate_us(effort: Effort) -> float:
    return calibration().estimate_us(effort)


def group(provider: str, kind: str, precision: Precision) -> str:
    """bf16 and fp16 have one speed; what mbc's own kernels do is bound by memory in every precision."""
    if provider == "mbc":
        return f"mbc {kind}"
    half = precision in (Precision.BF16, Precision.FP16)
    return f"{provider} {kind} {'half' if half else precision.value}"


def scaled_group(provider: str, times: int) -> str:
    """Of times from a size of up to so many times the rows, a power of two."""
    return f"{SCALED} {provider} {times}"


def peak_tflops(device: DeviceSpec, precision: Precision) -> float:
    """Of GEMMs. Raises KeyError for fp64, which no GPU runs here."""
    return {
        Precision.FP32: device.fp32_tflops,
        Precision.TF32: device.tf32_tflops,
        Precision.BF16: device.bf16_tflops,
        Precision.FP16: device.fp16_tflops,
    }[precision]


def busy(height: int, width: int, depth: int, device: DeviceSpec) -> float:
    """Share of the multiprocessors that a GEMM of this size keeps busy, with split-K (`depth` is K; 0: not split): its
    tiles run in waves, and the last wave is not full."""
    tiles = math.ceil(height / _TILE) * math.ceil(width / _TILE) * max(1, math.ceil(depth / _DEPTH))
    waves = math.ceil(tiles / device.multiprocessors)
    return max(_LEAST_BUSY, tiles / (waves * device.multiprocessors))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the neighbours."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
