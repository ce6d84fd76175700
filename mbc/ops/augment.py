"""Images of bytes as a network's input: cropped, resized, mirrored, recoloured and normalised, in one operation.

The random numbers of an image depend only on the seed, the step, the operation, and the image's row in the mini-batch
that all ranks share. Hence resuming, micro-batches and the number of ranks change nothing. Row i takes the eight words
of the blocks 2 i and 2 i + 1 of Philox 4x32-10 (`mbc.ops.random`): mirrored, top, left, brightness, contrast,
saturation, area, aspect ratio. Inference, and a training that draws nothing, take the centre.

An offset is word * choices >> 32; a factor or share begins with the word's 24 high bits. Positions and shares of
bilinear interpolation are whole numbers until the last division, so that a GPU and the interpreter read the same pixel.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, Call, Expansion, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.random import philox
from mbc.ops.resize import Resize, resampled
from mbc.ops.window import by_pair

MOST_CHANNELS = 4  # channels of an image, as in templates/kernels/pointwise/augment.cu
WORDS = 8  # random words that an image draws
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue (ITU-R BT.601)


@dataclass(frozen=True, slots=True)
class Augment(Attributes):
    """Settings of an augmentation of images.

    Attributes:
        size: (height, width) of the images.
        crop: (height, width) of the result.
        pad: Pixels of 0 on every side.
        scale: Least and largest share of the image's area that is resized to `crop`; empty: nothing is resized.
        ratio: Least and largest width over height of that share.
        flip: Whether images are mirrored.
        brightness: Largest distance of the brightness factor from 1.
        contrast: Largest distance of the contrast factor from 1.
        saturation: Largest distance of the saturation factor from 1.
        mean: Mean of each channel, for values from 0 to 1.
        std: Standard deviation of each channel, for values from 0 to 1.
        channels_last: Whether the input is [N, H, W, C] rather than [N, C, H, W].
        dtype: Element type of the result.
        key: 32 bits that distinguish the operations of a network.
    """

    size: tuple[int, int]
    crop: tuple[int, int]
    pad: int
    scale: tuple[float, ...]
    ratio: tuple[float, ...]
    flip: bool
    brightness: float
    contrast: float
    saturation: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels_last: bool
    dtype: str
    key: int = 0

    @property
    def jitters(self) -> bool:
        """True if colours change."""
        return bool(self.brightness or self.contrast or self.saturation)

    @property
    def choices(self) -> tuple[int, int]:
        """Number of crops from top to bottom, and from left to right."""
        height, width = (size + 2 * self.pad - crop + 1 for size, crop in zip(self.size, self.crop, strict=True))
        return height, width

    @property
    def draws(self) -> bool:
        """True if the operation draws random numbers."""
        return self.flip or self.jitters or bool(self.scale) or self.choices != (1, 1)


@dataclass(frozen=True, slots=True)
class View:
    """The visible part of one image, and factors of its colours.

    The part is a box, which may extend beyond the image, mirrored or not.
    """

    top: int
    left: int
    height: int
    width: int
    mirrored: bool = False
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0


def centre(a: Augment) -> View:
    """Return the view of inference; if the margin is odd, the additional pixel is below or to the right."""
    top, left = ((size - crop) // 2 for size, crop in zip(a.size, a.crop, strict=True))
    return View(top, left, *a.crop)


def views(a: Augment, rows: int, first_row: int, seed: int, step: int) -> list[View]:
    """Return the views of a step for `rows` rows of the mini-batch, starting with `first_row`."""
    blocks = np.arange(2 * first_row, 2 * (first_row + rows), dtype=np.uint64)
    words = philox((seed & 0xFFFFFFFF, seed >> 32), blocks, step, a.key).reshape(rows, WORDS)
    return [_view(a, *map(int, own)) for own in words]


def _view(
    a: Augment, mirrored: int, top: int, left: int, brightness: int, contrast: int, saturation: int, area: int,
    ratio: int,
) -> View:  # fmt: skip
    height, width = _box(a, area, ratio) if a.scale else a.crop
    return View(
        (top * (a.size[0] + 2 * a.pad - height + 1) >> 32) - a.pad,
        (left * (a.size[1] + 2 * a.pad - width + 1) >> 32) - a.pad,
        height,
        width,
        a.flip and mirrored >= 1 << 31,
        *(
            _factor(word, reach)
            for word, reach in ((brightness, a.brightness), (contrast, a.contrast), (saturation, a.saturation))
        ),
    )


def _share(word: int) -> float:
    return (word >> 8) * 2.0**-24


def _factor(word: int, reach: float) -> float:
    return 1 + reach * (2 * _share(word) - 1)


def _box(a: Augment, area: int, ratio: int) -> tuple[int, int]:
    """Return height and width of a box with a random share of the area and a random aspect ratio.

    The ratio is uniform in its logarithm. The box is not larger than the image.
    """
    pixels = a.size[0] * a.size[1] * (a.scale[0] + (a.scale[1] - a.scale[0]) * _share(area))
    low, high = (math.log(r) for r in a.ratio)
    wide = math.exp(low + (high - low) * _share(ratio))
    height, width = (
        min(most, max(1, round(math.sqrt(part))))
        for most, part in zip(a.size, (pixels / wide, pixels * wide), strict=True)
    )
    return height, width


def _shape(a: Augment, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    for control in inputs[1:]:  # a Network has no control block yet
        control_shape(control)
    return (_result(a, inputs[0]),)


def _centre_shape(a: Augment, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_result(a, inputs[0]),)


def _result(a: Augment, x: TensorType) -> TensorType:
    if x.dtype is not DType.UINT8 or len(x.shape) != 4:
        raise ShapeError(f"augment takes images of bytes, not {x}")
    rows, channels, *size = _as_chw(a, x.shape)
    if tuple(size) != a.size or channels != len(a.mean) or channels != len(a.std):
        raise ShapeError(f"{x} are not images of {a.size[0]} x {a.size[1]} with {len(a.mean)} channels")
    return TensorType((rows, channels, *a.crop), DType(a.dtype))


def _as_chw(a: Augment, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[3], *shape[1:3]) if a.channels_last else shape


def _augment(a: Augment, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, control = inputs
    record = control_record(control)
    first = int(record["first_row"]) + call.first_row
    shown = views(a, len(x), first, int(record["global_seed"]), int(record["step"]))
    return (np.stack([_seen(a, image, view) for image, view in zip(x, shown, strict=True)]),)


def _centre(a: Augment, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return (np.stack([_seen(a, image, centre(a)) for image in inputs[0]]),)


def _seen(a: Augment, image: Array, view: View) -> Array:
    """Return the visible part of one image, normalised, as [channels, height, width]."""
    real = np.float64 if a.dtype == "fp64" else np.float32
    pixels = (np.moveaxis(image, -1, 0) if a.channels_last else image).astype(real)
    if a.scale and (view.height, view.width) != a.crop:
        box = pixels[:, view.top : view.top + view.height, view.left : view.left + view.width]
        resize = Resize((view.height, view.width), a.crop, bilinear=True)
        for axis in (0, 1):
            box = resampled(resize, box, axis, leading=1)
    else:
        reach = max(0, -view.top, -view.left, view.top + view.height - a.size[0], view.left + view.width - a.size[1])
        wide = np.pad(pixels, ((0, 0), (reach, reach), (reach, reach)))
        top, left = view.top + reach, view.left + reach
        box = wide[:, top : top + view.height, left : left + view.width]
    if view.mirrored:
        box = box[:, :, ::-1]
    value = box * real(1 / 255)
    if a.jitters:
        value = _recoloured(value, view, real)
    mean, std = (np.array(x, np.float64)[:, None, None] for x in (a.mean, a.std))
    return value * (1 / std).astype(real) - (mean / std).astype(real)


def _recoloured(value: Array, view: View, real: type) -> Array:
    value = (value * real(view.brightness) - real(0.5)) * real(view.contrast) + real(0.5)
    if len(value) == len(LUMA):
        grey = sum(real(share) * channel for share, channel in zip(LUMA, value, strict=True))
        value = grey + real(view.saturation) * (value - grey)
    return np.clip(value, 0, 1)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    assert isinstance(a, Augment)
    a = replace(a, dtype=e.working.value)
    if training and a.draws:
        # The key depends on the operation's path, as in dropout.
        keyed = replace(a, key=zlib.crc32(op.name.encode()))
        return e.emit("augment", keyed, (op.inputs[0], e.control), op.outputs, op.name)
    return e.emit("centre_crop", _without_draws(a), op.inputs, op.outputs, op.name)


def _without_draws(a: Augment) -> Augment:
    return replace(a, pad=0, scale=(), ratio=(), flip=False, brightness=0.0, contrast=0.0, saturation=0.0)


def _reads(a: Augment, inputs: tuple[TensorType, ...]) -> tuple[float, ...]:
    """Return the share of the input that is read: for a scaled image, the mean share of its area."""
    share = sum(a.scale) / 2 if a.scale else math.prod(a.crop) / math.prod(a.size)
    return (min(1.0, share), *(1.0,) * (len(inputs) - 1))


OPS = (
    OpKind("augment", Augment, _shape, _augment, expand=_expand, divisible=True, reads=_reads),
    OpKind("centre_crop", Augment, _centre_shape, _centre, divisible=True, reads=_reads),
)


def _of_channels(name: str, given: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return one number for each channel. A single number applies to all channels.

    Raises:
        ShapeError: There are more or fewer numbers.
    """
    if len(given) not in (1, channels):
        raise ShapeError(f"{name} has {len(given)} numbers, but the image has {channels} channels")
    return given * (channels // len(given))


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x, last = builder.type(inputs[0]), settings["order"] == "hwc"
    if x.dtype is not DType.UINT8 or len(x.shape) != 4:
        raise ShapeError(f"augment takes an input of images that is declared `: uint8`, not {x}")
    height, width, channels = x.shape[1:] if last else (*x.shape[2:], x.shape[1])
    if channels > MOST_CHANNELS:
        other = "chw" if last else "hwc"
        raise ShapeError(f"{x} has {channels} channels, at most {MOST_CHANNELS} are possible: is it order={other}?")
    crop, pad = by_pair(settings["crop"]), settings["pad"]
    crop = (height, width) if crop == (0, 0) else crop
    if min(crop) < 1 or pad < 0:
        raise ShapeError(f"a crop of {crop[0]} x {crop[1]} with {pad} pixels around the image")
    scale, ratio = settings["scale"], settings["ratio"]
    if crop[0] > height + 2 * pad or crop[1] > width + 2 * pad:
        around = f" with {pad} pixels on each side" if pad else ""
        raise ShapeError(f"the crop of {crop[0]} x {crop[1]} is larger than the image of {height} x {width}{around}")
    if scale and (len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1):
        raise ShapeError(f"scale is {scale}, but must be the least and the largest share of the area, as (0.08, 1)")
    if len(ratio) != 2 or not 0 < ratio[0] <= ratio[1] < math.inf:
        raise ShapeError(f"ratio is {ratio}, but must be the least and the largest width over height, as (0.75, 1.33)")
    if scale and pad:
        raise ShapeError("scale shows a part of the image, pad its surroundings: give one of them")
    for name in ("brightness", "contrast", "saturation"):
        if not 0 <= settings[name] <= 1:
            raise ShapeError(f"{name} is {settings[name]}, but must be from 0 to 1: how far its factor may be from 1")
    if settings["saturation"] and channels != len(LUMA):
        raise ShapeError(f"saturation needs red, green and blue, but the image has {channels} channels")
    mean, std = (_of_channels(name, settings[name], channels) for name in ("mean", "std"))
    if any(not 0 < s < math.inf for s in std) or any(not math.isfinite(m) for m in mean):
        raise ShapeError(f"mean and std must be numbers, std positive, but are {mean} and {std}")
    attributes = Augment(
        (height, width), crop, pad, tuple(map(float, scale)), tuple(map(float, ratio)) if scale else (),
        settings["flip"], float(settings["brightness"]), float(settings["contrast"]), float(settings["saturation"]),
        tuple(map(float, mean)), tuple(map(float, std)), last, DType.FP32.value,
    )  # fmt: skip
    return builder.emit("augment", attributes, inputs)[0]


LAYERS = (
    Layer(
        "augment",
        (
            Parameter("crop", "spatial", 0),
            Parameter("pad", "int", 0),
            Parameter("flip", "bool", False),
            Parameter("scale", "numbers", ()),
            Parameter("ratio", "numbers", (3 / 4, 4 / 3)),
            Parameter("brightness", "float", 0.0),
            Parameter("contrast", "float", 0.0),
            Parameter("saturation", "float", 0.0),
            Parameter("mean", "numbers", (0.0,)),
            Parameter("std", "numbers", (1.0,)),
            Parameter("order", "word", "chw", ("chw", "hwc")),
        ),
        _build,
        help="Images of bytes as the network's input: random crops, mirrored and recoloured in training, the centre in "
        "inference. The result is (bytes / 255 - mean) / std.",
        takes_bytes=True,
    ),
)
