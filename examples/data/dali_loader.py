"""NVIDIA DALI: images of a folder for each class, decoded on the GPU, as bytes [256, 256, 3]."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types  # pyright: ignore[reportMissingImports]

FOLDER = os.environ.get("PHOTOS", "photos")
BATCH, SIZE = 64, 256


@pipeline_def(batch_size=BATCH, num_threads=8, prefetch_queue_depth=3)
def photos(rank: int, ranks: int, epoch: int) -> Any:
    """Return the DALI pipeline that reads the files of one rank in the order of one epoch."""
    files, labels = fn.readers.file(
        file_root=FOLDER, shard_id=rank, num_shards=ranks, random_shuffle=True, seed=epoch, name="files",
        pad_last_batch=False,
    )  # fmt: skip
    images = fn.decoders.image(files, device="mixed", output_type=types.RGB)
    images = fn.resize(images, resize_shorter=SIZE)
    return fn.crop(images, crop=(SIZE, SIZE), dtype=types.UINT8), labels


def on_gpu(epoch: int, rank: int = 0, ranks: int = 1, device: int = 0) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield mini-batches whose images stay in the GPU's memory, for a loop of your own.

    `net.step(images, labels, lr=...)` reads the images there. Read the loss of a step before you ask for the mini-batch
    after the next: DALI reuses its memory.
    """
    pipeline = photos(rank=rank, ranks=ranks, epoch=epoch, device_id=device)  # pyright: ignore[reportCallIssue]
    pipeline.build()
    rows = pipeline.reader_meta("files")["epoch_size_padded"] // ranks
    for _ in range(rows // BATCH):
        images, labels = pipeline.run()
        yield images.as_tensor(), labels.as_array()[:, 0].astype(np.int32)


def batches(epoch: int, rank: int, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield mini-batches in host memory, for `mbc train`."""
    for images, labels in on_gpu(epoch, rank, ranks):
        yield np.asarray(images.as_cpu()), labels
