"""Losses, their gradients and their weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import THREADS, Channels, OwnKernel, Slice, channels_first, image_of
from mbc.kernels.launch_struct import Struct
from mbc.ops.loss import CrossEntropy, CrossEntropyBackward, WeightedSum

MOST_PARTS = 512
SCORE_BYTES = 16  # bytes of a partial sum in loss.cuh
FEW_CLASSES = 32  # most classes of a position that one thread takes
MOST_CLASSES = 16 * THREADS  # most classes that a block keeps; equal to the constant in cross_entropy_rows.cu
PIXELS_PER_THREAD = 4  # fewest pixels of a thread if several blocks share them
ELEMENTS_PER_THREAD = 16  # fewest elements of a thread if several blocks share a reduction


@dataclass(frozen=True, slots=True)
class CrossEntropyArguments(Struct):
    """Integer arguments of a launch of the cross entropy."""

    type: int
    layout: int
    rows: int
    classes: int
    inner: int
    parts: int


@dataclass(frozen=True, slots=True)
class CrossEntropyBackwardArguments(Struct):
    """Integer arguments of a launch of the cross entropy's gradient."""

    type: int
    layout: int
    rows: int
    classes: int
    inner: int


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


def _entropy(at: Slice) -> CrossEntropyArguments:
    return CrossEntropyArguments(*image_of(at), entropy_parts(at.request.inputs[0], at.layout))


def _entropy_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, CrossEntropy)
    return (a.smoothing,)


def _entropy_workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(entropy_parts(request.inputs[0], layout))


def _entropy_backward(at: Slice) -> CrossEntropyBackwardArguments:
    return CrossEntropyBackwardArguments(*image_of(at))


def _entropy_backward_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, CrossEntropyBackward)
    return a.smoothing, a.weight


def _takes_pixels(request: Request) -> bool:
    c = Channels.of(request.inputs[0])
    return c.inner > 1 and c.channels <= FEW_CLASSES


def _pixel_parts(logits: TensorType) -> int:
    c = Channels.of(logits)
    return min(-(-c.rows * c.inner // (THREADS * PIXELS_PER_THREAD)), MOST_PARTS)


def _pixels(at: Slice) -> CrossEntropyArguments:
    return CrossEntropyArguments(*image_of(at), _pixel_parts(at.request.inputs[0]))


def _pixels_workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(_pixel_parts(request.inputs[0]))


def _takes_rows(request: Request) -> bool:
    c = Channels.of(request.inputs[0])
    return c.inner == 1 and FEW_CLASSES < c.channels <= MOST_CLASSES


def _row_parts(logits: TensorType) -> int:
    return min(logits.shape[0], MOST_PARTS)


def _rows(at: Slice) -> CrossEntropyArguments:
    return CrossEntropyArguments(*image_of(at), _row_parts(at.request.inputs[0]))


def _rows_workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(_row_parts(request.inputs[0]))


def _weighted_sum(at: Slice) -> WeightedSumArguments:
    return WeightedSumArguments(len(at.request.inputs))


def _weights(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, WeightedSum)
    return a.weights


FILE, PIXELS, ROWS = "pointwise/loss.cu", "pointwise/cross_entropy_pixels.cu", "pointwise/cross_entropy_rows.cu"

KERNELS = (
    OwnKernel(
        "softmax_cross_entropy",
        FILE,
        CrossEntropyArguments,
        _entropy,
        _entropy_reals,
        workspace=_entropy_workspace,
        launches=2,
    ),
    OwnKernel(
        "softmax_cross_entropy_backward",
        FILE,
        CrossEntropyBackwardArguments,
        _entropy_backward,
        _entropy_backward_reals,
    ),
    OwnKernel(
        "softmax_cross_entropy",
        PIXELS,
        CrossEntropyArguments,
        _pixels,
        _entropy_reals,
        workspace=_pixels_workspace,
        launches=2,
        launcher="softmax_cross_entropy_pixels",
        version=2,
        takes=_takes_pixels,
    ),
    OwnKernel(
        "softmax_cross_entropy_backward",
        PIXELS,
        CrossEntropyBackwardArguments,
        _entropy_backward,
        _entropy_backward_reals,
        launcher="softmax_cross_entropy_pixels_backward",
        version=2,
        takes=_takes_pixels,
    ),
    OwnKernel(
        "softmax_cross_entropy",
        ROWS,
        CrossEntropyArguments,
        _rows,
        _entropy_reals,
        workspace=_rows_workspace,
        launches=2,
        launcher="softmax_cross_entropy_rows",
        takes=_takes_rows,
    ),
    OwnKernel(
        "softmax_cross_entropy_backward",
        ROWS,
        CrossEntropyBackwardArguments,
        _entropy_backward,
        _entropy_backward_reals,
        launcher="softmax_cross_entropy_rows_backward",
        takes=_takes_rows,
    ),
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
