"""Tiles, blocks, shared memory and arithmetic of the convolutions by mma.sync (`mma_conv.cuh`)."""

from __future__ import annotations

import math

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Precision
from mbc.kernels.base import Request
from mbc.kernels.calibration import mma_sync_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS

# Equal to the constants in the source.
PIXELS, CHANNELS, STAGES = 128, 32, 3  # pixels of a tile, K of a stage, stages of a filter gradient
FILTERS = 128, 64  # filters of a tile: the smaller tile where it leaves fewer filters empty
ELEMENT_BYTES = 2
STAGES_BYTES = 48 << 10  # three stages of a tile of 128 filters, four of one of 64

# Blocks that are resident at once, two on each multiprocessor, on a GeForce RTX 3060, A10, RTX A6000, A100, GeForce RTX
# 4090 and H200.
RESIDENT_BLOCKS = 56, 144, 168, 216, 256, 264
# K whose products take as long as to write and read an element of a part: 8 bytes, at 32 multiply-adds a byte.
MERGE_PIXELS = 512

# Most blocks of a launch: a constant, so that sums have one order. Two blocks are resident on a multiprocessor, so that
# these are four rounds on an H200, five on an A100 and a GeForce RTX 4090, seven on a GeForce RTX 3090.
MOST_BLOCKS = 8 * REDUCTION_BLOCKS


def tile_filters(filters: int) -> int:
    """Return the filters of a tile of a launch with so many filters."""
    largest, smallest = FILTERS
    return smallest if (filters - 1) % largest < smallest else largest


def padded_filters(filters: int) -> int:
    """Return the filters that the tiles of a launch compute, those beyond the last one included."""
    tile = tile_filters(filters)
    return math.ceil(filters / tile) * tile


def blocks(pixels: int, filters: int) -> int:
    """Return the number of blocks that share the pixels of one tile of filters."""
    across = padded_filters(filters) // tile_filters(filters)
    return max(1, min(MOST_BLOCKS // across, math.ceil(pixels / PIXELS)))


def tile_edge(extent: int) -> int:
    """Return the filters or columns of a filter gradient's tile.

    The smaller tile is used where the larger one would compute more than an eighth of `extent` in vain.
    """
    largest, smallest = FILTERS
    return smallest if 8 * (math.ceil(extent / largest) * largest - extent) > extent else largest


def parts(tiles: int, pixels: int, merge_pixels: float) -> int:
    """Return the number of parts of K = `pixels` (split-K): one number for all GPUs, so that sums have one order.

    The number minimises the time of whole rounds of blocks, on average over the GPUs of RESIDENT_BLOCKS, plus the time
    to merge the parts.

    Args:
        tiles: Tiles of the result.
        pixels: Pixels of the gradient.
        merge_pixels: K whose products take as long as to write and read a part.
    """

    def cost(parts: int) -> float:
        blocks = tiles * parts
        rounded = sum(math.ceil(blocks / resident) * resident for resident in RESIDENT_BLOCKS)
        return rounded / blocks / len(RESIDENT_BLOCKS) + (merge_pixels * parts / pixels if parts > 1 else 0)

    return min(range(1, max(1, min(math.ceil(MOST_BLOCKS / tiles), pixels // CHANNELS)) + 1), key=cost)


def shared_bytes(filters: int, gemms: int = 1) -> int:
    """Return the shared memory of a block: its stages, and the results of all GEMMs but the last."""
    return STAGES_BYTES + (gemms - 1) * PIXELS * tile_filters(filters) * ELEMENT_BYTES


def arithmetic_us(request: Request, device: DeviceSpec, pixels: int, filters: int, depth: int) -> float:
    """Return the time of a launch's products at the peak of mma.sync, on the multiprocessors that its tiles keep busy.

    Everything behind the GEMM is in its epilogue, and costs no more than the bytes of its operands.

    Args:
        request: The request of the launch.
        device: The GPU.
        pixels: Pixels of the result.
        filters: Filters of the result; those that fill up the last tile are computed, too.
        depth: Multiply-adds for each element of the result.
    """
    tiles = math.ceil(pixels / PIXELS) * (padded_filters(filters) // tile_filters(filters))
    return tiles_us(request.precision, device, tiles, PIXELS * tile_filters(filters) * depth)


def tiles_us(precision: Precision, device: DeviceSpec, tiles: int, multiply_adds: float) -> float:
    """Return the time of a number of tiles, at the peak rate of mma.sync, in microseconds.

    Args:
        precision: The precision of the products, which selects the rate.
        device: The GPU, whose multiprocessors compute the tiles in rounds.
        tiles: The number of tiles.
        multiply_adds: Multiply-adds for each tile.
    """
    computed = math.ceil(tiles / device.multiprocessors) * device.multiprocessors * multiply_adds
    return 2 * computed / (mma_sync_tflops(device, precision) * 1e6)
