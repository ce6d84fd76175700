"""The end of a step: the guard (loss scale, finite gradients), and SGD, AdamW, moving average of one tensor."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.graph import Attributes
from mbc.ir.types import Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice
from mbc.kernels.cuda.update.clip_norm import clips
from mbc.kernels.launch_struct import Struct
from mbc.ops.base import NoAttributes
from mbc.ops.layerwise import LarsRatio
from mbc.ops.update import AdamW, Ema, Guard, Sgd

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
class SgdUpdateArguments(Struct):
    """Integer arguments of a launch of SGD.

    Attributes:
        momentum: Whether there is a velocity.
    """

    elements: int
    momentum: int
    nesterov: int


@dataclass(frozen=True, slots=True)
class AdamwUpdateArguments(Struct):
    """Integer arguments of a launch of AdamW."""

    elements: int


@dataclass(frozen=True, slots=True)
class EmaUpdateArguments(Struct):
    """Integer arguments of a launch of the moving average."""

    elements: int


@dataclass(frozen=True, slots=True)
class AccumulateArguments(Struct):
    """Integer arguments of a launch that accumulates a gradient."""

    elements: int


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


def _sgd(at: Slice) -> SgdUpdateArguments:
    a = at.request.attributes
    assert isinstance(a, Sgd)
    return SgdUpdateArguments(at.request.inputs[0].elements, int(len(at.request.inputs) == 4), int(a.nesterov))


def update_reals(attributes: Attributes) -> tuple[float, ...]:
    """Return the floating-point settings of an update; `sgd_settings` and its like in the sources read them."""
    if isinstance(attributes, AdamW):
        a = attributes
        return a.beta1, a.beta2, a.eps, a.weight_decay, a.rate, a.clip_value
    if isinstance(attributes, Ema):
        return (attributes.decay,)
    if isinstance(attributes, NoAttributes):
        return ()
    if isinstance(attributes, LarsRatio):
        return attributes.trust, attributes.eps, attributes.weight_decay, attributes.clip_value
    assert isinstance(attributes, Sgd)
    return attributes.momentum, attributes.weight_decay, attributes.rate, attributes.clip_value


def _reals(at: Slice) -> tuple[float, ...]:
    return update_reals(at.request.attributes)


def _adamw(at: Slice) -> AdamwUpdateArguments:
    return AdamwUpdateArguments(at.request.inputs[0].elements)


def _ema(at: Slice) -> EmaUpdateArguments:
    return EmaUpdateArguments(at.request.inputs[0].elements)


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
    OwnKernel("sgd_update", FILE, SgdUpdateArguments, _sgd, _reals),
    OwnKernel("adamw_update", FILE, AdamwUpdateArguments, _adamw, _reals),
    OwnKernel("accumulate", FILE, AccumulateArguments, lambda at: AccumulateArguments(at.request.inputs[0].elements)),
    OwnKernel("check_loss", FILE, CheckLossArguments, lambda at: CheckLossArguments(at.request.inputs[1].elements)),
    OwnKernel("ema_update", FILE, EmaUpdateArguments, _ema, _reals),
)
