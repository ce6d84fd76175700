"""The guard at the end of a step: loss scale, finite gradients."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice
from mbc.kernels.cuda.update.clip_norm import clips
from mbc.kernels.launch_struct import Struct
from mbc.ops.update import Guard

FLAG_BYTES = 4


@dataclass(frozen=True, slots=True)
class GuardArguments(Struct):
    """Integer arguments of a launch of the guard.

    The number of elements of every gradient follows, `gradients` integers.

    Attributes:
        scaled: Whether the loss scale is dynamic (fp16).
        accumulate: Number of mini-batches over which gradients are sums.
    """

    scaled: int
    accumulate: int
    gradients: int


@dataclass(frozen=True, slots=True)
class CheckLossArguments(Struct):
    """Integer arguments of a launch that checks the loss.

    Attributes:
        elements: Elements of the loss: 1.
    """

    elements: int


def _guard(at: Slice) -> GuardArguments:
    assert isinstance(at.request.attributes, Guard)
    scaled, accumulate = int(at.request.precision is Precision.FP16), at.request.attributes.accumulate
    return GuardArguments(scaled, accumulate, len(at.request.inputs) - 2)


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
        _guard,
        trailing=_elements_of_gradients,
        operands="control loss gradients[gradients] written flag?",
        workspace=_guard_workspace,
        launches=3,
        takes=_takes_guard,
    ),
    OwnKernel("check_loss", FILE, CheckLossArguments, lambda at: CheckLossArguments(at.request.inputs[1].elements)),
)
