"""Files of images and of their labels (`.npy`, `.npz`, NIfTI), opened at each use: few may be open at once."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mbc.errors import MbcError
from mbc.ops.base import Array
from mbc.runtime.formats import wrong_elements
from mbc.runtime.replace import replace_file
from mbc.train.archives import map_array, read_archive, reading
from mbc.train.inputs import Input
from mbc.train.nifti import SUFFIXES, NiftiArray, nifti_bytes


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
        affine: The matrix that maps voxels to millimetres; None for an array without one.
    """

    def __init__(self, path: Path, i: Input, names: Sequence[str]) -> None:
        """Open a file, and check that it fits an input.

        Args:
            path: The file.
            i: The input of the network that it feeds.
            names: Names of its array, if it is an `.npz` of several.

        Raises:
            MbcError: MBC172 if it cannot be read, MBC175 and MBC176 if it has another shape or other elements, MBC384
                if nibabel is missing.
        """
        self.path, self._names, self._input = path, names, i
        array, wanted, first = self._opened(), i.type.shape, 1 if i.is_class else 2
        self.affine = array.affine if isinstance(array, NiftiArray) else None
        self.shape: tuple[int, ...] = array.shape
        self.rows = self.shape[0] if array.ndim == len(wanted) else None
        rowless = self.shape if self.rows is None else self.shape[1:]
        self.size = rowless[first - 1 :]
        if len(rowless) != len(wanted) - 1 or rowless[: first - 1] != wanted[1:first] or 0 in self.shape:
            form = ", ".join(map(str, (*wanted[1:first], *["any"] * len(wanted[first:]))))
            message = f"'{path}' has the shape {self.shape}, but an image of input '{i.name}' is [{form}]"
            bare = not i.is_class and wanted[1] == 1 and array.ndim == len(wanted) - 2
            channels = "put the channels first, and give all images those of the input"
            raise MbcError("MBC175", message, "add an axis for the channel: array[None]" if bare else channels)
        if (wrong := wrong_elements(i.type.dtype, array.dtype)) is not None:
            raise MbcError("MBC176", f"'{path}' holds {array.dtype}, but input '{i.name}' needs {wrong[0]}", wrong[1])

    def read(self, region: Sequence[slice] = ()) -> Array:
        """Return a region of all rows and channels, mapped; the whole size if none is given."""
        return self._opened()[..., *region]

    def _opened(self) -> Array | NiftiArray:
        is_nifti = self.path.name.endswith(SUFFIXES)
        return NiftiArray(self.path, self._input) if is_nifti else read_array(self.path, self._names)


def write_array(path: Path, array: Array, axes: int, like: Path) -> None:
    """Write an array as `.npy`, as the only one of an `.npz`, or as NIfTI, whole or not at all.

    Args:
        path: The file; its suffix is that of `like`.
        array: [*size], or with channels or rows before.
        axes: Number of spatial axes.
        like: The file from which the array was computed.

    Raises:
        MbcError: MBC386 if it cannot be written.
    """
    buffer = io.BytesIO()
    try:
        if path.name.endswith(SUFFIXES):
            buffer.write(nifti_bytes(array, axes, like))
        else:
            np.save(buffer, array) if path.suffix == ".npy" else np.savez(buffer, predictions=array)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, (buffer.getbuffer(),))
    except OSError as error:
        message = f"cannot write '{path}': {error.strerror or error}"
        raise MbcError("MBC386", message, "choose a folder that can be written") from error
