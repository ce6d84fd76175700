"""The cuDNN that can be loaded on this machine, and its version."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

from mbc.errors import MbcError


def library_folders() -> Iterator[Path]:
    """Yield the folders of pip's `nvidia-cudnn` packages on Python's path, which may have libcudnn.so.9."""
    for entry in sys.path:
        folder = Path(entry or ".") / "nvidia" / "cudnn" / "lib"
        if folder.is_dir():
            yield folder


def _preload(site: Path) -> None:
    """Load from pip's packages the libraries that cuDNN opens by name only (cuBLASLt, NVRTC).

    If there are none, cuDNN uses copies of the system.
    """
    for pattern in ("*/lib/libcublas.so.*", "*/lib/libcublasLt.so.*", "*/lib/libnvrtc.so.*"):
        for path in sorted(site.glob(pattern)):
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue  # libcublas needs libcublasLt, which is loaded next; cuDNN reports libraries that it lacks


def load_cudnn() -> ctypes.CDLL:
    """Load the first cuDNN 9 of pip's packages, else the system's.

    Raises:
        MbcError: MBC078, there is none.
    """
    for folder in library_folders():
        _preload(folder.parent.parent)
        try:
            return ctypes.CDLL(str(folder / "libcudnn.so.9"), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    try:
        return ctypes.CDLL("libcudnn.so.9", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise MbcError(
            "MBC078", "cuDNN 9 was not found", "install the package 'nvidia-cudnn-cu13' or put libcudnn.so.9 on "
            "the library path"
        ) from error  # fmt: skip


def installed_cudnn() -> int:
    """Return the version number of the cuDNN that can be loaded, 91900 for 9.19.0; 0 if there is none."""
    try:
        library = load_cudnn()
    except MbcError:
        return 0
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return int(library.cudnnGetVersion())
