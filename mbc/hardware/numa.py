"""Host bridges and NUMA nodes of the GPUs of this machine, from Linux's sysfs.

Pinned memory should be near its GPU: a copy to the memory of another processor uses the link between the processors,
which all GPUs share. Linux takes memory from the node of the thread that allocates it. So it suffices that the thread
runs on that node while it pins.
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
    """Host bridge and NUMA node of a GPU.

    `bridge` is the host bridge, such as `pci0000:15`, whose lanes all GPUs behind it share; it is empty if unknown.
    `numa_node` is None if the machine has only one node, or if it is unknown.
    """

    bridge: str = ""
    numa_node: int | None = None

    def __str__(self) -> str:
        """Return a text such as `host bridge pci0000:15, NUMA node 0`."""
        node = "" if self.numa_node is None else f"NUMA node {self.numa_node}"
        return ", ".join(filter(None, (self.bridge and f"host bridge {self.bridge}", node)))


def gpu_place(bus_id: str, sysfs: Path = SYSFS) -> GpuPlace:
    """Return the place of the GPU at a PCI address in the format of the driver or of nvidia-smi.

    These are `0000:1B:00.0` and `00000000:1B:00.0`.
    """
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
    """Return the processors of the GPU's NUMA node; none if they are unknown."""
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
    """Run the body on the GPU's NUMA node if possible, so that memory allocated in it is on that node."""
    if not hasattr(os, "sched_setaffinity"):  # only Linux has it
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
