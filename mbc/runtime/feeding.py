"""The copies of each step on a GPU: inputs and control blocks on the way in, figures on the way out.

Inputs are copied from the host through pinned memory, and from arrays on the GPU directly. An input of a step that has
a landing buffer is copied ahead: a stream of its own copies it from pinned memory into the landing buffer while the GPU
computes. Only the copy from there into the arena, at the speed of the GPU's memory, waits for the step before. A caller
that calls `step` again before a step has finished thus never makes the GPU wait for a transfer. Inputs without a
landing buffer are copied in order with the programs.

Several steps may be queued, and their losses read later: pinned memory of a step stays taken until the GPU has done it.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.ir.control import HOST_BYTES
from mbc.ir.types import Layout
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.bindings import Place
from mbc.runtime.connection import Connection
from mbc.runtime.formats import STORED, stored_bytes
from mbc.runtime.host import padded
from mbc.runtime.machine import Figures
from mbc.runtime.turns import Home

Array = NDArray[Any]

# The host queues at most this many steps on the GPU. Before it queues another one, it waits until the oldest has ended.
_STEPS_AHEAD = 16
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


@dataclass
class _Slot:
    """Pinned memory of one queued step.

    Attributes:
        controls: The host's part of the control block, for each mini-batch of the step.
        figures: The loss and the metrics.
        begun: Event at the begin of the step.
        event: Event at the end of the step.
        number: Number of the step since the module was opened, from 1.
        pending: The figures that a caller may still fetch from this slot.
    """

    controls: tuple[Array, ...]
    figures: tuple[Array, ...]
    begun: Any
    event: Any
    number: int = 0
    pending: weakref.ref[Figures] | None = None


class QueuedSteps:
    """The queue of one module's steps, which take turns in a ring of slots."""

    def __init__(
        self, driver: Any, compute: Any, feeder: Feeder, control: int, figures: Sequence[tuple[Place, int]],
        mini_batches: int,
    ) -> None:  # fmt: skip
        """Take the pinned memory.

        Args:
            driver: PyCUDA's driver interface.
            compute: Stream on which the programs run.
            feeder: Copies the inputs.
            control: Address of the control block.
            figures: The places of loss and metrics, with their addresses.
            mini_batches: Number of mini-batches of a step.
        """
        self._driver, self._compute, self._feeder = driver, compute, feeder
        self._control, self._figures = control, figures
        self._slots = deque(self._slot(mini_batches) for _ in range(_STEPS_AHEAD))

    def _slot(self, mini_batches: int) -> _Slot:
        pinned = self._driver.pagelocked_empty
        figures = tuple(pinned(place.shape, STORED[place.dtype]) for place, _ in self._figures)
        controls = tuple(pinned(HOST_BYTES, np.uint8) for _ in range(mini_batches))
        return _Slot(controls, figures, self._driver.Event(), self._driver.Event())

    def start(self, control: bytes, number: int) -> None:
        """Queue the copies of the control block and the inputs for mini-batch `number` of a step, from 0."""
        slot = self._slots[0]
        if number == 0:  # the slot is that of an earlier step
            earlier = slot.pending() if slot.pending is not None else None
            if earlier is not None:
                _ = earlier.values  # a caller still holds the figures, and their slot is needed
            elif slot.pending is not None:
                slot.event.synchronize()
            slot.begun.record(self._compute)
        self._copy(slot, control, number)

    def _copy(self, slot: _Slot, control: bytes, number: int) -> None:
        slot.controls[number][:] = np.frombuffer(control, np.uint8)
        self._driver.memcpy_htod_async(self._control, slot.controls[number], self._compute)
        self._feeder.hand_over()

    def end(self, home: Home, connection: Connection | None) -> Figures:
        """Queue the copies of a step's figures, behind its last launch.

        Args:
            home: The process and thread in which figures can be fetched.
            connection: The connection to other ranks, which may fail while a caller waits.

        Returns:
            The figures, which are fetched when a caller reads them. They do not keep the arena alive.
        """
        previous, slot = self._slots[-1], self._slots[0]
        self._slots.rotate(-1)
        number = previous.number + 1
        for pinned, (_, address) in zip(slot.figures, self._figures, strict=True):
            self._driver.memcpy_dtoh_async(pinned, address, self._compute)
        slot.event.record(self._compute)
        slot.number = number  # only now: the events of a call that failed mean nothing

        def fetch() -> tuple[float, ...]:
            home.check()
            if connection is not None:
                connection.wait(slot.event.query)
            slot.event.synchronize()
            return tuple(float(pinned[0]) for pinned in slot.figures)

        def idle_s() -> float | None:
            if number == 1 or previous.number != number - 1:  # there is no step before, or its slot has been reused
                return None
            return slot.begun.time_since(previous.event) / 1e3

        figures = Figures(fetch, idle_s)
        slot.pending = weakref.ref(figures)
        return figures

    @contextmanager
    def half(self, control: bytes) -> Generator[None]:
        """Queue the copies for one half of a step before the body, which launches it."""
        slot = self._slots[0]
        self._slots.rotate(-1)
        slot.event.synchronize()
        self._copy(slot, control, 0)
        yield
        slot.event.record(self._compute)
