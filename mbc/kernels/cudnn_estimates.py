"""Estimated workspace and effort (`calibration`) of cuDNN's convolutions that nobody measured."""

from __future__ import annotations

import math

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.calibration import WITHOUT_WORKSPACE, Effort, busy, group, peak_tflops
from mbc.kernels.convolution_shapes import PASSES, Shapes

ALIGNMENT_BYTES = 256
_MOST_SUMS_BYTES = 32 << 20
# Filter gradients with small filters and large images split further: 1.5 MiB, but at most an eighth of the operands.
_LEAST_SUMS_BYTES = 3 << 19
_SUMS_PER_PASS = {0: 2, 1: 2, 2: 16}  # partial results of a split reduction, in sizes of the filter
_SLACK_BYTES = 4096  # pointers, counters and alignment of parts
# Channels of a tile of the result. On an H100 in bf16 the rate of groups of 4 to 32 channels was proportional to their
# channels. Extended to 128 channels it is the rate of a convolution without groups. On an H200 convolutions to 32
# channels took 2.1 to 2.5 times as long as those to 128 channels with as many operations (filter gradients 2.2 to 4.3
# times), and those to 64 channels 1.3 to 1.5 times as long. Whole tiles of 128 say more, but with the fitted shares
# they leave smaller errors than tiles of 64 or 96 (decision 102).
_TILE_CHANNELS = 128
# Groups whose number of channels is no power of two: engines copy image and result. Filter gradients want copies with
# each group padded to a power of two; without them RegNet's (24 channels) took 1.7 to 22 times as long on an H200. The
# other passes of groups of up to a tile want copies without padding: with more workspace cuDNN's heuristics prefer
# other engines, with which RegNet's step took 21.0 ms instead of 18.2. Wider groups want padding in all passes.
_COPIED_TILE_CHANNELS, COPIED = 64, "grouped copied"
_COUNTED_BYTES = 512  # bytes of a filter gradient for each byte with which engines count the finished parts of its sum


def padded(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def channel_multiple(precision: Precision) -> int:
    """Return the number of channels that a 16-byte load holds; 1 in strict fp32, whose engines load single elements."""
    return {Precision.FP32: 1, Precision.TF32: 4}.get(precision, 8)


def widened_bytes(filter_: TensorType, working: DType) -> int:
    """Return the workspace for a filter gradient in its operands' type; 0 if that type is fp32 already."""
    if working not in (DType.BF16, DType.FP16):
        return 0
    return padded(filter_.elements * working.size_bytes, ALIGNMENT_BYTES)


def _counters_bytes(filter_: TensorType, working: DType) -> int:
    """Return the workspace with which engines count the parts of a filter gradient; bf16 and fp16 need none."""
    return filter_.size_bytes // _COUNTED_BYTES + ALIGNMENT_BYTES if working is DType.FP32 else 0


def least_bytes(filter_: TensorType, working: DType) -> int:
    """Return the workspace of a filter gradient that gets no bytes for speed."""
    return padded(widened_bytes(filter_, working) + _counters_bytes(filter_, working), ALIGNMENT_BYTES)


def sums_bytes(shapes: Shapes, number: int) -> int:
    """Return the workspace for partial sums of a pass, with the bytes of a gradient that is widened."""
    working = shapes.image.dtype
    sums = _SUMS_PER_PASS[number] * (shapes.filter.elements * working.size_bytes + 512)
    if number == 2:
        sums = max(sums, min(_LEAST_SUMS_BYTES, (shapes.image.size_bytes + shapes.result.size_bytes) // 8))
    widened = widened_bytes(shapes.filter, working) if number == 2 else 0
    return widened + min(sums, _MOST_SUMS_BYTES) + _SLACK_BYTES


def _has_copied_groups(shapes: Shapes, precision: Precision) -> bool:
    """Return whether engines copy groups whose number of channels is no power of two."""
    channels = shapes.filter.shape[1]
    half = precision in (Precision.BF16, Precision.FP16)
    return half and shapes.attributes.groups > 1 and not shapes.depthwise and channels & (channels - 1) != 0


def _channels_of_copy(shapes: Shapes, number: int, channels: int, precision: Precision) -> int:
    """Return the channels of a group in a copy, in which some channels are zeros."""
    is_wide = max(shapes.filter.shape[1], shapes.filter.shape[0] // shapes.attributes.groups) > _TILE_CHANNELS
    if _has_copied_groups(shapes, precision) and (number == 2 or is_wide):
        return 1 << (channels - 1).bit_length()
    return padded(channels, channel_multiple(precision))


def copies_bytes(shapes: Shapes, number: int, precision: Precision, layout: Layout) -> int:
    """Return the workspace of a pass for copies of the operands in the form that engines want.

    The copies are of all operands. Where half-precision operands have the right layout but channels that are not
    aligned, only the operands whose channels are not aligned are copied.
    """
    groups, size = shapes.attributes.groups, shapes.image.dtype.size_bytes
    rows, channels, *pixels = shapes.image.shape
    filters, per_group, *kernel = shapes.filter.shape
    wide, deep = (_channels_of_copy(shapes, number, count, precision) for count in (per_group, filters // groups))
    image = rows * wide * groups * math.prod(pixels)
    filter_ = deep * groups * wide * math.prod(kernel)
    result = rows * deep * groups * math.prod(shapes.result.shape[2:])
    half = layout is Layout.CHANNELS_LAST and precision in (Precision.BF16, Precision.FP16)
    if half and groups == 1 and shapes.attributes.is_padded_evenly:
        image *= wide != channels
        result *= deep != filters
    return (image + filter_ + result) * size + 3 * 512


def is_natural(shapes: Shapes, number: int, layout: Layout, precision: Precision) -> bool:
    """Return whether the engines of this precision read the operands in this layout without a copy."""
    if shapes.depthwise:
        return layout is Layout.CHANNELS_LAST or (precision is Precision.FP32 and number != 2)
    if shapes.attributes.groups > 1 or not shapes.attributes.is_padded_evenly:
        return False
    if precision is Precision.FP32:
        return (layout is Layout.CHANNELS_LAST) == (number == 2)
    multiple = channel_multiple(precision)
    aligned = shapes.filter.shape[0] % multiple == 0 and shapes.filter.shape[1] % multiple == 0
    return layout is Layout.CHANNELS_LAST and aligned


def _variant(shapes: Shapes, number: int, layout: Layout, precision: Precision) -> str:
    """Return the variant of the estimate: how engines access the operands."""
    strided = number == 1 and set(shapes.attributes.stride) != {1}
    if shapes.depthwise:
        return "depthwise"
    if shapes.attributes.groups > 1:
        return "grouped strided" if strided else COPIED if _has_copied_groups(shapes, precision) else "grouped"
    multiple = channel_multiple(precision)
    if any(channels % multiple for channels in shapes.filter.shape[:2]):
        return "unaligned"
    # In both layouts the convolution is one GEMM, whose rows are pixels or channels: either can be loaded if aligned.
    product = shapes.is_product and precision is not Precision.FP32
    if product and math.prod(shapes.image.shape[2:]) % multiple == 0:
        return "straight"
    if not is_natural(shapes, number, layout, precision):
        return "converted"
    # The data gradient of a strided convolution splits into small ones, one for each pixel of a window of strides.
    return "strided" if strided else "straight"


def _filling(shapes: Shapes, number: int, variant: str) -> float:
    """Return the operations that tensor cores execute, divided by those that the convolution needs.

    Narrow groups are blocks on the diagonal of a GEMM of whole tiles. Channels of the result that do not fill a tile
    count as a whole one; 1 x 1 convolutions run as products, whose tiles fit.
    """
    filters, channels, *kernel = shapes.filter.shape
    if variant == COPIED:
        return padded(channels, _COPIED_TILE_CHANNELS) / channels
    if shapes.attributes.groups > 1:
        return 1.0 if shapes.depthwise else max(1.0, _TILE_CHANNELS / channels)
    columns = (filters, channels, min(filters, channels))[number]
    return padded(columns, _TILE_CHANNELS) / columns if math.prod(kernel) > 1 else 1.0


def effort_of(
    shapes: Shapes, kind: str, layout: Layout, precision: Precision, device: DeviceSpec, bare: bool
) -> Effort:
    """Return the effort of a convolution, with its full workspace or `bare`."""
    number = PASSES[kind]
    variant = _variant(shapes, number, layout, precision)
    # Without workspace for copies only direct kernels remain, and these use no tensor cores.
    direct = bare and variant not in ("straight", "strided")
    peak = device.fp32_tflops if direct else peak_tflops(device, precision)
    half = precision in (Precision.BF16, Precision.FP16)
    filling = _filling(shapes, number, variant) if half and not direct and variant != "unaligned" else 1.0
    share = busy(*shapes.product(number), device)
    moved_bytes = shapes.filter.size_bytes + shapes.result.size_bytes + shapes.touched_bytes(number)
    return Effort(
        group("cudnn", kind, precision, device),
        f"{WITHOUT_WORKSPACE} {variant}" if bare else variant,
        device.launch_us,
        shapes.operations * filling / (peak * 1e6 * share),
        moved_bytes / (device.copy_gb_s * 1e3),
    )
