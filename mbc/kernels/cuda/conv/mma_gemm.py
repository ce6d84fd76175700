"""Tiles, blocks, shared memory and estimated time of the convolutions by mma.sync (`mma_conv.cuh`)."""

from __future__ import annotations

import math

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, gemm_us

# Equal to the constants in the source.
PIXELS, CHANNELS, STAGES = 128, 32, 3  # pixels of a tile, K of a stage, stages
FILTERS = 128, 64  # filters of a tile: the smaller tile where it leaves fewer filters empty
ELEMENT_BYTES = 2

# Most blocks of a launch: a constant, so that sums have one order. Two blocks are resident on a multiprocessor, so that
# these are four rounds on an H200, five on an A100 and a GeForce RTX 4090, seven on a GeForce RTX 3090.
MOST_BLOCKS = 8 * REDUCTION_BLOCKS
# Share of the peak of mma.sync: a judgement, because no such kernel was measured. With the share of 0.85 that the model
# applies to every kernel of mbc without a fit, an estimate is 0.6 of the peak.
TENSOR_SHARE = 0.7


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


def shared_bytes(filters: int, gemms: int = 1) -> int:
    """Return the shared memory of a block: its stages, and the results of all GEMMs but the last."""
    tile = tile_filters(filters)
    stages = STAGES * (PIXELS + tile) * CHANNELS
    return (stages + (gemms - 1) * PIXELS * tile) * ELEMENT_BYTES


def time_us(request: Request, device: DeviceSpec, products: int) -> float:
    """Return the estimated time of a launch with so many multiply-adds, those of empty filters included.

    Everything behind the GEMM is in its epilogue, and costs no more than the bytes of its operands.
    """
    return gemm_us(request, device, 2 * products, peak_tflops(device, request.precision), TENSOR_SHARE)
