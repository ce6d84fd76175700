"""Arrays of a data set as inputs of a network: the array of each input, and checks of shape, type and classes."""

from __future__ import annotations

import math
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

# Usual names of the two arrays of a labelled data set. They are used only if a network has one input of each sort.
_PART_ELEMENTS = 1 << 24  # of labels that are checked together
_FLOAT_NAMES = ("x", "images", "image", "data", "inputs", "input")
_CLASS_NAMES = ("y", "labels", "label", "targets", "target", "classes")
_NUMPY_TYPES = {DType.FP32: np.float32, DType.FP64: np.float64, DType.INT32: np.int32, DType.UINT8: np.uint8}


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the network.

    Attributes:
        name: Name of the input.
        type: Type and shape; `type.shape[0]` is the mini-batch.
        classes: Labels are in [0, classes); None if the input holds no labels.
        ignored: Other class numbers that labels may have.
    """

    name: str
    type: TensorType
    classes: int | None = None
    ignored: tuple[int, ...] = ()

    @property
    def is_class(self) -> bool:
        """True if the input holds class numbers."""
        return self.type.dtype is DType.INT32


def converted(batch: Batch, inputs: Sequence[Input]) -> Batch:
    """Return a batch in the element types of the inputs.

    Raises:
        MbcError: MBC176 if a class number does not fit 32 bits.
    """
    arrays: list[Array] = []
    for array, i in zip(batch, inputs, strict=True):
        cast_array = array.astype(_NUMPY_TYPES[i.type.dtype], copy=False)
        if i.is_class and array.dtype.itemsize > 4 and not np.array_equal(cast_array, array):
            raise MbcError("MBC176", f"the data for input '{i.name}' hold class numbers beyond 32 bits", "count from 0")
        arrays.append(cast_array)
    return tuple(arrays)


def fit(arrays: Mapping[str, Array], inputs: Sequence[Input], place: str, part: str = "train") -> Batch:
    """Return the arrays of `inputs`, in their order, checked for rows, shapes, types and classes.

    Args:
        arrays: The arrays of the data set by name.
        inputs: The inputs of the network.
        place: Name of the data, for messages.
        part: Suffix of names, `train` or `test`.

    Raises:
        MbcError: MBC173 (no array for an input), MBC174 (different numbers of rows), MBC175 (shape), MBC176 (type),
            MBC232 (class numbers).
    """
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
    """Return the names under which the array of an input may be found, the best first."""
    alone = sum(other.is_class == i.is_class for other in inputs) == 1
    return (i.name, *((_CLASS_NAMES if i.is_class else _FLOAT_NAMES) if alone else ()))


def _fit_one(arrays: Mapping[str, Array], i: Input, inputs: Sequence[Input], place: str, part: str) -> Array:
    names = names_of(i, inputs)
    key = next((n for name in names for n in (f"{name}_{part}", name) if n in arrays), None)
    if key is None:
        raise MbcError(
            "MBC173",
            f"'{place}' has no array for input '{i.name}' (it has: {', '.join(sorted(arrays)) or 'none'})",
            f"name it {' or '.join(dict.fromkeys(names))}",
        )
    array = arrays[key]
    sample = i.type.shape[1:]
    if array.ndim < 1 or _without_ones(array.shape[1:]) != _without_ones(sample):
        raise MbcError(
            "MBC175",
            f"array '{key}' of '{place}' has the shape {array.shape}, but "
            f"input '{i.name}' needs rows of the shape {tuple(sample)}",
            _remedy_of_shape(i, array.shape[1:]),
        )
    if (wrong := wrong_elements(i.type.dtype, array.dtype)) is not None:
        needed, remedy = wrong
        raise MbcError(
            "MBC176", f"array '{key}' of '{place}' holds {array.dtype}, but input '{i.name}' needs {needed}", remedy
        )
    if i.classes is not None:
        check_classes(array, i.classes, i.ignored, f"array '{key}' of '{place}'")
    # The module converts only a slice at a time, so that a memory-mapped array stays on disk.
    return array.reshape(array.shape[0], *sample)


def check_classes(array: Array, classes: int, ignored: tuple[int, ...], name: str) -> None:
    """Check class numbers while their row in the data is known, which a shuffled mini-batch does not know.

    The array is read in parts, so that one on disk may be larger than the memory.

    Args:
        array: The class numbers, row by row.
        classes: Number of classes.
        ignored: Other class numbers that are allowed.
        name: Name of the array, for the message.

    Raises:
        MbcError: MBC232 with the first wrong position.
    """
    rows = max(1, _PART_ELEMENTS // max(1, math.prod(array.shape[1:])))
    count, place = 0, ""
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        if part.size and (int(part.min()) < 0 or int(part.max()) >= classes):
            wrong = np.argwhere(((part < 0) | (part >= classes)) & ~np.isin(part, ignored))
            if len(wrong) and not count:
                first = [start + int(wrong[0][0]), *map(int, wrong[0][1:])]
                place = f"class {int(part[tuple(wrong[0])])} {f'at {first}' if first[1:] else f'in row {first[0]:,}'}"
            count += len(wrong)
    if count:
        more = f", and {count - 1:,} more like it" if count > 1 else ""
        message = f"{name} has {place}{more}: the network has {classes} classes, 0 to {classes - 1}"
        remedy = "count rows and classes from 0, correct the data, give the network more classes, or use ignore_index"
        raise MbcError("MBC232", message, remedy)


def _remedy_of_shape(i: Input, given: tuple[int, ...]) -> str:
    """Return the remedy for a wrong shape, which depends on the order of an image's channels."""
    sample = i.type.shape[1:]
    last = len(sample) > 1 and given == (*sample[1:], sample[0])
    first = len(sample) == 3 and given == (sample[2], *sample[:2])
    if i.type.dtype is DType.UINT8 and len(sample) == 3 and (last or first):
        shape, order = ", ".join(map(str, given)), "hwc" if last else "chw"
        return f"declare it as input {i.name}[batch, {shape}] : uint8, and write augment(order={order}, …)"
    return "put the channels first: numpy.moveaxis(array, -1, 1)" if last else (
        "reshape the array, or change the network's input"
    )  # fmt: skip


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
