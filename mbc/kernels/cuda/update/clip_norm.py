"""The guard of a step whose gradients are clipped to a global norm."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, THREADS, OwnKernel, Slice, attributes_of
from mbc.kernels.launch_struct import Struct
from mbc.ops.update import Guard

FILE = "update/clip_norm.cu"
PART_ELEMENTS = 16 * THREADS  # fewest elements of a part of a gradient
SUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class GuardArguments(Struct):
    """Integer arguments of a launch of the guard, or of a norm.

    The number of elements of every gradient follows, and its number of parts if there are parts.

    Attributes:
        scaled: Whether the loss scale is dynamic (fp16).
        accumulate: Number of mini-batches over which gradients are sums.
        parts: Parts of all gradients.
    """

    scaled: int
    accumulate: int
    gradients: int
    parts: int


def clips(request: Request) -> bool:
    """Return whether a guard clips the gradients to a norm."""
    assert isinstance(request.attributes, Guard)
    return request.attributes.clip_norm > 0


def _parts(gradient: TensorType) -> int:
    return min(-(-gradient.elements // PART_ELEMENTS), REDUCTION_BLOCKS)


def _gradients(request: Request) -> tuple[TensorType, ...]:
    return request.inputs[2:] if request.kind == "guard" else request.inputs


def guard_arguments(at: Slice) -> GuardArguments:
    """Return the integer arguments of a launch of the guard or of a norm."""
    gradients, a = _gradients(at.request), at.request.attributes
    accumulate = a.accumulate if isinstance(a, Guard) else 1
    scaled = int(at.request.precision is Precision.FP16)
    return GuardArguments(scaled, accumulate, len(gradients), sum(map(_parts, gradients)))


def _fields(at: Slice) -> tuple[int, ...]:
    return tuple(field for gradient in _gradients(at.request) for field in (gradient.elements, _parts(gradient)))


def _workspace(request: Request, layout: Layout) -> int:
    return SUM_BYTES * sum(map(_parts, _gradients(request)))


KERNELS = (
    OwnKernel(
        "norm",
        FILE,
        GuardArguments,
        guard_arguments,
        trailing=_fields,
        operands="gradients[gradients] norm sums",
        workspace=_workspace,
        launches=2,
    ),
    OwnKernel(
        "guard",
        FILE,
        GuardArguments,
        guard_arguments,
        attributes_of("clip_norm"),
        trailing=_fields,
        operands="control loss gradients[gradients] written sums",
        workspace=_workspace,
        launches=2,
        launcher="guard_clip_norm",
        takes=clips,
    ),
)
