"""Tar archives as WebDataset has them: `NAME.jpg` and `NAME.cls` one after another, read as streams."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from decoding import Item, in_workers

FOLDER = os.environ.get("SHARDS", "shards")
SHUFFLED = 4096  # images that are mixed with each other
IMAGES = ("jpg", "jpeg", "png", "webp")


def samples(shard: Path) -> Iterator[Item]:
    """Yield encoded images with their classes, in the order of the archive."""
    parts: dict[str, bytes] = {}
    name = ""
    with tarfile.open(shard, "r|*") as archive:  # as a stream: nothing is sought
        for member in archive:
            stem, _, suffix = member.name.rpartition(".")
            content = archive.extractfile(member)
            if content is None:
                continue
            if stem != name:
                name, parts = stem, {}
            parts["image" if suffix.lower() in IMAGES else suffix.lower()] = content.read()
            if "image" in parts and "cls" in parts:
                yield parts.pop("image"), int(parts.pop("cls"))


def mixed(items: Iterable[Item], draws: np.random.Generator) -> Iterator[Item]:
    """Yield items in a random order, through a buffer from which one is drawn whenever another arrives."""
    buffer: list[Item] = []
    for item in items:
        if len(buffer) < SHUFFLED:
            buffer.append(item)
            continue
        at = int(draws.integers(SHUFFLED))
        buffer[at], item = item, buffer[at]
        yield item
    yield from (buffer[i] for i in draws.permutation(len(buffer)))


def batches(epoch: int, rank: int, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield one epoch, which is the same for every call with the same arguments.

    Each of several ranks has shards of its own; all ranks have equally many shards with equally many images.
    """
    draws = np.random.default_rng((epoch, rank))
    shards = sorted(Path(FOLDER).glob("*.tar"))
    order = np.random.default_rng(epoch).permutation(len(shards))
    items = (item for i in order[rank::ranks] for item in samples(shards[i]))
    yield from in_workers(mixed(items, draws))
