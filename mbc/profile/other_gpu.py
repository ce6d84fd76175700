"""What a profile of one GPU says of another of its architecture, with other clocks, multiprocessors or memory.

Kernels are the same code, so a measured time is split as a roofline has it: the part of its bytes goes by the
bandwidths of the two GPUs, the part of its arithmetic by their peaks, in which clocks and multiprocessors are; the gap
between two launches stays. Which is which is known by the shapes. The truth lies between what either ratio alone gives,
as long as nothing but these two limits a kernel: that is the range of such a time.
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
    """From the GPU `source`, which was measured, to `target`."""

    source: DeviceSpec
    target: DeviceSpec

    @property
    def memory(self) -> float:
        """Time of a kernel that waits for memory, on the target over that on the source."""
        return self.source.copy_gb_s / self.target.copy_gb_s

    def arithmetic(self, precision: Precision) -> float:
        """The same of one that waits for its arithmetic. Raises KeyError for fp64, which no GPU runs here."""
        return peak_tflops(self.source, precision) / peak_tflops(self.target, precision)

    def spread(self, precision: Precision) -> Spread:
        """The range of scaled times: what either limit alone would give. From an H200 to an H100 nine in ten lie in it
        (decision 069)."""
        ratios = self.memory, self.arithmetic(precision)
        low, high = min(ratios) / max(ratios), max(ratios) / min(ratios)
        return Spread(0, 1.0, low, high, high - 1, high - 1)

    def scaled(self, candidate: Candidate, request: Request) -> Candidate:
        """The same kernel on the target, as an estimate."""
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
            # What a fused matrix product computes its shapes alone do not say.
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
    """How unlike two GPUs are: the sum of what their bandwidths, peaks and multiprocessors differ by, in logarithms."""
    pairs = (
        (one.copy_gb_s, other.copy_gb_s),
        (one.fp16_tflops, other.fp16_tflops),
        (one.multiprocessors, other.multiprocessors),
    )
    return sum(abs(math.log(a / b)) for a, b in pairs)
