"""Linear layers through cuBLASLt. Its heuristics choose an algorithm when the module is made, within the plan's
workspace; without any there always is one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.device.spec import DeviceSpec
from mbc.ir.types import Layout, Precision, TensorType
from mbc.kernels.base import DTYPE_CODES, Arguments, Candidate, Request
from mbc.kernels.calibration import WITHOUT_WORKSPACE, Effort, busy, estimate_us, group, peak_tflops
from mbc.ops.matrix import Linear

PASSES = {"linear": 0, "linear_backward_data": 1, "linear_backward_filter": 2}

# The integers of a launch, in order. As `MatmulRow` of templates/host/matmul.cpp.
ROW_FIELDS = ("pass", "type", "math", "accumulate", "rows", "inputs", "outputs", "workspace_bytes")

_MOST_WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises for Hopper; more brought nothing
_MOST_SUMS = 16  # partial results of a split sum that the workspace holds


@dataclass(frozen=True, slots=True)
class _Sizes:
    rows: int
    inputs: int
    outputs: int

    def result(self, number: int) -> tuple[int, int]:
        """Height and width of the product."""
        return ((self.rows, self.outputs), (self.rows, self.inputs), (self.outputs, self.inputs))[number]

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs


def _sizes(request: Request) -> _Sizes | None:
    number = PASSES.get(request.kind)
    if number is None or not isinstance(request.attributes, Linear):
        return None
    first: TensorType = request.inputs[0]
    outputs = {0: request.outputs[0], 1: request.inputs[0], 2: request.inputs[1]}[number].shape[1]
    return _Sizes(first.shape[0], request.attributes.features_in, outputs)


def _workspace_bytes(sizes: _Sizes, number: int) -> int:
    """Room for the fp32 partial sums of a split product."""
    sums = _MOST_SUMS * math.prod(sizes.result(number)) * 4
    return min(-(-sums // 256) * 256, _MOST_WORKSPACE_BYTES)


def _effort(request: Request, sizes: _Sizes, number: int, device: DeviceSpec, split: bool) -> Effort:
    width = busy(*sizes.result(number), device, _MOST_SUMS if split else 1)
    moved_bytes = sum(t.size_bytes for t in (*request.inputs, *request.outputs))
    return Effort(
        group("cublaslt", request.kind, request.precision),
        "" if split else WITHOUT_WORKSPACE,
        device.launch_us,
        sizes.operations / (peak_tflops(device, request.precision) * 1e6 * width),
        moved_bytes / (device.copy_gb_s * 1e3),
    )


@dataclass(frozen=True)
class CublasLt:
    """The provider `cublaslt`."""

    name: str = "cublaslt"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """One without workspace and one that can split its sum. Reductions are in fp32 and in a fixed order."""
        return (candidate for candidate, _ in self.estimated(request, device))

    def estimated(self, request: Request, device: DeviceSpec) -> Iterable[tuple[Candidate, Effort]]:
        """Each candidate with what its time was estimated from."""
        sizes = _sizes(request)
        if sizes is None or request.precision is Precision.FP64:
            return
        if request.precision is Precision.BF16 and not device.has_bf16:
            return
        number = PASSES[request.kind]
        for workspace_bytes in (0, _workspace_bytes(sizes, number)):
            effort = _effort(request, sizes, number, device, workspace_bytes > 0)
            candidate = Candidate(
                provider=self.name,
                name=request.kind,
                settings=(),
                layouts=(Layout.CHANNELS_FIRST,) * 3,
                workspace_bytes=workspace_bytes,
                time_us=estimate_us(effort),
                measured=False,
                accumulates=number == 2,
            )
            yield candidate, effort

    def arguments(
        self,
        request: Request,
        name: str,
        settings: tuple[tuple[str, int], ...],
        layouts: tuple[Layout, ...],
        first_row: int,
        accumulate: bool,
        workspace_bytes: int,
    ) -> Arguments:
        """A `MatmulRow`."""
        sizes = _sizes(request)
        if sizes is None:
            raise ValueError(f"cuBLASLt runs no {request.kind}")
        return Arguments(
            (
                PASSES[request.kind],
                DTYPE_CODES[request.inputs[0].dtype.value],
                0 if request.precision is Precision.FP32 else 1,
                int(accumulate),
                sizes.rows,
                sizes.inputs,
                sizes.outputs,
                workspace_bytes,
            )
        )


CUBLASLT = CublasLt()
