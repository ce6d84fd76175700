"""The benchmark harness of mbc's own kernels, which compares results on few random rows with the NumPy reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout
from mbc.kernels.base import Candidate, Request
from mbc.kernels.providers import PROVIDERS
from mbc.measure.clock import Clock
from mbc.measure.gpu import Gpu
from mbc.measure.harness import POISON, Checker, Harness
from mbc.measure.kernel_library import Call, KernelLibrary
from mbc.measure.offers import Offer, device_spec
from mbc.measure.operand_buffers import Pointers, operand_types
from mbc.measure.random_operands import few, stored_values, values
from mbc.measure.random_pool import MOST_ELEMENTS
from mbc.ops.base import Array
from mbc.ops.base import Call as Evaluation
from mbc.ops.fused import Fused, evaluate_epilogue, gives_product, rounds_inside, sums
from mbc.profile.signature import asked_kind
from mbc.runtime.formats import loaded, stored_bytes

# Largest allowed normalised L2 distance of outputs from float64: reductions are in fp32 whatever the storage type, and
# an output is rounded once more. Whole numbers must be exact, except those that a fused operation derives from a
# computed value, such as bit masks: a value near zero may be rounded differently.
TOLERANCES = {DType.FP32: 1e-5, DType.BF16: 2.0**-8, DType.FP16: 2.0**-11}
MOST_ROUNDED = 1e-5  # allowed share of such numbers that differ
ROUNDED_INSIDE = 0.5  # share of the type's tolerance that is allowed for reductions over a result that is not stored


class PlainHarness(Harness):
    """Harness of every kind but convolutions and linear layers."""

    def __init__(self, gpu: Gpu, library: KernelLibrary, clock: Clock, request: Request) -> None:
        """Draw the operands of the few rows that are compared."""
        super().__init__(gpu, library, clock, request, 1)
        self._spec = device_spec(gpu)
        self._few = few(request)
        # With few planes, a candidate of the whole request may not be offered, and could not be checked.
        if not candidate_keys(request, self._spec) <= candidate_keys(self._few, self._spec):
            self._few = few(request, planes=False)
        self._inputs = [values(self._few, i, t.elements).reshape(t.shape) for i, t in enumerate(self._few.inputs)]
        self._meaning: list[Array] | None = None
        self._checked: dict[tuple[object, ...], tuple[str, float]] = {}

    def fill(self, index: int, layout: Layout, address: int) -> None:
        """Write random values of input `index` at `address`."""
        tensor = self.largest.inputs[index]
        data = stored_values(self.largest, index, min(tensor.elements, MOST_ELEMENTS))
        self.gpu.upload(address, data)
        self.gpu.repeat(address, data.size, tensor.size_bytes)

    def checker(self, request: Request, offered: Sequence[Offer]) -> Checker:
        """Return this harness, which also compares results."""
        return self

    def wrong(self, candidate: Candidate, at: Pointers) -> tuple[str, float]:
        """Return an error message, empty if the results on few rows are right, and their largest distance."""
        return self._compared(candidate, accumulate=False)

    def adds(self, candidate: Candidate, at: Pointers, call: Call) -> bool:
        """Return whether the candidate adds to its output."""
        return not self._compared(candidate, accumulate=True)[0]

    def _compared(self, candidate: Candidate, accumulate: bool) -> tuple[str, float]:
        """Compare a candidate once for all sizes, because the small request is the same for each of them."""
        key = (candidate.provider, candidate.name, candidate.settings, candidate.layouts, accumulate)
        if key not in self._checked:
            self._checked[key] = self._compare(candidate, accumulate)
        return self._checked[key]

    def _compare(self, asked: Candidate, accumulate: bool) -> tuple[str, float]:
        """Return an error message and the largest distance of an output; `accumulate` adds two runs to zero."""
        request, gpu = self._few, self.gpu
        provider = next(p for p in PROVIDERS if p.name == asked.provider)
        key = (asked.name, asked.settings, asked.layouts)
        alike = (c for c in provider.candidates(request, self._spec) if (c.name, c.settings, c.layouts) == key)
        candidate = next(alike, None)
        if candidate is None:
            return "the kernel cannot be checked: it does not support few rows", -1.0
        mark = gpu.mark()
        try:
            pointers: list[int] = []
            for index, (tensor, layout) in enumerate(zip(operand_types(request), candidate.layouts, strict=True)):
                output = index - len(request.inputs)
                if output in self.shared:
                    pointers.append(pointers[self.shared[output]])
                    continue
                pointers.append(gpu.take(tensor.size_bytes))
                if output < 0:
                    gpu.upload(pointers[-1], stored_bytes(self._inputs[index], tensor.dtype, layout))
                else:
                    gpu.fill(pointers[-1], 0 if accumulate else POISON, tensor.size_bytes)
            workspace = gpu.take(candidate.workspace_bytes)
            gpu.fill(workspace, POISON, candidate.workspace_bytes)
            call = self.library.prepare(candidate, request, pointers, workspace, accumulate)
            for _ in range(2 if accumulate else 1):
                call.enqueue()
            gpu.synchronize()
            return self._judge(candidate, pointers[len(request.inputs) :], accumulate)
        finally:
            gpu.reset(mark)

    def _judge(self, candidate: Candidate, addresses: Sequence[int], accumulate: bool) -> tuple[str, float]:
        worst = 0.0
        few = self._few
        twice = sums(few.kind, few.attributes, len(few.outputs)) if accumulate else (False,) * len(few.outputs)
        layouts = candidate.layouts[len(self._few.inputs) :]
        most_different = MOST_ROUNDED if isinstance(few.attributes, Fused) else 0.0
        inside = rounds_inside(few.attributes)
        least_allowed = ROUNDED_INSIDE * TOLERANCES[few.inputs[0].dtype] if inside else 0.0
        meant = self._wanted()
        for number, (tensor, address, layout) in enumerate(zip(few.outputs, addresses, layouts, strict=True)):
            result = loaded(self.gpu.download(address, tensor.size_bytes), tensor.shape, tensor.dtype, layout)
            wanted = 2 * meant[number] if twice[number] else meant[number]
            error = distance(result, wanted)
            allowed = max(TOLERANCES.get(tensor.dtype, most_different), least_allowed)
            if not error <= allowed:
                return f"output {number} is {error:.2e} off, {allowed:.0e} is allowed", error
            worst = max(worst, error)
            if number == 0 and gives_product(few.attributes):
                # The other outputs are computed from the product as it was rounded.
                meant = meaning(few, self._inputs, result)
        return "", worst

    def _wanted(self) -> list[Array]:
        if self._meaning is None:
            self._meaning = meaning(self._few, self._inputs)
        return self._meaning


def candidate_keys(request: Request, spec: DeviceSpec) -> set[tuple[object, ...]]:
    """Return provider, name, settings and layouts of each candidate of a request.

    The workspace is left out, because it depends on sizes.
    """
    offered = (candidate for provider in PROVIDERS for candidate in provider.candidates(request, spec))
    return {(c.provider, c.name, c.settings, c.layouts) for c in offered}


def meaning(request: Request, inputs: Sequence[Array], product: Array | None = None) -> list[Array]:
    """Return the outputs of the operation for canonical inputs, in float64.

    Args:
        request: The operation with its shapes.
        inputs: Canonical inputs.
        product: The result of the first convolution or GEMM; None to compute it.
    """
    kind = asked_kind(request)
    exact = [v.astype(np.float64) if v.dtype.kind == "f" else v.copy() for v in inputs]
    if kind is None:  # a change of layout or type
        return exact
    assert kind.evaluate is not None
    call = Evaluation(request.outputs, 0, request.inputs[0].shape[0], request.precision)
    with np.errstate(all="ignore"):
        if product is not None and isinstance(request.attributes, Fused):
            return list(evaluate_epilogue(request.attributes, exact, product.astype(np.float64), call))
        return list(kind.evaluate(request.attributes, exact, call))


def distance(result: Array, wanted: Array) -> float:
    """Return the normalised L2 distance of floating values, or the share of different elements for other types.

    The distance is infinite if a value is not finite where the wanted one is, or the reverse.
    """
    if result.dtype.kind != "f":
        return float(np.count_nonzero(result != wanted)) / max(1, result.size)
    if not np.array_equal(np.isfinite(result), np.isfinite(wanted)):
        return math.inf
    result = result.astype(np.float64)
    if not np.isfinite(wanted).all():
        result, wanted = np.nan_to_num(result), np.nan_to_num(wanted)
    difference = result - wanted
    scale = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(difference)) / (scale or 1.0)
