"""The guard of a step whose gradients are clipped to a global norm."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, THREADS, OwnKernel, Slice
from mbc.kernels.launch_struct import Struct
from mbc.ops.update import Guard

FILE = "update/clip_norm.cu"
PART_ELEMENTS = 16 * THREADS  # fewest elements of a part of a gradient
SUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class ClipNormArguments(Struct):
    """Integer arguments of a launch of the guard.

    Two integers for every gradient follow: its elements, and its parts.

    Attributes:
        scaled: Whether the loss scale is dynamic (fp16).
        accumulate: Number of mini-batches over which gradients are sums.
        parts: Parts of all gradients.
    """

    scaled: int
    accumulate: int
    gradients: int
    parts: int


@dataclass(frozen=True, slots=True)
class NormArguments(Struct):
    """Integer arguments of a launch that computes a norm.

    Two integers for every operand follow: its elements, and its parts.
    """

    gradients: int
    parts: int


def clips(request: Request) -> bool:
    """Return whether a guard clips the gradients to a norm."""
    assert isinstance(request.attributes, Guard)
    return request.attributes.clip_norm > 0


def _parts(gradient: TensorType) -> int:
    return min(-(-gradient.elements // PART_ELEMENTS), REDUCTION_BLOCKS)


def _arguments(at: Slice) -> ClipNormArguments:
    gradients, a = at.request.inputs[2:], at.request.attributes
    assert isinstance(a, Guard)
    scaled = int(at.request.precision is Precision.FP16)
    return ClipNormArguments(scaled, a.accumulate, len(gradients), sum(map(_parts, gradients)))


def _limit(at: Slice) -> tuple[float, ...]:
    assert isinstance(at.request.attributes, Guard)
    return (at.request.attributes.clip_norm,)


def _fields(at: Slice) -> tuple[int, ...]:
    return tuple(field for gradient in at.request.inputs[2:] for field in (gradient.elements, _parts(gradient)))


def _workspace(request: Request, layout: Layout) -> int:
    return SUM_BYTES * sum(map(_parts, request.inputs[2:]))


def _norm(at: Slice) -> NormArguments:
    return NormArguments(len(at.request.inputs), sum(map(_parts, at.request.inputs)))


def _fields_of_norm(at: Slice) -> tuple[int, ...]:
    return tuple(field for gradient in at.request.inputs for field in (gradient.elements, _parts(gradient)))


def _workspace_of_norm(request: Request, layout: Layout) -> int:
    return SUM_BYTES * sum(map(_parts, request.inputs))


KERNELS = (
    OwnKernel(
        "norm",
        FILE,
        NormArguments,
        _norm,
        trailing=_fields_of_norm,
        operands="gradients[gradients] norm sums",
        workspace=_workspace_of_norm,
        launches=2,
    ),
    OwnKernel(
        "guard",
        FILE,
        ClipNormArguments,
        _arguments,
        _limit,
        trailing=_fields,
        operands="control loss gradients[gradients] written sums",
        workspace=_workspace,
        launches=2,
        launcher="guard_clip_norm",
        takes=clips,
    ),
)
