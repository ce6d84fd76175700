"""The provider `cublaslt`: linear layers and 1 x 1 convolutions through cuBLASLt.

Both are GEMMs of matrices. The images of a convolution are channels last, so that each pixel is a row of a matrix.

cuBLASLt's heuristics list algorithms when the module is loaded: those that fit the plan's workspace, the fastest first
by cuBLASLt's own estimate. The setting `algorithm` is a position in that list, and `split_k` says for which workspace
the list was requested. The first position always exists. The others are there to be measured: one version of cuBLASLt
gives the same list on the same GPU. A filter gradient of bf16 or fp16 operands is summed and written in fp32.
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
from mbc.kernels.convolution_shapes import PASSES as CONVOLUTION_PASSES
from mbc.kernels.launch_struct import Struct
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear

PASSES = {"linear": 0, "linear_backward_data": 1, "linear_backward_filter": 2, **CONVOLUTION_PASSES}

ALGORITHMS = 4  # length of the heuristics' list; equal to the constant in templates/host/cublaslt.cpp

_MOST_WORKSPACE_BYTES = 32 << 20  # NVIDIA's advice for Hopper; larger workspaces were not faster
_SPLIT_K = 16  # partial results of split-K that the workspace holds
_IMAGE_SPLIT_K = 128  # the same for a pointwise filter gradient, which has few tiles and reduces over every pixel
# Unless these divide the bytes of each row of a matrix, cuBLASLt reads single elements and does not split K: 4 million
# rows then took 0.14 to 0.26 of the bandwidth on an H200.
_ALIGNED_BYTES, _UNALIGNED_SHARE = 16, 0.2
# No large product in 16 bits reached more of the peak on an H200. Fitted shares may be larger, because most products of
# the fit wait for memory.
_MOST_OF_PEAK = 0.9


@dataclass(frozen=True, slots=True)
class MatmulRow(Struct):
    """Integer arguments of a matrix product, which templates/host/cublaslt.cpp reads.

    Attributes:
        algorithm: Position in the heuristics' list, which begins with the best.
    """

    pass_: int
    type: int
    math: int
    accumulate: int
    rows: int
    inputs: int
    outputs: int
    workspace_bytes: int
    algorithm: int


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of y [rows, outputs] = x [rows, inputs] w [outputs, inputs]^T and of its gradients."""

    rows: int
    inputs: int
    outputs: int

    def result(self, number: int) -> tuple[int, int]:
        """Return M and N of the GEMM of a pass."""
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
    return a.is_pointwise and a.groups == 1


def _layout(request: Request) -> Layout:
    """Return the layout of every operand; a matrix and a filter of one pixel have the same order in both layouts."""
    return Layout.CHANNELS_LAST if isinstance(request.attributes, Convolution) else Layout.CHANNELS_FIRST


def _workspaces(request: Request, sizes: _Sizes) -> dict[int, int]:
    """Return the possible workspaces in bytes, each with the number of splits of K that it has room for."""
    of_image = request.kind == "convolution_backward_filter"
    result_bytes = math.prod(sizes.result(PASSES[request.kind])) * 4
    splits_by_bytes: dict[int, int] = {}
    for splits in (0, _SPLIT_K, _IMAGE_SPLIT_K if of_image else _SPLIT_K):
        splits_by_bytes.setdefault(min(-(-splits * result_bytes // 256) * 256, _MOST_WORKSPACE_BYTES), splits)
    return splits_by_bytes


def _effort(request: Request, sizes: _Sizes, number: int, device: DeviceSpec, workspace_bytes: int) -> Effort:
    split = workspace_bytes > 0
    # The gain of a larger workspace is not estimated: among equal times the smallest workspace wins.
    terms = (sizes.inputs, sizes.outputs, sizes.rows)[number]
    element_bytes = request.inputs[0].dtype.size_bytes
    aligned = all(count * element_bytes % _ALIGNED_BYTES == 0 for count in (sizes.inputs, sizes.outputs))
    share = busy(*sizes.result(number), terms if split and aligned else 0, device)
    moved_bytes = sum(t.size_bytes for t in (*request.inputs, *request.outputs)) / (1 if aligned else _UNALIGNED_SHARE)
    arithmetic_us = sizes.operations / (peak_tflops(device, request.precision) * 1e6 * share)
    return Effort(
        group("cublaslt", request.kind, request.precision, device),
        "" if split else WITHOUT_WORKSPACE,
        device.launch_us,
        arithmetic_us,
        moved_bytes / (device.copy_gb_s * 1e3),
        least_us=arithmetic_us / _MOST_OF_PEAK,
    )


@dataclass(frozen=True)
class CublasLt:
    """The provider `cublaslt`."""

    name: str = "cublaslt"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Return candidates without workspace and with enough workspace for split-K, the best algorithm of each first.

        The estimated times of all algorithms are equal. Reductions run in fp32 and in a fixed order.
        """
        return (candidate for candidate, _ in self.estimated(request, device))

    def estimated(self, request: Request, device: DeviceSpec) -> Iterable[tuple[Candidate, Effort]]:
        """Yield each candidate with the effort that its time was estimated from."""
        sizes = _sizes(request)
        if sizes is None or request.precision is Precision.FP64:
            return
        if request.precision is Precision.BF16 and not device.has_bf16_and_tf32:
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
        """Accept a call if its workspace is at least as large as that for which its list of algorithms was requested.

        Only cuBLASLt on the GPU can tell whether the list is as long as the plan assumes.
        """
        sizes, request, given = _sizes(call.request), call.request, dict(call.settings)
        if sizes is None or call.name != request.kind or request.precision is Precision.FP64:
            return Acceptance(f"cuBLASLt cannot run {request.kind} with these operands as '{call.name}'")
        if request.precision is Precision.BF16 and not device.has_bf16_and_tf32:
            return Acceptance(f"{device.architecture} does not compute in bf16")
        rooms = {splits: size_bytes for size_bytes, splits in _workspaces(request, sizes).items()}
        valid = given.keys() <= {"algorithm", "split_k"} and len(given) == len(call.settings)
        if not valid or given.get("algorithm") not in range(ALGORITHMS) or given.get("split_k", 0) not in rooms:
            return Acceptance(f"cuBLASLt's list has no algorithm with the settings {given}")
        gradient = PASSES[request.kind] == 2
        working, master = request.precision.working, request.precision.master
        if tuple(t.dtype for t in call.operands) != (working, working, master if gradient else working):
            return Acceptance(f"it does not take operands of {', '.join(map(str, call.operands))}")
        if not call.has_layouts((_layout(request),) * 3):
            return Acceptance(f"it does not take operands in the layouts {', '.join(call.layouts)}")
        if call.accumulate and not gradient:
            return Acceptance("it cannot add to its output")
        needed_bytes = rooms[given.get("split_k", 0)]
        if call.workspace_bytes < needed_bytes:
            return Acceptance(workspace_refusal=f"its algorithm needs {needed_bytes} bytes")
        return Acceptance(proved=given["algorithm"] == 0, aligned=True)

    def arguments(self, call: Call, first_row: int) -> Arguments:
        """Return the integers of a `MatmulRow`."""
        request, sizes = call.request, _sizes(call.request)
        if sizes is None:
            raise ValueError(f"cuBLASLt cannot run {request.kind}")
        row = MatmulRow(
            pass_=PASSES[request.kind],
            type=DTYPE_CODES[request.inputs[0].dtype.value],
            math=0 if request.precision is Precision.FP32 else 1,
            accumulate=call.accumulate,
            rows=sizes.rows,
            inputs=sizes.inputs,
            outputs=sizes.outputs,
            workspace_bytes=call.workspace_bytes,
            algorithm=dict(call.settings).get("algorithm", 0),
        )
        return Arguments(row.integers())


CUBLASLT = CublasLt()
