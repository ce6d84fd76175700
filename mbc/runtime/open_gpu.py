"""A GPU that is open for one module: context, streams, memory, and copies to and from them.

Memory is taken before the library is loaded and given back after the library is destroyed. `cuda` adds the programs.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.part import split_name
from mbc.hardware.streams import ALIGNMENT_BYTES, Space, Stream
from mbc.kernels.nccl import BY_COPIES
from mbc.plan.collectives import ctas_of
from mbc.plan.model import Plan
from mbc.plan.prefetch import prefetch_bytes
from mbc.runtime.bindings import Place
from mbc.runtime.communicator import Communicator, SymmetricMemory, load_nccl
from mbc.runtime.connection import Connection
from mbc.runtime.driver import check_architecture, open_context, open_driver
from mbc.runtime.formats import loaded, stored_bytes
from mbc.runtime.green_context import limited_streams
from mbc.runtime.lender import Lent, borrow
from mbc.runtime.library import Library
from mbc.runtime.machine import Allocation
from mbc.runtime.membership import Membership
from mbc.runtime.pinned import check_together, pin
from mbc.runtime.turns import Home
from mbc.runtime.usage import taken_since, usage_of

Array = NDArray[Any]

GUARD_BYTES = 64 << 10  # size of each canary; keeps the arena aligned
_GUARD_PATTERN = 0xA5


@dataclass
class Resources:
    """Resources that the process that took them gives back, in this order; a fork of the process has none of them."""

    home: Home
    library: Library | None = None
    communicator: Communicator | None = None  # graphs of the library hold it
    host: NDArray[np.uint8] | None = None  # pinned; freed when this last reference to it goes
    memory: list[Any] = field(default_factory=list[Any])

    def free(self, together: bool = True) -> None:
        """Give everything back. `together`: the other ranks do so at the same time."""
        if not self.home.is_this_process:
            return
        if self.library is not None:
            self.library.destroy()
            self.library = None
        communicator, self.communicator = self.communicator, None
        try:
            if communicator is not None:
                (communicator.close if together else communicator.abort)()
        finally:  # even if another rank does not take part
            self.host = None
            while self.memory:
                self.memory.pop().free()


class OpenGpu:
    """The GPU of one module, used from the thread that opened it."""

    def __init__(self, plan: Plan) -> None:
        """Open a context; `_take` takes the memory."""
        self._plan = plan
        self._driver: Any = open_driver()
        addresses = [self._driver.Device(number).pci_bus_id() for number in range(self._driver.Device.count())]
        self._used_before = {address: usage_of(address) for address in addresses}
        self._context = open_context(self._driver)
        check_architecture(plan, self._context.get_device())
        self._bus_address: str = self._context.get_device().pci_bus_id()
        self._number = addresses.index(self._bus_address)
        self._overhead: int | None = None  # bytes; None if the driver does not report them
        self._overhead_checked = False
        self._connection: Connection | None = None  # to other ranks
        self._home = Home()
        self._resources = Resources(self._home)
        self._closed = weakref.finalize(self, Resources.free, self._resources)
        # The exit handler must run while PyCUDA's context still exists: the handler registered last runs first.
        self._closed.atexit = False
        atexit.register(self._closed)

    def _take(
        self, members: Membership | None, allocate: Callable[[int], Allocation] | None, canaries: bool, prefetch: bool
    ) -> None:
        """Take memory and streams; for the arguments see `mbc.runtime.cuda.open_cuda`."""
        driver, predicted = self._driver, self._plan.predictions
        self._arena_bytes = predicted.arena_bytes
        if driver.mem_get_info()[0] < self._arena_bytes:
            self._report_too_little()
        guard = GUARD_BYTES if canaries else 0
        self._prefetch_bytes = prefetch_bytes(self._plan) if prefetch else 0
        if driver.mem_get_info()[0] < self._arena_bytes + self._prefetch_bytes:
            self._prefetch_bytes = 0
        self._own_bytes = self._arena_bytes + 2 * guard + self._prefetch_bytes
        try:
            allocation = (allocate or self._allocated)(max(1, self._own_bytes))
        except driver.MemoryError:
            self._report_too_little()
        self._resources.memory.append(allocation)
        self._arena = int(allocation) + guard
        self._landings = self._arena + self._arena_bytes + guard  # address of the memory for prefetched inputs
        self._guards = (int(allocation), self._arena + self._arena_bytes) if canaries else ()
        for address in self._guards:
            driver.memset_d8(address, _GUARD_PATTERN, GUARD_BYTES)
        # Blocking streams: work on the legacy default stream, where PyTorch is by default, is ordered with them.
        self._part = split_name(self._plan.target.gpu).multiprocessors
        with limited_streams(self._part):
            self._streams = tuple(driver.Stream() for _ in Stream)
        self._compute = self._streams[0]
        if members is not None:
            check_together(members, predicted.host_bytes)
        self._resources.host = pin(driver, predicted.host_bytes)
        self._lent: Lent | None = borrow(driver, predicted.peer_bytes)  # memory of another GPU
        if self._lent is not None:
            self._resources.memory.append(self._lent)

    def _allocated(self, size_bytes: int) -> Any:
        """Return device memory with a method `free`; NCCL allocates it if collectives copy to the arena."""
        if ctas_of(self._plan.train) != BY_COPIES:
            return self._driver.mem_alloc(size_bytes)
        return SymmetricMemory(load_nccl(), size_bytes)

    def _report_too_little(self) -> NoReturn:
        free = self._driver.mem_get_info()[0]
        raise MbcError(
            "MBC155",
            f"the arena takes {self._arena_bytes:,} bytes, but only {free:,} are free on the GPU{self._others()}",
            "end other programs that use the GPU, or compile with a smaller memory.device",
        )

    def _nothing_left(self, error: MbcError) -> MbcError:
        """Return MBC155 for the case that the arena fits, but not the memory that libraries take beside it."""
        free = self._driver.mem_get_info()[0]
        return MbcError(
            "MBC155",
            f"the plan reserved {self._plan.predictions.overhead_bytes:,} bytes beside the arena for the context and "
            f"libraries, but this GPU has too few: {free:,} are free{self._others()} ({error.message})",
            "end other programs that use the GPU, or compile with a smaller memory.device",
        )

    def _others(self) -> str:
        """Return a clause with the memory that was in use before, or nothing if that is unknown."""
        used = self._used_before[self._bus_address].used_bytes
        return f"; {used:,} were in use before this module was opened" if used else ""

    def _measured_overhead(self) -> int | None:
        """Return the device memory taken since before the context was created, without the memory of `_take`."""
        taken = taken_since(self._used_before[self._bus_address], usage_of(self._bus_address))
        return None if taken is None else max(0, taken - self._own_bytes)

    def _check_overhead(self, before: int | None) -> None:
        """Check, after the first step has loaded everything, that the module stays within its budget.

        Memory that this process took between opening the module and that step belongs to the caller, for instance for
        tensors of inputs; it is not counted.

        Args:
            before: Overhead measured just before the first step.

        Raises:
            MbcError: MBC160 if arena, prefetched inputs and overhead take more than the budget.
        """
        self.wait()
        self._overhead_checked = True
        after = self._measured_overhead()
        if self._overhead is not None and before is not None and after is not None:
            self._overhead += max(0, after - before)
        budget, predicted = self._plan.budget_bytes, self._plan.predictions
        ours = self._arena_bytes + self._prefetch_bytes
        if self._overhead is None or ours + self._overhead <= budget:
            return
        ahead = f", {self._prefetch_bytes:,} for inputs of the next step" if self._prefetch_bytes else ""
        or_without = ", or pass prefetch=False" if self._prefetch_bytes else ""
        raise MbcError(
            "MBC160",
            f"the module takes {self._arena_bytes:,} bytes of arena{ahead} and {self._overhead:,} of overhead,"
            f" more than the budget of {budget:,}; the plan reserved {predicted.overhead_bytes:,} for the overhead",
            f"raise memory.device by the difference{or_without}, or measure the overhead of this GPU and compile "
            "again; if another program took GPU memory meanwhile, open the module again",
        )

    @property
    def stream(self) -> int:
        """Handle of the compute stream, which reads device arrays."""
        return int(self._compute.handle)

    def wait(self) -> None:
        """Wait for all queued work."""
        if self._connection is not None:
            self._connection.wait(self._compute.is_done)
        self._compute.synchronize()

    def check_home(self) -> None:
        """Raise MBC235 in a process or thread other than the one that opened the machine."""
        self._home.check()

    @contextmanager
    def lent(self) -> Generator[None]:
        """Let the calling thread use the machine within this context, while the thread that opened it waits.

        PyTorch computes backward passes on a GPU in a thread of its own.
        """
        with self._home.moved() as is_other:
            if is_other:
                self._context.push()
            try:
                yield
            finally:
                if is_other:
                    self._driver.Context.pop()

    def write(self, place: Place, array: Array) -> None:
        """Store a canonical array, after all queued work."""
        self.wait()
        data = stored_bytes(array, place.dtype, place.layout)
        if place.space is Space.HOST:
            self._bytes_at(place)[:] = data
        else:
            self._upload(self._address(place), data)

    def read(self, place: Place) -> Array:
        """Return the canonical array at a place, after all queued work."""
        self.wait()
        data = self._bytes_at(place)
        return loaded(data.copy() if place.space is Space.HOST else data, place.shape, place.dtype, place.layout)

    @property
    def arena_address(self) -> int | None:
        """Address of the arena in device memory."""
        return self._arena

    def memory_bytes(self, space: Space, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop) of a space; a copy if they are in device memory."""
        if space is Space.HOST:
            assert self._resources.host is not None
            return self._resources.host[start:stop]
        return self._download(self._base(space) + start, stop - start)

    def check_canaries(self) -> None:
        """Raise an error if guard bytes beside the arena have changed, or if the arena's size was predicted wrongly.

        Raises:
            MbcError: MBC161 in both cases.
        """
        self.wait()
        ends = (
            offset + -(-buffer.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            for buffer, offset in zip(self._plan.buffers, self._plan.offsets, strict=True)
            if buffer.space is Space.ARENA
        )
        if max(ends, default=0) != self._arena_bytes:
            raise MbcError(
                "MBC161", "the arena does not end where its last buffer does", "report it with the plan file"
            )
        for side, address in zip(("before", "after"), self._guards, strict=False):
            wrong = np.flatnonzero(self._download(address, GUARD_BYTES) != _GUARD_PATTERN)
            if wrong.size:
                raise MbcError(
                    "MBC161",
                    f"{wrong.size} bytes {side} the arena were written, the first at {int(wrong[0])} of the guard",
                    "a kernel writes outside its buffers: report it with the plan file",
                )

    def _zero(self) -> None:
        if self._arena_bytes:
            self._driver.memset_d8(self._arena, 0, self._arena_bytes)
            self._driver.Context.synchronize()

    def _bytes_at(self, place: Place) -> NDArray[np.uint8]:
        """Return the bytes of a place; a copy if they are in device memory."""
        return self.memory_bytes(place.space, place.offset_bytes, place.offset_bytes + place.size_bytes)

    def _address(self, place: Place) -> int:
        return self._base(place.space) + place.offset_bytes

    def _base(self, space: Space) -> int:
        """Return the start address of the arena, or of the memory that a peer lends."""
        if space is Space.ARENA:
            return self._arena
        assert space is Space.PEER and self._lent is not None
        return self._lent.address

    def _download(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return a copy of bytes of the device."""
        data = np.empty(size_bytes, np.uint8)
        self._driver.memcpy_dtoh(data, address)
        return data

    def _upload(self, address: int, data: Array) -> None:
        """Copy bytes to the device; streams of the module start later work only after this copy."""
        self._driver.memcpy_htod(address, data)
        if self._part is not None:  # the default stream, which copies, is not ordered with the part's streams
            self._driver.Context.synchronize()
