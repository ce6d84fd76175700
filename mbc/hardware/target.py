"""The GPU that a plan is for, and its free memory; nvidia-smi is asked, so that planning does not need CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mbc.errors import MbcError
from mbc.hardware.datasheet import read_sheet
from mbc.hardware.part import split_name, whole_name
from mbc.hardware.spec import DeviceSpec, device_specs, find_spec, part_of, spec_of

DEFAULT_GPU = "h200"
# The operating system cannot move pinned memory, so other programs lack it, and loading data needs memory too.
HOST_SHARE = 0.5
_MEMORY_FILES = ("/proc/meminfo", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class LocalGpu:
    """One GPU of this machine, as nvidia-smi reports it."""

    name: str
    driver: str
    architecture: str  # sm_90
    memory_bytes: int
    free_bytes: int
    uuid: str = ""
    bus_id: str = ""  # its PCI address


def local_gpus() -> tuple[LocalGpu, ...]:
    """Return the GPUs of this machine; none if there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = "name,driver_version,compute_cap,memory.total,memory.free,uuid,pci.bus_id"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus: list[LocalGpu] = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 7 and fields[3].isdigit() and fields[4].isdigit():
            name, driver, capability, total, free, uuid, bus_id = fields
            architecture = "sm_" + capability.replace(".", "")
            gpus.append(LocalGpu(name, driver, architecture, int(total) << 20, int(free) << 20, uuid, bus_id))
    return tuple(gpus)


def current_gpu() -> LocalGpu | None:
    """Return this machine's GPU on which a module would run: the first that CUDA_VISIBLE_DEVICES makes visible.

    Return None if no GPU is visible. GPUs are numbered as by nvidia-smi, in the order of the bus.
    """
    here = local_gpus()
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return next(iter(here), None)
    first = asked.split(",")[0].strip()
    if first.isdecimal():
        return here[int(first)] if int(first) < len(here) else None
    return next((gpu for gpu in here if first.startswith("GPU-") and gpu.uuid.startswith(first)), None)


def find_device(gpu: str) -> DeviceSpec:
    """Return the spec of a GPU.

    Args:
        gpu: A name; `auto` for the GPU on which a module would run on this machine, else the default GPU; `NAME@N` for
            N of a GPU's multiprocessors; a file `*.json` with the datasheet of one's own card. A GPU of this machine
            that is not listed gets the spec of the listed one of its architecture with the nearest memory size.

    Raises:
        MbcError: MBC069, the file is no datasheet; MBC070, no GPU of that name is listed; MBC071, no listed GPU has
            the architecture of this machine's; MBC286, the part is not possible.
    """
    whole, multiprocessors = split_name(gpu)
    if multiprocessors is not None:
        return part_of(find_device(whole), multiprocessors)
    if gpu.endswith(".json"):
        return spec_of(read_sheet(Path(gpu)))
    if gpu != "auto":
        return find_spec(gpu)
    here = current_gpu()
    if here is None:
        return find_spec(DEFAULT_GPU)
    specs = device_specs().values()
    for spec in specs:
        if spec.name == here.name:
            return spec
    alike = [spec for spec in specs if spec.architecture == here.architecture]
    if not alike:
        raise MbcError(
            "MBC071",
            f"mbc has no data on the GPU of this machine, {here.name} ({here.architecture})",
            f"choose a GPU with --gpu: {', '.join(device_specs())}",
        )
    nearest = min(alike, key=lambda spec: abs(spec.memory_bytes - here.memory_bytes))
    return replace(nearest, name=here.name, memory_bytes=here.memory_bytes, overhead_bytes=0, measured=False)


def free_bytes(device: DeviceSpec, gpu: str) -> int:
    """Return the memory that a module may use: the free memory of this machine's GPU if the plan is for it, else all.

    The driver counts bytes as free that CUDA cannot allocate (on an H200 0.6 GB).
    """
    here = current_gpu() if whole_name(gpu) == "auto" else None
    same = here is not None and here.name == whole_name(device.name)
    return min(here.free_bytes, device.memory_bytes) if here is not None and same else device.memory_bytes


def free_host_bytes(device: DeviceSpec, gpu: str, modules: int = 1) -> int | None:
    """Return the host memory that each of `modules` modules on one machine may pin, None for no limit.

    If the plan is for this machine, all together may pin half of its memory.
    """
    total = local_memory_bytes(device, gpu)
    return None if total is None else int(total * HOST_SHARE / modules)


def local_memory_bytes(device: DeviceSpec, gpu: str) -> int | None:
    """Return `machine_memory_bytes` if the plan is for this machine, else None."""
    if whole_name(gpu) != "auto" or all(here.name != whole_name(device.name) for here in local_gpus()):
        return None
    return machine_memory_bytes()


def machine_memory_bytes(files: Iterable[str] = _MEMORY_FILES) -> int | None:
    """Return the machine's memory, or the limit of this process's control group if that is lower; None if unknown."""
    limits_bytes: list[int] = []
    for file in files:
        try:
            words = Path(file).read_text(encoding="ascii").split()
        except (OSError, UnicodeDecodeError):
            continue
        if words[:1] == ["MemTotal:"]:
            limits_bytes.append(int(words[1]) << 10)  # /proc/meminfo gives KiB and calls them kB
        elif words and words[0].isdigit():
            limits_bytes.append(int(words[0]))
    return min(limits_bytes, default=None)
