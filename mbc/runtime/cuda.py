"""Runs a package on a GPU. PyCUDA owns context, arena, pinned and lent memory and streams; the library gets pointers.

The order of construction is: arena, library, one warm-up of every launch on a zeroed arena, capture. States are
written only after that, so that nothing of the warm-up stays. Afterwards nothing is allocated on the device.
"""

from __future__ import annotations

import atexit
import platform
import re
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
from mbc.plan.collectives import ctas_of
from mbc.plan.cut import parts_before_last
from mbc.plan.live import rounded
from mbc.plan.model import Plan
from mbc.plan.prefetch import prefetch_bytes
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.bindings import Place, Places
from mbc.runtime.communicator import Communicator, SymmetricMemory, load_nccl
from mbc.runtime.connection import Connection
from mbc.runtime.driver import check_architecture, open_context, open_driver
from mbc.runtime.feeding import Feeder
from mbc.runtime.formats import STORED, canonical_view, loaded, stored_bytes
from mbc.runtime.green_context import limited_streams
from mbc.runtime.lender import Lent, borrow
from mbc.runtime.library import LIBRARY_FILE, Library, RanksInterface
from mbc.runtime.machine import Allocation, Figures, Memory, Observer
from mbc.runtime.membership import Membership
from mbc.runtime.output import DeviceOutput
from mbc.runtime.pinned import address_of, check_together, pin
from mbc.runtime.turns import Home, refuse_copy
from mbc.runtime.usage import taken_since, usage_of

Array = NDArray[Any]

GUARD_BYTES = 64 << 10  # size of each canary; keeps the arena aligned
_GUARD_PATTERN = 0xA5
_STEPS_AHEAD = 16  # steps that may be queued before the figures of the first one are fetched
# Messages of CUDA, cuDNN and cuBLAS when no memory is left.
_OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC", re.IGNORECASE)


def report_not_built(reason: str) -> NoReturn:
    """Raise MBC157: a module shall run on a GPU, but no code was built for one.

    Raises:
        MbcError: MBC157, with the reason.
    """
    raise MbcError("MBC157", reason, "run `mbc doctor` to see what a build needs, then compile again")


def open_cuda(
    plan: Plan, places: Places, folder: Path | None, *, canaries: bool, eager: bool, prefetch: bool,
    membership: Membership | None = None, listener: int | None = None,
    allocate: Callable[[int], Allocation] | None = None,
) -> Cuda:  # fmt: skip
    """Return a machine that runs the package in `folder` on this process's GPU.

    Args:
        plan: The package's plan.
        places: Where the plan's inputs, states and outputs are.
        folder: The package's folder; None if there is only a plan.
        canaries: Whether guard bytes surround the arena, for `check_canaries`.
        eager: Whether programs run launch by launch instead of as graphs.
        prefetch: Whether the inputs of a step are copied while the step before runs. It happens only if the budget and
            the free memory have room for these inputs.
        membership: The ranks that share a mini-batch; each takes the GPU of its number. None for one process.
        listener: Address of a function that `Library.capture` calls for each node of a graph.
        allocate: Returns device memory of so many bytes for the arena; None for CUDA's own allocator.

    Raises:
        MbcError: MBC168 (the plan's precision is for the CPU), MBC157 (no library), MBC153 (no PyCUDA), MBC152 (no
            GPU), MBC154 (not the planned architecture), MBC155 (too little free memory), MBC105 and MBC106 (no GPU
            lends the memory to which the plan offloads), and the errors of `Library`.
    """
    if plan.graph.precision is Precision.FP64:
        raise MbcError("MBC168", "precision fp64 runs on the CPU only", 'choose another precision, or device="cpu"')
    if folder is None or not (folder / LIBRARY_FILE).is_file():
        where = f"'{folder}' has no {LIBRARY_FILE}" if folder is not None else "a plan alone has no library"
        report_not_built(f"{where}: it was not built for a GPU")
    return Cuda(plan, places, folder, membership, listener, allocate, canaries=canaries, eager=eager, prefetch=prefetch)


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


@dataclass
class _Taken:
    """Resources that the process that took them gives back, in this order; a fork of the process has none of them."""

    home: Home
    library: Library | None = None
    communicator: Communicator | None = None  # graphs of the library hold it
    host: Array | None = None  # pinned; freed when this last reference to it goes
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


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """Device memory that another machine gives back."""

    memory: Any

    def __int__(self) -> int:
        return int(self.memory)

    def free(self) -> None:
        """Leave the memory to its owner."""


class Cuda:
    """A machine (`mbc/runtime/machine.py`) on one GPU, used from the thread that opened it."""

    device = "cuda"

    def __init__(
        self, plan: Plan, places: Places, folder: Path, membership: Membership | None, listener: int | None,
        allocate: Callable[[int], Allocation] | None, *, canaries: bool, eager: bool, prefetch: bool,
    ) -> None:  # fmt: skip
        """Take the memory, load the library, and capture the graphs; for the arguments see `open_cuda`."""
        self._plan, self._places, self._membership, self._eager = plan, places, membership, eager
        self._listener, self._allocate = listener, allocate
        self._driver: Any = open_driver()
        gpus = [self._driver.Device(number) for number in range(self._driver.Device.count())]
        addresses = [gpu.pci_bus_id() for gpu in gpus]
        self._used_before = {address: usage_of(address) for address in addresses}
        self._context = open_context(self._driver)
        check_architecture(plan, self._context.get_device())
        self._number = addresses.index(self._context.get_device().pci_bus_id())
        self._observer: Observer | None = None
        self._connection: Connection | None = None  # to other ranks
        self._lent: Lent | None = None  # memory of another GPU
        self._home = Home()
        self._taken = _Taken(self._home)
        self._closed = weakref.finalize(self, _Taken.free, self._taken)
        # The exit handler must run while PyCUDA's context still exists: the handler registered last runs first.
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
        """Handle of the compute stream, which reads device arrays."""
        return int(self._compute.handle)

    @property
    def memory(self) -> Memory:
        """Bytes planned and taken."""
        predicted = self._plan.predictions
        host = self._taken.host
        return Memory(
            predicted.arena_bytes, self._arena_bytes, predicted.overhead_bytes, self._overhead,
            predicted.host_bytes, 0 if host is None else host.nbytes, self._feeder.staging_bytes, self._prefetch_bytes,
            predicted.peer_bytes, 0 if self._lent is None else self._lent.size_bytes,
        )  # fmt: skip

    def feed(self, place: Place, array: Array | DeviceArray) -> None:
        """Queue the copy of an input of the program that runs next; missing rows become zeros.

        Raises:
            MbcError: MBC150 if the array is an output of this module in its arena.
        """
        if isinstance(array, DeviceArray) and 0 <= array.address - self._arena < self._arena_bytes:
            raise MbcError(
                "MBC150",
                f"input '{place.value}' is an output of the same module, in memory that this call overwrites",
                "pass a copy of the output of forward(..., copy=False): output.numpy() or tensor.clone()",
            )
        self._feeder.feed(place, self._address(place), array)

    def write(self, place: Place, array: Array) -> None:
        """Store a canonical array, after all queued work."""
        self._settle()
        data = stored_bytes(array, place.dtype, place.layout)
        if place.space is Space.HOST:
            self._host_bytes(place)[:] = data
        else:
            self._upload(self._address(place), data)

    def read(self, place: Place) -> Array:
        """Return the canonical array at a place, after all queued work."""
        self._settle()
        data = np.empty(place.size_bytes, np.uint8)
        if place.space is Space.HOST:
            data[:] = self._host_bytes(place)
        else:
            self._driver.memcpy_dtoh(data, self._address(place))
        return loaded(data, place.shape, place.dtype, place.layout)

    def gathered(self, part: Place, parameter: Place) -> Array:
        """Return the whole of a state of which this rank has a part. Collective.

        The parameter's bytes serve as the buffer, so that nothing is allocated: they have the size and layout of the
        whole state, and are restored afterwards.
        """
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
        """Return the first rows of an output of `infer`, without a copy; valid until a program runs."""
        shown = DeviceOutput(
            place, rows, self._address(place), self._compute, self._number, lambda: self.read(place), self._home.check
        )
        self._shown.append(shown)
        return shown

    def accumulate(self, control: bytes, number: int) -> None:
        """Run a mini-batch of a step that is not its last mini-batch; `number` counts from 0."""
        self._expire()
        if number == 0:
            self._begin(self._slots[0])
        self._start(self._slots[0], control, number)
        for part in parts_before_last(self._plan.graph):
            self._library.run(part, self._eager)

    def train(self, control: bytes) -> Figures:
        """Queue the training program.

        The first step also checks that the module stays within its budget.

        Returns:
            The step's figures, which are fetched when a caller reads them.
        """
        self._expire()
        # Observers, and listeners to a capture, take memory of their own while the step runs.
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
        slot.number = number  # only now: the events of a call that failed mean nothing

        home, connection = self._home, self._connection  # not `self`: a loss must not keep the arena alive

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
        if unchecked:
            self._check_overhead(before)
        return figures

    def _begin(self, slot: _Slot) -> None:
        """Start a step in the slot of an earlier step, whose figures are fetched first if a caller still holds them."""
        earlier = slot.pending() if slot.pending is not None else None
        if earlier is not None:
            _ = earlier.values  # a caller still holds the figures, and their slot is needed
        elif slot.pending is not None:
            slot.event.synchronize()
        slot.begun.record(self._compute)

    def _start(self, slot: _Slot, control: bytes, number: int) -> None:
        """Queue the copies of the control block and the inputs for mini-batch `number` of a step."""
        slot.controls[number][:] = np.frombuffer(control, np.uint8)
        self._driver.memcpy_htod_async(self._address(self._places.control), slot.controls[number], self._compute)
        self._feeder.hand_over()

    def run_half(self, half: str, control: bytes) -> None:
        """Queue one part of the training program."""
        self._expire()
        slot = self._slots[0]
        self._slots.rotate(-1)
        slot.event.synchronize()
        self._start(slot, control, 0)
        self._library.run(half, self._eager)
        slot.event.record(self._compute)

    @property
    def arena(self) -> Any:
        """The allocation of the arena, which another module may use as long as it exists."""
        return _Borrowed(self._taken.memory[0])

    def shared(self, place: Place) -> Any:
        """Return an object with DLPack over the memory of a place, which stays allocated while the object lives."""
        if place.space is Space.HOST:
            return canonical_view(self._host_bytes(place), place.shape, place.dtype, place.layout)
        memory = self._taken.memory[0]
        return DeviceOutput(
            place, place.shape[0], self._address(place), self._compute, self._number, lambda: self._held(memory, place)
        )

    def _held(self, memory: Any, place: Place) -> Array:
        """Return a copy of what is at a place of the arena, whose memory the caller holds."""
        assert memory is not None
        return self.read(place)

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

    def infer(self) -> None:
        """Queue the inference program."""
        self._expire()
        self._run("infer")

    def observe(self, observer: Observer | None) -> None:
        """Show each launch of the programs to `observer` from now on; None ends this."""
        self._observer = observer

    @property
    def arena_address(self) -> int | None:
        """Address of the arena in device memory."""
        return self._arena

    def memory_bytes(self, space: Space, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop) of a space; a copy if they are in device memory."""
        if space is Space.HOST:
            assert self._taken.host is not None
            return self._taken.host[start:stop]
        data = np.empty(stop - start, np.uint8)
        self._driver.memcpy_dtoh(data, self._base(space) + start)
        return data

    def check_canaries(self) -> None:
        """Raise an error if guard bytes beside the arena have changed, or if the arena's size was predicted wrongly.

        Raises:
            MbcError: MBC161 in both cases.
        """
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
                    "a kernel writes outside its buffers: report it with the plan file",
                )

    def wait(self) -> None:
        """Wait for all queued work."""
        self._settle()

    def check_home(self) -> None:
        """Raise MBC235 in a process or thread other than the one that opened the machine."""
        self._home.check()

    def twin(self) -> NoReturn:
        """Raise MBC234: a second arena would break the memory budget."""
        refuse_copy(
            "a module on a GPU",
            "a second arena would break the memory budget: save a checkpoint, and load it into another Module",
        )

    def close(self) -> None:
        """Give back the arena and everything that the library holds; the module cannot be used afterwards.

        A fork of the process that opened the module has nothing to give back.
        """
        if self._closed.alive and self._home.is_this_process:
            self._home.check()
            self._expire()
            self._settle()
            self._closed()

    def _upload(self, address: int, data: Array) -> None:
        """Copy bytes to the device; streams of the module start later work only after this copy."""
        self._driver.memcpy_htod(address, data)
        if self._part is not None:  # the default stream, which copies, is not ordered with the part's streams
            self._driver.Context.synchronize()

    def _settle(self) -> None:
        """Wait for all queued work."""
        if self._connection is not None:
            self._connection.wait(self._compute.is_done)
        self._compute.synchronize()

    def _run(self, program: str) -> None:
        if self._observer is None:
            self._library.run(program, self._eager)
            return
        launches = self._plan.train.launches if program == "train" else self._plan.infer.launches
        self._settle()  # launches of other streams do not wait for the inputs
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
        self._part = split_name(self._plan.target.gpu).multiprocessors
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
        """Return device memory with a method `free`; NCCL allocates it if collectives copy to the arena."""
        if self._allocate is not None:
            return self._allocate(size_bytes)
        if ctas_of(self._plan.train) != BY_COPIES:
            return self._driver.mem_alloc(size_bytes)
        return SymmetricMemory(load_nccl(), size_bytes)

    def _ready(self) -> None:
        """Create everything that a step needs beside the arena."""
        self._library.create(
            self._arena, self._arena_bytes, address_of(self._taken.host), self._plan.predictions.host_bytes,
            0 if self._lent is None else self._lent.address, self._plan.predictions.peer_bytes,
            [int(stream.handle) for stream in self._streams], self._connected(),
        )  # fmt: skip
        # Without graphs nothing has to be prepared, and a memory checker then notices reads before the first write.
        if not self._eager:
            self._library.warm()
            self._library.capture(self._listener)
            self._zero()

    def _connected(self) -> RanksInterface | None:
        """Connect to the other ranks before the overhead is measured.

        Every rank then goes through warm-up and capture in the same order. At the end graphs are destroyed before the
        communicator.

        Returns:
            The interface for generated code; None for one process.
        """
        if self._membership is None:
            return None
        versions = {
            "driver": ".".join(map(str, divmod(self._driver.get_driver_version(), 1000))),
            "cuDNN": str(self._library.cudnn_version),
        }
        gpu = f"{platform.node()} {self._context.get_device().pci_bus_id()}"
        connection = Connection.open(self._membership, versions, gpu, ctas_of(self._plan.train))
        self._taken.communicator, self._connection = connection.communicator, connection
        for memory in self._taken.memory:
            if isinstance(memory, SymmetricMemory):
                memory.register(connection.communicator)
        return connection.interface

    def _expire(self) -> None:
        """Expire outputs that were left in the arena, before a program overwrites them."""
        while self._shown:
            self._shown.pop().expire()

    def _zero(self) -> None:
        if self._arena_bytes:
            self._driver.memset_d8(self._arena, 0, self._arena_bytes)
            self._driver.Context.synchronize()

    def _landings(self, address: int) -> dict[int, int]:
        """Return addresses of landing buffers by input buffer, one after another from `address`."""
        addresses: dict[int, int] = {}
        for place in self._places.train_inputs.values():
            addresses[place.buffer] = address
            address += rounded(place.size_bytes)
        return addresses

    def _slot(self) -> _Slot:
        places = (self._places.loss, *self._places.metrics.values())
        pinned = self._driver.pagelocked_empty
        figures = tuple(pinned(place.shape, STORED[place.dtype]) for place in places)
        controls = tuple(pinned(HOST_BYTES, np.uint8) for _ in range(self._plan.graph.optimizer.accumulate))
        return _Slot(controls, figures, self._driver.Event(), self._driver.Event())

    def _host_bytes(self, place: Place) -> Array:
        """Return the pinned bytes of a state that is in host memory between steps."""
        assert self._taken.host is not None
        return self._taken.host[place.offset_bytes : place.offset_bytes + place.size_bytes]

    def _address(self, place: Place) -> int:
        return self._base(place.space) + place.offset_bytes

    def _base(self, space: Space) -> int:
        """Return the start address of the arena, or of the memory that a peer lends."""
        if space is Space.ARENA:
            return self._arena
        assert space is Space.PEER and self._lent is not None
        return self._lent.address

    def _measured_overhead(self) -> int | None:
        """Return the device memory taken since before the context was created, without the memory of `_build`."""
        address = self._context.get_device().pci_bus_id()
        before = self._used_before.get(address)
        taken = None if before is None else taken_since(before, usage_of(address))
        canaries = len(self._guards) * GUARD_BYTES
        return None if taken is None else max(0, taken - self._arena_bytes - self._prefetch_bytes - canaries)

    def _check_overhead(self, before: int | None) -> None:
        """Check, after the first step has loaded everything, that the module stays within its budget.

        Memory that this process took between opening the module and that step belongs to the caller, for instance for
        tensors of inputs; it is not counted.

        Args:
            before: Overhead measured just before the first step.

        Raises:
            MbcError: MBC160 if arena, prefetched inputs and overhead take more than the budget.
        """
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
            "again; if another program took GPU memory meanwhile, open the module again",
        )

    def _check_free(self) -> None:
        free = self._driver.mem_get_info()[0]
        if free < self._arena_bytes:
            self._too_little(free)

    def _too_little(self, free: int) -> NoReturn:
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
        before = self._used_before.get(self._context.get_device().pci_bus_id())
        used = before.used_bytes if before is not None else None
        return f"; {used:,} were in use before this module was opened" if used else ""
