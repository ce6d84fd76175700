"""The guard at the end of a step: loss scale, finite gradients."""

from __future__ import annotations

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice
from mbc.kernels.cuda.update.clip_norm import GuardArguments, clips, guard_arguments
from mbc.kernels.launch_struct import Struct

FLAG_BYTES = 4


def _elements_of_gradients(at: Slice) -> tuple[int, ...]:
    return tuple(gradient.elements for gradient in at.request.inputs[2:])


def _takes_guard(request: Request) -> bool:
    return not clips(request)


def _guard_workspace(request: Request, layout: Layout) -> int:
    return FLAG_BYTES if len(request.inputs) > 2 else 0


FILE = "update/optimizer.cu"

KERNELS = (
    OwnKernel(
        "guard",
        FILE,
        GuardArguments,
        guard_arguments,
        trailing=_elements_of_gradients,
        operands="control loss gradients[gradients] written flag?",
        workspace=_guard_workspace,
        launches=3,
        takes=_takes_guard,
    ),
    OwnKernel("check_loss", FILE, Struct, lambda _: Struct()),
    OwnKernel("copy_control", FILE, Struct, lambda _: Struct()),
)
