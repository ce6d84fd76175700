"""What this process took of a GPU's memory, whatever other processes took meanwhile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mbc.runtime.nvml import processes, used_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes in use on a GPU, by everyone and by process; None where that is not told."""

    used_bytes: int | None
    by_process: Mapping[int, int] | None


def usage_of(pci_bus_id: str) -> Usage:
    """What is in use on the GPU there now."""
    return Usage(used_bytes(pci_bus_id), processes(pci_bus_id))


def taken_since(before: Usage, now: Usage) -> int | None:
    """Bytes that this process took between the two; None where nothing is told. Where it cannot be told which process
    is this one, what others took is counted too."""
    if before.used_bytes is None or now.used_bytes is None:
        return None
    return now.used_bytes - before.used_bytes - _by_others(before.by_process, now.by_process)


def _by_others(before: Mapping[int, int] | None, now: Mapping[int, int] | None) -> int:
    if before is None or now is None:
        return 0
    own = os.getpid()
    if own not in now:
        # In a container the driver tells numbers that are not those seen inside; this process then is the new one.
        new = now.keys() - before.keys()
        if len(new) != 1:
            return 0
        (own,) = new
    return sum(now.get(pid, 0) - before.get(pid, 0) for pid in before.keys() | now.keys() if pid != own)
