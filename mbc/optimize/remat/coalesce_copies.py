"""Coalesces copies to and from the host where enough bytes are free for them to wait for each other.

A kernel at an end of a wait for a copy starts late, no later at the ends of several
(`mbc.optimize.schedule.coalesce_waits`). A value that is fetched as late as possible, and freed as soon as its copy is
over, takes the fewest bytes and leaves the least choice of kernels to wait at. So where bytes are free in the end, a
fetch starts together with the one before it, and an offloaded value is freed together with the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbc.optimize import effort
from mbc.optimize.remat.live_bytes_ledger import Ledger
from mbc.optimize.remat.offload import Offloader
from mbc.plan.model import Stream


def coalesce_copies(offloader: Offloader, ledger: Ledger, over_bytes: NDArray[np.int64], available_bytes: int) -> None:
    """List copies anew; `over_bytes`: by how much each run exceeds the available bytes, the ledger's delta not
    counted."""
    over_bytes = over_bytes + int(effort.COALESCE_SPARE_SHARE * available_bytes)  # of what may be filled
    _come_together(offloader, ledger, over_bytes)
    _leave_together(offloader, ledger, over_bytes)


def _come_together(offloader: Offloader, ledger: Ledger, over_bytes: NDArray[np.int64]) -> None:
    starts_us = offloader.starts_us()
    needed = {b: ledger.first_read(b, ledger.offloads[b][1]) for b in offloader.unhurried()}
    group: list[int] = []
    free_us = group_us = 0.0  # when the group before is back, and what copies of this take
    for buffer in sorted(needed, key=lambda b: (needed[b], b)):
        takes_us = offloader.copy_us(buffer, Stream.TO_DEVICE)
        joined = [*group, buffer]
        end_us = float(starts_us[needed[joined[0]]])
        at = int(np.searchsorted(starts_us, end_us - group_us - takes_us, side="right")) - 1
        if group and starts_us[max(at, 0)] >= free_us and _back_at(ledger, joined, at, over_bytes):
            group, group_us = joined, group_us + takes_us
            continue
        if group:
            free_us = float(starts_us[needed[group[0]]])
        group, group_us = [buffer], takes_us


def _back_at(ledger: Ledger, group: Sequence[int], position: int, over_bytes: NDArray[np.int64]) -> bool:
    """Whether all of a group can be listed to come back at a run; then they are."""
    listed: list[tuple[int, int, int]] = []
    for buffer in group:
        out, back = ledger.offloads[buffer]
        if position <= out or position <= ledger.last_touch(buffer, back):
            return False
        if position < back:
            listed.append((buffer, out, position))
    return _listed(ledger, listed, over_bytes)


def _leave_together(offloader: Offloader, ledger: Ledger, over_bytes: NDArray[np.int64]) -> None:
    """From the last that is gone to the first: as long as the next one, if there is room."""
    later = -1
    for buffer in sorted(offloader.unhurried(), key=lambda b: (-ledger.offloads[b][0], -b)):
        out, back = ledger.offloads[buffer]
        if not (out < later < back and _listed(ledger, [(buffer, later, back)], over_bytes)):
            later = out


def _listed(ledger: Ledger, offloads: Sequence[tuple[int, int, int]], over_bytes: NDArray[np.int64]) -> bool:
    """List copies of buffers, out and back at these runs, if no run is then over by more than it was."""
    start = ledger.mark()
    before_bytes = over_bytes + ledger.delta_bytes
    for buffer, out, back in offloads:
        ledger.offload(buffer, out, back)
    after_bytes = over_bytes + ledger.delta_bytes
    fits = not ((after_bytes > before_bytes) & (after_bytes > 0)).any()
    if not fits:
        ledger.undo(start)
    return fits
