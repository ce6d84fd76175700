"""Coalesced copies out of the arena and back, where enough bytes are free for them to wait for each other.

A kernel at an end of a wait for a copy starts late, but no later at the ends of several
(`mbc.optimize.schedule.coalesce_waits`). A value that is prefetched as late as possible, and freed as soon as its copy
has ended, has the shortest live range, but leaves the least choice of kernels to wait at. So where bytes are free in
the end, a prefetch starts together with the one before it, and an offloaded value is freed together with the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.streams import STREAM_FROM, Space
from mbc.optimize import effort
from mbc.optimize.remat.live_bytes_ledger import Ledger
from mbc.optimize.remat.offload import Offloader


def coalesce_copies(
    offloader: Offloader, ledger: Ledger, excess_bytes: NDArray[np.int64], available_bytes: int
) -> None:
    """Reschedule copies so that fewer kernels wait for them.

    Args:
        offloader: The copies.
        ledger: The decisions.
        excess_bytes: Bytes by which each region exceeds the available bytes, without the ledger's delta.
        available_bytes: Bytes of the arena.
    """
    excess_bytes = excess_bytes + int(effort.COALESCE_SPARE_SHARE * available_bytes)  # these bytes stay free
    for space in STREAM_FROM:  # copies of different links do not wait for each other
        _coalesce_prefetches(offloader, ledger, excess_bytes, space)
    _coalesce_offloads(offloader, ledger, excess_bytes)


def _coalesce_prefetches(
    offloader: Offloader, ledger: Ledger, excess_bytes: NDArray[np.int64], space: Space
) -> None:  # fmt: skip
    starts_us = offloader.starts_us()
    here = (b for b in offloader.overlapped() if ledger.offloads[b].space is space)
    needed = {b: ledger.first_read(b, ledger.offloads[b].back) for b in here}
    group: list[int] = []
    free_us = group_us = 0.0  # end of the previous group's copies, and duration of this group's
    for buffer in sorted(needed, key=lambda b: (needed[b], b)):
        takes_us = offloader.copy_us(buffer, STREAM_FROM[space])
        joined = [*group, buffer]
        end_us = float(starts_us[needed[joined[0]]])
        at = int(np.searchsorted(starts_us, end_us - group_us - takes_us, side="right")) - 1
        if group and starts_us[max(at, 0)] >= free_us and _prefetch_at(ledger, joined, at, excess_bytes):
            group, group_us = joined, group_us + takes_us
            continue
        if group:
            free_us = float(starts_us[needed[group[0]]])
        group, group_us = [buffer], takes_us


def _prefetch_at(ledger: Ledger, group: Sequence[int], position: int, excess_bytes: NDArray[np.int64]) -> bool:
    """Schedule the prefetches of a whole group at one region if possible, and return whether that was possible."""
    listed: list[tuple[int, int, int]] = []
    for buffer in group:
        out, back, _ = ledger.offloads[buffer]
        if position <= out or position <= ledger.last_touch(buffer, back):
            return False
        if position < back:
            listed.append((buffer, out, position))
    return _reschedule(ledger, listed, excess_bytes)


def _coalesce_offloads(offloader: Offloader, ledger: Ledger, excess_bytes: NDArray[np.int64]) -> None:
    """Free each offloaded value together with the next one, if the bytes are free, the last offload first."""
    later = -1
    for buffer in sorted(offloader.overlapped(), key=lambda b: (-ledger.offloads[b].out, -b)):
        out, back, _ = ledger.offloads[buffer]
        if not (out < later < back and _reschedule(ledger, [(buffer, later, back)], excess_bytes)):
            later = out


def _reschedule(ledger: Ledger, offloads: Sequence[tuple[int, int, int]], excess_bytes: NDArray[np.int64]) -> bool:
    """Schedule copies of buffers, out and back at these regions; return whether they fit.

    They fit if no region exceeds the available bytes by more than before. Otherwise nothing changes.
    """
    start = ledger.mark()
    before_bytes = excess_bytes + ledger.delta_bytes
    for buffer, out, back in offloads:
        ledger.offload(buffer, out, back)
    after_bytes = excess_bytes + ledger.delta_bytes
    fits = not ((after_bytes > before_bytes) & (after_bytes > 0)).any()
    if not fits:
        ledger.undo(start)
    return fits
