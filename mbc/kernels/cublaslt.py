"""Linear layers and 1 x 1 convolutions of images whose channels lie last, through cuBLASLt: both are GEMMs of matrices,
the rows of an image being its pixels.

Its heuristics list algorithms when the module is made, within the plan's workspace and the best first by their own
estimate; `algorithm` is a place in that list, and `split_k` says for which workspace it was made. The first is always
there. The others are for measuring: the same version of cuBLASLt on the same GPU gives the same list. A filter gradient
of bf16 or fp16 operands is summed and written in fp32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout, Precision
from mbc.kernels.base import DTYPE_CODES, Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.calibration import WITHOUT_WORKSPACE, Effort, busy, estimate_us, group, peak_tflops
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear

PASSES = {
    "linear": 0,
    "linear_backward_data": 1,
    "linear_backward_filter": 2,
    "convolution": 0,
    "convolution_backward_data": 1,
    "convolution_backward_filter": 2,
}

# The integers of a launch, in order. As `MatmulRow` of templates/host/cublaslt.cpp.
ROW_FIELDS = ("pass", "type", "math", "accumulate", "rows", "inputs", "outputs", "workspace_bytes", "algorithm")
ALGORITHMS = 4  # of the heuristics' list; as in templates/host/cublaslt.cpp

_MOST_WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises for Hopper; more brought nothing
_SPLIT_K = 16  # partial results of split-K that the workspace holds
_IMAGE_SPLIT_K = 128  # of a pointwise filter gradient besides: few tiles, each a reduction over every pixel


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of y [rows, outputs] = x [rows, inputs] w [outputs, inputs]^T and of its gradients."""

    rows: int
    inputs: int
    outputs: int

    def result(self, number: int) -> tuple[int, int]:
        """M and N of the GEMM."""
        return ((self.rows, self.outputs), (self.rows, self.inputs), (self.outputs, self.inputs))[number]

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs


def _sizes(request: Request) -> _Sizes | None:
    number = PASSES.get(request.kind)
    if number is None:
        return None
    a, first = request.attributes, request.inputs[0]
    outputs = {0: request.outputs[0], 1: request.inputs[0], 2: request.inputs[1]}[number].shape[1]
    if isinstance(a, Linear):
        return _Sizes(first.shape[0], a.features_in, outputs)
    if not isinstance(a, Convolution) or not _pointwise(a):
        return None
    inputs = (request.outputs[0] if number == 1 else first).shape[1]
    return _Sizes(first.shape[0] * math.prod(a.size), inputs, outputs)


def _pointwise(a: Convolution) -> bool:
    return a.kernel == (1, 1) and a.stride == (1, 1) and not any(a.pad) and a.groups == 1


def _layout(request: Request) -> Layout:
    """Of every operand. The order of a matrix and of a filter of one pixel is the same in both layouts."""
    return Layout.CHANNELS_LAST if isinstance(request.attributes, Convolution) else Layout.CHANNELS_FIRST


def _workspaces(request: Request, sizes: _Sizes) -> dict[int, int]:
    """None, and the fp32 partial results of split-K: bytes, and the number of splits they were meant for."""
    of_image = request.kind == "convolution_backward_filter"
    result_bytes = math.prod(sizes.result(PASSES[request.kind])) * 4
    found: dict[int, int] = {}
    for splits in (0, _SPLIT_K, _IMAGE_SPLIT_K if of_image else _SPLIT_K):
        found.setdefault(min(-(-splits * result_bytes // 256) * 256, _MOST_WORKSPACE_BYTES), splits)
    return found


def _effort(request: Request, sizes: _Sizes, number: int, device: DeviceSpec, workspace_bytes: int) -> Effort:
    split = workspace_bytes > 0
    # What a larger workspace brings is not estimated: of equal times the least workspace wins.
    terms = (sizes.inputs, sizes.outputs, sizes.rows)[number]
    share = busy(*sizes.result(number), terms if split else 0, device)
    moved_bytes = sum(t.size_bytes for t in (*request.inputs, *request.outputs))
    return Effort(
        group("cublaslt", request.kind, request.precision),
        "" if split else WITHOUT_WORKSPACE,
        device.launch_us,
        sizes.operations / (peak_tflops(device, request.precision) * 1e6 * share),
        moved_bytes / (device.copy_gb_s * 1e3),
    )


@dataclass(frozen=True)
class CublasLt:
    """The provider `cublaslt`."""

    name: str = "cublaslt"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Without workspace and with enough for split-K, the best algorithm of each first: the estimates of all are
        equal. Reductions are in fp32 and in a fixed order."""
        return (candidate for candidate, _ in self.estimated(request, device))

    def estimated(self, request: Request, device: DeviceSpec) -> Iterable[tuple[Candidate, Effort]]:
        """Each candidate with what its time was estimated from."""
        sizes = _sizes(request)
        if sizes is None or request.precision is Precision.FP64:
            return
        if request.precision is Precision.BF16 and not device.has_bf16:
            return
        number = PASSES[request.kind]
        rooms = _workspaces(request, sizes).items()
        for algorithm, (workspace_bytes, splits) in itertools.product(range(ALGORITHMS), rooms):
            effort = _effort(request, sizes, number, device, workspace_bytes)
            candidate = Candidate(
                provider=self.name,
                name=request.kind,
                settings=(("algorithm", algorithm), ("split_k", splits)),
                layouts=(_layout(request),) * 3,
                workspace_bytes=workspace_bytes,
                time_us=estimate_us(effort),
                measured=False,
                accumulates=number == 2,
            )
            yield candidate, effort

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """The workspace is what its list of algorithms is asked for with, or more. That the list is as long as the
        plan thinks cuBLASLt says on the GPU."""
        sizes, request, given = _sizes(call.request), call.request, dict(call.settings)
        if sizes is None or call.name != request.kind or request.precision is Precision.FP64:
            return Acceptance(f"cuBLASLt runs no {request.kind} of these operands as '{call.name}'")
        if request.precision is Precision.BF16 and not device.has_bf16:
            return Acceptance(f"{device.architecture} does not compute in bf16")
        rooms = {splits: size_bytes for size_bytes, splits in _workspaces(request, sizes).items()}
        known = given.keys() <= {"algorithm", "split_k"} and len(given) == len(call.settings)
        if not known or given.get("algorithm") not in range(ALGORITHMS) or given.get("split_k", 0) not in rooms:
            return Acceptance(f"its list of algorithms has no {given}")
        gradient = PASSES[request.kind] == 2
        working, master = request.precision.working, request.precision.master
        if tuple(t.dtype for t in call.operands) != (working, working, master if gradient else working):
            return Acceptance(f"it does not take operands of {', '.join(map(str, call.operands))}")
        if not call.lies_in((_layout(request),) * 3):
            return Acceptance(f"it does not take operands that lie in {', '.join(call.layouts)}")
        if call.accumulate and not gradient:
            return Acceptance("it cannot add to its output")
        needed_bytes = rooms[given.get("split_k", 0)]
        if call.workspace_bytes < needed_bytes:
            return Acceptance(workspace_refusal=f"its algorithm is listed for {needed_bytes} bytes")
        return Acceptance(proved=given["algorithm"] == 0, aligned=True)

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
                dict(settings).get("algorithm", 0),
            )
        )


CUBLASLT = CublasLt()
