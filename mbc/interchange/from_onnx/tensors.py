"""Numbers of an ONNX file, in the file or in another file of its folder; sizes are checked before reading."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np

from mbc.errors import MbcError
from mbc.files import check_file
from mbc.interchange.program import NUMPY, Array
from mbc.interchange.refusal import printable
from mbc.units import show_size

# PyTorch's name for each TensorProto.DataType.
DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    16: "bfloat16",
}  # fmt: skip
_OTHERS = {4: "uint16", 8: "string", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128"}
_EXTERNAL = 1  # TensorProto.DataLocation
# The field of a TensorProto that holds the numbers if there are no raw bytes.
_FIELDS = {
    "float32": "float_data", "float64": "double_data", "int64": "int64_data", "uint8": "int32_data",
    "int8": "int32_data", "int16": "int32_data", "int32": "int32_data", "bool": "int32_data",
    "float16": "int32_data", "bfloat16": "int32_data",
}  # fmt: skip
LARGEST_SIZE = 1 << 47


def dtype_name(number: int) -> str:
    """Return PyTorch's name for a type of elements, also for a type that is not supported."""
    return DTYPES.get(number) or _OTHERS.get(number) or f"type {number}"


def read_tensor(tensor: Any, path: Path) -> Array:
    """Return the array of a TensorProto of the file `path`; bfloat16 is returned as its bits.

    Raises:
        MbcError: MBC351 if the numbers are missing or damaged, or have an unsupported type.
    """
    shown = printable(str(tensor.name)) or "a constant"
    shape = tuple(int(size) for size in tensor.dims)
    name = DTYPES.get(tensor.data_type)
    if name is None:
        _report_wrong(path, f"'{shown}' is of the type {dtype_name(tensor.data_type)}")
    dtype = NUMPY[name]
    if min(shape, default=0) < 0 or math.prod(shape) > LARGEST_SIZE:
        _report_wrong(path, f"'{shown}' has the shape {list(shape)}")
    size = math.prod(shape) * dtype.itemsize
    if tensor.data_location == _EXTERNAL:
        raw = _external(tensor, path, size, shown)
    elif tensor.HasField("raw_data"):
        raw = bytes(tensor.raw_data)
    else:
        values = getattr(tensor, _FIELDS[name])
        if len(values) != math.prod(shape):
            _report_wrong(path, f"'{shown}' {list(shape)} has {len(values)} numbers")
        if name in ("float16", "bfloat16"):  # stored as their bits
            return np.array(values, np.int64).astype(np.uint16).view(dtype).reshape(shape)
        return np.array(values, dtype).reshape(shape)
    if len(raw) != size:
        _report_wrong(path, f"'{shown}' {list(shape)} takes {show_size(size)}, and has {show_size(len(raw))}")
    return np.frombuffer(raw, dtype).reshape(shape).copy()


def _external(tensor: Any, path: Path, size: int, shown: str) -> bytes:
    """Return the bytes of a tensor in a file beside the model, which must be in the model's folder.

    Raises:
        MbcError: MBC351 if the file is elsewhere, is missing, or is too short.
    """
    said = {str(entry.key): str(entry.value) for entry in tensor.external_data}
    location = said.get("location", "")
    where = PurePosixPath(location)
    shown_location = printable(location)
    if not location or "\0" in location or "\\" in location or ":" in location or where.is_absolute():
        _report_wrong(path, f"'{shown}' has the location '{shown_location}', which is no file of its folder")
    folder = path.resolve().parent
    file = folder / where
    if ".." in where.parts or not file.resolve().is_relative_to(folder):
        _report_wrong(path, f"'{shown}' has the location '{shown_location}', outside of the model's folder")
    try:
        offset, length = int(said.get("offset", "0")), int(said.get("length", str(size)))
    except ValueError as error:
        _report_wrong(path, f"the place of '{shown}' in '{shown_location}' is damaged", cause=error)
    try:
        check_file(file.stat())
        there = file.stat().st_size
        if length != size or offset < 0 or offset + size > there:
            _report_wrong(
                path,
                f"'{shown}' takes {show_size(size)} from byte {offset} of '{shown_location}', "
                f"which has {show_size(there)}",
            )
        with file.open("rb") as opened:
            opened.seek(offset)
            return opened.read(size)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        _report_wrong(path, f"'{shown}' is in '{shown_location}', which cannot be read: {reason}", cause=error)


def _report_wrong(path: Path, reason: str, cause: BaseException | None = None) -> NoReturn:
    remedy = "keep the files of weights beside the model, as they were exported, or export it into one file"
    raise MbcError("MBC351", f"cannot read the weights of '{path}': {reason}", remedy) from cause
