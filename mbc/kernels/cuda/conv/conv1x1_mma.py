"""Pointwise (1x1) convolutions by mma.sync, in bf16 and fp16, for GPUs without wgmma: alone and fused.

Each kernel by wgmma of `conv1x1`, `conv1x1_backward_data`, `conv1x1_bn_backward` and `dual_conv1x1` has a form here, of
the same operands, arguments and partial sums. The additions of all forms here have one order, so that a recomputed
result is equal to the bit.

Forms by wgmma that are fused are never chosen by an estimate. These are, on a GPU without a profile: statistics in any
case, other reductions once shares were fitted to their kernels (`is_calibrated`).
"""

from __future__ import annotations

from dataclasses import replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, moved_us
from mbc.kernels.cuda.conv import conv1x1, conv1x1_backward_data, conv1x1_bn_backward, dual_conv1x1, mma_gemm
from mbc.kernels.cuda.conv.conv1x1 import Conv1x1Arguments, blocks_of, pixels_of, result_of
from mbc.kernels.cuda.wiring import gemms_of


def _blocks(request: Request) -> int:
    return mma_gemm.blocks(pixels_of(request), result_of(request).shape[1])


def _shared_bytes(request: Request) -> int:
    return mma_gemm.shared_bytes(result_of(request).shape[1], len(gemms_of(request)))


def _arithmetic_us(request: Request, device: DeviceSpec) -> float:
    channels = sum(gemm.inputs[0].shape[1] for gemm in gemms_of(request))
    return mma_gemm.arithmetic_us(request, device, pixels_of(request), result_of(request).shape[1], channels)


def form_of(kernel: OwnKernel) -> OwnKernel:
    """Return the form by mma.sync of a kernel by wgmma; it writes partial sums of more and smaller blocks."""

    def integers(at: Slice) -> Conv1x1Arguments:
        given = kernel.integers(at)
        assert isinstance(given, Conv1x1Arguments)
        return replace(given, blocks=_blocks(at.request), stages=mma_gemm.STAGES, staged_tiles=0)

    def partial_bytes(request: Request, layout: Layout) -> int:
        return kernel.workspace(request, layout) // blocks_of(request) * _blocks(request)

    return replace(
        kernel,
        file=kernel.file.replace(".cu", "_mma.cu"),
        launcher=f"{kernel.launcher}_mma",
        named=kernel.named and f"{kernel.named}_mma",
        integers=integers,
        workspace=partial_bytes,
        shared=_shared_bytes,
        time_us=moved_us,
        arithmetic_us=_arithmetic_us,
        needs=Instruction.MMA_SYNC,
        superseded_by=Instruction.WGMMA,
        bitwise_equal_to=tuple(f"{name}_mma" for name in kernel.bitwise_equal_to),
        without_statistics=kernel.without_statistics and f"{kernel.without_statistics}_mma",
        version=2,
    )


KERNELS = tuple(
    form_of(kernel)
    for module in (conv1x1, conv1x1_backward_data, conv1x1_bn_backward, dual_conv1x1)
    for kernel in module.KERNELS
)
