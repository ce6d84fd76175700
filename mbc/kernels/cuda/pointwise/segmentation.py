"""Sums of Dice, Tversky and focal losses, the loss of these sums, their gradients, and counts of overlaps."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import THREADS, Channels, OwnKernel, Slice, channels_first, image_of, no_reals
from mbc.kernels.cuda.pointwise.loss import SCORE_BYTES
from mbc.kernels.launch_struct import Struct
from mbc.ops.dice import Dice, DiceMeanBackward
from mbc.ops.mean_iou import MeanIou

FILE = "pointwise/segmentation.cu"
TILE = 4 * THREADS  # positions of a tile; equal to the constant in segmentation.cu
MOST_PARTS = 4 * 132  # of all images: the blocks that an H200 runs at a time; a constant, so that sums have one order


@dataclass(frozen=True, slots=True)
class SegmentationArguments(Struct):
    """Integer arguments of a launch over the pixels of images.

    Attributes:
        parts: Blocks of an image, or of all images.
        columns: Pairs of sums of an image, or of all images.
        first: First class that has an index.
    """

    type: int
    layout: int
    rows: int
    classes: int
    inner: int
    ignores: int
    ignored: int
    parts: int
    columns: int
    first: int
    squared: int
    sigmoid: int
    entropy: int


@dataclass(frozen=True, slots=True)
class DiceMeanArguments(Struct):
    """Integer arguments of a launch that computes a loss from sums of images, or the slopes of these sums.

    Attributes:
        totals: Whether the sums of all images are an operand.
    """

    rows: int
    columns: int
    classes: int
    totals: int
    batch: int


@dataclass(frozen=True, slots=True)
class MeanIouArguments(Struct):
    """Integer arguments of a launch that computes the mean of intersections over unions."""

    classes: int


def _parts(request: Request) -> int:
    """Return the number of blocks that share an image (Dice loss) or all images (overlap of classes)."""
    c = Channels.of(request.inputs[0])
    images = c.rows if isinstance(request.attributes, Dice) else 1
    tiles = -(-c.rows * c.inner // images // TILE)
    return min(tiles, max(1, MOST_PARTS // images))


def _arguments(at: Slice) -> SegmentationArguments:
    a, classes = at.request.attributes, at.request.inputs[0].shape[1]
    assert isinstance(a, Dice | MeanIou)
    shared = (*image_of(at), bool(a.ignored), sum(a.ignored), _parts(at.request))
    if isinstance(a, MeanIou):
        return SegmentationArguments(*shared, classes, 0, 0, 0, 0)
    return SegmentationArguments(*shared, a.columns(classes), a.first, a.squared, a.sigmoid, a.entropy != 0)


def _sums_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Dice)
    return (*a.shares, a.focus, *a.weights)


def _workspace(request: Request, layout: Layout) -> int:
    sums: TensorType = request.outputs[0]
    return _parts(request) * sums.elements // 2 * SCORE_BYTES


def _mean(at: Slice) -> DiceMeanArguments:
    a, (rows, twice, *_) = at.request.attributes, at.request.inputs[0].shape
    assert isinstance(a, Dice)
    return DiceMeanArguments(rows, twice // 2, twice // 2 - (a.entropy != 0), a.has_total, a.batch)


def _mean_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Dice)
    weight = (a.weight,) if isinstance(a, DiceMeanBackward) else ()
    return (a.smooth, a.added_below, a.missing, a.power, a.entropy, a.share, *weight)


def _mean_iou(at: Slice) -> MeanIouArguments:
    return MeanIouArguments(at.request.inputs[0].shape[1])


KERNELS = (
    *(
        OwnKernel(kind, FILE, SegmentationArguments, _arguments, reals, workspace=_workspace, launches=2, version=2)
        for kind, reals in (("dice_sums", _sums_reals), ("class_overlap", no_reals))
    ),
    OwnKernel("dice_sums_backward", FILE, SegmentationArguments, _arguments, _sums_reals, version=2),
    *(
        OwnKernel(kind, FILE, DiceMeanArguments, _mean, _mean_reals, layouts=channels_first)
        for kind in ("dice_mean", "dice_mean_backward")
    ),
    OwnKernel("mean_iou_of_overlap", FILE, MeanIouArguments, _mean_iou, layouts=channels_first),
)
