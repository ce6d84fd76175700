"""Pinned host memory: what the copies of a plan go to and come from, taken once for the life of a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError


def pin(driver: Any, size_bytes: int) -> NDArray[np.uint8] | None:
    """So many bytes, given back when nobody holds the array; None where there are none to take. MBC189."""
    if not size_bytes:
        return None
    # Pinned memory cannot be paged out: taking more than there is ends other processes, perhaps this one.
    available = available_bytes()
    if available is not None and available < size_bytes:
        raise _too_little(size_bytes, f"{available:,} are available")
    try:
        return driver.pagelocked_empty(size_bytes, np.uint8)
    except driver.Error as error:
        raise _too_little(size_bytes, f"the driver does not pin them: {error}") from error


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
