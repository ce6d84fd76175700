"""Image augmentation from bytes: random crops that are mirrored, recoloured and normalized, and the centre crop."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import THREADS, Layouts, OwnKernel, Slice, layout_code, touched_us, type_code
from mbc.kernels.cuda.image import TensorArguments
from mbc.ops.augment import Augment

FILE = "pointwise/augment.cu"
PIXELS_PER_THREAD = 8


@dataclass(frozen=True, slots=True)
class AugmentArguments(TensorArguments):
    """Integer arguments of a launch of image augmentation.

    Attributes:
        layout: Layout of the output.
        channels_last: Whether the input's shape is channels last.
    """

    height: int
    width: int
    crop_height: int
    crop_width: int
    channels_last: int
    pad: int
    flip: int
    scaled: int
    jitters: int
    first_row: int
    key: int
    parts: int


def _settings(request: Request) -> Augment:
    assert isinstance(request.attributes, Augment)
    return request.attributes


def _arguments(at: Slice) -> AugmentArguments:
    a, y = _settings(at.request), at.request.outputs[0]
    rows, channels = y.shape[:2]
    parts = -(-math.prod(a.crop) // (THREADS * PIXELS_PER_THREAD))
    return AugmentArguments(
        type_code(y), layout_code(at.layout), rows, channels, *a.size, *a.crop, a.channels_last, a.pad, a.flip,
        bool(a.scale), a.jitters, at.first_row, a.key, parts,
    )  # fmt: skip


def _reals(at: Slice) -> tuple[float, ...]:
    a = _settings(at.request)
    least, most = a.scale or (1.0, 1.0)
    narrow, wide = (math.log(r) for r in a.ratio or (1.0, 1.0))
    ranges = (a.brightness, a.contrast, a.saturation, least, most - least, narrow, wide - narrow)
    return (*ranges, *(1 / s for s in a.std), *(m / s for m, s in zip(a.mean, a.std, strict=True)))


def _layouts(request: Request) -> Iterable[Layouts]:
    """Yield the layouts: the bytes in the order of their shape, the result in either layout."""
    first = (Layout.CHANNELS_FIRST,) * len(request.inputs)
    yield (*first, Layout.CHANNELS_FIRST)
    if request.outputs[0].ordered:
        yield (*first, Layout.CHANNELS_LAST)


KERNELS = tuple(
    OwnKernel(kind, FILE, AugmentArguments, _arguments, _reals, layouts=_layouts, time_us=touched_us, operands=operands)
    for kind, operands in (("augment", "image control y"), ("centre_crop", "image y"))
)
