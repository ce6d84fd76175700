"""Images in a folder for each class, as torchvision's ImageFolder reads them, decoded by worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from decoding import Item, in_workers

FOLDER = os.environ.get("PHOTOS", "photos")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def photos(folder: str = FOLDER) -> list[Item]:
    """Return the files with their classes, which are the numbers of the folders in the order of their names."""
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    return [
        (file, label)
        for label, path in enumerate(classes)
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]


def batches(epoch: int, rank: int, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield one epoch in a random order, which is the same for every call with the same arguments.

    A training that is resumed depends on that. Each of several ranks reads files of its own.
    """
    items = photos()
    order = np.random.default_rng(epoch).permutation(len(items))
    yield from in_workers(items[i] for i in order[rank::ranks])


def in_order() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all images in the order of their files, for `--test`."""
    yield from in_workers(photos(os.environ.get("TEST_PHOTOS", FOLDER)))
