"""Sources of an epoch's rows: arrays in memory or on disk, or a Python function that yields batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.runtime.arguments import shown
from mbc.train.archives import read_archive, reading
from mbc.train.cases import folder_of, open_cases
from mbc.train.inputs import Batch, Input, fit, names_of
from mbc.train.loader import IterableData, find_function
from mbc.train.share import Part, Share
from mbc.train.volumes import read_array

Array = NDArray[Any]


class Data(Protocol):
    """Rows to train or to test on."""

    @property
    def rows(self) -> int | None:
        """Number of rows; None if it is known only after reading them."""
        ...

    @property
    def common(self) -> bool:
        """True if each of several ranks reads all rows of a mini-batch, or skips the rows of the other ranks."""
        ...

    def shuffled(self, share: Share, seed: int, epoch: int, after: int = 0) -> Iterator[Part]:
        """Return a rank's parts of the mini-batches of one epoch, without the first `after` mini-batches.

        The last mini-batch may be incomplete. Equal arguments give equal parts, whatever was read before: resuming
        depends on it.

        Args:
            share: The rows of this rank.
            seed: Seed of the order.
            epoch: Number of the epoch, from 0.
            after: Number of mini-batches to skip.
        """
        ...

    def in_order(self, share: Share) -> Iterator[Batch]:
        """Return a rank's share of all rows once, for testing: up to `share.rows` rows at a time."""
        ...


@dataclass(frozen=True)
class ArrayData:
    """Arrays with equal numbers of rows, in the order of the network's inputs."""

    arrays: Batch

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.arrays[0].shape[0])

    common = True

    def shuffled(self, share: Share, seed: int, epoch: int, after: int = 0) -> Iterator[Part]:
        """Return a rank's parts of the mini-batches of one epoch, in an order that depends on seed and epoch alone."""
        # The generator's key is (seed, epoch), so that an epoch has the same order after a resume, on all ranks.
        order = np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch])).permutation(self.rows)
        for start in range(after * share.batch, self.rows, share.batch):
            chosen = np.sort(order[start : start + share.batch])
            arrays = self._read(chosen[share.first : share.stop])
            yield Part(arrays, len(chosen), len(chosen) == share.batch)

    def in_order(self, share: Share) -> Iterator[Batch]:
        """Return a rank's share of all rows once, up to `share.rows` rows at a time."""
        for start in range(0, self.rows, share.batch):
            chosen = slice(start + share.first, start + share.stop)
            if chosen.start < self.rows:
                yield self._read(chosen)

    def _read(self, chosen: Array | slice) -> Batch:
        return tuple(np.ascontiguousarray(array[chosen]) for array in self.arrays)


def open_data(place: str, inputs: Sequence[Input], part: str = "train") -> Data:
    """Return the data from an `.npz`, a folder of `.npy` or of cases (read when needed), or `module:function`.

    Arrays, and the folders of cases, are found by the names of the inputs, or else as x/y, images/labels and similar
    names, also with the suffix `_train` or `_test` (`part`).

    Args:
        place: Path, or `module:function`.
        inputs: Inputs of the network.
        part: `train` or `test`.

    Raises:
        MbcError: MBC171 to MBC176, MBC232, MBC233 and MBC382 to MBC384.
    """
    inputs = tuple(inputs)
    if _exists(place):
        path = Path(place)
        arrays = {file.stem: read_array(file) for file in sorted(path.glob("*.npy"))}
        if not arrays and any(folder_of(path, i, inputs, part) for i in inputs):
            return open_cases(path, inputs, part)
        if not path.is_dir():
            with reading(path, "give an .npz written by numpy.savez"):
                arrays = read_archive(path)
        data = ArrayData(fit(arrays, inputs, place, part))
        if data.rows == 0:
            raise MbcError("MBC233", f"the data of '{place}' have no rows", "give one sample or more")
        return data
    check_place(place)
    return IterableData(find_function(place), inputs, place)


def open_data_and_test(place: str, test_place: str | None, inputs: Sequence[Input]) -> tuple[Data, Data | None]:
    """Return data to train on, and data to test on or None.

    Test data come from a place of their own, or from arrays of the same place with the suffix `_test`.
    """
    data = open_data(place, inputs, "train")
    if test_place is not None:
        return data, open_data(test_place, inputs, "test")
    return data, open_data(place, inputs, "test") if is_tested(place, None, inputs) else None


def is_tested(place: str, test_place: str | None, inputs: Sequence[Input]) -> bool:
    """Return whether `open_data_and_test` would find data to test on."""
    return test_place is not None or has_part(place, inputs, "test")


def check_place(place: str) -> None:
    """Raise an error if `place` names no data; called before anything is planned or built.

    Raises:
        MbcError: MBC172 unless `place` is a file, a folder or `module:function`, MBC171 if the function cannot be
            called.
    """
    if _exists(place):
        return
    module, _, function = place.partition(":") if isinstance(cast(object, place), str) else ("", "", "")
    if not (module and function):
        raise MbcError(
            "MBC172",
            f"there is no data {shown(place)}",
            "give an .npz file, a folder of .npy files, or module:function that yields batches",
        )
    find_function(place)


def _exists(place: object) -> bool:
    try:
        return isinstance(place, str | os.PathLike) and Path(cast("str", place)).exists()
    except OSError:  # for instance a name that is too long
        return False


def has_part(place: str, inputs: Sequence[Input], part: str) -> bool:
    """Return whether an `.npz` or a folder holds arrays for `part` under their own names (`x_test`)."""
    path = Path(place)
    if path.is_dir():
        names = {file.stem for file in path.iterdir() if file.is_dir() or file.suffix == ".npy"}
    elif path.suffix == ".npz" and path.is_file():
        with np.load(path, allow_pickle=False) as archive:
            names = set(archive.files)
    else:
        return False
    return all(any(f"{name}_{part}" in names for name in names_of(i, inputs)) for i in inputs)
