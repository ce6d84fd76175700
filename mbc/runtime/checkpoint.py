"""Checkpoints: the safetensors format, written whole or not at all.

A file is the length of a JSON header (8 bytes, little endian), the header, and the tensors' bytes. The header gives
each tensor's type, shape and range of bytes; see the format's page in the safetensors project.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ops.rounding import from_bf16

Array = NDArray[Any]

_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
_NAMES = {np.dtype(stored): name for name, stored in _TYPES.items() if name != "BF16"}
_LONGEST_HEADER_BYTES = 100_000_000  # the limit of the format's own library


def write_checkpoint(path: Path, tensors: Iterable[tuple[str, Array]], metadata: Mapping[str, str]) -> None:
    """Write named arrays to `path`, replacing what was there only when all is written; MBC162 when that fails."""
    named = [(name, np.ascontiguousarray(array)) for name, array in tensors]
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, array in named:
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start aligned
    temporary: str | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for _, array in named:
                file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise MbcError("MBC162", f"cannot write checkpoint '{path}': {reason}", "choose another place") from error


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a checkpoint. `start` and `stop` count bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Checkpoint:
    """A safetensors file, read tensor by tensor. Raises MBC163 when it is none, or not a whole one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size_bytes < 8 or not 2 <= length <= min(size_bytes - 8, _LONGEST_HEADER_BYTES):
                    raise self._broken("it does not start with a header")
                text = file.read(length)
        except OSError as error:
            raise self._broken(error.strerror or str(error)) from error
        try:
            header: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._broken("its header is not JSON") from error
        if not isinstance(header, dict):
            raise self._broken("its header is not an object")
        entries = cast(dict[str, Any], header)
        metadata = entries.pop("__metadata__", {})
        texts = cast(dict[str, Any], metadata) if isinstance(metadata, dict) else {}
        self.metadata = {key: text for key, text in texts.items() if isinstance(text, str)}
        self.tensors = {name: self._tensor(name, entry, 8 + length) for name, entry in entries.items()}
        needed = max((tensor.stop for tensor in self.tensors.values()), default=8 + length)
        if needed != size_bytes:
            raise self._broken(f"its header speaks of {needed} bytes, it has {size_bytes}")

    def read(self, name: str) -> Array:
        """The array called `name`; bfloat16 comes as float32."""
        tensor = self.tensors[name]
        with self._path.open("rb") as file:
            file.seek(tensor.start)
            data = file.read(tensor.stop - tensor.start)
        array = np.frombuffer(data, _TYPES[tensor.dtype]).reshape(tensor.shape)
        return from_bf16(array) if tensor.dtype == "BF16" else array

    def _tensor(self, name: str, entry: object, base: int) -> Tensor:
        try:
            fields = cast(dict[str, Any], entry)
            dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
            shape = tuple(int(size) for size in shape)
            size_bytes = math.prod(shape) * np.dtype(_TYPES[dtype]).itemsize
            sound = min(shape, default=0) >= 0 and start >= 0 and stop - start == size_bytes
        except (KeyError, TypeError, ValueError):
            sound = False
            dtype, shape, start, stop = "", (), 0, 0
        if not sound:
            raise self._broken(f"its entry '{name}' makes no sense")
        return Tensor(dtype, shape, base + start, base + stop)

    def _broken(self, why: str) -> MbcError:
        return MbcError(
            "MBC163", f"cannot read checkpoint '{self._path}': {why}", "give a whole file in the safetensors format"
        )
