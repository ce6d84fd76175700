"""The cuDNN that can be loaded on this machine, and its version."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

from mbc.errors import MbcError


def library_folders() -> Iterator[Path]:
    """Folders that may hold libcudnn.so.9: those of pip's `nvidia-cudnn` package, wherever Python looks."""
    for entry in sys.path:
        folder = Path(entry or ".") / "nvidia" / "cudnn" / "lib"
        if folder.is_dir():
            yield folder


def _preload(site: Path) -> None:
    """Load what cuDNN opens by name only (cuBLASLt, NVRTC) from pip's packages; a system copy serves as well."""
    for pattern in ("*/lib/libcublas.so.*", "*/lib/libcublasLt.so.*", "*/lib/libnvrtc.so.*"):
        for path in sorted(site.glob(pattern)):
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue  # libcublas needs libcublasLt, which comes next: cuDNN will say what it misses


def load_cudnn() -> ctypes.CDLL:
    """The first cuDNN 9 of pip's packages, else the system's; MBC078 when there is none."""
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
    """Version number of the cuDNN that can be loaded here, 91900 for 9.19.0; 0 where none can."""
    try:
        library = load_cudnn()
    except MbcError:
        return 0
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return int(library.cudnnGetVersion())
