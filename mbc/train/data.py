"""Where the rows of an epoch come from: arrays in memory or on disk, or a Python function that yields batches."""

from __future__ import annotations

import importlib
import inspect
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.types import DType, TensorType

Array = NDArray[Any]
Batch = tuple[Array, ...]  # one array per input of the network, in the network's order

# What people call the two arrays of a labelled data set. Used only where a network has one input of each sort.
_FLOAT_NAMES = ("x", "images", "image", "data", "inputs", "input")
_CLASS_NAMES = ("y", "labels", "label", "targets", "target", "classes")
_NUMPY_TYPES = {DType.FP32: np.float32, DType.FP64: np.float64, DType.INT32: np.int32}


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the network: `type.shape[0]` is the mini-batch. Labels are of `classes` classes."""

    name: str
    type: TensorType
    classes: int | None = None

    @property
    def is_class(self) -> bool:
        return self.type.dtype is DType.INT32


class Data(Protocol):
    """Rows to train or to test on."""

    @property
    def rows(self) -> int | None:
        """How many, None when only reading them tells."""
        ...

    def shuffled(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch of training. The last may have fewer than `batch` rows.

        The same arguments give the same batches, whatever was read before: resuming depends on it."""
        ...

    def in_order(self, batch: int) -> Iterator[Batch]:
        """All rows once, for testing. The last batch may have fewer rows."""
        ...


@dataclass(frozen=True)
class ArrayData:
    """Arrays of equally many rows, in the order of the network's inputs."""

    arrays: Batch

    @property
    def rows(self) -> int:
        return int(self.arrays[0].shape[0])

    def shuffled(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        # A generator keyed by (seed, epoch), not one that runs on: epoch 7 is the same after a resume.
        order = np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch])).permutation(self.rows)
        return self._batches(batch, lambda start: np.sort(order[start : start + batch]))

    def in_order(self, batch: int) -> Iterator[Batch]:
        return self._batches(batch, lambda start: slice(start, start + batch))

    def _batches(self, batch: int, choose: Callable[[int], Array | slice]) -> Iterator[Batch]:
        for start in range(0, self.rows, batch):
            chosen = choose(start)
            yield tuple(np.ascontiguousarray(array[chosen]) for array in self.arrays)


@dataclass(frozen=True)
class IterableData:
    """A function that yields batches of any number of rows; they are cut anew to the mini-batch.

    It is called once an epoch, with `epoch=` where it has such a parameter. Shuffling is its own business.
    """

    function: Callable[..., Iterable[Any]]
    inputs: tuple[Input, ...]
    name: str

    @property
    def rows(self) -> None:
        return None

    def shuffled(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        return self._batches(batch, epoch)

    def in_order(self, batch: int) -> Iterator[Batch]:
        return self._batches(batch, 0)

    def _batches(self, batch: int, epoch: int) -> Iterator[Batch]:
        waiting: list[Batch] = []
        rows = waiting_rows = 0
        for number, item in enumerate(self._items(epoch), 1):
            waiting.append(fit(self._arrays(item), self.inputs, f"{self.name} (batch {number})"))
            waiting_rows += int(waiting[-1][0].shape[0])
            rows += int(waiting[-1][0].shape[0])
            if waiting_rows < batch:
                continue
            joined = tuple(np.concatenate(parts) for parts in zip(*waiting, strict=True))
            whole = waiting_rows - waiting_rows % batch
            for start in range(0, whole, batch):
                yield tuple(part[start : start + batch] for part in joined)
            waiting = [tuple(part[whole:] for part in joined)]
            waiting_rows -= whole
        if waiting_rows:
            yield tuple(np.concatenate(parts) for parts in zip(*waiting, strict=True))
        if not rows:
            raise MbcError(
                "MBC233",
                f"{self.name} yields no rows",
                "begin anew at each call: it is called once an epoch, and an iterator that ended yields nothing more",
            )

    def _items(self, epoch: int) -> Iterable[Any]:
        takes_epoch = "epoch" in inspect.signature(self.function).parameters
        given: Any = self.function(epoch=epoch) if takes_epoch else self.function()
        if not isinstance(given, Iterable):
            raise MbcError(
                "MBC171",
                f"{self.name} returns {given!r:.40}, which holds no batches",
                "yield batches, or return a list or another iterable of them",
            )
        return cast("Iterable[Any]", given)

    def _arrays(self, item: Any) -> Mapping[str, Array]:
        if isinstance(item, Mapping):
            return {str(k): np.asarray(v) for k, v in cast("Mapping[Any, Any]", item).items()}
        parts: Sequence[Any] = cast("Sequence[Any]", item) if isinstance(item, tuple | list) else (item,)
        if len(parts) != len(self.inputs):
            raise MbcError(
                "MBC171",
                f"{self.name} yields {len(parts)} arrays a batch, the network has {len(self.inputs)} inputs: "
                + ", ".join(i.name for i in self.inputs),
                "yield a tuple of one array per input, in this order, or a dict with their names",
            )
        return {i.name: np.asarray(part) for i, part in zip(self.inputs, parts, strict=True)}


def open_data(place: str, inputs: Sequence[Input], part: str = "train") -> Data:
    """Data from an `.npz`, a folder of `.npy` (read as needed, not loaded whole) or `module:function`.

    Arrays are found by the names of the inputs, else as x/y, images/labels and the like, also with `_train` or
    `_test` (`part`) behind. Raises MBC171 to MBC176, MBC232 and MBC233.
    """
    path = Path(place)
    inputs = tuple(inputs)
    if path.exists():
        arrays = (
            {file.stem: _read_npy(file) for file in sorted(path.glob("*.npy"))} if path.is_dir() else _read_npz(path)
        )
        found = ArrayData(fit(arrays, inputs, place, part))
        if found.rows == 0:
            raise MbcError("MBC233", f"the data of '{place}' have no rows", "give one sample or more")
        return found
    module, colon, function = place.partition(":")
    if colon and module and function:
        return IterableData(_import(module, function), inputs, place)
    raise _no_data(place)


def check_place(place: str) -> None:
    """MBC172 unless `place` is a file, a folder or `module:function`: known before anything is planned or built."""
    module, _, function = place.partition(":")
    if not Path(place).exists() and not (module and function):
        raise _no_data(place)


def _no_data(place: str) -> MbcError:
    return MbcError(
        "MBC172",
        f"there is no data '{place}'",
        "give an .npz file, a folder of .npy files, or module:function that yields batches",
    )


def converted(batch: Batch, inputs: Sequence[Input]) -> Batch:
    """A batch in the element types of the inputs. MBC176 for a class number that does not fit 32 bits."""
    made: list[Array] = []
    for array, i in zip(batch, inputs, strict=True):
        cast_array = array.astype(_NUMPY_TYPES[i.type.dtype], copy=False)
        if i.is_class and array.dtype.itemsize > 4 and not np.array_equal(cast_array, array):
            raise MbcError("MBC176", f"the data for input '{i.name}' hold class numbers beyond 32 bits", "count from 0")
        made.append(cast_array)
    return tuple(made)


def has_part(place: str, inputs: Sequence[Input], part: str) -> bool:
    """Whether an `.npz` or a folder holds arrays for `part` under their own names (`x_test`)."""
    path = Path(place)
    if path.is_dir():
        names = {file.stem for file in path.glob("*.npy")}
    elif path.suffix == ".npz" and path.is_file():
        with np.load(path, allow_pickle=False) as archive:
            names = set(archive.files)
    else:
        return False
    return all(any(f"{name}_{part}" in names for name in _names(i, inputs)) for i in inputs)


def fit(arrays: Mapping[str, Array], inputs: Sequence[Input], place: str, part: str = "train") -> Batch:
    """The arrays of `inputs`, checked: same rows, the inputs' shapes and types."""
    chosen = tuple(_fit_one(arrays, i, inputs, place, part) for i in inputs)
    counts = {i.name: array.shape[0] for i, array in zip(inputs, chosen, strict=True)}
    if len(set(counts.values())) > 1:
        raise MbcError(
            "MBC174",
            f"the arrays of '{place}' differ in their rows: " + ", ".join(f"{k} {v}" for k, v in counts.items()),
            "each row of one array belongs to the same row of the others",
        )
    return chosen


def _names(i: Input, inputs: Sequence[Input]) -> tuple[str, ...]:
    alone = sum(other.is_class == i.is_class for other in inputs) == 1
    return (i.name, *((_CLASS_NAMES if i.is_class else _FLOAT_NAMES) if alone else ()))


def _fit_one(arrays: Mapping[str, Array], i: Input, inputs: Sequence[Input], place: str, part: str) -> Array:
    names = _names(i, inputs)
    found = next((n for name in names for n in (f"{name}_{part}", name) if n in arrays), None)
    if found is None:
        raise MbcError(
            "MBC173",
            f"'{place}' has no array for input '{i.name}' (it has: {', '.join(sorted(arrays)) or 'none'})",
            f"name it {' or '.join(dict.fromkeys(names))}",
        )
    array = arrays[found]
    sample = i.type.shape[1:]
    if array.ndim < 1 or _without_ones(array.shape[1:]) != _without_ones(sample):
        channels_last = len(sample) == 3 and array.shape[1:] == (*sample[1:], sample[0])
        raise MbcError(
            "MBC175",
            f"array '{found}' of '{place}' has the shape {array.shape}, "
            f"input '{i.name}' needs rows of the shape {tuple(sample)}",
            "put the channels first: numpy.moveaxis(array, -1, 1)" if channels_last
            else "reshape the array, or change the network's input",
        )  # fmt: skip
    if i.is_class and array.dtype.kind not in "iu":
        raise MbcError(
            "MBC176",
            f"array '{found}' of '{place}' holds {array.dtype}, input '{i.name}' needs class numbers",
            "give integers that count the classes from 0",
        )
    if not i.is_class and array.dtype.kind not in "fiu":
        raise MbcError("MBC176", f"array '{found}' of '{place}' holds {array.dtype}, not numbers", "give floats")
    if i.classes is not None:
        _check_classes(array, i.classes, found, place)
    # Only a slice is converted at a time by the module, so a memory-mapped array stays on disk.
    return array.reshape(array.shape[0], *sample)


def _check_classes(array: Array, classes: int, name: str, place: str) -> None:
    """MBC232 with the row of these data: a mini-batch would know its own, shuffled rows only."""
    if array.size == 0 or (int(array.min()) >= 0 and int(array.max()) < classes):
        return
    wrong = np.argwhere((array < 0) | (array >= classes))
    first = tuple(int(at) for at in wrong[0])
    more = f", and {len(wrong) - 1:,} more like it" if len(wrong) > 1 else ""
    raise MbcError(
        "MBC232",
        f"array '{name}' of '{place}' has class {int(array[first])} in row {first[0]:,}{more}: the network has "
        f"{classes} classes, 0 to {classes - 1}",
        "count rows and classes from 0, and correct the data, or give the network more classes",
    )


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _read_npz(file: Path) -> dict[str, Array]:
    try:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array, not an .npz archive")
        with cast("np.lib.npyio.NpzFile[Any]", loaded) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise MbcError(
            "MBC172", f"cannot read '{file}': {_why(error)}", "give an .npz written by numpy.savez"
        ) from None


def _read_npy(file: Path) -> Array:
    try:
        return cast("Array", np.load(file, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise MbcError("MBC172", f"cannot read '{file}': {_why(error)}", "write it with numpy.save") from None


def _why(error: Exception) -> str:
    """NumPy's own advice is to allow what may run any code."""
    return "it is no array of numbers, or holds Python objects" if "allow_pickle" in str(error) else str(error)


def _import(module: str, function: str) -> Callable[..., Iterable[Any]]:
    # A script's own folder is not on the path of an installed command; the current folder is what the user means.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise MbcError(
            "MBC172", f"cannot import {module}:{function}: {error}", "check the names, or add its folder to PYTHONPATH"
        ) from None
    if not callable(found):
        raise MbcError("MBC172", f"{module}:{function} is not a function", "name a function that yields batches")
    return cast("Callable[..., Iterable[Any]]", found)
