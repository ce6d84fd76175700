"""Losses, their gradients and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import (
    THREADS,
    Channels,
    OwnKernel,
    Slice,
    always,
    attributes_of,
    channels_first,
    image_of,
    no_workspace,
)
from mbc.kernels.cuda.image import ImageArguments
from mbc.kernels.launch_struct import Struct
from mbc.ops.loss import WeightedSum

MOST_PARTS = 512
SCORE_BYTES = 16  # bytes of a partial sum in loss.cuh
FEW_CLASSES = 32  # most classes of a position that one thread takes
MOST_CLASSES = 16 * THREADS  # most classes that a block keeps; equal to the constant in cross_entropy_rows.cu
PIXELS_PER_THREAD = 4  # fewest pixels of a thread if several blocks share them
ELEMENTS_PER_THREAD = 16  # fewest elements of a thread if several blocks share a reduction


@dataclass(frozen=True, slots=True)
class CrossEntropyArguments(ImageArguments):
    """Integer arguments of a launch of a cross entropy or its gradient; channels are classes.

    Attributes:
        side: The gradient is that of the logits (0) or of the targets.
    """

    parts: int
    side: int = 0


@dataclass(frozen=True, slots=True)
class WeightedSumArguments(Struct):
    """Integer arguments of a launch of the weighted sum of losses."""

    inputs: int


def _positions_per_block(logits: TensorType, layout: Layout) -> int:
    """Return the positions that a block takes at a time.

    A warp takes a position whose classes are adjacent in memory; otherwise a thread takes a position.
    """
    adjacent = layout is Layout.CHANNELS_LAST or Channels.of(logits).inner == 1
    return THREADS // 32 if adjacent else THREADS


def entropy_parts(logits: TensorType, layout: Layout) -> int:
    """Return the number of parts of a reduction over all positions of the logits."""
    c = Channels.of(logits)
    return min(-(-c.rows * c.inner // _positions_per_block(logits, layout)), MOST_PARTS)


def elementwise_parts(prediction: TensorType) -> int:
    """Return the number of parts of a reduction over all elements of the prediction."""
    return max(1, min(prediction.elements // (THREADS * ELEMENTS_PER_THREAD), MOST_PARTS))


def partial_bytes(parts: int) -> int:
    """Return the workspace for the partial sums of the parts; 0 if there is one part."""
    return parts * SCORE_BYTES if parts > 1 else 0


def entropy(at: Slice, parts_of: Callable[[TensorType, Layout], int] = entropy_parts) -> CrossEntropyArguments:
    """Return the integer arguments of a launch of a cross entropy or its gradient."""
    return CrossEntropyArguments(*image_of(at), parts_of(at.request.inputs[0], at.layout))


def _takes_pixels(request: Request) -> bool:
    c = Channels.of(request.inputs[0])
    return c.inner > 1 and c.channels <= FEW_CLASSES


def _takes_rows(request: Request) -> bool:
    c = Channels.of(request.inputs[0])
    return c.inner == 1 and FEW_CLASSES < c.channels <= MOST_CLASSES


def _pixel_parts(logits: TensorType, _: Layout) -> int:
    c = Channels.of(logits)
    return min(-(-c.rows * c.inner // (THREADS * PIXELS_PER_THREAD)), MOST_PARTS)


def _row_parts(logits: TensorType, _: Layout) -> int:
    return min(logits.shape[0], MOST_PARTS)


def _weighted_sum(at: Slice) -> WeightedSumArguments:
    return WeightedSumArguments(len(at.request.inputs))


def _weights(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, WeightedSum)
    return a.weights


FILE = "pointwise/loss.cu"


def _pair(
    form: str,
    parts_of: Callable[[TensorType, Layout], int],
    takes: Callable[[Request], bool] = always,
    version: int = 1,
) -> Iterator[OwnKernel]:
    """Yield the kernels of one form of the cross entropy and of its gradient; `form` is part of their names."""

    def workspace(request: Request, layout: Layout) -> int:
        return partial_bytes(parts_of(request.inputs[0], layout))

    forward = OwnKernel(
        "softmax_cross_entropy",
        f"pointwise/cross_entropy{form}.cu" if form else FILE,
        CrossEntropyArguments,
        partial(entropy, parts_of=parts_of),
        attributes_of("smoothing"),
        workspace=workspace,
        launches=2,
        launcher=f"softmax_cross_entropy{form}",
        takes=takes,
        version=version,
    )
    yield forward
    yield replace(
        forward,
        kind="softmax_cross_entropy_backward",
        reals=attributes_of("smoothing", "weight"),
        workspace=no_workspace,
        launches=1,
        launcher=f"softmax_cross_entropy{form}_backward",
    )


KERNELS = (
    *_pair("", entropy_parts),
    *_pair("_pixels", _pixel_parts, _takes_pixels, version=2),
    *_pair("_rows", _row_parts, _takes_rows),
    OwnKernel(
        "weighted_sum",
        FILE,
        WeightedSumArguments,
        _weighted_sum,
        _weights,
        layouts=channels_first,
        operands="losses[inputs] total",
    ),
)
