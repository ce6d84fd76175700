"""What cuDNN's convolutions should take where nobody measured them: workspace, and effort of `calibration`."""

from __future__ import annotations

import math

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.calibration import WITHOUT_WORKSPACE, Effort, busy, group, peak_tflops
from mbc.kernels.convolution_shapes import PASSES, Shapes

ALIGNMENT_BYTES = 256
_MOST_SUMS_BYTES = 32 << 20
_LEAST_SUMS_BYTES = 3 << 19  # small filters of large images split further: 1.5 MiB, but not above their own size
_SUMS_PER_PASS = {0: 2, 1: 2, 2: 16}  # partial results of a split reduction, in sizes of the filter
_SLACK_BYTES = 4096  # pointers, counters and alignment of parts
# On an H100 in bf16 what groups of 4 to 32 channels computed in a second was in proportion to their channels, and would
# be at 128 what a convolution without groups computes.
_GROUP_TILE_CHANNELS = 128
_COUNTED_BYTES = 512  # of a filter gradient, by one of the bytes that engines count finished parts of its sum with


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def channel_multiple(precision: Precision) -> int:
    """Channels of which 16-byte loads of the operands take whole numbers; strict engines load one by one."""
    return {Precision.FP32: 1, Precision.TF32: 4}.get(precision, 8)


def widened_bytes(filter_: TensorType, working: DType) -> int:
    """Workspace that a filter gradient takes in the type of its operands, 0 where that is fp32 already."""
    if working not in (DType.BF16, DType.FP16):
        return 0
    return padded(filter_.elements * working.size_bytes, ALIGNMENT_BYTES)


def _counters_bytes(filter_: TensorType, working: DType) -> int:
    """What it takes to count the parts of a filter gradient; engines for bf16 and fp16 do with none."""
    return filter_.size_bytes // _COUNTED_BYTES + ALIGNMENT_BYTES if working is DType.FP32 else 0


def least_bytes(filter_: TensorType, working: DType) -> int:
    """Workspace of a filter gradient that gets none to be fast with."""
    return padded(widened_bytes(filter_, working) + _counters_bytes(filter_, working), ALIGNMENT_BYTES)


def sums_bytes(shapes: Shapes, number: int) -> int:
    working = shapes.image.dtype
    sums = _SUMS_PER_PASS[number] * (shapes.filter.elements * working.size_bytes + 512)
    if number == 2:
        sums = max(sums, min(_LEAST_SUMS_BYTES, (shapes.image.size_bytes + shapes.result.size_bytes) // 8))
    widened = widened_bytes(shapes.filter, working) if number == 2 else 0
    return widened + min(sums, _MOST_SUMS_BYTES) + _SLACK_BYTES


def copies_bytes(shapes: Shapes, precision: Precision, layout: Layout) -> int:
    """Copies of the operands as engines want them: all of them, or, where half-precision operands lie right but for
    their alignment, those whose channels are not aligned."""
    multiple, groups, size = channel_multiple(precision), shapes.attributes.groups, shapes.image.dtype.size_bytes
    rows, channels, height, width = shapes.image.shape
    filters, per_group, kernel_height, kernel_width = shapes.filter.shape
    out_height, out_width = shapes.result.shape[2:]
    wide, deep = padded(per_group, multiple), padded(filters // groups, multiple)
    image = rows * wide * groups * height * width
    filter_ = deep * groups * wide * kernel_height * kernel_width
    result = rows * deep * groups * out_height * out_width
    if layout is Layout.CHANNELS_LAST and precision in (Precision.BF16, Precision.FP16) and groups == 1:
        top, bottom, left, right = shapes.attributes.pad
        if top == bottom and left == right:
            image *= wide != channels
            result *= deep != filters
    return (image + filter_ + result) * size + 3 * 512


def is_natural(shapes: Shapes, number: int, layout: Layout, precision: Precision) -> bool:
    """Whether the engines of this precision work on the operands as they lie."""
    if shapes.depthwise:
        return layout is Layout.CHANNELS_LAST or (precision is Precision.FP32 and number != 2)
    top, bottom, left, right = shapes.attributes.pad
    if shapes.attributes.groups > 1 or top != bottom or left != right:
        return False
    if precision is Precision.FP32:
        return (layout is Layout.CHANNELS_LAST) == (number == 2)
    multiple = channel_multiple(precision)
    aligned = shapes.filter.shape[0] % multiple == 0 and shapes.filter.shape[1] % multiple == 0
    return layout is Layout.CHANNELS_LAST and aligned


def _variant(shapes: Shapes, number: int, layout: Layout, precision: Precision) -> str:
    """How engines come at the operands: what estimates have in common."""
    strided = number == 1 and shapes.attributes.stride != (1, 1)
    if shapes.depthwise or shapes.attributes.groups > 1:
        return "depthwise" if shapes.depthwise else "grouped strided" if strided else "grouped"
    multiple = channel_multiple(precision)
    if any(channels % multiple for channels in shapes.filter.shape[:2]):
        return "unaligned"
    # A GEMM either way: rows of pixels can be loaded where rows of channels are not.
    product = shapes.is_product and precision is not Precision.FP32
    if product and math.prod(shapes.image.shape[2:]) % multiple == 0:
        return "straight"
    if not is_natural(shapes, number, layout, precision):
        return "converted"
    # The data gradient of a strided convolution is as many small ones as a window of strides has pixels.
    return "strided" if strided else "straight"


def _filling(shapes: Shapes) -> float:
    """What tensor cores compute over what counts: narrow groups are blocks on the diagonal of a GEMM of whole tiles."""
    grouped = shapes.attributes.groups > 1 and not shapes.depthwise
    return max(1.0, _GROUP_TILE_CHANNELS / shapes.filter.shape[1]) if grouped else 1.0


def effort_of(
    shapes: Shapes, kind: str, layout: Layout, precision: Precision, device: DeviceSpec, bare: bool
) -> Effort:
    number = PASSES[kind]
    variant = _variant(shapes, number, layout, precision)
    # Direct kernels, which are left where operands cannot be copied, use no tensor cores.
    direct = bare and variant not in ("straight", "strided")
    peak = device.fp32_tflops if direct else peak_tflops(device, precision)
    half = precision in (Precision.BF16, Precision.FP16)
    filling = _filling(shapes) if half and not direct else 1.0
    share = busy(*shapes.product(number), device)
    moved_bytes = shapes.filter.size_bytes + shapes.result.size_bytes + shapes.touched_bytes(number)
    return Effort(
        group("cudnn", kind, precision),
        f"{WITHOUT_WORKSPACE} {variant}" if bare else variant,
        device.launch_us,
        shapes.operations * filling / (peak * 1e6 * share),
        moved_bytes / (device.copy_gb_s * 1e3),
    )
