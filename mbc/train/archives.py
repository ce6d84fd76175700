"""Archives of arrays (`.npz`) from elsewhere: read only where they hold as much as they say, and memory does."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mbc.files import check_file
from mbc.hardware.target import machine_memory_bytes
from mbc.units import show_size

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def check_archive(path: Path) -> None:
    """OSError where it is no regular file, ValueError where an array is not as long as its header says, or where all
    of them are longer than the machine's memory: little that is packed can unpack to much. BadZipFile for no archive.
    """
    check_file(path.stat())
    if not zipfile.is_zipfile(path):  # what NumPy says of a single array is better
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if sum(entry.compress_size for entry in entries) > path.stat().st_size:
            raise ValueError("its parts lie over each other")
        unpacked_bytes, memory_bytes = sum(entry.file_size for entry in entries), machine_memory_bytes()
        if memory_bytes is not None and unpacked_bytes > memory_bytes:
            raise ValueError(
                f"unpacked it has {show_size(unpacked_bytes)}, more than this machine's memory of "
                f"{show_size(memory_bytes)}"
            )
        for entry in entries:
            with archive.open(entry) as member:
                _check_length(entry.filename, entry.file_size, member)


def _check_length(name: str, size_bytes: int, member: IO[bytes]) -> None:
    try:
        header = _HEADERS[npy.read_magic(cast(Any, member))]
        shape, _, dtype = header(cast(Any, member))
        said_bytes = math.prod(shape) * dtype.itemsize
    except Exception as error:  # NumPy parses the header as Python, which fails in many ways
        raise ValueError(f"'{name}' is no array of numbers") from error
    there_bytes = size_bytes - member.tell()
    if not dtype.hasobject and said_bytes != there_bytes:
        raise ValueError(f"'{name}' says that it has {said_bytes} bytes, and has {there_bytes}")


def map_array(path: Path) -> NDArray[Any]:
    """The array of an `.npy`, read from the file as it is used. OSError and ValueError as `check_archive`."""
    check_file(path.stat())
    with path.open("rb") as file:
        _check_length(path.name, path.stat().st_size, file)
    return cast("NDArray[Any]", np.load(path, mmap_mode="r", allow_pickle=False))


def read_archive(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an `.npz`, by name. Raises what `check_archive` does, and ValueError for a single array."""
    check_archive(path)
    loaded = np.load(path, allow_pickle=False)
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise ValueError("it is a single array, not an .npz archive")
    with cast("np.lib.npyio.NpzFile[Any]", loaded) as archive:
        return {name: archive[name] for name in archive.files}
