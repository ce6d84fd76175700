"""`mbc doctor`"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mbc import __version__

if TYPE_CHECKING:
    from mbc.codegen.toolchain import Part

_NO_GPU = "no training on a GPU here: modules run on the CPU, and plans can still be made for any GPU"
_NO_BUILD = "packages are written with their sources but without the GPU library: they run on the CPU"


@dataclass(frozen=True, slots=True)
class Finding:
    """One part that mbc can use. `cost` and `remedy` are empty where it was found."""

    part: str
    found: str | None
    cost: str = ""
    remedy: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Say what is here; nothing that is missing makes this fail."""
    findings = tuple(examine())
    if arguments.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
        return 0
    width = max(len(finding.part) for finding in findings)
    for finding in findings:
        if finding.found is not None:
            print(f"ok       {finding.part:<{width}}  {finding.found}")
        else:
            print(f"missing  {finding.part:<{width}}  {finding.cost}\n{'':<{width + 11}}get it: {finding.remedy}")
    missing = [finding.part for finding in findings if finding.found is None]
    print()
    print(
        "everything is here to compile for and train on this machine's GPU" if not missing
        else f"without {', '.join(missing)}: planning and training on the CPU work all the same"
    )  # fmt: skip
    return 0


def examine() -> Iterator[Finding]:
    """Every part in turn."""
    from mbc.codegen.toolchain import CUBLASLT, CUDART, CUDNN, GXX, NVCC, find_toolchain
    from mbc.hardware.target import local_gpus

    yield Finding("mbc", f"{__version__} with Python {platform.python_version()} on {platform.machine()}")
    gpus = local_gpus()
    if gpus:
        yield Finding("driver", gpus[0].driver)
        for index, gpu in enumerate(gpus):
            memory = f"{gpu.free_bytes / 1e9:.1f} of {gpu.memory_bytes / 1e9:.1f} GB free"
            yield Finding(f"GPU {index}", f"{gpu.name} ({gpu.architecture}), {memory}")
    elif shutil.which("nvidia-smi"):
        yield Finding("driver", None, _NO_GPU, "nvidia-smi finds no GPU: check the driver, or give the container a GPU")
        yield Finding("GPU", None, _NO_GPU, "plan for one elsewhere with --gpu (mbc gpus lists them)")
    else:
        yield Finding(
            "driver", None, _NO_GPU, "install NVIDIA's driver, 580 or newer for CUDA 13 (it brings nvidia-smi)"
        )
        yield Finding("GPU", None, _NO_GPU, "plan for one elsewhere with --gpu (mbc gpus lists them)")

    tools = find_toolchain()
    makes = f", code for {tools.architectures[0]} to {tools.architectures[-1]}" if tools.architectures else ""
    yield _program("nvcc", tools.nvcc, r"release ([\d.]+)", makes, NVCC.remedy)
    yield _program("g++", tools.gxx, r"(\d+\.\d+\.\d+)", "", GXX.remedy)
    yield _library("CUDA runtime", tools.cudart, "", "", CUDART.remedy)
    yield _library("cuDNN", tools.cudnn, "cudnn_version.h", "CUDNN", CUDNN.remedy)
    yield _library("cuBLASLt", tools.cublaslt, "cublas_api.h", "CUBLAS_VER", CUBLASLT.remedy)

    if importlib.util.find_spec("pycuda") is not None:
        yield Finding("PyCUDA", _version("pycuda"))
    else:
        yield Finding(
            "PyCUDA", None, "modules run on the CPU: PyCUDA is what loads them on a GPU",
            "pip install 'mbc-compiler[cuda]' (builds PyCUDA: needs the CUDA toolkit and g++)",
        )  # fmt: skip


def _program(name: str, path: Path | None, version: str, note: str, remedy: str) -> Finding:
    """`version`: a pattern of what `--version` prints."""
    if path is None:
        return Finding(name, None, _NO_BUILD, remedy)
    try:
        told = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(name, None, _NO_BUILD, f"{path} does not run: {error}")
    match = re.search(version, told)
    return Finding(name, f"{match[1] if match else 'of unknown version'} ({path}{note})")


def _library(name: str, part: Part | None, header: str, prefix: str, remedy: str) -> Finding:
    """`header` defines <prefix>_MAJOR, _MINOR and _PATCH (or _PATCHLEVEL)."""
    if part is None:
        return Finding(name, None, _NO_BUILD, remedy)
    place = part.library_folder / part.library
    file = part.include / header
    if not header or not file.is_file():
        return Finding(name, str(place))
    pattern = rf"#define {prefix}_(?:MAJOR|MINOR|PATCH|PATCHLEVEL)\s+(\d+)"
    return Finding(name, f"{'.'.join(re.findall(pattern, file.read_text(errors='replace')))} ({place})")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
