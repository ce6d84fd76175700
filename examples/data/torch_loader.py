"""A torch DataLoader: several workers hand images to a thread that puts them into pinned memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from decoding import WORKERS, decoded
from image_folder import photos
from torch.utils.data import DataLoader, Dataset, Sampler

BATCH = 64  # of the loader: `mbc train` cuts and joins what comes to the network's batch


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """Bytes [256, 256, 3] and class numbers. torchvision's PILToTensor makes [3, 256, 256]: augment(order=chw)."""

    def __init__(self) -> None:
        self.items = photos()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.items[index]
        return torch.from_numpy(decoded(image).copy()), label


class EpochOrder(Sampler[int]):
    """An order of the rows for each epoch, which is equal in every call; each of several ranks has a part of it."""

    def __init__(self, rows: int, rank: int, ranks: int) -> None:
        self.rows, self.rank, self.ranks, self.epoch = rows, rank, ranks, 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(self.rows)
        return iter(order[self.rank :: self.ranks].tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self.rows, self.ranks))


@functools.cache
def loader(rank: int, ranks: int) -> tuple[DataLoader[Any], EpochOrder]:
    """Return the loader of all epochs, whose worker processes stay, with its order of rows."""
    data = Photos()
    order = EpochOrder(len(data), rank, ranks)
    loading: DataLoader[Any] = DataLoader(
        data, BATCH, sampler=order, num_workers=WORKERS, pin_memory=torch.cuda.is_available(), persistent_workers=True,
        multiprocessing_context="spawn", prefetch_factor=4,
    )  # fmt: skip
    return loading, order


def batches(epoch: int, rank: int, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the mini-batches of one epoch, without a copy: a tensor on the CPU is an array."""
    loading, order = loader(rank, ranks)
    order.epoch = epoch
    for images, labels in loading:
        yield images.numpy(), labels.numpy()
