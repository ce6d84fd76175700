"""Pinned host memory for a plan's copies, taken once for the life of a module."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.numa import near
from mbc.runtime.membership import Membership


def pin(driver: Any, size_bytes: int) -> NDArray[np.uint8] | None:
    """Return `size_bytes` of pinned memory near the current GPU, or None for 0 bytes.

    The memory is given back with the last reference to the array.

    Raises:
        MbcError: MBC189 if too little memory is available.
    """
    if not size_bytes:
        return None
    # Pinned memory cannot be paged out: taking more than is available ends other processes, perhaps this one.
    available = available_bytes()
    if available is not None and available < size_bytes:
        _report_too_little(size_bytes, f"only {available:,} are available")
    try:
        with near(driver.Context.get_device().pci_bus_id()):
            return driver.pagelocked_empty(size_bytes, np.uint8)
    except driver.Error as error:
        _report_too_little(size_bytes, f"the driver does not pin them: {error}")


def check_together(membership: Membership, size_bytes: int) -> None:
    """Check on each machine, before any rank pins memory, that there is enough for all its ranks. Collective.

    Raises:
        MbcError: MBC361, on all ranks, if a machine has too little memory.
    """
    need = json.dumps([_machine(), size_bytes, available_bytes()]).encode()
    machines: dict[str, list[tuple[int, int | None]]] = {}
    for part in membership.gather(need):
        machine, wanted, available = json.loads(part)
        machines.setdefault(machine, []).append((wanted, available))
    for ranks in machines.values():
        wanted = sum(wanted for wanted, _ in ranks)
        available = [available for _, available in ranks if available is not None]
        if available and wanted > min(available):
            raise MbcError(
                "MBC361",
                f"{len(ranks)} ranks on one machine move values to {wanted:,} bytes of pinned host memory together: "
                f"only {min(available):,} are available",
                "end other programs, start fewer ranks on this machine, or compile with a smaller memory.host or a "
                "larger memory.device",
            )


def _machine() -> str:
    """Return an identity that all ranks on one machine share, in all its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return platform.node()


def address_of(pinned: NDArray[np.uint8] | None) -> int:
    """Return the address of pinned memory; 0 for None."""
    return 0 if pinned is None else int(pinned.ctypes.data)


def available_bytes(file: str = "/proc/meminfo") -> int | None:
    """Return the memory that processes can still take without swapping; None if the system does not report it."""
    try:
        lines = Path(file).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _report_too_little(size_bytes: int, why: str) -> NoReturn:
    raise MbcError(
        "MBC189",
        f"the plan moves values to {size_bytes:,} bytes of pinned host memory: {why}",
        "end other programs, or compile with a smaller memory.host or a larger memory.device",
    )
