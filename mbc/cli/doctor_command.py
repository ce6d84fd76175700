"""The command `mbc doctor`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mbc.errors import MbcError
from mbc.hardware.collective_times import Link
from mbc.hardware.datasheet import OLDEST_CAPABILITY, capability_of
from mbc.units import show_size
from mbc.version import __version__

if TYPE_CHECKING:
    from mbc.codegen.toolchain import Part
    from mbc.hardware.target import LocalGpu

_NO_GPU = "no training on a GPU here: modules run on the CPU, and plans can still be made for any GPU"
_ELSEWHERE = "plan for one elsewhere with --gpu (mbc gpus lists them)"
_NO_RANKS = "a training stays on one GPU"
_NO_CPU_RANKS = "a training on the CPU stays in one process"
_OF_RANKS = frozenset(("NCCL", "mpi4py", "launcher"))
_OF_RECORDS = frozenset(("CUPTI",))
_LINKS = {
    Link.NVLINK: "NVLink",
    Link.PCIE: "PCIe, with peer access,",
    Link.SHARED_MEMORY: "memory of the host, without peer access,",
    Link.SOCKET: "sockets",
}
_NO_RECORD = "what a step takes is not recorded (mbc train --record, mbc bench --record)"
LEAST_DRIVER = 580  # for CUDA 13
LEAST_TOOLKIT = (12, 4)
LEAST_CUDNN = (9, 19)  # the oldest with which kernels were measured and tested
_NO_BUILD = "packages are written with their sources but without the GPU library: they run on the CPU"


@dataclass(frozen=True, slots=True)
class Finding:
    """One part that mbc can use.

    Attributes:
        part: Name of the part.
        version: Version and place; None if the part is missing.
        cost: What mbc cannot do, because the part is missing or unusable; empty otherwise.
        remedy: How to get a usable one; empty if it is usable.
    """

    part: str
    version: str | None
    cost: str = ""
    remedy: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Print which parts are usable, the cost of each missing part and how to get it; return 0 in any case."""
    findings = tuple(examine())
    if arguments.json:
        print(json.dumps({"findings": [_document(finding) for finding in findings]}, indent=2))
        return 0
    width = max(len(finding.part) for finding in findings)
    for finding in findings:
        if finding.version is not None and finding.cost:
            cost = f"{finding.version}: {finding.cost}"
            print(f"unusable {finding.part:<{width}}  {cost}\n{'':<{width + 11}}do: {finding.remedy}")
        elif finding.version is not None:
            print(f"ok       {finding.part:<{width}}  {finding.version}")
        else:
            print(f"missing  {finding.part:<{width}}  {finding.cost}\n{'':<{width + 11}}get it: {finding.remedy}")
    missing = [finding.part for finding in findings if finding.version is None or finding.cost]
    print()
    here = "everything is here to compile for and train on this machine's GPU"
    if not set(missing) <= _OF_RANKS | _OF_RECORDS:
        here = f"without {', '.join(missing)}: planning and training on the CPU work all the same"
    else:
        for parts, cost in (
            (_OF_RANKS, "several processes cannot share a training"),
            (_OF_RECORDS, "no step is recorded"),
        ):
            if absent := [part for part in missing if part in parts]:
                here += f"; without {', '.join(absent)} {cost}"
    print(here)
    return 0


def examine() -> Iterator[Finding]:
    """Yield a finding for each part."""
    from mbc.codegen.toolchain import CUBLASLT, CUDART, CUDNN, CUPTI, GXX, NVCC, find_toolchain
    from mbc.hardware.target import current_gpu, local_gpus
    from mbc.hardware.topology import link_between

    yield Finding("mbc", f"{__version__} with Python {platform.python_version()} on {platform.machine()}")
    gpus, tools = local_gpus(), find_toolchain()
    if gpus:
        yield _driver(gpus[0].driver)
        for index, gpu in enumerate(gpus):
            yield _gpu(f"GPU {index}", gpu, tools.architectures)
        if len({gpu.name for gpu in gpus}) > 1 and (first := current_gpu()) is not None:
            yield Finding("unlike GPUs", f"plans are for {first.name}; CUDA_VISIBLE_DEVICES chooses another one")
        if len(gpus) > 1:
            link = link_between([gpu.uuid for gpu in gpus])
            yield Finding("link", f"{_LINKS[link]} between the GPUs (the slowest of any two)")
    else:
        install = "install NVIDIA's driver, 580 or newer for CUDA 13 (it brings nvidia-smi)"
        check = "nvidia-smi finds no GPU: check the driver, or give the container a GPU"
        yield Finding("driver", None, _NO_GPU, check if shutil.which("nvidia-smi") else install)
        yield Finding("GPU", None, _NO_GPU, _ELSEWHERE)

    makes = f", code for {tools.architectures[0]} to {tools.architectures[-1]}" if tools.architectures else ""
    yield _at_least(LEAST_TOOLKIT, _program("nvcc", tools.nvcc, r"release ([\d.]+)", makes, NVCC.remedy), NVCC.remedy)
    yield _program("g++", tools.gxx, r"(\d+\.\d+\.\d+)", "", GXX.remedy)
    yield _library("CUDA runtime", tools.cudart, "", "", CUDART.remedy)
    cudnn = _library("cuDNN", tools.cudnn, "cudnn_version.h", "CUDNN", CUDNN.remedy)
    yield _at_least(LEAST_CUDNN, cudnn, CUDNN.remedy)
    yield _library("cuBLASLt", tools.cublaslt, "cublas_api.h", "CUBLAS_VER", CUBLASLT.remedy)
    yield _library("CUPTI", tools.cupti, "", "", CUPTI.remedy, _NO_RECORD)

    if importlib.util.find_spec("pycuda") is not None:
        yield Finding("PyCUDA", _version("pycuda"))
    else:
        yield Finding(
            "PyCUDA", None, "modules run on the CPU: PyCUDA is what loads them on a GPU",
            "pip install 'mbc-compiler[cuda]' (builds PyCUDA: needs the CUDA toolkit and g++)",
        )  # fmt: skip
    yield from _rank_parts()


def _rank_parts() -> Iterator[Finding]:
    """Yield the parts that several ranks need: NCCL between GPUs, MPI between processes on CPUs, and a launcher."""
    from mbc.ranks.launch import mpiexec
    from mbc.ranks.mpi import INSTALL
    from mbc.runtime.nccl_library import nccl_path, open_nccl, version_text

    nccl = nccl_path()
    try:
        yield Finding("NCCL", f"{version_text(open_nccl(nccl).version)} ({nccl})")
    except MbcError as error:
        why = f": {error.message}" if nccl.exists() else ""
        yield Finding("NCCL", None, f"{_NO_RANKS}{why}", error.remedy)
    if importlib.util.find_spec("mpi4py") is not None:
        yield Finding("mpi4py", _version("mpi4py"))
    else:
        yield Finding("mpi4py", None, _NO_CPU_RANKS, INSTALL)
    others = [name for name in ("srun", "torchrun") if shutil.which(name)]
    with suppress(MbcError):
        others.insert(0, f"mpiexec ({mpiexec()})")
    if others:
        yield Finding("launcher", ", ".join(others))
    else:
        yield Finding("launcher", None, f"{_NO_CPU_RANKS}; --gpus on this machine's GPUs needs none", INSTALL)


def _at_least(needed: tuple[int, int], finding: Finding, remedy: str) -> Finding:
    """Return the finding, with its cost if the version is older than needed."""
    numbers = re.match(r"(\d+)\.(\d+)", finding.version or "")
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= needed:
        return finding
    return replace(finding, cost=f"older than {needed[0]}.{needed[1]}; {_NO_BUILD}", remedy=remedy)


def _program(name: str, path: Path | None, version: str, note: str, remedy: str) -> Finding:
    """Return the finding for a program; `version` is a pattern for the output of `--version`."""
    if path is None:
        return Finding(name, None, _NO_BUILD, remedy)
    try:
        output = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(name, None, _NO_BUILD, f"{path} does not run: {error}")
    match = re.search(version, output)
    return Finding(name, f"{match[1] if match else 'of unknown version'} ({path}{note})")


def _library(
    name: str, part: Part | None, header: str, prefix: str, remedy: str, cost: str = _NO_BUILD
) -> Finding:  # fmt: skip
    """Return the finding for a library, whose `header` defines <prefix>_MAJOR, _MINOR and _PATCH (or _PATCHLEVEL)."""
    if part is None:
        return Finding(name, None, cost, remedy)
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


def _driver(version: str) -> Finding:
    """Return the finding for the driver, which must support CUDA 13."""
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) >= LEAST_DRIVER:
        return Finding("driver", version)
    return Finding("driver", version, _NO_GPU, f"install NVIDIA's driver, {LEAST_DRIVER} or newer for CUDA 13")


def _gpu(part: str, gpu: LocalGpu, architectures: Sequence[str]) -> Finding:
    """Return the finding for a GPU.

    MIG must not divide it, mbc must have data on its architecture, and nvcc must compile for it (`architectures`, empty
    without nvcc).
    """
    from mbc.hardware.target import check_capability, mig_slice, sharing_text

    memory = f"{show_size(gpu.free_bytes)} of {show_size(gpu.memory_bytes)} free"
    version = ", ".join(filter(None, (f"{gpu.name} ({gpu.architecture})", memory, sharing_text(gpu))))
    if (divided := mig_slice()).startswith((gpu.name, "MIG-")):
        cost = f"CUDA sees only a slice that MIG divides off ({divided}); {_NO_GPU}"
        return Finding(part, version, cost, "switch MIG off: nvidia-smi -mig 0")
    if capability_of(gpu.architecture) < OLDEST_CAPABILITY:
        needed = f"{OLDEST_CAPABILITY // 10}.{OLDEST_CAPABILITY % 10}"
        return Finding(part, version, _NO_GPU, f"CUDA 13 and its libraries need compute capability {needed} or more")
    try:
        check_capability(gpu)
    except MbcError as error:
        return Finding(part, version, f"mbc has no data on this architecture; {_NO_GPU}", error.remedy)
    if architectures and gpu.architecture not in architectures:
        makes = f"nvcc makes code for {architectures[0]} to {architectures[-1]} only"
        return Finding(part, version, f"{makes}; {_NO_BUILD}", f"install a CUDA toolkit that has {gpu.architecture}")
    return Finding(part, version)


def _document(finding: Finding) -> dict[str, str | None]:
    return {"part": finding.part, "found": finding.version, "cost": finding.cost, "remedy": finding.remedy}
