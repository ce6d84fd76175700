"""Arrays of a data set as inputs of a network: which is which, and whether shapes, types and classes are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.types import DType, TensorType
from mbc.runtime.formats import wrong_elements

Array = NDArray[Any]
Batch = tuple[Array, ...]  # one array per input of the network, in the network's order

# What people call the two arrays of a labelled data set. Used only where a network has one input of each sort.
_FLOAT_NAMES = ("x", "images", "image", "data", "inputs", "input")
_CLASS_NAMES = ("y", "labels", "label", "targets", "target", "classes")
_NUMPY_TYPES = {DType.FP32: np.float32, DType.FP64: np.float64, DType.INT32: np.int32, DType.UINT8: np.uint8}


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the network: `type.shape[0]` is the mini-batch. Labels are of `classes` classes, or `ignored`."""

    name: str
    type: TensorType
    classes: int | None = None
    ignored: tuple[int, ...] = ()

    @property
    def is_class(self) -> bool:
        return self.type.dtype is DType.INT32


def converted(batch: Batch, inputs: Sequence[Input]) -> Batch:
    """A batch in the element types of the inputs. MBC176 for a class number that does not fit 32 bits."""
    made: list[Array] = []
    for array, i in zip(batch, inputs, strict=True):
        cast_array = array.astype(_NUMPY_TYPES[i.type.dtype], copy=False)
        if i.is_class and array.dtype.itemsize > 4 and not np.array_equal(cast_array, array):
            raise MbcError("MBC176", f"the data for input '{i.name}' hold class numbers beyond 32 bits", "count from 0")
        made.append(cast_array)
    return tuple(made)


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


def names_of(i: Input, inputs: Sequence[Input]) -> tuple[str, ...]:
    alone = sum(other.is_class == i.is_class for other in inputs) == 1
    return (i.name, *((_CLASS_NAMES if i.is_class else _FLOAT_NAMES) if alone else ()))


def _fit_one(arrays: Mapping[str, Array], i: Input, inputs: Sequence[Input], place: str, part: str) -> Array:
    names = names_of(i, inputs)
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
        raise MbcError(
            "MBC175",
            f"array '{found}' of '{place}' has the shape {array.shape}, "
            f"input '{i.name}' needs rows of the shape {tuple(sample)}",
            _remedy_of_shape(i, array.shape[1:]),
        )
    if (wrong := wrong_elements(i.type.dtype, array.dtype)) is not None:
        needed, remedy = wrong
        raise MbcError(
            "MBC176", f"array '{found}' of '{place}' holds {array.dtype}, input '{i.name}' needs {needed}", remedy
        )
    if i.classes is not None:
        _check_classes(array, i.classes, i.ignored, found, place)
    # Only a slice is converted at a time by the module, so a memory-mapped array stays on disk.
    return array.reshape(array.shape[0], *sample)


def _check_classes(array: Array, classes: int, ignored: tuple[int, ...], name: str, place: str) -> None:
    """MBC232 with the row of these data: a mini-batch would know its own, shuffled rows only."""
    if array.size == 0 or (int(array.min()) >= 0 and int(array.max()) < classes):
        return
    wrong = np.argwhere(((array < 0) | (array >= classes)) & ~np.isin(array, ignored))
    if not len(wrong):
        return
    first = tuple(int(at) for at in wrong[0])
    more = f", and {len(wrong) - 1:,} more like it" if len(wrong) > 1 else ""
    raise MbcError(
        "MBC232",
        f"array '{name}' of '{place}' has class {int(array[first])} in row {first[0]:,}{more}: the network has "
        f"{classes} classes, 0 to {classes - 1}",
        "count rows and classes from 0, and correct the data, or give the network more classes",
    )


def _remedy_of_shape(i: Input, given: tuple[int, ...]) -> str:
    """Where an image's channels come last, or the network says that they do."""
    sample = i.type.shape[1:]
    last = len(sample) == 3 and given == (*sample[1:], sample[0])
    first = len(sample) == 3 and given == (sample[2], *sample[:2])
    if i.type.dtype is DType.UINT8 and (last or first):
        shape, order = ", ".join(map(str, given)), "hwc" if last else "chw"
        return f"declare it as input {i.name}[batch, {shape}] : uint8, and write augment(order={order}, …)"
    return "put the channels first: numpy.moveaxis(array, -1, 1)" if last else (
        "reshape the array, or change the network's input"
    )  # fmt: skip


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
