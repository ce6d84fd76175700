"""Where the GPUs of this machine sit, as Linux has it (sysfs): behind which host bridge, and next to which memory.

Pinned memory is best next to its GPU: a copy to the memory of another processor crosses the link between both, which
all of them share. Linux takes memory from the node of the thread that asks for it, so a thread that runs there while it
pins is enough.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """`bridge`: the host bridge, `pci0000:15`, whose lanes all behind it share; empty where it is not told.
    `numa_node`: None where the machine has one only, or does not tell."""

    bridge: str = ""
    numa_node: int | None = None

    def __str__(self) -> str:
        node = "" if self.numa_node is None else f"NUMA node {self.numa_node}"
        return ", ".join(filter(None, (self.bridge and f"host bridge {self.bridge}", node)))


def gpu_place(bus_id: str, sysfs: Path = SYSFS) -> GpuPlace:
    """Of the GPU at a PCI address, as the driver (`0000:1B:00.0`) or nvidia-smi (`00000000:1B:00.0`) has it."""
    address = _ADDRESS.fullmatch(bus_id)
    if address is None:
        return GpuPlace()
    device = sysfs / "bus" / "pci" / "devices" / f"{int(address[1], 16):04x}:{address[2].lower()}"
    try:
        bridge = next((part for part in device.resolve().parts if _BRIDGE.fullmatch(part)), "")
        node = int((device / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return GpuPlace()
    return GpuPlace(bridge, node if node >= 0 else None)


def cpus_near(bus_id: str, sysfs: Path = SYSFS) -> frozenset[int]:
    """The processors of the GPU's NUMA node; none where it has none, or they are not told."""
    node = gpu_place(bus_id, sysfs).numa_node
    if node is None:
        return frozenset()
    try:
        text = (sysfs / "devices" / "system" / "node" / f"node{node}" / "cpulist").read_text(encoding="ascii")
        return frozenset(cpu for part in filter(None, text.strip().split(",")) for cpu in _range(part))
    except (OSError, ValueError):
        return frozenset()


def _range(text: str) -> range:
    first, dash, last = text.partition("-")  # 0-3, or 5
    return range(int(first), int(last if dash else first) + 1)


@contextmanager
def near(bus_id: str, sysfs: Path = SYSFS) -> Generator[None]:
    """In the body this thread runs next to the GPU, where it may, and so memory that it takes lies there."""
    if not hasattr(os, "sched_setaffinity"):  # Linux alone has it
        yield
        return
    before = os.sched_getaffinity(0)  # of this thread
    cpus = cpus_near(bus_id, sysfs) & before
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, before)
