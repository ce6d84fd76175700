"""Scaled dot-product attention of short sequences, forward and backward: one head in the shared memory of a block."""

from __future__ import annotations

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Request
from mbc.kernels.cuda.attention.attention import (
    OPERANDS,
    AttentionArguments,
    arguments_of,
    attention_of,
    channels_last,
    mma_us,
    scale_of,
    takes_tensor_cores,
    tiled_operations,
)
from mbc.kernels.cuda.base import OwnKernel

FILE = "attention/attention_resident.cu"
# The next five constants are equal to those in the source.
TILE = 16  # positions
DEPTHS = (32, 64)  # channels of a head that kernels are compiled for
BACKWARD_WARPS = {32: 20, 64: 16}  # warps of a block by depth, each for a tile of keys
PAD = 8  # padding elements of a row in shared memory
ELEMENT_BYTES = 2

MOST_SHARED_BYTES = 227 << 10  # the largest shared memory of a block on any GPU
PRODUCTS = {"attention": 2, "attention_backward": 5}
# Share of the rate that convolutions by mma.sync reach. Measured on an H100 in bf16: 57 us forward and 144 us backward
# for 64 images of ViT-B/16, 34 us and 74 us for DeiT-small.
SHARE = 0.42


def _depth(request: Request) -> int:
    return next(d for d in DEPTHS if attention_of(request)[1].depth <= d)


def _padded(request: Request) -> tuple[int, int]:
    """Return the numbers of queries and keys, padded to whole tiles."""
    s = attention_of(request)[1]
    return -(-s.queries // TILE) * TILE, -(-s.keys // TILE) * TILE


def _shared(request: Request) -> int:
    """Return the shared memory of a block in bytes.

    Forward: keys and values. Backward: keys, queries beside dy, gradients of scores, and two numbers for each query.
    """
    (queries, keys), depth = _padded(request), _depth(request)
    if request.kind == "attention":
        return 2 * keys * (depth + PAD) * ELEMENT_BYTES
    elements = keys * (depth + PAD) + queries * (2 * depth + PAD) + keys * (queries + PAD)
    return elements * ELEMENT_BYTES + 8 * queries


def _takes(request: Request) -> bool:
    if not takes_tensor_cores(request) or attention_of(request)[1].depth > DEPTHS[-1]:
        return False
    if request.kind != "attention" and _padded(request)[1] > BACKWARD_WARPS[_depth(request)] * TILE:
        return False
    return _shared(request) <= MOST_SHARED_BYTES


def _arithmetic_us(request: Request, device: DeviceSpec) -> float:
    return mma_us(request, device, tiled_operations(request, PRODUCTS[request.kind], TILE, TILE), SHARE)


KERNELS = tuple(
    OwnKernel(
        kind,
        FILE,
        AttentionArguments,
        arguments_of,
        scale_of,
        layouts=channels_last,
        arithmetic_us=_arithmetic_us,
        operands=OPERANDS[kind],
        launcher=kind.replace("attention", "attention_resident", 1),
        takes=_takes,
        shared=_shared,
        needs=Instruction.MMA_SYNC,
        aligned=True,
    )
    for kind in PRODUCTS
)
