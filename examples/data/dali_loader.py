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
    """The files of one rank in an order of this epoch."""
    files, labels = fn.readers.file(
        file_root=FOLDER, shard_id=rank, num_shards=ranks, random_shuffle=True, seed=epoch, name="files",
        pad_last_batch=False,
    )  # fmt: skip
    images = fn.decoders.image(files, device="mixed", output_type=types.RGB)
    images = fn.resize(images, resize_shorter=SIZE)
    return fn.crop(images, crop=(SIZE, SIZE), dtype=types.UINT8), labels


def on_gpu(epoch: int, rank: int = 0, ranks: int = 1, device: int = 0) -> Iterator[tuple[Any, np.ndarray]]:
    """For a loop of your own: `net.step(images, labels, lr=...)` takes the images where they are, in the GPU's memory.

    Look at the loss of a step before the batch after the next one is asked for: DALI uses its memory again.
    """
    made = photos(rank=rank, ranks=ranks, epoch=epoch, device_id=device)  # pyright: ignore[reportCallIssue]
    made.build()
    rows = made.reader_meta("files")["epoch_size_padded"] // ranks
    for _ in range(rows // BATCH):
        images, labels = made.run()
        yield images.as_tensor(), labels.as_array()[:, 0].astype(np.int32)


def batches(epoch: int, rank: int, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For `mbc train`, which takes arrays of the host."""
    for images, labels in on_gpu(epoch, rank, ranks):
        yield np.asarray(images.as_cpu()), labels
