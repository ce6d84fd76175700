"""Runs a package on a GPU. PyCUDA owns context, arena, pinned and lent memory and streams; the library gets pointers.

Order of construction: arena, library, one warm-up of every launch on a zeroed arena, capture; states are written only
then, so that nothing of the warm-up stays. Afterwards nothing is allocated on the device.
"""

from __future__ import annotations

import atexit
import platform
import re
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.part import split_name
from mbc.hardware.streams import ALIGNMENT_BYTES, Space, Stream
from mbc.ir.control import HOST_BYTES
from mbc.ir.types import Precision
from mbc.kernels.nccl import BY_COPIES
from mbc.ops.shard import own_rows
from mbc.plan.accumulation import ACCUMULATE
from mbc.plan.collectives import ctas_of
from mbc.plan.live import rounded
from mbc.plan.model import Plan
from mbc.plan.prefetch import prefetch_bytes
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.bindings import Place, Places
from mbc.runtime.connection import Connection
from mbc.runtime.driver import check_architecture, open_context, open_driver
from mbc.runtime.feeding import Feeder
from mbc.runtime.formats import STORED, loaded, stored_bytes
from mbc.runtime.green_context import limited_streams
from mbc.runtime.lender import Lent, borrow
from mbc.runtime.library import LIBRARY_FILE, Library, RanksInterface
from mbc.runtime.machine import Figures, Memory, Observer
from mbc.runtime.membership import Membership
from mbc.runtime.nccl import Communicator, SymmetricMemory, load_nccl
from mbc.runtime.output import DeviceOutput
from mbc.runtime.pinned import address_of, check_together, pin
from mbc.runtime.turns import Home, no_copy
from mbc.runtime.usage import taken_since, usage_of

Array = NDArray[Any]

GUARD_BYTES = 64 << 10  # of each canary; keeps the arena aligned
_GUARD_PATTERN = 0xA5
_STEPS_AHEAD = 16  # steps that may be queued before the first one's figures are fetched
# How CUDA, cuDNN and cuBLAS say that there is no memory left.
_OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC", re.IGNORECASE)


def not_built(reason: str) -> MbcError:
    """Return MBC157: a module is to run on a GPU, and no code was built for one."""
    return MbcError("MBC157", reason, "`mbc doctor` says what a build needs; then compile again")


def open_cuda(
    plan: Plan, places: Places, folder: Path | None, *, canaries: bool, eager: bool, prefetch: bool,
    membership: Membership | None = None, listener: int | None = None,
) -> Cuda:  # fmt: skip
    """The package in `folder` on this machine's GPU; as one of the ranks of `membership`, on the GPU of its number.
    `prefetch`: inputs of a step travel while the one before runs, where the budget and the free memory have room for
    them. `listener`: as `Library.capture` takes it.

    Raises MBC168 (the plan's precision is for the CPU), MBC157 (no library), MBC153 (no PyCUDA), MBC152 (no GPU),
    MBC154 (not the planned architecture), MBC155 (too little free memory), MBC105 and MBC106 (no GPU lends what the
    plan offloads to it), and what `Library` raises.
    """
    if plan.graph.precision is Precision.FP64:
        raise MbcError("MBC168", "precision fp64 runs on the CPU only", 'choose another precision, or device="cpu"')
    if folder is None or not (folder / LIBRARY_FILE).is_file():
        where = f"'{folder}' has no {LIBRARY_FILE}" if folder is not None else "a plan alone has no library"
        raise not_built(f"{where}: it was not built for a GPU")
    return Cuda(plan, places, folder, membership, listener, canaries=canaries, eager=eager, prefetch=prefetch)


@dataclass
class _Slot:
    """Pinned memory of one queued step: the host's part of the control block for each mini-batch, loss and metrics.
    `begun`, `event`: it has begun, and ended; `number`: which of all steps it is, from 1 on."""

    controls: tuple[Array, ...]
    figures: tuple[Array, ...]
    begun: Any
    event: Any
    number: int = 0
    pending: weakref.ref[Figures] | None = None


@dataclass
class _Taken:
    """What has to be given back, in this order, by the process that took it: a fork of it has none of it."""

    home: Home
    library: Library | None = None
    communicator: Communicator | None = None  # graphs of the library hold it
    host: Array | None = None  # pinned; nobody else may hold it
    memory: list[Any] = field(default_factory=list[Any])

    def free(self, together: bool = True) -> None:
        """`together`: the other ranks do so, too."""
        if not self.home.is_this_process:
            return
        if self.library is not None:
            self.library.destroy()
            self.library = None
        communicator, self.communicator = self.communicator, None
        try:
            if communicator is not None:
                (communicator.close if together else communicator.abort)()
        finally:  # also where another rank does not come
            self.host = None
            while self.memory:
                self.memory.pop().free()


class Cuda:
    """A machine (`mbc/runtime/machine.py`) on one GPU, used from the thread that made it."""

    device = "cuda"

    def __init__(
        self, plan: Plan, places: Places, folder: Path, membership: Membership | None, listener: int | None, *,
        canaries: bool, eager: bool, prefetch: bool,
    ) -> None:  # fmt: skip
        self._plan, self._places, self._membership, self._eager = plan, places, membership, eager
        self._listener = listener
        self._driver: Any = open_driver()
        gpus = [self._driver.Device(number) for number in range(self._driver.Device.count())]
        addresses = [gpu.pci_bus_id() for gpu in gpus]
        self._used_before = {address: usage_of(address) for address in addresses}
        self._context = open_context(self._driver)
        check_architecture(plan, self._context.get_device())
        self._number = addresses.index(self._context.get_device().pci_bus_id())
        self._observer: Observer | None = None
        self._connection: Connection | None = None  # where there are other ranks
        self._lent: Lent | None = None  # memory of another GPU
        self._home = Home()
        self._taken = _Taken(self._home)
        self._closed = weakref.finalize(self, _Taken.free, self._taken)
        # Run while PyCUDA's context is still there: exit handlers run last in, first out.
        self._closed.atexit = False
        atexit.register(self._closed)
        try:
            self._build(folder, canaries, prefetch)
        except BaseException:
            self._closed.detach()
            self._taken.free(together=False)
            raise

    @property
    def stream(self) -> int:
        return int(self._compute.handle)

    @property
    def memory(self) -> Memory:
        predicted = self._plan.predictions
        host = self._taken.host
        return Memory(
            predicted.arena_bytes, self._arena_bytes, predicted.overhead_bytes, self._overhead,
            predicted.host_bytes, 0 if host is None else host.nbytes, self._feeder.staging_bytes, self._prefetch_bytes,
            predicted.peer_bytes, 0 if self._lent is None else self._lent.size_bytes,
        )  # fmt: skip

    def feed(self, place: Place, array: Array | DeviceArray) -> None:
        if isinstance(array, DeviceArray) and 0 <= array.address - self._arena < self._arena_bytes:
            raise MbcError(
                "MBC150",
                f"input '{place.value}' is an output of the same module, left where this call writes over it",
                "pass a copy (of what forward(..., copy=False) gave: output.numpy() or tensor.clone())",
            )
        self._feeder.feed(place, self._address(place), array)

    def write(self, place: Place, array: Array) -> None:
        self._settle()
        data = stored_bytes(array, place.dtype, place.layout)
        if place.space is Space.HOST:
            self._host_bytes(place)[:] = data
        else:
            self._upload(self._address(place), data)

    def read(self, place: Place) -> Array:
        self._settle()
        data = np.empty(place.size_bytes, np.uint8)
        if place.space is Space.HOST:
            data[:] = self._host_bytes(place)
        else:
            self._driver.memcpy_dtoh(data, self._address(place))
        return loaded(data, place.shape, place.dtype, place.layout)

    def gathered(self, part: Place, parameter: Place) -> Array:
        """By way of the parameter's bytes, which are as many and lie alike, and are put back: nothing is allocated."""
        assert self._connection is not None and self._membership is not None
        self._settle()
        own = own_rows(parameter.shape[0], part.shape[0], self._membership.rank)
        row_bytes, address = parameter.size_bytes // parameter.shape[0], self._address(parameter)
        mine = stored_bytes(self.read(part)[: own.stop - own.start], part.dtype, part.layout)
        kept, whole = (np.empty(parameter.size_bytes, np.uint8) for _ in range(2))
        self._driver.memcpy_dtoh(kept, address)
        try:
            if mine.size:
                self._upload(address + own.start * row_bytes, mine)
            self._connection.communicator.gather_parts(
                address, part.shape[0] * row_bytes, parameter.size_bytes, int(self._compute.handle)
            )
            self._settle()
            self._driver.memcpy_dtoh(whole, address)
        finally:
            self._upload(address, kept)
        return loaded(whole, parameter.shape, part.dtype, part.layout)

    def output(self, place: Place, rows: int) -> Array | DeviceOutput:
        shown = DeviceOutput(
            place, rows, self._address(place), self._compute, self._number, lambda: self.read(place), self._home.check
        )
        self._shown.append(shown)
        return shown

    def accumulate(self, control: bytes, number: int) -> None:
        self._expire()
        if number == 0:
            self._begin(self._slots[0])
        self._start(self._slots[0], control, number)
        self._library.run(ACCUMULATE, self._eager)

    def train(self, control: bytes) -> Figures:
        self._expire()
        # An observer takes memory of its own while the step runs, and so does whoever listens to a capture.
        unchecked = not self._overhead_checked and self._observer is None and self._listener is None
        before = self._measured_overhead() if unchecked else None
        previous, slot = self._slots[-1], self._slots[0]
        self._slots.rotate(-1)
        if len(slot.controls) == 1:
            self._begin(slot)
        number = previous.number + 1
        self._start(slot, control, len(slot.controls) - 1)
        self._run("train")
        places = (self._places.loss, *self._places.metrics.values())
        for pinned, place in zip(slot.figures, places, strict=True):
            self._driver.memcpy_dtoh_async(pinned, self._address(place), self._compute)
        slot.event.record(self._compute)
        slot.number = number  # only now: where a call has failed its events say nothing

        home, connection = self._home, self._connection  # not all of this: who keeps a loss keeps no arena

        def fetch() -> tuple[float, ...]:
            home.check()
            if connection is not None:
                connection.wait(slot.event.query)
            slot.event.synchronize()
            return tuple(float(pinned[0]) for pinned in slot.figures)

        def idle_s() -> float | None:
            if number == 1 or previous.number != number - 1:  # there is none before, or its place is taken
                return None
            return slot.begun.time_since(previous.event) / 1e3

        figures = Figures(fetch, idle_s)
        slot.pending = weakref.ref(figures)
        if unchecked:
            self._check_overhead(before)
        return figures

    def _begin(self, slot: _Slot) -> None:
        """A step in the place of an earlier one, whose figures are fetched where somebody wants them."""
        earlier = slot.pending() if slot.pending is not None else None
        if earlier is not None:
            _ = earlier.values  # somebody still holds it, and its place is needed
        elif slot.pending is not None:
            slot.event.synchronize()
        slot.begun.record(self._compute)

    def _start(self, slot: _Slot, control: bytes, number: int) -> None:
        """Of mini-batch `number` of a step: control block and inputs."""
        slot.controls[number][:] = np.frombuffer(control, np.uint8)
        self._driver.memcpy_htod_async(self._address(self._places.control), slot.controls[number], self._compute)
        self._feeder.hand_over()

    def infer(self) -> None:
        self._expire()
        self._run("infer")

    def observe(self, observer: Observer | None) -> None:
        self._observer = observer

    @property
    def arena_address(self) -> int | None:
        return self._arena

    def memory_bytes(self, space: Space, start: int, stop: int) -> NDArray[np.uint8]:
        if space is Space.HOST:
            assert self._taken.host is not None
            return self._taken.host[start:stop]
        data = np.empty(stop - start, np.uint8)
        self._driver.memcpy_dtoh(data, self._base(space) + start)
        return data

    def check_canaries(self) -> None:
        """MBC161 when the bytes beside the arena, or the prediction of its size, are not what they should be."""
        self._settle()
        ends = (
            offset + -(-buffer.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            for buffer, offset in zip(self._plan.buffers, self._plan.offsets, strict=True)
            if buffer.space is Space.ARENA
        )
        if max(ends, default=0) != self._plan.predictions.arena_bytes:
            raise MbcError(
                "MBC161", "the arena does not end where its last buffer does", "report it with the plan file"
            )
        for side, address in zip(("before", "after"), self._guards, strict=False):
            guard = np.empty(GUARD_BYTES, np.uint8)
            self._driver.memcpy_dtoh(guard, address)
            wrong = np.flatnonzero(guard != _GUARD_PATTERN)
            if wrong.size:
                raise MbcError(
                    "MBC161",
                    f"{wrong.size} bytes {side} the arena were written, the first at {int(wrong[0])} of the guard",
                    "a kernel leaves its buffers: report it with the plan file",
                )

    def wait(self) -> None:
        self._settle()

    def check_home(self) -> None:
        self._home.check()

    def twin(self) -> NoReturn:
        raise no_copy(
            "a module on a GPU",
            "a second arena would break the memory budget: save a checkpoint, and load it into another Module",
        )

    def close(self) -> None:
        """Give back the arena and everything of the library's; the module cannot be used afterwards. A fork of the
        process that opened it has nothing to give back."""
        if self._closed.alive and self._home.is_this_process:
            self._home.check()
            self._expire()
            self._settle()
            self._closed()

    def _upload(self, address: int, data: Array) -> None:
        """What is there before any stream of the module goes on."""
        self._driver.memcpy_htod(address, data)
        if self._part is not None:  # the default stream, on which that is, is not ordered with the part's
            self._driver.Context.synchronize()

    def _settle(self) -> None:
        """Wait for everything that was started."""
        if self._connection is not None:
            self._connection.wait(self._compute.is_done)
        self._compute.synchronize()

    def _run(self, program: str) -> None:
        if self._observer is None:
            self._library.run(program, self._eager)
            return
        launches = self._plan.train.launches if program == "train" else self._plan.infer.launches
        self._settle()  # inputs are there, and launches of other streams do not wait for them
        for index in range(len(launches)):
            self._observer.before(self, program, index)
            self._library.run_launch(program, index)
            self._observer.after(self, program, index)

    def _build(self, folder: Path, canaries: bool, prefetch: bool) -> None:
        driver, predicted = self._driver, self._plan.predictions
        self._arena_bytes = predicted.arena_bytes
        self._check_free()
        guard = GUARD_BYTES if canaries else 0
        self._prefetch_bytes = prefetch_bytes(self._plan) if prefetch else 0
        if driver.mem_get_info()[0] < self._arena_bytes + self._prefetch_bytes:
            self._prefetch_bytes = 0
        try:
            allocation = self._allocated(max(1, self._arena_bytes + 2 * guard + self._prefetch_bytes))
        except driver.MemoryError:
            self._too_little(driver.mem_get_info()[0])
        self._taken.memory.append(allocation)
        self._arena = int(allocation) + guard
        self._guards = (int(allocation), self._arena + self._arena_bytes) if canaries else ()
        for address in self._guards:
            driver.memset_d8(address, _GUARD_PATTERN, GUARD_BYTES)
        # Blocking streams: work on the legacy default stream, where PyTorch is by default, is ordered with them.
        _, self._part = split_name(self._plan.target.gpu)
        with limited_streams(self._part):
            self._streams = tuple(driver.Stream() for _ in Stream)
        self._compute = self._streams[0]
        if self._membership is not None:
            check_together(self._membership, predicted.host_bytes)
        self._taken.host = pin(driver, predicted.host_bytes)
        self._lent = borrow(driver, predicted.peer_bytes)
        if self._lent is not None:
            self._taken.memory.append(self._lent)
        self._slots = deque(self._slot() for _ in range(_STEPS_AHEAD))
        landings = self._landings(self._arena + self._arena_bytes + guard) if self._prefetch_bytes else {}
        self._feeder = Feeder(driver, self._compute, driver.Stream(), landings)
        self._shown: list[DeviceOutput] = []
        self._overhead: int | None = None
        self._overhead_checked = False
        self._library = Library(self._plan, folder)
        self._taken.library = self._library
        if self._part is not None:
            self._library.limit(self._part)
        if not self._eager:
            self._zero()
        try:
            self._ready()
        except MbcError as error:
            if _OUT_OF_MEMORY.search(error.message):
                raise self._nothing_left(error) from error
            raise
        self._overhead = self._measured_overhead()

    def _allocated(self, size_bytes: int) -> Any:
        """Device memory with a method `free`; NCCL's own where copies of collectives go to the arena."""
        if ctas_of(self._plan.train) != BY_COPIES:
            return self._driver.mem_alloc(size_bytes)
        return SymmetricMemory(load_nccl(), size_bytes)

    def _ready(self) -> None:
        """Everything that a step needs beside the arena is made here."""
        self._library.create(
            self._arena, self._arena_bytes, address_of(self._taken.host), self._plan.predictions.host_bytes,
            0 if self._lent is None else self._lent.address, self._plan.predictions.peer_bytes,
            [int(stream.handle) for stream in self._streams], self._connected(),
        )  # fmt: skip
        # Without a graph there is nothing to ready, and a memory checker sees what is read before it is written.
        if not self._eager:
            self._library.warm()
            self._library.capture(self._listener)
            self._zero()

    def _connected(self) -> RanksInterface | None:
        """To the other ranks, before the overhead is measured. Every rank then goes through warm-up and capture in the
        same order; at the end graphs are destroyed before the communicator."""
        if self._membership is None:
            return None
        versions = {
            "driver": ".".join(map(str, divmod(self._driver.get_driver_version(), 1000))),
            "cuDNN": str(self._library.cudnn_version),
        }
        gpu = f"{platform.node()} {self._context.get_device().pci_bus_id()}"
        made = Connection.open(self._membership, versions, gpu, ctas_of(self._plan.train))
        self._taken.communicator, self._connection = made.communicator, made
        for memory in self._taken.memory:
            if isinstance(memory, SymmetricMemory):
                memory.register(made.communicator)
        return made.interface

    def _expire(self) -> None:
        """Before a program writes over the outputs that were left in the arena."""
        while self._shown:
            self._shown.pop().expire()

    def _zero(self) -> None:
        if self._arena_bytes:
            self._driver.memset_d8(self._arena, 0, self._arena_bytes)
            self._driver.Context.synchronize()

    def _landings(self, address: int) -> dict[int, int]:
        """Addresses by buffer, one after the other from `address` on."""
        found: dict[int, int] = {}
        for place in self._places.train_inputs.values():
            found[place.buffer] = address
            address += rounded(place.size_bytes)
        return found

    def _slot(self) -> _Slot:
        places = (self._places.loss, *self._places.metrics.values())
        pinned = self._driver.pagelocked_empty
        figures = tuple(pinned(place.shape, STORED[place.dtype]) for place in places)
        controls = tuple(pinned(HOST_BYTES, np.uint8) for _ in range(self._plan.graph.optimizer.accumulate))
        return _Slot(controls, figures, self._driver.Event(), self._driver.Event())

    def _host_bytes(self, place: Place) -> Array:
        """The pinned bytes of a state that lies in host memory between steps."""
        assert self._taken.host is not None
        return self._taken.host[place.offset_bytes : place.offset_bytes + place.size_bytes]

    def _address(self, place: Place) -> int:
        return self._base(place.space) + place.offset_bytes

    def _base(self, space: Space) -> int:
        """Where the arena, or the memory that a peer lends, begins."""
        if space is Space.ARENA:
            return self._arena
        assert space is Space.PEER and self._lent is not None
        return self._lent.address

    def _measured_overhead(self) -> int | None:
        """Device memory taken since before the context was made, without what `_build` allocates."""
        address = self._context.get_device().pci_bus_id()
        before = self._used_before.get(address)
        taken = None if before is None else taken_since(before, usage_of(address))
        canaries = len(self._guards) * GUARD_BYTES
        return None if taken is None else max(0, taken - self._arena_bytes - self._prefetch_bytes - canaries)

    def _check_overhead(self, before: int | None) -> None:
        """After the first step everything is loaded: what the module takes must be within its budget. What this process
        took between opening it and that step (`before` was measured there) is its caller's: tensors to be fed, say."""
        self._settle()
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
            "again; where another program took of the GPU's memory meanwhile, open the module again",
        )

    def _check_free(self) -> None:
        free = self._driver.mem_get_info()[0]
        if free < self._arena_bytes:
            self._too_little(free)

    def _too_little(self, free: int) -> NoReturn:
        raise MbcError(
            "MBC155",
            f"the arena takes {self._arena_bytes:,} bytes, free on the GPU are {free:,}{self._others()}",
            "end other programs that use the GPU, or compile with a smaller memory.device",
        )

    def _nothing_left(self, error: MbcError) -> MbcError:
        """MBC155 where the arena was there, and what libraries take beside it is not."""
        free = self._driver.mem_get_info()[0]
        return MbcError(
            "MBC155",
            f"beside the arena the plan reserved {self._plan.predictions.overhead_bytes:,} bytes for the context and "
            f"libraries, and they ran out: {free:,} are free{self._others()} ({error.message})",
            "end other programs that use the GPU, or compile with a smaller memory.device",
        )

    def _others(self) -> str:
        """What other processes have of the GPU, where that is told."""
        before = self._used_before.get(self._context.get_device().pci_bus_id())
        used = before.used_bytes if before is not None else None
        return f"; {used:,} were in use before this module was opened" if used else ""
