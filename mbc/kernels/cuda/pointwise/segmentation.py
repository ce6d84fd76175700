"""The Dice loss and its gradient, and the counts of intersection over union."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import THREADS, Channels, OwnKernel, Slice, channels_first, image_of, no_reals
from mbc.kernels.cuda.pointwise.loss import MOST_PARTS, SCORE_BYTES
from mbc.kernels.launch_struct import Struct
from mbc.ops.dice import DiceMean, DiceMeanBackward, DiceSums
from mbc.ops.mean_iou import MeanIou

FILE = "pointwise/segmentation.cu"
TILE = 8 * THREADS  # positions of a tile; equal to the constant in segmentation.cu


@dataclass(frozen=True, slots=True)
class SegmentationArguments(Struct):
    """Integer arguments of a launch over the pixels of images.

    Attributes:
        parts: Blocks of an image, or of all images.
    """

    type: int
    layout: int
    rows: int
    classes: int
    inner: int
    ignores: int
    ignored: int
    parts: int


@dataclass(frozen=True, slots=True)
class DiceMeanArguments(Struct):
    """Integer arguments of a launch that computes a mean over images and classes."""

    rows: int
    classes: int


def _parts(request: Request) -> int:
    """Return the number of blocks that share an image (Dice loss) or all images (overlap of classes)."""
    c = Channels.of(request.inputs[0])
    images = c.rows if isinstance(request.attributes, DiceSums) else 1
    tiles = -(-c.rows * c.inner // images // TILE)
    return min(tiles, max(1, MOST_PARTS // images))


def _arguments(at: Slice) -> SegmentationArguments:
    a = at.request.attributes
    assert isinstance(a, DiceSums | MeanIou)
    return SegmentationArguments(*image_of(at), bool(a.ignored), sum(a.ignored), _parts(at.request))


def _workspace(request: Request, layout: Layout) -> int:
    sums: TensorType = request.outputs[0]
    return _parts(request) * sums.elements // 2 * SCORE_BYTES


def _mean(at: Slice) -> DiceMeanArguments:
    rows, twice, *_ = at.request.inputs[0].shape
    return DiceMeanArguments(rows, twice // 2)


def _mean_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, DiceMean | DiceMeanBackward)
    return (a.smooth, a.weight) if isinstance(a, DiceMeanBackward) else (a.smooth,)


def _mean_iou(at: Slice) -> DiceMeanArguments:
    return DiceMeanArguments(*at.request.inputs[0].shape)


KERNELS = (
    *(
        OwnKernel(kind, FILE, SegmentationArguments, _arguments, workspace=_workspace, launches=2)
        for kind in ("dice_sums", "class_overlap")
    ),
    OwnKernel("dice_sums_backward", FILE, SegmentationArguments, _arguments),
    *(
        OwnKernel(kind, FILE, DiceMeanArguments, integers, reals, layouts=channels_first)
        for kind, integers, reals in (
            ("dice_mean", _mean, _mean_reals),
            ("dice_mean_backward", _mean, _mean_reals),
            ("mean_iou_of_overlap", _mean_iou, no_reals),
        )
    ),
)
