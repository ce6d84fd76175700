"""Copies of inputs into a GPU's arena: from the host through pinned memory, from arrays on the GPU directly.

An input of a step that has a landing buffer is copied ahead: a stream of its own copies it from pinned memory into the
landing buffer while the GPU computes. Only the copy from there into the arena, at the speed of the GPU's memory, waits
for the step before. A caller that calls `step` again before a step has finished thus never makes the GPU wait for a
transfer. Inputs without a landing buffer are copied in order with the programs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.ir.types import Layout
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.bindings import Place
from mbc.runtime.formats import STORED, stored_bytes
from mbc.runtime.machine import padded

Array = NDArray[Any]

_DEVICE_INPUTS_AHEAD = 4  # device arrays kept alive while copies of them are queued


@dataclass
class _Staging:
    """Two pinned copies of an input, so that one is filled while the other one is being copied."""

    buffers: list[Array]
    events: list[Any]
    next: int = 0


@dataclass
class _Landing:
    """Device memory in which one input arrives.

    Attributes:
        address: Address of the memory.
        arrived: Event: the copy from the host is done.
        left: Event: the copy into the arena is done.
        used: Whether `left` has been recorded.
        target: Address and bytes in the arena of an input that waits here; None if none waits.
    """

    address: int
    arrived: Any
    left: Any
    used: bool = False
    target: tuple[int, int] | None = None  # address and bytes


class Feeder:
    """Copies inputs for programs that run on one compute stream."""

    def __init__(self, driver: Any, compute: Any, ahead: Any, landings: Mapping[int, int]) -> None:
        """Create the events of the landing buffers.

        Args:
            driver: PyCUDA's driver interface.
            compute: Stream on which the programs run.
            ahead: Stream that fills the landing buffers.
            landings: Addresses of landing buffers by input buffer; each is as large as that buffer.
        """
        self._driver, self._compute, self._ahead = driver, compute, ahead
        # By buffer: inputs of the two programs may share an offset.
        self._landings = {
            buffer: _Landing(address, driver.Event(), driver.Event()) for buffer, address in landings.items()
        }
        self._staging: dict[int, _Staging] = {}
        self._held: deque[tuple[Any, object]] = deque()
        self._events: list[Any] = []  # recorded and passed

    @property
    def staging_bytes(self) -> int:
        """Bytes of pinned host memory that feeding inputs takes."""
        return sum(pinned.nbytes for staging in self._staging.values() for pinned in staging.buffers)

    def feed(self, place: Place, address: int, array: Array | DeviceArray) -> None:
        """Fill the first rows of the input at `address`, and the other rows with zeros.

        An input that is copied ahead is at `address` only after `hand_over`.
        """
        filled = array.shape[0] * (place.size_bytes // max(1, place.shape[0]))
        landing = self._landings.get(place.buffer)
        if landing is not None:
            landing.target = None
        if isinstance(array, DeviceArray):
            self._copy_within(place, address, array)
        elif landing is not None and filled == place.size_bytes:
            if landing.used:
                self._ahead.wait_for_event(landing.left)
            self._copy_in(place, landing.address, array, filled, self._ahead)
            landing.arrived.record(self._ahead)
            landing.used, landing.target = True, (address, filled)
        else:
            self._copy_in(place, address, array, filled, self._compute)
        if filled < place.size_bytes:
            self._driver.memset_d8_async(address + filled, 0, place.size_bytes - filled, self._compute)

    def hand_over(self) -> None:
        """Copy the inputs that were copied ahead from their landing buffers into the arena.

        Small copies that the step needs must be queued before this call: after it they would wait for the inputs of the
        next step, whose copies may start from here on.
        """
        for landing in self._landings.values():
            if landing.target is None:
                continue
            (address, size_bytes), landing.target = landing.target, None
            self._compute.wait_for_event(landing.arrived)
            self._driver.memcpy_dtod_async(address, landing.address, size_bytes, self._compute)
            landing.left.record(self._compute)

    def _copy_in(self, place: Place, address: int, array: Array, filled: int, stream: Any) -> None:
        staging = self._staging.get(place.buffer)
        if staging is None:
            buffers = [self._driver.pagelocked_empty(place.size_bytes, np.uint8) for _ in range(2)]
            staging = self._staging[place.buffer] = _Staging(buffers, [None, None])
        turn = staging.next
        staging.next = 1 - turn
        if staging.events[turn] is None:
            staging.events[turn] = self._driver.Event()
        else:
            staging.events[turn].synchronize()
        pinned = staging.buffers[turn]
        if place.layout is Layout.CHANNELS_FIRST and array.dtype == STORED[place.dtype]:
            np.copyto(pinned[:filled].view(STORED[place.dtype]).reshape(array.shape), array)
        else:
            pinned[:] = stored_bytes(padded(array, place.shape), place.dtype, place.layout)
        self._driver.memcpy_htod_async(address, pinned[:filled], stream)
        staging.events[turn].record(stream)

    def _copy_within(self, place: Place, address: int, array: DeviceArray) -> None:
        while self._held and (len(self._held) >= _DEVICE_INPUTS_AHEAD or self._held[0][0].query()):
            event, owner = self._held.popleft()
            event.synchronize()
            self._events.append(event)
            del owner  # its memory may be reused only after the copy
        if array.stream not in (None, 1):
            # Another library's stream, of which only the handle is available.
            self._driver.Context.synchronize()
        wanted = STORED[place.dtype].itemsize
        count = math.prod(array.shape)
        if array.itemsize == wanted:
            self._driver.memcpy_dtod_async(address, array.address, count * wanted, self._compute)
        elif count:
            # Integers of 64 bits: a copy of one column of 4 bytes takes their low halves.
            copy = self._driver.Memcpy2D()
            copy.set_src_device(array.address)
            copy.src_pitch = array.itemsize
            copy.set_dst_device(address)
            copy.dst_pitch = copy.width_in_bytes = wanted
            copy.height = count
            copy(self._compute)
        event = self._events.pop() if self._events else self._driver.Event()
        event.record(self._compute)
        self._held.append((event, array.owner))
