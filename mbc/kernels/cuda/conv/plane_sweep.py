"""Convolutions that sweep a tile of the image along its planes: their sizes, and the arguments of launches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.ir.types import DType
from mbc.kernels.base import Request
from mbc.kernels.cuda.conv.conv_operands import MOST_PIXELS, ConvOperands, attributes
from mbc.kernels.launch_struct import Struct

# Equal to the constants in the sources.
TAPS = 3  # planes, lines and columns under a filter
STAGES = 4
VOXELS = 128  # voxels of a plane of a tile
LINES = 16  # lines of a tile of a volume


@dataclass(frozen=True, slots=True)
class PlaneSweepArguments(Struct):
    """Integer arguments of a launch that sweeps planes.

    Attributes:
        flat: 1 for tiles of one line, which images have; 0 for tiles of 16 lines.
    """

    rows: int
    channels: int
    filters: int
    planes: int
    lines: int
    columns: int
    out_planes: int
    out_lines: int
    out_columns: int
    pad_planes: int
    pad_lines: int
    pad_columns: int
    flat: int

    @property
    def taps(self) -> int:
        """Number of filter taps."""
        return TAPS**2 if self.flat else TAPS**3

    @property
    def box_voxels(self) -> int:
        """Number of voxels of a plane of a tile with its halo."""
        lines, halo = (1, 0) if self.flat else (LINES, TAPS - 1)
        return (lines + halo) * (VOXELS // lines + TAPS - 1)

    @property
    def tiles_of_plane(self) -> int:
        """Number of tiles that cover a plane of the output."""
        lines = 1 if self.flat else LINES
        return math.ceil(self.out_columns * lines / VOXELS) * math.ceil(self.out_lines / lines)

    @property
    def voxels_computed(self) -> int:
        """Number of voxels that all tiles compute, including those outside the output."""
        return self.rows * self.out_planes * self.tiles_of_plane * VOXELS

    def divide_planes(self, rows: int, blocks: int) -> int:
        """Return the planes of a tile with which `blocks` blocks have the least work for `rows` rows.

        A tile has two planes more on its input than on its output, so that many short tiles cost time, too.
        """

        def work(length: int) -> int:
            tiles = rows * self.tiles_of_plane * math.ceil(self.out_planes / length)
            return math.ceil(tiles / blocks) * (length + TAPS - 1)

        return min(range(self.out_planes, 0, -1), key=work)


def plane_sweep(request: Request) -> PlaneSweepArguments | None:
    """Return the sizes of a convolution in any pass, or None if it cannot sweep planes.

    A data gradient is the convolution of the gradient with rotated filters. The planes of a volume are those of its
    depth; an image is a volume whose planes are its lines. A volume whose filters have one plane is as many images.
    """
    a, conv = attributes(request), ConvOperands.of(request)
    image, features = conv.image, conv.features
    size, out, kernel = image.shape[2:], features.shape[2:], a.kernel
    if len(size) not in (2, 3) or a.groups != 1 or {*a.stride, *a.dilation} != {1}:
        return None
    rows, before = image.shape[0], a.before
    after = tuple(o + k - 1 - s - b for s, o, k, b in zip(size, out, kernel, before, strict=True))
    if any(not 0 <= pad < k for pad, k in zip((*before, *after), (*kernel, *kernel), strict=True)):
        return None
    channels, filters = image.shape[1], features.shape[1]
    if request.kind == "convolution_backward_data":
        size, out, channels, filters = out, size, filters, channels
        before = tuple(k - 1 - pad for k, pad in zip(kernel, before, strict=True))
    if len(size) == 3 and kernel[0] == 1:
        rows, size, out, kernel, before = rows * size[0], size[1:], out[1:], kernel[1:], before[1:]
    if {*kernel} != {TAPS} or max(*size, *out) >= MOST_PIXELS:
        return None
    flat = len(size) == 2

    def in_volume(numbers: tuple[int, ...], missing: int) -> tuple[int, int, int]:
        planes, *lines, columns = numbers
        return planes, lines[0] if lines else missing, columns

    (planes, lines, columns), (out_planes, out_lines, out_columns) = in_volume(size, 1), in_volume(out, 1)
    pad_planes, pad_lines, pad_columns = in_volume(before, 0)
    return PlaneSweepArguments(
        rows, channels, filters, planes, lines, columns, out_planes, out_lines, out_columns,
        pad_planes, pad_lines, pad_columns, int(flat),
    )  # fmt: skip


def in_16_bits(request: Request) -> bool:
    """Return whether image and features are both in bf16 or both in fp16."""
    conv = ConvOperands.of(request)
    return {conv.image.dtype, conv.features.dtype} in ({DType.BF16}, {DType.FP16})
