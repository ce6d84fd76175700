"""Files of images and of their labels (`.npy`, `.npz`), opened at each use: a process may have few files open."""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mbc.errors import MbcError
from mbc.ops.base import Array
from mbc.runtime.formats import wrong_elements
from mbc.runtime.replace import replace_file
from mbc.train.archives import map_array, read_archive
from mbc.train.inputs import Input


@contextmanager
def reading(path: Path, remedy: str = "write it with numpy.save") -> Generator[None]:
    """Raise MBC172 for each error of a file that cannot be read."""
    try:
        yield
    except Exception as error:  # NumPy, zipfile and zlib raise errors of many types for damaged files
        # Without NumPy's advice to allow files that may run any code.
        why = "it is not an array of numbers, or holds Python objects" if "allow_pickle" in str(error) else str(error)
        raise MbcError("MBC172", f"cannot read '{path}': {why}", remedy) from None


def read_array(path: Path, names: Sequence[str] = ()) -> Array:
    """Return the array of an `.npy` file, mapped, or of an `.npz` file: its only one, or the one with such a name."""
    with reading(path):
        arrays = {"": map_array(path)} if path.suffix == ".npy" else read_archive(path)
        if (key := next((name for name in arrays if len(arrays) == 1 or name in names), None)) is None:
            raise ValueError(f"it has the arrays {', '.join(arrays) or 'none'}, but none called {' or '.join(names)}")
        return arrays[key]


class Volume:
    """A file of one image, [channels, *size], or of several, [rows, channels, *size]; labels have no channels.

    Attributes:
        path: The file.
        shape: The shape of the array.
        rows: Number of images; None for a file of one image without an axis for rows.
        size: The spatial size.
    """

    def __init__(self, path: Path, i: Input, names: Sequence[str]) -> None:
        """Open a file, and check that it fits an input.

        Args:
            path: The file.
            i: The input of the network that it feeds.
            names: Names of its array, if it is an `.npz` of several.

        Raises:
            MbcError: MBC172 if it cannot be read, MBC175 and MBC176 if it has another shape or other elements.
        """
        self.path, self._names = path, names
        array, wanted, first = read_array(path, names), i.type.shape, 1 if i.is_class else 2
        self.shape: tuple[int, ...] = array.shape
        self.rows = self.shape[0] if array.ndim == len(wanted) else None
        rowless = self.shape if self.rows is None else self.shape[1:]
        self.size = rowless[first - 1 :]
        if len(rowless) != len(wanted) - 1 or rowless[: first - 1] != wanted[1:first] or 0 in self.shape:
            form = ", ".join(map(str, (*wanted[1:first], *["any"] * len(wanted[first:]))))
            message = f"'{path}' has the shape {self.shape}, but an image of input '{i.name}' is [{form}]"
            raise MbcError("MBC175", message, "put the channels first, and give all images those of the input")
        if (wrong := wrong_elements(i.type.dtype, array.dtype)) is not None:
            raise MbcError("MBC176", f"'{path}' holds {array.dtype}, but input '{i.name}' needs {wrong[0]}", wrong[1])

    def read(self, region: Sequence[slice] = ()) -> Array:
        """Return a region of all rows and channels, mapped; the whole size if none is given."""
        return read_array(self.path, self._names)[..., *region]


def write_array(path: Path, array: Array) -> None:
    """Write an array as `.npy`, or as the only one of an `.npz`, whole or not at all; MBC386 if that is impossible."""
    buffer = io.BytesIO()
    try:
        np.save(buffer, array) if path.suffix == ".npy" else np.savez(buffer, predictions=array)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, (buffer.getbuffer(),))
    except OSError as error:
        message = f"cannot write '{path}': {error.strerror or error}"
        raise MbcError("MBC386", message, "choose a folder that can be written") from error
