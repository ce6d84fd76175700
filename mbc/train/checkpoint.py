"""Checkpoints of a training: the module's weights file with, in its metadata, how far the training had come.

A safetensors file is 8 bytes of header length (little endian), a JSON header and the data; the header's
`__metadata__` is free text, which readers of weights pass over. So a checkpoint is also a weights file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from mbc.errors import MbcError

_KEY = "mbc.training"
_LARGEST_HEADER_BYTES = 100_000_000  # the limit of the format's own implementation


class Saves(Protocol):
    """What can write and read a weights file."""

    def save(self, path: str | Path) -> None: ...

    def load(self, path: str | Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """`epochs` are finished ones; `steps` those taken in them; `seed` shuffles and drives dropout."""

    epochs: int
    steps: int
    seed: int
    batch: int


def save_checkpoint(net: Saves, path: Path, progress: Progress) -> None:
    """Write weights and progress to `path`, whole or not at all. MBC180 where it cannot be written."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            net.save(folder / "weights")
            _add_metadata(folder / "weights", Path(name), {_KEY: json.dumps(asdict(progress))})
            Path(name).replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(name).unlink()
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None


def check_writable(path: Path) -> None:
    """MBC180 where a checkpoint could not be written: better known before the first epoch than after it."""
    if path.is_dir():
        raise _unwritable(path, "it is a folder")
    if not path.parent.is_dir():
        raise _unwritable(path, "its folder does not exist")
    if not os.access(path.parent, os.W_OK):
        raise _unwritable(path, "its folder cannot be written to")


def _unwritable(path: Path, reason: str) -> MbcError:
    return MbcError("MBC180", f"cannot write the checkpoint '{path}': {reason}", "choose a folder that exists")


def load_checkpoint(net: Saves, path: Path) -> Progress:
    """Load weights into `net`; returns how far the training had come. MBC181 for a file that is no checkpoint."""
    progress = read_progress(path)
    net.load(path)
    return progress


def read_progress(path: Path) -> Progress:
    """How far the training of a checkpoint had come, its weights left alone. MBC181 for a file that is none."""
    try:
        with path.open("rb") as file:
            header, _ = _read_header(file)
        metadata = cast("dict[str, Any]", header.get("__metadata__", {}))
        fields = cast("dict[str, int]", json.loads(metadata[_KEY]))
        return Progress(**{name: int(fields[name]) for name in Progress.__slots__})
    except KeyError:
        raise MbcError(
            "MBC181",
            f"'{path}' holds weights but not how far a training had come",
            "resume from a file that `mbc train --checkpoint` wrote, or load the weights with Module.load",
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MbcError(
            "MBC181", f"cannot read the checkpoint '{path}': {reason}", "give a file that `mbc train` wrote"
        ) from None


def _read_header(file: Any) -> tuple[dict[str, Any], int]:
    """The JSON header and the number of bytes before the data."""
    count = int.from_bytes(file.read(8), "little")
    if not 2 <= count <= _LARGEST_HEADER_BYTES:
        raise ValueError("it is not a safetensors file")
    text = file.read(count)
    if len(text) != count:
        raise ValueError("it is cut short")
    return json.loads(text), 8 + count


def _add_metadata(weights: Path, target: Path, metadata: dict[str, str]) -> None:
    with weights.open("rb") as source, target.open("wb") as out:
        header, _ = _read_header(source)
        header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data stays aligned to 8 bytes
        out.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
