"""Arrays that users pass to `step` and `forward`: NumPy, and anything with DLPack or `__cuda_array_interface__`.

All checks run before any byte is copied. Messages name the input, what was expected, and what was passed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import Operation, Ranks, TrainingGraph
from mbc.ir.types import DType, TensorType
from mbc.ops import KINDS as OPERATIONS
from mbc.ops.dice import Dice
from mbc.ops.weighted_cross_entropy import WeightedMean
from mbc.runtime.dlpack import KINDS, tensor_of
from mbc.runtime.formats import canonical_dtype, wrong_elements
from mbc.units import with_article

Array = NDArray[Any]

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_PINNED, _DLPACK_MANAGED = 1, 2, 3, 13


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A contiguous array in a GPU's memory.

    Attributes:
        address: Address of the first element.
        shape: Number of elements of each axis.
        dtype: NumPy type string (`f4`, `i8`, `bf2`).
        owner: Object that keeps the memory alive.
        stream: Handle of the stream whose queued work fills the array; None if there is nothing to wait for.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    owner: object
    stream: int | None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.dtype.lstrip("biuf"))


def rows_of(array: Array | DeviceArray, start: int, stop: int) -> Array | DeviceArray:
    """Return rows [start, stop) of an array, without a copy."""
    if not isinstance(array, DeviceArray):
        return array[start:stop]
    row_bytes = math.prod(array.shape[1:]) * array.itemsize
    return replace(array, address=array.address + start * row_bytes, shape=(stop - start, *array.shape[1:]))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirements on one input.

    Attributes:
        name: Name of the input.
        type: Type of the input for the whole mini-batch.
        per_sample: Whether the first axis counts the rows of the mini-batch.
        classes: Labels are in [0, classes); None if the input holds no labels.
        ignored: Class numbers outside this range that labels may also have.
    """

    name: str
    type: TensorType
    per_sample: bool
    classes: int | None = None
    ignored: tuple[int, ...] = ()


def received(wanted: Wanted, given: object, stream: int | None) -> Array | DeviceArray:
    """Return `given` as a canonical array of the wanted type, or as a device array.

    The number of rows is not checked here: see `check_rows`.

    Args:
        wanted: Requirements on the input.
        given: The array as the user passed it.
        stream: Handle of the stream that will read a device array; None if there is no GPU.

    Raises:
        MbcError: MBC146 (shape), MBC148 (type or layout), MBC149 (labels), MBC150 (not an array), MBC151 (the array is
            in a GPU's memory, but the module runs on the CPU).
    """
    array = given if isinstance(given, DeviceArray) else _host_or_device(wanted, given, stream)
    _check_shape(wanted, tuple(array.shape))
    if isinstance(array, DeviceArray):
        return _checked_device(wanted, array)
    return _checked_host(wanted, array)


def classes_of(graph: TrainingGraph, name: str) -> int | None:
    """Return the number of classes of an input's labels; None if the input is no label of a classifying loss."""
    values = graph.values
    counts = [values[o.inputs[0]].type.shape[1] for o in _labelled(graph, name)]
    return min(counts) if counts and values[name].type.dtype is DType.INT32 else None


def ignored_of(graph: TrainingGraph, name: str) -> tuple[int, ...]:
    """Return the class numbers that every loss of these labels ignores."""
    attributes = [o.attributes for o in _labelled(graph, name)]
    ignored = {a.ignored if isinstance(a, WeightedMean | Dice) else () for a in attributes}
    return ignored.pop() if len(ignored) == 1 else ()


def _labelled(graph: TrainingGraph, name: str) -> list[Operation]:
    """Return the operations that compute a loss or metric from this input of class numbers."""
    kinds = ((o, OPERATIONS[o.kind]) for o in graph.train)
    read = {name, *(v for o in graph.train if o.kind == "strided_slice" and o.inputs == (name,) for v in o.outputs)}
    return [o for o, kind in kinds if (kind.classifies or kind.labelled) and o.inputs[1] in read]


def wanted_inputs(graph: TrainingGraph, names: Sequence[str]) -> tuple[Wanted, ...]:
    """Return the requirements on some inputs of a network."""
    values = (graph.values[name] for name in names)
    return tuple(
        Wanted(v.name, v.type, v.per_sample, classes_of(graph, v.name), ignored_of(graph, v.name)) for v in values
    )


def check_rows(
    wanted: Sequence[Wanted],
    arrays: Sequence[Array | DeviceArray],
    batch: int,
    exact: bool,
    ranks: Ranks | None = None,
    rank: int = 0,
    accumulate: int = 1,
) -> int:
    """Return the number of rows that all per-sample arrays have in common.

    Args:
        wanted: Requirements on the inputs.
        arrays: One array for each of them.
        batch: Rows that one rank's step or forward pass takes at most.
        exact: Whether the number must be `batch`; otherwise it may be 1 to `batch`.
        ranks: The ranks that share the mini-batch; None for one process.
        rank: Number of this rank, for the message.
        accumulate: Number of mini-batches that `batch` covers, for the message.

    Raises:
        MbcError: MBC147 if the arrays have different numbers of rows, or a number that is not allowed.
    """
    counts = {w.name: a.shape[0] for w, a in zip(wanted, arrays, strict=True) if w.per_sample}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"'{name}' has {count}" for name, count in counts.items())
        raise MbcError("MBC147", f"inputs have different numbers of rows: {each}", "pass the same samples in each")
    rows = next(iter(counts.values()), batch)
    name = next(iter(counts), "")
    if exact and rows != batch and ranks is not None:
        first = ranks.first_row(rank)
        raise MbcError(
            "MBC147",
            f"input '{name}' has {rows} rows, a step of rank {rank} takes exactly {batch}, of {ranks.batch} that"
            f" {ranks.size} ranks share",
            f"pass rows [{first}:{first + batch}] of each mini-batch; batch (--set batch) counts the rows of all ranks",
        )
    if exact and rows != batch:
        each, rest = divmod(rows, accumulate)
        of = f" (accumulate: {accumulate} mini-batches of {batch // accumulate})" if accumulate > 1 else ""
        other = "" if rest or not each else f", or compile the network with --set batch={each}"
        raise MbcError(
            "MBC147", f"input '{name}' has {rows} rows, a step takes exactly {batch}{of}", f"pass {batch} rows{other}"
        )
    if not 1 <= rows <= batch:
        raise MbcError(
            "MBC147", f"input '{name}' has {rows} rows, forward takes 1 to {batch}", "pass the rows in several calls"
        )
    return rows


def _host_or_device(wanted: Wanted, given: Any, stream: int | None) -> Array | DeviceArray:
    if isinstance(given, np.ndarray):
        if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(cast(Array, given)):
            raise MbcError(
                "MBC150",
                f"input '{wanted.name}' is a masked array, whose masked elements would be read, too",
                "pass a plain array: array.filled(value)",
            )
        return cast(Array, given)
    try:
        place = given.__dlpack_device__()[0] if hasattr(given, "__dlpack_device__") else None
        if place in (_DLPACK_CUDA, _DLPACK_MANAGED) or (place is None and hasattr(given, "__cuda_array_interface__")):
            if stream is None:
                raise MbcError(
                    "MBC151",
                    f"input '{wanted.name}' is in the memory of a GPU, but the module runs on the CPU",
                    "pass a NumPy array (for a PyTorch tensor: tensor.cpu())",
                )
            return _from_dlpack(given, stream) if place is not None else _from_interface(given)
        if place in (_DLPACK_CPU, _DLPACK_PINNED):
            try:
                return np.from_dlpack(given)
            except BufferError:
                if not hasattr(given, "__array__"):
                    raise
        if hasattr(given, "__array__") or hasattr(given, "__array_interface__") or type(given) in (list, tuple):
            return np.asarray(given)
    except MbcError:
        raise
    except Exception as error:  # the object that was passed may raise any error
        raise MbcError(
            "MBC150", f"input '{wanted.name}' cannot be read: {error}", "pass a plain array without gradients"
        ) from error
    raise MbcError(
        "MBC150",
        f"input '{wanted.name}' is {with_article(type(given).__name__)}, which is not an array",
        "pass a NumPy array, or anything with DLPack or __cuda_array_interface__",
    )


def _check_shape(wanted: Wanted, shape: tuple[int, ...]) -> None:
    expected = wanted.type.shape
    compared = shape[1:] if wanted.per_sample else shape
    if len(shape) == len(expected) and compared == (expected[1:] if wanted.per_sample else expected):
        return
    first = ("rows", *expected[1:]) if wanted.per_sample else expected
    remedy = "pass it in that shape"
    if len(shape) == len(expected) and len(shape) > 2 and shape[-1:] + shape[1:-1] == expected[1:]:
        remedy = "put the channels second: for a NumPy array, np.moveaxis(array, -1, 1)"
    raise MbcError("MBC146", f"input '{wanted.name}' must have the shape {_shape(first)}, got {_shape(shape)}", remedy)


def _checked_host(wanted: Wanted, array: Array) -> Array:
    target = canonical_dtype(wanted.type.dtype)
    if (wrong := wrong_elements(wanted.type.dtype, array.dtype)) is not None:
        raise _wrong_type(wanted, str(array.dtype), *wrong)
    if wanted.type.dtype is DType.INT32:
        _check_labels(wanted, array)
    return array.astype(target, copy=False)


def _check_labels(wanted: Wanted, array: Array) -> None:
    """Check the range of labels if their number of classes is known, otherwise that integers fit 32 bits.

    Raises:
        MbcError: MBC149 with the first wrong label and its position.
    """
    limits = np.iinfo(np.int32)
    low, high = (0, wanted.classes) if wanted.classes is not None else (int(limits.min), int(limits.max) + 1)
    if array.size == 0 or (int(array.min()) >= low and int(array.max()) < high):
        return
    wrong = ((array < low) | (array >= high)) & ~np.isin(array, wanted.ignored)
    if not wrong.any():
        return
    position = tuple(int(axis[0]) for axis in np.nonzero(wrong))
    raise MbcError(
        "MBC149",
        f"input '{wanted.name}' has {int(array[position])} at {list(position)}, outside of [{low}, {high})",
        f"labels count from 0 to {high - 1}" if wanted.classes is not None else "pass smaller numbers",
    )


def _checked_device(wanted: Wanted, array: DeviceArray) -> DeviceArray:
    exact = {DType.FP32: "f4", DType.FP64: "f8", DType.INT32: "i4", DType.UINT8: "u1"}[wanted.type.dtype]
    # PyTorch's labels have 64 bits; the copy takes their low halves.
    if array.dtype != exact and not (exact == "i4" and array.dtype == "i8"):
        name = np.dtype(exact).name
        remedy = f"convert it on the GPU first (for a PyTorch tensor: tensor.to(torch.{name}))"
        raise _wrong_type(wanted, array.dtype, f"{name} on the GPU", remedy)
    return array


def _wrong_type(wanted: Wanted, got: str, expected: str, remedy: str) -> MbcError:
    return MbcError("MBC148", f"input '{wanted.name}' must hold {expected}, got {got}", remedy)


def _check_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> None:
    expected = unit
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            raise BufferError(f"on a GPU it must be contiguous, channels first; its strides are {strides}")
        expected *= size


def _from_interface(given: Any) -> DeviceArray:
    """Return the device array of an object with version 2 or 3 of the CUDA array interface (Numba's definition)."""
    fields: dict[str, Any] = given.__cuda_array_interface__
    shape, dtype = tuple(fields["shape"]), np.dtype(fields["typestr"])
    strides = fields.get("strides")
    if strides is not None:
        _check_contiguous(shape, tuple(strides), dtype.itemsize)
    return DeviceArray(int(fields["data"][0] or 0), shape, f"{dtype.kind}{dtype.itemsize}", given, fields.get("stream"))


def _from_dlpack(given: Any, stream: int) -> DeviceArray:
    """Return the device array of an object with DLPack, whose producer orders its work before `stream`.

    The capsule becomes the array's owner and frees the memory in the end.
    """
    capsule = given.__dlpack__(stream=stream)
    tensor = tensor_of(capsule)
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides:
        _check_contiguous(shape, tuple(tensor.strides[axis] for axis in range(tensor.ndim)), 1)
    dtype = f"{KINDS.get(tensor.code, '?')}{tensor.bits // 8}"
    return DeviceArray((tensor.data or 0) + tensor.byte_offset, shape, dtype, capsule, None)


def _shape(shape: Sequence[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"
