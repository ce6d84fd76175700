"""Fusion groups around a concatenation.

They are statistics, bias or batch normalization of its parts, and a slice with its sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, channels_last, image_of, touched_us
from mbc.kernels.cuda.image import SumArguments
from mbc.kernels.cuda.norm.batch_norm import SUM_BYTES, partial_bytes, parts, statistics_workspace
from mbc.kernels.cuda.pointwise.move import ConcatArguments
from mbc.kernels.cuda.wiring import AFFINE, SCALE_SHIFT, Wiring, affines, eps, members, run, slice_of, taking

# Blocks of a channels-last reduction on 132 multiprocessors. Half of the bytes are written, and loads wait for stores,
# so that more blocks are needed than for a reduction that only reads.
SLICE_BLOCKS = 4 * REDUCTION_BLOCKS


@dataclass(frozen=True, slots=True)
class StatisticsAndCopyArguments(SumArguments):
    """Integer arguments of a launch that computes statistics and copies those of other channels.

    Attributes:
        joined: Further channels, whose statistics exist already and are copied.
        before: Whether these come first.
    """

    joined: int
    before: int


# Statistics of x, and copied statistics of other channels, in either order.
_AFTER_COPIED = (((0,), (1, 2, 3, 4)), (5, 6))
_BEFORE_COPIED = (((0,), (3, 4, 1, 2)), (5, 6))


def _statistics_and_copy(at: Slice) -> StatisticsAndCopyArguments:
    x, joined, _ = at.request.inputs
    join = members(at.request).members[-1]
    sums = parts(x, at.layout), int(at.accumulate)
    return StatisticsAndCopyArguments(*image_of(at, x), *sums, joined.elements, int(join.inputs[0] == 1))


@dataclass(frozen=True, slots=True)
class SliceSumArguments(SumArguments):
    """Integer arguments of a launch that copies a slice and sums its channels.

    Attributes:
        start: The first channel of the slice.
        all: Channels of the whole tensor.
    """

    start: int
    all: int


def _slice_sum(at: Slice) -> SliceSumArguments:
    taken = at.request.outputs[0]
    count = parts(taken, at.layout, SLICE_BLOCKS)
    return SliceSumArguments(*image_of(at, taken), count, int(at.accumulate), *slice_of(at))


def _slice_sum_workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(request.outputs[0], layout, SUM_BYTES, SLICE_BLOCKS)


@dataclass(frozen=True, slots=True)
class BiasConcatArguments(ConcatArguments):
    """Integer arguments of a launch that adds a bias to one part and concatenates the parts.

    Attributes:
        biased: Number of the part that the bias is added to.
    """

    biased: int


# The biased part is the first of two, or the second.
_BIASED = (3, 2)
_BIAS_CONCAT = tuple((((0, 1), parts_), (4,)) for parts_ in (_BIASED, _BIASED[::-1]))


def _bias_concat(at: Slice) -> BiasConcatArguments:
    biased = members(at.request).members[-1].inputs.index(_BIASED[0])
    type_, layout, rows, _, inner = image_of(at)
    return BiasConcatArguments(type_, layout, rows, inner, 2, biased)


def _channels_of_parts(at: Slice) -> tuple[int, ...]:
    biased, _, other = at.request.inputs
    first = members(at.request).members[-1].inputs[0] == _BIASED[0]
    parts_ = (biased, other) if first else (other, biased)
    return tuple(x.shape[1] for x in parts_)


@dataclass(frozen=True, slots=True)
class ConcatNormalizeArguments(ConcatArguments):
    """Integer arguments of a launch that normalizes and concatenates.

    Attributes:
        affine: Whether the normalizations have scale and shift.
        operands: Operands of a part: itself, and those of its normalization, if each part has one.
    """

    affine: int
    operands: int


def _normalized(operands: int) -> Wiring:
    """Return the wiring of the concatenation of two parts, its batch_normalize and its relu."""
    joined = operands + 1
    return ((0, 1), (joined, *run(2, operands - 1)), (joined + 1,)), (joined, joined + 2)


MOST_PARTS = 4  # equal to the constant in the source


def _parts_normalized(operands: int, count: int) -> Wiring:
    """Return the wiring of batch_normalize of each part, relu of each part, and their concatenation."""
    z, y = operands * count, operands * count + count
    normalized = (run(part * operands, operands) for part in range(count))
    return (*normalized, *((value,) for value in run(z, count)), run(y, count)), (y + count,)


def _joined(at: Slice) -> tuple[TensorType, ...]:
    """Return the types of the parts."""
    return tuple(x for x in at.request.inputs if len(x.shape) > 1)


def _concat_normalize(at: Slice) -> ConcatNormalizeArguments:
    type_, layout, rows, _, inner = image_of(at)
    count, normalized = len(_joined(at)), affines(at.request)
    operands = len(at.request.inputs) // count if len(normalized) == count else 1
    return ConcatNormalizeArguments(type_, layout, rows, inner, count, normalized[0], operands)


def _channels_joined(at: Slice) -> tuple[int, ...]:
    return tuple(x.shape[1] for x in _joined(at))


_CONCAT_NORMALIZE = OwnKernel(
    "concat+batch_normalize+relu",
    "fused/concat.cu",
    ConcatNormalizeArguments,
    _concat_normalize,
    eps,
    trailing=_channels_joined,
    layouts=channels_last,
    operands=f"parts[inputs] mean variance {SCALE_SHIFT} joined y",
    launcher="concat_batch_normalize_relu",
    takes=taking(*map(_normalized, AFFINE)),
)

KERNELS = (
    OwnKernel(
        "batch_statistics+concat_statistics",
        "norm/batch_norm.cu",
        StatisticsAndCopyArguments,
        _statistics_and_copy,
        workspace=statistics_workspace,
        launches=2,
        launcher="batch_statistics_concat",
        takes=taking(_AFTER_COPIED, _BEFORE_COPIED),
    ),
    OwnKernel(
        "bias_add+concat",
        "fused/concat.cu",
        BiasConcatArguments,
        _bias_concat,
        trailing=_channels_of_parts,
        layouts=channels_last,
        operands="x bias other y",
        launcher="bias_add_concat",
        takes=taking(*_BIAS_CONCAT),
    ),
    _CONCAT_NORMALIZE,
    replace(
        _CONCAT_NORMALIZE,
        kind="batch_normalize*+relu*+concat",
        operands="parts[inputs*operands] y",
        launcher="batch_normalize_relu_concat",
        takes=taking(*(_parts_normalized(n, count) for n in AFFINE for count in range(2, MOST_PARTS + 1))),
    ),
    OwnKernel(
        "channel_slice+channel_sum",
        "norm/bias.cu",
        SliceSumArguments,
        _slice_sum,
        workspace=_slice_sum_workspace,
        time_us=touched_us,
        launches=2,
        launcher="channel_slice_sum",
        takes=taking((((0,), (1,)), (1, 2))),
        version=2,
    ),
)
