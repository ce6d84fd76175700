"""The bias of attention within windows, and the gradient of the bias table."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.kernels.cuda.base import OwnKernel, Slice, channels_first, type_code
from mbc.kernels.launch_struct import Struct
from mbc.ops.window_bias import WindowBias

FILE = "attention/window_bias.cu"


@dataclass(frozen=True, slots=True)
class WindowBiasArguments(Struct):
    """Integer arguments of a launch of the window bias, forward or backward."""

    type: int
    heads: int
    height: int
    width: int
    down: int
    across: int
    shift_down: int
    shift_across: int


def _arguments(at: Slice) -> WindowBiasArguments:
    request, a = at.request, at.request.attributes
    assert isinstance(a, WindowBias)
    forward = request.kind == "window_bias"
    heads = request.outputs[0].shape[0] if forward else request.inputs[0].shape[0]
    return WindowBiasArguments(type_code(request.inputs[0]), heads, *a.window, *a.grid, *a.shift)


KERNELS = tuple(
    OwnKernel(kind, FILE, WindowBiasArguments, _arguments, layouts=channels_first)
    for kind in ("window_bias", "window_bias_backward")
)
