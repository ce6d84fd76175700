"""The GPU that a plan is for, and its free memory; nvidia-smi is asked, so that planning does not need CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mbc.errors import MbcError
from mbc.hardware.card_file import read_sheet
from mbc.hardware.datasheet import OLDEST_CAPABILITY, Datasheet, capability_of
from mbc.hardware.driver_card import driver_cards, spec_of_card
from mbc.hardware.part import split_name, whole_name
from mbc.hardware.spec import DeviceSpec, device_specs, find_spec, known_spec, restricted, spec_like, spec_of_sheet
from mbc.options import UNLIMITED_BYTES
from mbc.units import show_size

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
    card: Datasheet | None = None  # its figures by the driver; None for a GPU that CUDA does not see


def local_gpus() -> tuple[LocalGpu, ...]:
    """Return the GPUs of this machine; none if there is no driver."""
    query = "name,driver_version,compute_cap,memory.total,memory.free,uuid,pci.bus_id"
    rows = ask_nvidia_smi(f"--query-gpu={query},pcie.link.gen.max,pcie.link.width.max")
    cards = {card.uuid: card.sheet for card in driver_cards()} if rows else {}
    gpus = (_local_gpu(row, cards.get(row[5])) for row in rows if len(row) == 9)
    return tuple(gpu for gpu in gpus if gpu is not None)


def ask_nvidia_smi(query: str) -> list[list[str]]:
    """Return the fields of each line of nvidia-smi's answer; nothing if there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in answer.splitlines()]


def _local_gpu(row: Sequence[str], card: Datasheet | None) -> LocalGpu | None:
    """Return a GPU of nvidia-smi, which does not know the memory that a GPU shares with the host."""
    name, driver, capability, total, free, uuid, bus_id, generation, lanes = row
    if card is not None and generation.isdigit() and lanes.isdigit() and int(generation) and int(lanes):
        card = replace(card, pcie_generation=int(generation), pcie_lanes=int(lanes))
    if total.isdigit() and free.isdigit():
        total_bytes, free_bytes = int(total) << 20, int(free) << 20
    elif card is not None:
        total_bytes = card.memory_bytes
        free_bytes = min(total_bytes, machine_memory_bytes(word="MemAvailable:") or total_bytes)
    else:
        return None
    architecture = "sm_" + capability.replace(".", "") if card is None else card.architecture
    return LocalGpu(name, driver, architecture, total_bytes, free_bytes, uuid, bus_id, card)


def current_gpu() -> LocalGpu | None:
    """Return this machine's GPU on which a module would run: the first that CUDA sees.

    Return None if no GPU is visible. Without the driver's answer it is the first that CUDA_VISIBLE_DEVICES names, where
    GPUs are numbered as by nvidia-smi, in the order of the bus; CUDA numbers unlike GPUs from the fastest on.
    """
    here = local_gpus()
    if here and (cards := driver_cards()):
        first_seen = next((gpu for gpu in here if gpu.uuid == cards[0].uuid), None)
        if first_seen is not None:
            return first_seen
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return next(iter(here), None)
    first = asked.split(",")[0].strip()
    if first.isdecimal():
        return here[int(first)] if int(first) < len(here) else None
    return next((gpu for gpu in here if first.startswith("GPU-") and gpu.uuid.startswith(first)), None)


def check_presence() -> None:
    """Raise an error if this machine has no GPU on which a module would run.

    Raises:
        MbcError: MBC070, there is none.
    """
    if current_gpu() is None:
        raise MbcError(
            "MBC070",
            "this machine has no GPU that 'auto' could mean",
            "name a GPU that `mbc gpus` lists, or let `mbc doctor` say what is missing here",
        )


def find_device(gpu: str) -> DeviceSpec:
    """Return the spec of a GPU.

    Args:
        gpu: A name; `auto` for the GPU on which a module would run on this machine, else the default GPU; `NAME@N` for
            N of a GPU's multiprocessors; `NAME@sm_80` for its pose as this architecture; a file `*.json` with
            the datasheet of one's own card.

    Raises:
        MbcError: MBC069, the file is no datasheet; MBC070, no GPU of that name is listed; MBC071, no listed GPU has
            the architecture of this machine's, or it is too old; MBC085, MIG divides it; MBC286, the part is not
            possible; MBC288, the pose is not possible.
    """
    name = split_name(gpu)
    if name.whole != gpu:
        return restricted(find_device(name.whole), name)
    if gpu.endswith(".json"):
        return spec_of_sheet(read_sheet(Path(gpu))[0])
    if gpu != "auto":
        return find_spec(gpu)
    if part := mig_slice():
        raise MbcError(
            "MBC085",
            f"MIG divides the GPU of this machine, and CUDA sees only a slice ({part})",
            "switch MIG off (nvidia-smi -mig 0), or describe the slice in a file: --gpu card.json",
        )
    here = current_gpu()
    if here is None:
        return find_spec(DEFAULT_GPU)
    return spec_of_gpu(here)


def is_default(gpu: str) -> bool:
    """Return whether `find_device` takes the default GPU, because this machine has none that mbc can use."""
    return whole_name(gpu) == "auto" and current_gpu() is None


def spec_of_gpu(gpu: LocalGpu) -> DeviceSpec:
    """Return the spec of a GPU of this machine.

    If CUDA does not see the GPU, it is the listed one of its name, or of its architecture with the nearest memory.

    Raises:
        MbcError: MBC071, mbc has no data on the architecture.
    """
    check_capability(gpu)
    if gpu.card is not None:
        return replace(spec_of_card(gpu.card), name=gpu.name)
    if (named := known_spec(gpu.name)) is not None:
        return named
    alike = [spec for spec in device_specs().values() if spec.architecture == gpu.architecture]
    nearest = min(alike, key=lambda spec: abs(spec.memory_bytes - gpu.memory_bytes))
    return replace(nearest, name=gpu.name, memory_bytes=gpu.memory_bytes, overhead_bytes=0, measured=False)


def local_spec(name: str, architecture: str) -> DeviceSpec:
    """Return the spec of the GPU with this driver name, or of a part or pose of it; the driver's if no list has it."""
    whole = split_name(name).whole
    alike = (gpu.card for gpu in local_gpus() if gpu.name == whole and gpu.card is not None)
    card = next(alike, None) if known_spec(name) is None else None
    return spec_like(name, architecture, None if card is None else spec_of_card(card).sheet)


def mig_slice() -> str:
    """Return the name of the slice of a GPU on which a module would run, if MIG divides the GPU; else an empty text."""
    cards, asked = driver_cards(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if cards:
        return cards[0].sheet.name if cards[0].is_slice else ""
    return asked.split(",")[0] if asked.startswith("MIG-") else ""


def sharing_text(gpu: LocalGpu) -> str:
    """Say which other processes use the GPU; empty without any."""
    rows = ask_nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory")
    of_gpu = [row for row in rows if len(row) == 3 and row[0] == gpu.uuid and row[1] != str(os.getpid())]
    if not of_gpu:
        return ""
    used = sum(int(row[2]) << 20 for row in of_gpu if row[2].isdigit())
    listed = f"process{'es' if len(of_gpu) > 1 else ''} {', '.join(row[1] for row in of_gpu)}"
    return f"shared with {listed} ({show_size(used)}): measured times are then too long"


def check_capability(gpu: LocalGpu) -> None:
    """Raise an error if mbc has no data on the GPU's architecture.

    Raises:
        MbcError: MBC071, the compute capability is too old, unknown, or newer than any that mbc has data on.
    """
    capability = capability_of(gpu.architecture)
    if capability in {capability_of(spec.architecture) for spec in device_specs().values()}:
        return
    if capability < OLDEST_CAPABILITY:
        why = f"has compute capability {capability / 10:.1f}, and CUDA 13 needs {OLDEST_CAPABILITY / 10:.1f} or more"
        remedy = 'choose a GPU with --gpu, or train here with device="cpu"'
    else:
        why = f"has an architecture on which mbc has no data ({gpu.architecture})"
        remedy = "choose a GPU of an older architecture with --gpu: newer GPUs run most of its packages (docs/gpu.md)"
    raise MbcError("MBC071", f"the GPU of this machine, {gpu.name}, {why}", remedy)


def free_bytes(device: DeviceSpec, gpu: str) -> int:
    """Return the memory that a module may use: the free memory of this machine's GPU if the plan is for it, else all.

    The driver counts bytes as free that CUDA cannot allocate (on an H200 0.6 GB).
    """
    here = _card_here(device, gpu)
    return device.memory_bytes if here is None else min(here.free_bytes, device.memory_bytes)


def is_here(device: DeviceSpec, gpu: str) -> bool:
    """Return whether the plan is for this machine's GPU, so that its driver said what memory is free."""
    return _card_here(device, gpu) is not None


def _card_here(device: DeviceSpec, gpu: str) -> LocalGpu | None:
    here = current_gpu() if whole_name(gpu) == "auto" else None
    return here if here is not None and here.name == whole_name(device.name) else None


def free_host_bytes(device: DeviceSpec, gpu: str, modules: int = 1) -> int:
    """Return the host memory that each of `modules` modules on one machine may pin, UNLIMITED_BYTES for no limit.

    If the plan is for this machine, all together may pin half of its memory.
    """
    total = local_memory_bytes(device, gpu)
    return UNLIMITED_BYTES if total is None else int(total * HOST_SHARE / modules)


def local_memory_bytes(device: DeviceSpec, gpu: str) -> int | None:
    """Return `machine_memory_bytes` if the plan is for this machine, else None."""
    if whole_name(gpu) != "auto" or all(here.name != whole_name(device.name) for here in local_gpus()):
        return None
    return machine_memory_bytes()


def machine_memory_bytes(files: Iterable[str] = _MEMORY_FILES, word: str = "MemTotal:") -> int | None:
    """Return the machine's memory, or the limit of this process's control group if that is lower; None if unknown.

    Args:
        files: The files to read.
        word: The entry of /proc/meminfo: all memory, or what is available.
    """
    limits_bytes: list[int] = []
    for file in files:
        try:
            words = Path(file).read_text(encoding="ascii").split()
        except (OSError, UnicodeDecodeError):
            continue
        if words[:1] == ["MemTotal:"] and word in words[:-1]:
            limits_bytes.append(int(words[words.index(word) + 1]) << 10)  # /proc/meminfo gives KiB and calls them kB
        elif words and words[0].isdigit():
            limits_bytes.append(int(words[0]))
    return min(limits_bytes, default=None)
