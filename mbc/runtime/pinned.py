"""Pinned host memory: what the copies of a plan go to and come from, taken once for the life of a module."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.numa import near
from mbc.runtime.membership import Membership


def pin(driver: Any, size_bytes: int) -> NDArray[np.uint8] | None:
    """So many bytes next to the current GPU, given back when nobody holds the array; None where there are none to take.
    MBC189."""
    if not size_bytes:
        return None
    # Pinned memory cannot be paged out: taking more than there is ends other processes, perhaps this one.
    available = available_bytes()
    if available is not None and available < size_bytes:
        raise _too_little(size_bytes, f"{available:,} are available")
    try:
        with near(driver.Context.get_device().pci_bus_id()):
            return driver.pagelocked_empty(size_bytes, np.uint8)
    except driver.Error as error:
        raise _too_little(size_bytes, f"the driver does not pin them: {error}") from error


def check_together(membership: Membership, size_bytes: int) -> None:
    """Collective, before any rank pins: MBC361 on all of them where a machine has too little for its ranks together."""
    told = json.dumps([_machine(), size_bytes, available_bytes()]).encode()
    machines: dict[str, list[tuple[int, int | None]]] = {}
    for part in membership.gather(told):
        machine, wanted, available = json.loads(part)
        machines.setdefault(machine, []).append((wanted, available))
    for ranks in machines.values():
        wanted, known = (
            sum(wanted for wanted, _ in ranks),
            [available for _, available in ranks if available is not None],
        )
        if known and wanted > min(known):
            raise MbcError(
                "MBC361",
                f"{len(ranks)} ranks on one machine move values to {wanted:,} bytes of pinned host memory together: "
                f"{min(known):,} are available",
                "end other programs, start fewer ranks on this machine, or compile with a smaller memory.host or a "
                "larger memory.device",
            )


def _machine() -> str:
    """The same on all ranks that share memory: containers of one machine do."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return platform.node()


def address_of(pinned: NDArray[np.uint8] | None) -> int:
    """0 where there is none."""
    return 0 if pinned is None else int(pinned.ctypes.data)


def available_bytes(file: str = "/proc/meminfo") -> int | None:
    """Memory that processes can still take without swapping; None where the system does not say."""
    try:
        lines = Path(file).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _too_little(size_bytes: int, why: str) -> MbcError:
    return MbcError(
        "MBC189",
        f"the plan moves values to {size_bytes:,} bytes of pinned host memory: {why}",
        "end other programs, or compile with a smaller memory.host or a larger memory.device",
    )
