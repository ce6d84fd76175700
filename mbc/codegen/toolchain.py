"""Finds the compilers, headers and libraries that turn a package's sources into a library.

The search order is: paths in the environment (CUDA_HOME, CUDA_PATH, CUDNN_HOME, CXX), PATH, NVIDIA's packages from PyPI
in this Python, the usual folders of toolkits.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TOOLKITS = ("/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda")
_SYSTEM_INCLUDES = ("/usr/include", "/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu")
_SYSTEM_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


@dataclass(frozen=True, slots=True)
class Missing:
    """A part that is missing: its name, its purpose, and how to get it."""

    name: str
    purpose: str
    remedy: str

    def __str__(self) -> str:
        """Return the part, its purpose and the remedy as one line."""
        return f"{self.name} ({self.purpose}): {self.remedy}"


@dataclass(frozen=True, slots=True)
class Part:
    """A folder of headers and the library to link, in the form that the linker needs: a file of `library_folder`."""

    include: Path
    library_folder: Path
    library: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Compilers and libraries; None for each that does not exist.

    `missing` is empty if every plan can be built, which does not need `cupti`.
    """

    nvcc: Path | None
    gxx: Path | None
    cudart: Part | None
    cudnn: Part | None
    cublaslt: Part | None
    architectures: tuple[str, ...]  # targets of nvcc: sm_75, ...
    missing: tuple[Missing, ...]
    cupti: Part | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Folders to search, beside those that the environment names; `system` holds pairs of headers and libraries."""

    toolkits: tuple[Path, ...] = ()
    wheels: tuple[Path, ...] = ()
    system: tuple[tuple[Path, Path], ...] = ()


NVCC = Missing(
    "nvcc", "compiles kernels", "install the CUDA toolkit 12.4 or newer and put nvcc on PATH, or set CUDA_HOME to it"
)
GXX = Missing("g++", "compiles host code", "install g++ 9 or newer, or set CXX to a C++17 compiler")
CUDART = Missing(
    "the CUDA runtime", "headers and library", "install the CUDA toolkit, or: pip install nvidia-cuda-runtime"
)
CUDNN = Missing(
    "cuDNN 9", "runs convolutions", "pip install 'nvidia-cudnn-cu13==9.19.*', or set CUDNN_HOME to an installation"
)
CUBLASLT = Missing(
    "cuBLASLt", "runs linear layers and 1 x 1 convolutions", "pip install nvidia-cublas, or install the CUDA toolkit"
)
CUPTI = Missing("CUPTI", "times what a GPU runs", "install all of the CUDA toolkit, or: pip install nvidia-cuda-cupti")


def find_toolchain(environment: Mapping[str, str] | None = None, places: Places | None = None) -> Toolchain:
    """Return the toolchain of this machine; parts that do not exist are listed in `missing`, and nothing is raised."""
    env = dict(os.environ) if environment is None else environment
    searched = places or _usual_places()
    gxx = _find_program(env, env.get("CXX") or "g++")
    toolkits = (*_named(env, "CUDA_HOME", "CUDA_PATH"), *searched.toolkits)
    wheels, system = searched.wheels, searched.system
    nvcc = _find_nvcc(env, toolkits, wheels)
    if nvcc is not None:
        toolkits = (*_roots_of(nvcc), *toolkits)
    named = _named(env, "CUDNN_HOME", "CUDNN_PATH")
    # The toolkit that nvcc belongs to comes first for the runtime, whose version must be nvcc's; PyPI's packages come
    # first for the libraries, because those are what a module loads when it runs.
    cudart = _part("cuda_runtime.h", ("libcudart_static.a", "libcudart.so.*"), _folders((*toolkits, *wheels)) + system)
    cudnn = _part("cudnn.h", ("libcudnn.so.9",), _folders((*named, *wheels, *toolkits)) + system)
    cublaslt = _part("cublasLt.h", ("libcublasLt.so.*",), _folders((*wheels, *toolkits)) + system)
    # The installers of toolkits put CUPTI into a folder of its own.
    roots = (root for toolkit in toolkits for root in (toolkit, toolkit / "extras" / "CUPTI"))
    cupti = _part("cupti.h", ("libcupti.so.*",), _folders((*roots, *wheels)) + system)
    needed = ((nvcc, NVCC), (gxx, GXX), (cudart, CUDART), (cudnn, CUDNN), (cublaslt, CUBLASLT))
    return Toolchain(
        nvcc,
        gxx,
        cudart,
        cudnn,
        cublaslt,
        _architectures(nvcc),
        tuple(missing for part, missing in needed if part is None),
        cupti,
    )


def _find_program(env: Mapping[str, str], name: str) -> Path | None:
    path = shutil.which(name, path=env.get("PATH", os.defpath))
    return Path(path) if path else None


def _named(env: Mapping[str, str], *names: str) -> tuple[Path, ...]:
    return tuple(Path(env[name]) for name in names if env.get(name) and Path(env[name]).is_dir())


def _usual_places() -> Places:
    toolkits = tuple(Path(root) for root in _TOOLKITS if Path(root).is_dir())
    return Places(toolkits, _wheels(), _system_folders())


def _wheels() -> tuple[Path, ...]:
    """Return the folders of NVIDIA's packages in this Python: nvidia/cu13, nvidia/cudnn; for CUDA 12 nvidia/cublas."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    return tuple(folder for root in roots if root.is_dir() for folder in sorted(root.iterdir()) if folder.is_dir())


def _find_nvcc(env: Mapping[str, str], toolkits: Iterable[Path], wheels: Iterable[Path]) -> Path | None:
    for root in (env.get("CUDA_HOME"), env.get("CUDA_PATH")):
        if root and (Path(root) / "bin" / "nvcc").is_file():
            return Path(root) / "bin" / "nvcc"
    on_path = _find_program(env, "nvcc")
    if on_path is not None:
        return on_path
    for root in (*toolkits, *wheels):
        if (root / "bin" / "nvcc").is_file():
            return root / "bin" / "nvcc"
    return None


def _roots_of(nvcc: Path) -> tuple[Path, ...]:
    """Return the toolkit that nvcc belongs to; a wrapper on PATH belongs to none."""
    root = nvcc.resolve().parent.parent
    return (root,) if (root / "include" / "cuda_runtime.h").is_file() else ()


def _folders(roots: Iterable[Path]) -> tuple[tuple[Path, Path], ...]:
    """Return pairs of a folder of headers and a folder of libraries."""
    return tuple(
        (include, library)
        for root in roots
        for include in (root / "include", root / "targets" / "x86_64-linux" / "include")
        for library in (root / "lib64", root / "lib", root / "targets" / "x86_64-linux" / "lib")
        if include.is_dir() and library.is_dir()
    )


def _system_folders() -> tuple[tuple[Path, Path], ...]:
    return tuple(
        (Path(include), Path(library))
        for include in _SYSTEM_INCLUDES
        for library in _SYSTEM_LIBRARIES
        if Path(include).is_dir() and Path(library).is_dir()
    )


def _part(header: str, libraries: tuple[str, ...], folders: Iterable[tuple[Path, Path]]) -> Part | None:
    for include, library_folder in folders:
        if not (include / header).is_file():
            continue
        for pattern in libraries:
            name = _newest(library_folder, pattern)
            if name is not None:
                return Part(include, library_folder, name)
    return None


def _newest(folder: Path, pattern: str) -> str | None:
    """Return the library with the highest major version: libcublasLt.so.13, not .12, and not libcublasLt.so.13.0.2."""
    names = [path.name for path in folder.glob(pattern) if re.search(r"(\.a|\.so\.\d+)$", path.name)]
    return max(names, key=lambda name: int(name.rpartition(".")[2]) if name[-1].isdigit() else 0, default=None)


def _architectures(nvcc: Path | None) -> tuple[str, ...]:
    if nvcc is None:
        return ()
    try:
        listed = subprocess.run(
            [str(nvcc), "--list-gpu-code"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.splitlines() if line.startswith("sm_"))
