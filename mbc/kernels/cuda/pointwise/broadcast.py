"""Images and one number for each of their channels: products, sums, and their gradients, which are sums over pixels."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.kernels.cuda.base import OwnKernel, Slice, Struct, image_of

FILE = "pointwise/broadcast.cu"


@dataclass(frozen=True, slots=True)
class BroadcastArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int


def _arguments(at: Slice) -> BroadcastArguments:
    return BroadcastArguments(*image_of(at))


KERNELS = tuple(
    OwnKernel(kind, FILE, BroadcastArguments, _arguments)
    for kind in ("broadcast_mul", "broadcast_add", "pixel_sum", "pixel_dot")
)
