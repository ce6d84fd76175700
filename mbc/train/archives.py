"""Archives of arrays (`.npz`) from elsewhere: read only if their sizes are as stated and fit the machine's memory."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.files import check_file
from mbc.hardware.target import machine_memory_bytes
from mbc.units import show_size

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@contextmanager
def reading(path: Path, remedy: str = "write it with numpy.save") -> Generator[None]:
    """Raise MBC172 for each error of a file that cannot be read."""
    try:
        yield
    except MbcError:
        raise
    except Exception as error:  # NumPy, zipfile, zlib and nibabel raise errors of many types for damaged files
        # Without NumPy's advice to allow files that may run any code.
        why = "it is not an array of numbers, or holds Python objects" if "allow_pickle" in str(error) else str(error)
        raise MbcError("MBC172", f"cannot read '{path}': {why}", remedy) from None


def check_archive(path: Path) -> None:
    """Raise an error unless an archive's arrays have the sizes that their headers state, and fit the machine's memory.

    A small packed file can unpack to a large one. A file that is not an archive is accepted: NumPy reports it better.

    Raises:
        OSError: The path is not a regular file.
        ValueError: An array is not as long as its header states, parts of the archive overlap, or all arrays together
            are larger than the machine's memory.
        BadZipFile: The archive is damaged.
    """
    check_file(path.stat())
    if not zipfile.is_zipfile(path):  # NumPy's own message about a single array is better
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if sum(entry.compress_size for entry in entries) > path.stat().st_size:
            raise ValueError("its parts overlap")
        unpacked_bytes, memory_bytes = sum(entry.file_size for entry in entries), machine_memory_bytes()
        if memory_bytes is not None and unpacked_bytes > memory_bytes:
            raise ValueError(
                f"its unpacked size is {show_size(unpacked_bytes)}, more than this machine's memory of "
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
        raise ValueError(f"'{name}' is not an array of numbers") from error
    there_bytes = size_bytes - member.tell()
    if not dtype.hasobject and said_bytes != there_bytes:
        raise ValueError(f"'{name}' states {said_bytes} bytes, but has {there_bytes}")


def map_array(path: Path) -> NDArray[Any]:
    """Return the array of an `.npy` file, which is read from the file when it is used.

    Raises:
        OSError: The path is not a regular file.
        ValueError: The file is not an array, or not as long as its header states.
    """
    check_file(path.stat())
    with path.open("rb") as file:
        _check_length(path.name, path.stat().st_size, file)
    return cast("NDArray[Any]", np.load(path, mmap_mode="r", allow_pickle=False))


def read_archive(path: Path) -> dict[str, NDArray[Any]]:
    """Return all arrays of an `.npz` file by name.

    Raises:
        OSError: See `check_archive`.
        ValueError: See `check_archive`; or the file is a single array.
    """
    check_archive(path)
    loaded = np.load(path, allow_pickle=False)
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise ValueError("it is a single array, not an .npz archive")
    with cast("np.lib.npyio.NpzFile[Any]", loaded) as archive:
        return {name: archive[name] for name in archive.files}
