"""The memory of a GPU that this process took, without the memory that other processes took meanwhile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mbc.runtime.nvml import processes, used_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes in use on a GPU, in total and by process; None if the driver does not report them."""

    used_bytes: int | None
    by_process: Mapping[int, int] | None


def usage_of(pci_bus_id: str) -> Usage:
    """Return the memory that is now in use on the GPU at a bus address."""
    return Usage(used_bytes(pci_bus_id), processes(pci_bus_id))


def taken_since(before: Usage, now: Usage) -> int | None:
    """Return the bytes that this process took between two measurements; None if there are none.

    If the driver does not show which process is this one, the bytes that others took are counted, too.
    """
    if before.used_bytes is None or now.used_bytes is None:
        return None
    return now.used_bytes - before.used_bytes - _by_others(before.by_process, now.by_process)


def own_bytes(pci_bus_id: str) -> int | None:
    """Return the bytes that this process takes on the GPU at a bus address; None if the driver does not show them."""
    shown = processes(pci_bus_id)
    if shown is None or os.getpid() in shown:
        return None if shown is None else shown[os.getpid()]
    # In a container the driver may report numbers of the machine outside, which no process here has.
    outside = [taken for pid, taken in shown.items() if not Path(f"/proc/{pid}").exists()]
    return None if len(outside) > 1 else sum(outside)


def _by_others(before: Mapping[int, int] | None, now: Mapping[int, int] | None) -> int:
    if before is None or now is None:
        return 0
    own = os.getpid()
    if own not in now:
        # In a container the driver reports process numbers of the machine outside; this process then is the new one.
        new = now.keys() - before.keys()
        if len(new) != 1:
            return 0
        (own,) = new
    return sum(now.get(pid, 0) - before.get(pid, 0) for pid in before.keys() | now.keys() if pid != own)
