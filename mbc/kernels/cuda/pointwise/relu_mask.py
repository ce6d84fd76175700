"""ReLU's bit mask, and ReLU's gradient by the mask, each in a launch of its own."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.cuda.base import Channels, OwnKernel, Slice, type_code
from mbc.kernels.launch_struct import Struct
from mbc.ops.relu_mask import CHANNELS

FILE = "pointwise/relu_mask.cu"


@dataclass(frozen=True, slots=True)
class ReluMaskArguments(Struct):
    """Integer arguments of a launch of ReLU's bit mask or its gradient."""

    type: int
    bytes: int
    inner: int


def _arguments(at: Slice) -> ReluMaskArguments:
    image = at.request.inputs[0]
    inner = 1 if at.layout is Layout.CHANNELS_LAST else Channels.of(image).inner
    return ReluMaskArguments(type_code(image), image.elements // CHANNELS, inner)


KERNELS = tuple(OwnKernel(kind, FILE, ReluMaskArguments, _arguments) for kind in ("relu_mask", "relu_backward_masked"))
