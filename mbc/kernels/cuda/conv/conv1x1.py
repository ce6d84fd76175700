"""1x1 convolutions at a stride of one, in bf16 and fp16, alone and fused.

A fused kernel either computes batch statistics in the epilogue, or recomputes the convolution inside the reductions of
batch normalization's backward pass, which read its result (`CONVOLUTION_FUSED_REMAT` of
`mbc.optimize.fusion.catalogue_conv1x1`). Variants of the latter do not write the result (`REMAT_INSIDE_REDUCTIONS`).

One source computes all of them, with additions in the same order: a recomputed result is equal to the bit. The time of
a reduction with a GEMM in the same launch is unknown until somebody measures it. The estimate is the time of the two
one after the other, so that the search never chooses such a kernel by an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, channels_last, gemm_us, moved_us, type_code
from mbc.kernels.cuda.conv.conv_operands import attributes, channels_by
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.cuda.norm.batch_norm import SUMS_BYTES
from mbc.kernels.cuda.wiring import Wiring, affines, eps, gemms_of, taking
from mbc.kernels.launch_struct import Struct
from mbc.ops.fused import gives_product

# The constants up to LEAST_STAGED are equal to those in the source.
PIXELS, FILTERS = 64, 128  # pixels and filters of a tile
CHANNELS = 64  # K of a stage
EIGHT = 8  # filters that are written together; rows of tensor maps are multiples of 16 bytes
MOST_CHANNELS = 512
RESULTS = 2  # tiles of results
MOST_STAGES, MOST_STAGED = 12, 6  # largest numbers of stages of pixels, and of staged tiles of the epilogue
ENOUGH_STAGES = 6  # stages of pixels if operands are staged: further shared memory holds staged tiles
LEAST_STAGES, LEAST_STAGED = 4, 2  # next to the weights of two GEMMs, one staged tile is enough
SHARED_BYTES = 227 * 1024  # shared memory of a block, from compute capability 9.0 on
ALIGNED_BYTES = 1008  # padding with which shared memory begins at a multiple of 1,024
BARRIERS_BYTES = 384  # upper bound
TENSOR_SHARE = 0.6  # share of the peak, by judgement


@dataclass(frozen=True, slots=True)
class Conv1x1Arguments(Struct):
    """Integer arguments of a launch of a 1x1 convolution.

    Attributes:
        blocks: At most one for each tile; independent of the GPU, so that sums have one order.
        stages: Stages of K = 64 of a tile's pixels, as many as fit; even.
        staged_tiles: Tiles of staged operands, as many as fit.
    """

    type: int
    pixels: int
    channels: int
    filters: int
    blocks: int
    stages: int
    staged_tiles: int


@dataclass(frozen=True, slots=True)
class Conv1x1RematArguments(Conv1x1Arguments):
    """Integer arguments of a launch that recomputes a normalization, too.

    Attributes:
        affine: Whether the recomputed normalization has scale and shift.
    """

    affine: int


def _takes(request: Request) -> bool:
    a, image, result = attributes(request), request.inputs[0], request.outputs[0]
    return (
        {image.dtype, result.dtype} in ({DType.BF16}, {DType.FP16})
        and a.is_pointwise
        and channels_by(EIGHT, request)
        and image.shape[1] <= MOST_CHANNELS
    )


def result_of(request: Request) -> TensorType:
    """Return the type of the (first) GEMM's result, whether the kernel writes it or not."""
    return gemms_of(request)[0].outputs[0]


def pixels_of(request: Request) -> int:
    """Return the number of pixels of the GEMM, over all samples."""
    result = result_of(request)
    return result.elements // result.shape[1]


def blocks_of(request: Request) -> int:
    """Return the number of blocks that share the pixels of one tile of filters."""
    across = math.ceil(result_of(request).shape[1] / FILTERS)
    return max(1, min(REDUCTION_BLOCKS // across, math.ceil(pixels_of(request) / PIXELS)))


def arguments(at: Slice) -> Conv1x1Arguments:
    """Return the integer arguments of a launch."""
    image, result = at.request.inputs[0], result_of(at.request)
    stages, staged_tiles = _pipeline_stages(at.request)
    return Conv1x1Arguments(
        type_code(image),
        pixels_of(at.request),
        image.shape[1],
        result.shape[1],
        blocks_of(at.request),
        stages,
        staged_tiles,
    )


def _remat_arguments(at: Slice) -> Conv1x1RematArguments:
    (affine,) = affines(at.request)
    return Conv1x1RematArguments(*arguments(at).integers(), affine=affine)


def _fixed_bytes(request: Request) -> int:
    """Return the shared memory of the weights, results and barriers of a block."""
    chunks = sum(math.ceil(alone.inputs[0].shape[1] / CHANNELS) for alone in gemms_of(request))
    elements = FILTERS * chunks * CHANNELS + RESULTS * PIXELS * FILTERS
    return elements * request.inputs[0].dtype.size_bytes + ALIGNED_BYTES + BARRIERS_BYTES


def _staged(request: Request) -> list[TensorType]:
    """Return the operands of the epilogue that are as large as the result."""
    return [i for i in request.inputs[2 * len(gemms_of(request)) :] if len(i.shape) > 2]


def _staged_tile_bytes(request: Request) -> int:
    """Return the bytes of the operands that are staged for a tile."""
    bits = sum(1 if i.dtype is DType.UINT8 else 8 * i.dtype.size_bytes for i in _staged(request))
    return PIXELS * FILTERS * bits // 8


def _pipeline_stages(request: Request) -> tuple[int, int]:
    """Return the numbers of stages of pixels (even) and of staged tiles that fit into shared memory."""
    stage_bytes, tile_bytes = PIXELS * CHANNELS * request.inputs[0].dtype.size_bytes, _staged_tile_bytes(request)
    available_bytes = SHARED_BYTES - _fixed_bytes(request)
    if not tile_bytes:
        return min(MOST_STAGES, available_bytes // stage_bytes // 2 * 2), 0
    enough = available_bytes >= ENOUGH_STAGES * stage_bytes + LEAST_STAGED * tile_bytes
    stages = ENOUGH_STAGES if enough else LEAST_STAGES
    return stages, max(0, min(MOST_STAGED, (available_bytes - stages * stage_bytes) // tile_bytes))


def _shared_bytes(request: Request) -> int:
    stages, staged_tiles = _pipeline_stages(request)
    stage_bytes = PIXELS * CHANNELS * request.inputs[0].dtype.size_bytes
    return _fixed_bytes(request) + stages * stage_bytes + staged_tiles * _staged_tile_bytes(request)


def _partial_bytes(request: Request, layout: Layout) -> int:
    return blocks_of(request) * result_of(request).shape[1] * SUMS_BYTES


def _time_us(request: Request, device: DeviceSpec) -> float:
    operations = 2 * request.inputs[0].elements * request.outputs[0].shape[1]
    return gemm_us(request, device, operations, peak_tflops(device, request.precision), TENSOR_SHARE)


def _unfused_us(request: Request, device: DeviceSpec) -> float:
    """Return the time of the reductions and the GEMMs one after the other, each in its own launch."""
    gemms = gemms_of(request)
    read = (*request.inputs[2 * len(gemms) :], *(result for alone in gemms for result in alone.outputs))
    written = request.outputs[gives_product(request.attributes) :]
    sums_us = moved_us(replace(request, inputs=read, outputs=written), device)
    return sum(_time_us(alone, device) + device.launch_us for alone in gemms) + sums_us


PLAIN = OwnKernel(
    "convolution",
    "conv/conv1x1.cu",
    Conv1x1Arguments,
    arguments,
    layouts=channels_last,
    time_us=_time_us,
    launcher="conv1x1",
    takes=_takes,
    shared=_shared_bytes,
    needs=Instruction.WGMMA,
    aligned=True,
    version=2,
)


WITH_STATISTICS = replace(
    with_statistics(PLAIN, blocks_of), without_statistics=PLAIN.name, operands="image weights x mean variance workspace"
)


def with_epilogue(product: OwnKernel, launcher: str, epilogue: str, wirings: Iterable[Wiring]) -> OwnKernel:
    """Return a kernel of one or two GEMMs with an epilogue.

    Args:
        product: Kernel of one GEMM, or of two.
        launcher: C function of the new kernel, without the prefix `mbc_`.
        epilogue: Kinds of the operations of the epilogue, joined by `+`.
        wirings: Wirings of the fusion groups that the kernel takes.
    """
    wired = taking(*wirings)

    def takes(request: Request) -> bool:
        gemms = gemms_of(request)
        if not (wired(request) and all(map(product.takes, gemms))):
            return False
        # A pixel's mask is a row of a tensor map: a multiple of 16 bytes.
        with_relu_masks = any(i.dtype is DType.UINT8 for i in _staged(request))
        enough = _pipeline_stages(request)[1] >= LEAST_STAGED // len(gemms)
        return enough and (not with_relu_masks or result_of(request).shape[1] % FILTERS == 0)

    return replace(
        product, kind=f"{product.kind}+{epilogue}", reals=eps, time_us=_unfused_us, launcher=launcher, takes=takes
    )


def with_reduction(product: OwnKernel, launcher: str, between: str, wirings: Iterable[Wiring]) -> OwnKernel:
    """Return a kernel of GEMMs with an epilogue that ends in batch normalization's reductions.

    `between` holds the kinds of the operations before the reductions; the other arguments are those of `with_epilogue`.
    """
    epilogue = "+".join(filter(None, (between, "batch_normalize_backward_reduce")))
    return replace(with_epilogue(product, launcher, epilogue, wirings), workspace=_partial_bytes, launches=2)


def relu_backward_kinds(added: bool, by_mask: bool) -> str:
    """Return the kinds of ReLU's backward pass by its output or by its bit mask (`by_mask`).

    The pass takes one gradient, or the sum of two (`added`).
    """
    return f"{'add+' if added else ''}relu_backward{'_masked' if by_mask else ''}"


def add_relu_remat_kinds(added: bool, by_mask: bool) -> str:
    """Return the kinds that recompute ReLU of a residual sum, then those of its backward pass.

    `by_mask`: its bit mask is recomputed, too.
    """
    return f"batch_normalize+add+relu{'+relu_mask' if by_mask else ''}+{relu_backward_kinds(added, by_mask)}"


def with_affine(kernel: OwnKernel) -> OwnKernel:
    """Return the kernel for groups that normalize: its launcher reads whether there are scale and shift."""
    return replace(kernel, struct=Conv1x1RematArguments, integers=_remat_arguments)


def without_mask_read(kernel: OwnKernel) -> OwnKernel:
    """Return the kernel for groups that have the bit mask of a value which they recompute.

    The mask is recomputed with the value, so that the launcher is that of the group without a mask.
    """
    return replace(kernel, named=f"{kernel.launcher}_masked")


def _bitwise(kernel: OwnKernel) -> OwnKernel:
    """Return the kernel with a declaration that it recomputes the result of these convolutions to the bit."""
    return replace(kernel, bitwise_equal_to=(PLAIN.name, WITH_STATISTICS.name))


def not_stored(kernel: OwnKernel) -> OwnKernel:
    """Return the kernel that does not write the result.

    It is offered only where the image is smaller than the result: otherwise it would save no bytes.
    """

    def offered(request: Request) -> bool:
        return request.inputs[0].elements < result_of(request).elements

    return _bitwise(replace(kernel, offered=offered))


def _gradient_reduction(between: str, gradient: str, wiring: Wiring) -> OwnKernel:
    """Return the kernel that reduces a gradient, which is the result of the operations `between`.

    `gradient` names the operands of these operations.
    """
    launcher = "_".join(filter(None, ("conv1x1", *between.split("+"), "bn_reduce")))
    written = "x d" if between else "x"
    operands = f"image weights {gradient} mean variance {written} dgamma dbeta workspace"
    return replace(_bitwise(with_reduction(PLAIN, launcher, between, (wiring,))), operands=operands)


def _not_stored_reduction(between: str, gradient: str, wiring: Wiring) -> OwnKernel:
    """Return the kernel of such a reduction that does not write the result of the GEMM."""
    inputs, given = wiring
    launcher = f"conv1x1_unstored_{between.replace('+', '_')}_bn_reduce"
    operands = f"image weights {gradient} mean variance d dgamma dbeta workspace"
    return replace(not_stored(with_reduction(PLAIN, launcher, between, ((inputs, given[1:]),))), operands=operands)


_RELU_BACKWARD: tuple[tuple[str, str, Wiring], ...] = (
    ("add+relu_backward", "dy dy2 relu", (((0, 1), (2, 3), (4, 8), (7, 9, 5, 6)), (7, 9, 10, 11))),
    ("add+relu_backward_masked", "dy dy2 relu", (((0, 1), (2, 3), (8, 4), (7, 9, 5, 6)), (7, 9, 10, 11))),
)
FUSED_REMAT = (
    _gradient_reduction("", "dy", (((0, 1), (5, 2, 3, 4)), (5, 6, 7))),
    *(_gradient_reduction(*epilogue) for epilogue in _RELU_BACKWARD),
)
NOT_STORED = tuple(_not_stored_reduction(*epilogue) for epilogue in _RELU_BACKWARD)
KERNELS = (PLAIN, WITH_STATISTICS, *FUSED_REMAT, *NOT_STORED)
