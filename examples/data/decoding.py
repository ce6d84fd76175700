"""From an image's file to 256 x 256 pixels of bytes, in worker processes."""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = int(os.environ.get("PHOTO_SIZE", "256"))
WORKERS = int(os.environ.get("PHOTO_WORKERS", str(min(16, os.cpu_count() or 1))))
ROWS = 64  # that a worker decodes at a time
Item = tuple[Path | bytes, int]  # a file, or what it holds, and its class


def decoded(image: Path | bytes) -> np.ndarray:
    """Return the middle of an image as uint8 [SIZE, SIZE, 3]; its shorter side is resized to SIZE."""
    with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
        opened.draft("RGB", (SIZE, SIZE))  # a JPEG is decoded no larger than it has to be
        rgb = opened.convert("RGB")
    scale = SIZE / min(rgb.size)
    width, height = (max(SIZE, round(side * scale)) for side in rgb.size)
    left, top = (width - SIZE) // 2, (height - SIZE) // 2
    return np.asarray(rgb.resize((width, height)).crop((left, top, left + SIZE, top + SIZE)))


def decode_rows(items: Sequence[Item]) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and class numbers of some rows."""
    return np.stack([decoded(image) for image, _ in items]), np.array([label for _, label in items], np.int32)


def in_workers(items: Iterable[Item]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows in the order of `items`, decoded ahead by WORKERS processes.

    Each process decodes at most two portions ahead, so that decoded rows do not fill the memory.
    """
    waiting: deque[Future[tuple[np.ndarray, np.ndarray]]] = deque()
    rest = iter(items)
    while portion := list(islice(rest, ROWS)):
        waiting.append(_workers().submit(decode_rows, portion))
        if len(waiting) >= 2 * WORKERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@functools.cache
def _workers() -> ProcessPoolExecutor:
    # Not forked: the parent has a GPU open, which a forked process cannot use.
    return ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"))
