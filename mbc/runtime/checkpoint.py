"""Checkpoints in the safetensors format: read by the format's own library, and written whole or not at all.

A file is the length of a JSON header (8 bytes, little endian), the header, and the tensors' bytes. The library decides
which files are valid. mbc writes the files itself: the library puts metadata in a different order every time, so that
equal trainings would not give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ops.rounding import from_bf16
from mbc.runtime.replace import replace_file

Array = NDArray[Any]

NAMES = {
    np.dtype(stored): name
    for stored, name in (
        ("<f8", "F64"), ("<f4", "F32"), ("<f2", "F16"), ("<i8", "I64"), ("<i4", "I32"), ("<i2", "I16"), ("i1", "I8"),
        ("<u8", "U64"), ("<u4", "U32"), ("<u2", "U16"), ("u1", "U8"), ("?", "BOOL"),
    )
}  # fmt: skip
FLOATING: frozenset[str] = frozenset(("F64", "F32", "F16", "BF16"))
INTEGERS: frozenset[str] = frozenset(("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8"))


def write_checkpoint(path: Path, tensors: Iterable[tuple[str, Array]], metadata: Mapping[str, str]) -> None:
    """Write named arrays to `path`, which replaces an existing file only after everything is written.

    Raises:
        MbcError: MBC162 if the file cannot be written.
    """
    named = [(name, np.asarray(array, order="C")) for name, array in tensors]
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, array in named:
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start aligned
    parts = (array.reshape(-1).view(np.uint8).data for _, array in named)
    try:
        replace_file(path, (len(text).to_bytes(8, "little"), text, *parts))
    except (OSError, ValueError) as error:  # ValueError: a path that the system does not accept
        raise MbcError("MBC162", f"cannot write checkpoint '{path}': {why(error)}", "choose another path") from error


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's entry in a checkpoint's header: the format's name of the type, and the shape."""

    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """A safetensors file that is open for reading."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its header.

        Raises:
            MbcError: MBC163 if the file is not a complete safetensors file.
        """
        self._path = path
        try:
            if path.exists() and not path.is_file():
                raise self._broken(OSError("it is not a file"))
            self._file: Any = cast(Any, safetensors).safe_open(path, framework="numpy")
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise self._broken(error) from error
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.tensors = {name: self._tensor(name) for name in cast("list[str]", self._file.keys())}

    def read(self, name: str) -> Array:
        """Return the array with this name."""
        return self.read_all((name,))[name]

    def read_all(self, names: Iterable[str]) -> dict[str, Array]:
        """Return the arrays with these names; bfloat16 is converted to float32.

        All tensors must have a type that NumPy has, or bfloat16.
        """
        names = tuple(names)
        halves = {name for name in names if self.tensors[name].dtype == "BF16"}
        try:
            arrays = {name: self._file.get_tensor(name) for name in names if name not in halves}
            if halves:  # NumPy has no bfloat16, so that the library cannot return such arrays
                everything: Any = cast(Any, safetensors).deserialize(self._path.read_bytes())
                bits = {name: np.frombuffer(entry["data"], "<u2") for name, entry in everything if name in halves}
                arrays |= {name: from_bf16(bits[name].reshape(self.tensors[name].shape)) for name in halves}
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise self._broken(error) from error  # the file was changed after it had been opened
        return arrays

    def _tensor(self, name: str) -> Tensor:
        shown = self._file.get_slice(name)
        return Tensor(shown.get_dtype(), tuple(shown.get_shape()))

    def _broken(self, error: Exception) -> MbcError:
        return MbcError(
            "MBC163",
            f"cannot read checkpoint '{self._path}': {why(error)}",
            "give a complete file in the safetensors format",
        )


def why(error: Exception) -> str:
    """Return the reason of a read or write error, without the name of the file."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text.removeprefix("Error while deserializing header: ")
