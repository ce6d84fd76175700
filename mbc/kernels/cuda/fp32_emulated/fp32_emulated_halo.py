"""Convolutions in emulated fp32 (3xFP16), with filters of several pixels and a stride of one.

The halo of a block's tile is in shared memory, where it is split into fp16 words once for all filter pixels.
"""

from __future__ import annotations

from dataclasses import replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, shared_of
from mbc.kernels.cuda.conv.conv_operands import ConvOperands
from mbc.kernels.cuda.conv.halo import HaloArguments, halo_arguments, halo_fits, pixels_computed
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import KERNELS as CONV_KERNELS
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import STAGE_K

# Equal to the constant in the source.
SHARED_BYTES = 226 << 10
# Share of the time of `fp32_emulated_conv`, which splits words for each filter pixel, by judgement.
TIME_SHARE = 0.9


def _weights_bytes(request: Request, layout: Layout) -> int:
    """Return the workspace for the split weights and for a scale for every filter and stage."""
    weight = ConvOperands.of(request).weight
    return weight.size_bytes + weight.elements // STAGE_K * 4


def _with_halo(kernel: OwnKernel) -> OwnKernel:
    def takes(request: Request) -> bool:
        return kernel.takes(request) and halo_fits(request)

    def time_us(request: Request, device: DeviceSpec) -> float:
        result = request.outputs[0]
        computed_per_pixel = pixels_computed(request) * result.shape[1] / result.elements
        return TIME_SHARE * computed_per_pixel * kernel.time_us(request, device)

    return replace(
        kernel,
        file="fp32_emulated/fp32_emulated_halo.cu",
        struct=HaloArguments,
        integers=halo_arguments,
        workspace=_weights_bytes,
        time_us=time_us,
        launcher="fp32_emulated_halo",
        named=f"fp32_emulated_halo{kernel.kind.removeprefix('convolution')}",
        takes=takes,
        shared=shared_of(SHARED_BYTES),
    )


KERNELS = tuple(_with_halo(kernel) for kernel in CONV_KERNELS if kernel.kind != "convolution_backward_filter")
