"""Images and labels in NIfTI files (`.nii`, `.nii.gz`), read and written by nibabel.

The spatial axes are those of nibabel, in the order of the file; channels are the last axis of a file, and the first one
here.
"""

from __future__ import annotations

import gzip
import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from mbc.errors import MbcError
from mbc.files import check_file
from mbc.hardware.target import machine_memory_bytes
from mbc.ops.base import Array
from mbc.train.archives import reading
from mbc.train.inputs import Input
from mbc.units import show_size

SUFFIXES = (".nii.gz", ".nii")


class NiftiArray:
    """The array of a NIfTI file, [channels, *size] or labels [*size], of which only the regions that are used are read.

    Attributes:
        shape: The shape.
        dtype: Type of the elements that are read: float32 of images, int32 of labels.
        affine: The matrix that maps voxels to millimetres.
    """

    def __init__(self, path: Path, i: Input) -> None:
        """Open a file.

        Args:
            path: The file.
            i: The input of the network that it feeds.

        Raises:
            MbcError: MBC172 if it cannot be read, MBC384 if nibabel is missing.
        """
        self._path, self._is_class, axes = path, i.is_class, len(i.type.shape) - (1 if i.is_class else 2)
        package = nibabel(path)
        with reading(path, "write it with nibabel.save"):
            check_file(path.stat())
            image = package.load(path)
            shape: tuple[int, ...] = image.shape
            size_bytes = math.prod(shape) * np.dtype(image.get_data_dtype()).itemsize
            if size_bytes > (machine_memory_bytes() or math.inf):  # a small packed file can unpack to a large one
                raise ValueError(f"its size is {show_size(size_bytes)}, more than this machine's memory")
            while len(shape) > axes and shape[-1] == 1:
                shape = shape[:-1]
            self._data, self._axes = image.dataobj.reshape(shape), axes
        self.affine: Array = image.affine
        channels = shape[axes:] if i.is_class else shape[axes:] or (1,)
        self.shape, self.ndim = (*channels, *shape[:axes]), len(channels) + len(shape[:axes])
        self.dtype = np.dtype(np.int32 if i.is_class else np.float32)

    def __getitem__(self, key: tuple[Any, ...]) -> Array:
        """Return a region, given as `...` and slices of the spatial axes; all of it without slices.

        Raises:
            MbcError: MBC172 if the file is damaged, MBC176 if labels are no whole numbers.
        """
        with reading(self._path, "write it with nibabel.save"):
            block = np.asanyarray(self._data[(*key[1:], ...)])
        has_channels = block.ndim > self._axes
        block = np.moveaxis(block, range(self._axes, block.ndim), range(block.ndim - self._axes))
        with np.errstate(invalid="ignore"):
            values = block.astype(self.dtype)
        if self._is_class and not np.array_equal(values, block):
            raise MbcError("MBC176", f"'{self._path}' has labels that are no whole numbers", "count classes from 0")
        return values if has_channels or self._is_class else values[None]


def grid(affine: Array) -> str:
    """Return voxel size, orientation (the directions of the axes, such as RAS) and origin as text."""
    sizes = " x ".join(f"{mm:.4g}" for mm in np.linalg.norm(affine[:3, :3], axis=0))
    codes = "".join(map(str, nibabel(Path()).aff2axcodes(affine)))
    return f"{sizes} mm, {codes}, origin {np.round(affine[:3, 3], 2).tolist()}"


def nifti_bytes(array: Array, axes: int, like: Path) -> bytes:
    """Return the content of a file with the affine and the units of another file, packed if that one is.

    Args:
        array: [*size] or [channels, *size].
        axes: Number of spatial axes.
        like: The other file.
    """
    package = nibabel(like)
    source = package.load(like)
    image = package.Nifti1Image(np.moveaxis(array, 0, -1) if array.ndim > axes else array, source.affine, source.header)
    image.set_data_dtype(array.dtype)
    content: bytes = image.to_bytes()
    return gzip.compress(content, mtime=0) if like.suffix == ".gz" else content


def nibabel(path: Path) -> Any:
    """Return the package that reads NIfTI, which is imported only where a file needs it; MBC384 if it is missing."""
    try:
        return importlib.import_module("nibabel")
    except ImportError as error:
        remedy = "pip install 'mbc-compiler[volumes]', or convert it to .npy"
        raise MbcError("MBC384", f"'{path}' needs the package nibabel: {error}", remedy) from error
