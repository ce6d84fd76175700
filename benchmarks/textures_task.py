"""Patches of pictures as a classification task, and ResNet-18 with a whole recipe to learn it.

Twelve pictures that scikit-image comes with are the classes. Patches for training and for testing come from regions of
them that do not overlap. The recipe: bytes, random crops and flips, label smoothing, SGD with Nesterov momentum, no
weight decay of norms and biases, gradients clipped to a norm, moving averages (which are evaluated), and a cosine
schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import ROOT

from mbc.source import Source

Arrays = Mapping[str, NDArray[Any]]
DATA = ROOT / "build" / "textures.npz"
PICTURES = (
    "astronaut.png", "brick.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png",
    "hubble_deep_field.jpg", "ihc.png", "moon.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip
FLOATS = "input image[batch, 3, size, size] : float"  # of examples/resnet.mbc
PATCH, CROP = 56, 48
TRAIN, TEST = 160, 60  # patches of a class
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEARNING_RATE, SMOOTHING, DECAY = 0.05, 0.1, 0.98
RECIPE = f"""train {{
  optimizer = sgd(momentum=0.9, nesterov=true, weight_decay=5e-4)
  no_decay = norm_and_bias  clip_norm = 2.0  ema = {DECAY}
}}"""


@dataclass(frozen=True)
class Task:
    """A training run. The defaults are those of the published result; smaller sizes rehearse it.

    Attributes:
        shared: Both frameworks get the crops and flips that the host drew; otherwise each draws its own.
        train: Number of training patches of each class.
        test: Number of test patches of each class.
    """

    shared: bool
    precision: str = "bf16"
    epochs: int = 12
    batch: int = 64
    width: int = 64
    train: int = TRAIN
    test: int = TEST

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"resnet18 {self.precision}, {'shared' if self.shared else 'own'} crops"

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """Settings of the network, as for `--set`."""
        return (
            ("batch", str(self.batch)), ("classes", str(len(PICTURES))), ("size", str(CROP)),
            ("width", str(self.width)), ("train.precision", self.precision),
        )  # fmt: skip

    def source(self) -> Source:
        """Return the example with the recipe. It takes bytes, and augments them or only normalises them."""
        size, flip = (CROP, "false") if self.shared else (PATCH, "true")
        augmented = f"photo |> augment(crop=size, flip={flip}, order=hwc, mean={MEAN}, std={STD})"
        text = self.source_of_floats().text
        text = text.replace(FLOATS, f"input photo[batch, {size}, {size}, 3] : uint8")
        return Source("textures.mbc", text.replace("x = image |> conv", f"image = {augmented}\n  x = image |> conv"))

    def source_of_floats(self) -> Source:
        """Return the network without augmentation, which PyTorch's twin runs on normalised images."""
        text = (ROOT / "examples" / "resnet.mbc").read_text(encoding="utf-8")
        text = text[: text.index("train {")] + RECIPE
        text = text.replace("|> softmax_cross_entropy", f"|> softmax_cross_entropy(smoothing={SMOOTHING})")
        return Source("textures.mbc", text)

    def data(self) -> Arrays:
        """Return the first patches of each class."""
        with np.load(DATA) as archive:
            held = dict(archive)
        result: dict[str, NDArray[Any]] = {}
        for name, count, of_all in (("", self.train, TRAIN), ("test_", self.test, TEST)):
            first = np.arange(len(held[f"{name}target"])) % of_all < count
            result |= {f"{name}{kind}": held[f"{name}{kind}"][first] for kind in ("photo", "target")}
        return result

    def last_epoch(self, data: Arrays) -> int:
        """Return the number of the first step of the last epoch."""
        return (self.epochs - 1) * (len(data["photo"]) // self.batch)

    def steps(self, data: Arrays, seed: int) -> Iterator[tuple[NDArray[Any], float]]:
        """Yield the rows of each mini-batch and its learning rate; an incomplete mini-batch is left out."""
        draws = np.random.default_rng(seed)
        rows = len(data["photo"])
        steps = rows // self.batch
        for epoch in range(self.epochs):
            order = draws.permutation(rows)
            for i in range(steps):
                done = (epoch * steps + i) / (self.epochs * steps)
                yield order[i * self.batch : (i + 1) * self.batch], LEARNING_RATE * (1 + np.cos(np.pi * done)) / 2


class Crops:
    """Random crops and flips, drawn on the host: every offset and side with equal probability, as in `augment`."""

    def __init__(self, seed: int) -> None:
        """Begin a sequence of draws."""
        self._draws = np.random.default_rng(seed + 1000)

    def __call__(self, photos: NDArray[Any]) -> NDArray[Any]:
        """Return randomly cropped and flipped photos."""
        offsets = self._draws.integers(0, PATCH - CROP + 1, (len(photos), 2))
        mirrored = self._draws.random(len(photos)) < 0.5
        cut = [photo[y : y + CROP, x : x + CROP] for photo, (y, x) in zip(photos, offsets, strict=True)]
        return np.stack([crop[:, ::-1] if flip else crop for crop, flip in zip(cut, mirrored, strict=True)])


def centre(photos: NDArray[Any]) -> NDArray[Any]:
    """Return the centre crops, on which both networks are evaluated."""
    edge = (PATCH - CROP) // 2
    return photos[:, edge : edge + CROP, edge : edge + CROP]


def prepare(folder: Path) -> None:
    """Write training patches of the left two thirds of each picture, and test patches of its right quarter."""
    from PIL import Image

    draws = np.random.default_rng(0)
    arrays: dict[str, list[np.ndarray]] = {"photo": [], "test_photo": []}
    for name in PICTURES:
        picture = np.asarray(Image.open(folder / name).convert("RGB"))
        width = picture.shape[1]
        for part, (left, right), count in (
            ("photo", (0, 2 * width // 3), TRAIN),
            ("test_photo", (3 * width // 4, width), TEST),
        ):
            for _ in range(count):
                y = draws.integers(0, picture.shape[0] - PATCH + 1)
                x = draws.integers(left, max(left + 1, right - PATCH + 1))
                arrays[part].append(picture[y : y + PATCH, x : x + PATCH])
    DATA.parent.mkdir(parents=True, exist_ok=True)
    classes = np.arange(len(PICTURES), dtype=np.int32)
    np.savez_compressed(
        DATA,
        photo=np.stack(arrays["photo"]), target=np.repeat(classes, TRAIN),
        test_photo=np.stack(arrays["test_photo"]), test_target=np.repeat(classes, TEST),
    )  # fmt: skip
