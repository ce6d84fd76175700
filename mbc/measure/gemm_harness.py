"""The benchmark harness of convolutions and linear layers, which compares results with float64 on the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.base import Candidate, Request
from mbc.measure.clock import Clock
from mbc.measure.compare import Comparer, as_fp32, mean_square
from mbc.measure.cudnn_passes import CONVOLUTION_KINDS
from mbc.measure.gemm_trial import TOLERANCES, Operand, Trial, with_rows
from mbc.measure.gpu import Gpu
from mbc.measure.harness import Checker, Harness
from mbc.measure.kernel_library import Call, KernelLibrary
from mbc.measure.offers import Offer, device_spec
from mbc.measure.operand_buffers import Pointers

RESULT = 2  # index of a GEMM's result, after its two operands
GRADIENT = 1  # index of dy among the inputs of a filter gradient
ADDED = 0.01  # allowed difference of two additions from twice one, which distinguishes adding from overwriting


class ProductHarness(Harness):
    """Harness of convolutions and linear layers, which compares results with float64 on the GPU."""

    def __init__(self, gpu: Gpu, library: KernelLibrary, clock: Clock, trial: Trial, request: Request) -> None:
        """Put the operands of `trial` on the GPU."""
        self._trial = trial
        self._comparer = Comparer(gpu, library, device_spec(gpu), request.precision)
        super().__init__(gpu, library, clock, request, trial.period)

    def fill(self, index: int, layout: Layout, address: int) -> None:
        """Write the trial's operand `index` at `address`, repeated to its whole size."""
        trial, gpu = self._trial, self.gpu
        tensor = trial.request.inputs[index]
        operand = trial.operands[index]
        short = operand.tensor
        signs = trial.signs if trial.adds_up and index == GRADIENT else (1,)
        mark = gpu.mark()
        try:
            periods = {sign: self._period(operand, sign, layout) for sign in dict.fromkeys(signs)}
            left_bytes = tensor.size_bytes
            for number, sign in enumerate(signs):
                count = min(short.size_bytes, left_bytes)
                gpu.copy(address + number * short.size_bytes, periods[sign], count)
                left_bytes -= count
            if left_bytes:
                gpu.repeat(address, short.size_bytes, tensor.size_bytes)
        finally:
            gpu.reset(mark)

    def _period(self, operand: Operand, sign: int, layout: Layout) -> int:
        """Put one period of an operand, times `sign`, on the GPU and return its address in `layout`."""
        tensor = operand.tensor
        address, data = self.gpu.take(tensor.size_bytes), operand.first_bytes(tensor.dtype, sign)
        self.gpu.upload(address, data)
        self.gpu.repeat(address, data.size, tensor.size_bytes)
        return self._comparer.relaid(address, tensor, layout)

    def part(self, request: Request, rows: int) -> Request | None:
        """Return the request for the first `rows` rows, None for a kind that is not a convolution."""
        return with_rows(request, rows) if request.kind in CONVOLUTION_KINDS else None

    def checker(self, request: Request, offered: Sequence[Offer]) -> Checker:
        """Return a checker with the reference in each layout that the offers write."""
        layouts = dict.fromkeys(o.candidate.layouts[RESULT] for o in offered)
        return ProductChecker(self.gpu, self._comparer, self._trial, request, layouts)


class ProductChecker:
    """Compares results of a request with the reference of its trial."""

    def __init__(
        self, gpu: Gpu, comparer: Comparer, trial: Trial, request: Request, layouts: dict[Layout, None]
    ) -> None:
        """Upload the reference in `layouts`."""
        self._gpu = gpu
        self._comparer = comparer
        self._request = request
        self._rows = request.inputs[0].shape[0]
        self._trial = trial
        expected = trial.expected(self._rows)
        self._mean_square = mean_square(expected)
        tensor = TensorType(expected.shape, DType.FP32)
        canonical = gpu.take(tensor.size_bytes)
        gpu.upload(canonical, as_fp32(expected))
        self._wanted = {layout: comparer.relaid(canonical, tensor, layout) for layout in layouts}

    def wrong(self, candidate: Candidate, at: Pointers) -> tuple[str, float]:
        """Return an error message, empty if the result is right, and the largest distance of its parts."""
        error = max(self._distances(candidate, at), key=lambda e: math.inf if math.isnan(e) else e)
        if math.isnan(error):
            return "it leaves elements of its output unwritten", -1.0
        allowed = TOLERANCES[self._request.precision]
        return (f"its result is {error:.2e} off, {allowed:.0e} is allowed" if error > allowed else "", error)

    def adds(self, candidate: Candidate, at: Pointers, call: Call) -> bool:
        """Return whether `call` adds to its output.

        Added to zero it must give the result. Added to the result it must give twice the result, which is as far from
        the result as zero is.
        """
        self._gpu.fill(at.outputs[0], 0, self._request.outputs[0].size_bytes)
        call.enqueue()
        if not self._distances(candidate, at)[0] <= TOLERANCES[self._request.precision]:
            return False
        call.enqueue()
        return abs(self._distances(candidate, at)[0] - 1) <= ADDED

    def _distances(self, candidate: Candidate, at: Pointers) -> list[float]:
        output, wanted = self._request.outputs[0], self._wanted[candidate.layouts[RESULT]]
        if self._trial.adds_up:
            parts = [(at.outputs[0], wanted, output.elements)]
        else:
            row = output.with_rows(1)
            parts = [
                (at.outputs[0] + start * row.size_bytes, wanted, count * row.elements)
                for start, count in checked_rows(self._rows, self._trial.period)
            ]
        return self._comparer.distances(parts, output.dtype, self._mean_square)


def checked_rows(rows: int, period: int) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of the compared parts: one period at the start, the middle and the end."""
    starts = dict.fromkeys((0, rows // 2 // period * period, (rows - 1) // period * period))
    return [(start, min(period, rows - start)) for start in starts]
