"""Estimates for a GPU from the profile of another one of its architecture.

The other GPU may have other clocks, multiprocessors or memory. Kernels have the same code, so a measured time is
divided as in a roofline: the part of the bytes scales with the bandwidths of the two GPUs, the part of the arithmetic
with their peaks, which depend on clocks and multiprocessors. The gap between two launches stays. The shapes determine
the parts. If nothing but these two limits a kernel, the true time is between those that either ratio alone gives: that
is the range of such a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Precision
from mbc.kernels.base import Candidate, Request
from mbc.kernels.calibration import Spread, peak_tflops
from mbc.ops import KINDS
from mbc.ops.fused import Fused


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling of times from the measured GPU `source` to `target`."""

    source: DeviceSpec
    target: DeviceSpec

    @property
    def memory(self) -> float:
        """Ratio of the target's time to the source's for a kernel that waits for memory."""
        return self.source.copy_gb_s / self.target.copy_gb_s

    def arithmetic(self, precision: Precision) -> float:
        """Return the ratio of the target's time to the source's for a kernel that waits for arithmetic.

        Raises:
            KeyError: The precision is fp64, which mbc runs on no GPU.
        """
        return peak_tflops(self.source, precision) / peak_tflops(self.target, precision)

    def spread(self, precision: Precision) -> Spread:
        """Return the range of scaled times: those that either limit alone would give.

        From an H200 to an H100 nine in ten are within the range (decision 069).
        """
        ratios = self.memory, self.arithmetic(precision)
        low, high = min(ratios) / max(ratios), max(ratios) / min(ratios)
        return Spread(0, 1.0, low, high, high - 1, high - 1)

    def scaled(self, candidate: Candidate, request: Request) -> Candidate:
        """Return the same kernel on the target, as an estimate."""
        factor = self._factor(request)
        return replace(
            candidate,
            measured=False,
            time_us=self._scaled_us(candidate.time_us, factor),
            accumulate_us=self._scaled_us(candidate.accumulate_us, factor),
        )

    def _factor(self, request: Request) -> float:
        arithmetic = self.arithmetic(request.precision)
        if isinstance(request.attributes, Fused):
            multiplies = any(KINDS[member.kind].flops is not None for member in request.attributes.members)
            # The shapes of a fused matrix product do not determine its arithmetic.
            return math.sqrt(self.memory * arithmetic) if multiplies else self.memory
        kind = KINDS.get(request.kind)  # None: a change of layout or type
        flops = 0
        if kind is not None and kind.flops is not None:
            flops = kind.flops(request.attributes, request.inputs, request.outputs)
        moved_bytes = sum(operand.size_bytes for operand in (*request.inputs, *request.outputs))
        memory_us = moved_bytes / (self.source.copy_gb_s * 1e3)
        arithmetic_us = flops / (peak_tflops(self.source, request.precision) * 1e6)
        together_us = memory_us + arithmetic_us
        return (memory_us * self.memory + arithmetic_us * arithmetic) / together_us if together_us else self.memory

    def _scaled_us(self, time_us: float, factor: float) -> float:
        gap_us = min(self.source.launch_us, time_us)
        return gap_us + (time_us - gap_us) * factor


def distance(one: DeviceSpec, other: DeviceSpec) -> float:
    """Return how different two GPUs are: the sum of the differences of the logarithms of their data.

    The data are bandwidth, fp16 peak and number of multiprocessors.
    """
    pairs = (
        (one.copy_gb_s, other.copy_gb_s),
        (one.fp16_tflops, other.fp16_tflops),
        (one.multiprocessors, other.multiprocessors),
    )
    return sum(abs(math.log(a / b)) for a, b in pairs)
