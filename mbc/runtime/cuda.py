"""Runs a package on a GPU. PyCUDA owns context, arena, pinned and lent memory and streams; the library gets pointers.

The order of construction is: arena, library, one warm-up of every launch on a zeroed arena, capture. States are
written only after that, so that nothing of the warm-up stays. Afterwards nothing is allocated on the device.

Context, streams and memory are in `open_gpu`, the copies of each step in `feeding`. This file loads the library, and
runs programs and what they need of other ranks.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.streams import Space
from mbc.ops.shard import own_rows
from mbc.plan.collectives import ctas_of
from mbc.plan.cut import parts_before_last
from mbc.plan.live import rounded
from mbc.plan.model import Plan
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.bindings import Place, Places
from mbc.runtime.communicator import SymmetricMemory
from mbc.runtime.connection import Connection
from mbc.runtime.feeding import Feeder, QueuedSteps
from mbc.runtime.formats import canonical_view, loaded, stored_bytes
from mbc.runtime.library import LIBRARY_FILE, Library, RanksInterface
from mbc.runtime.machine import Allocation, Figures, Memory, Observer
from mbc.runtime.membership import Membership
from mbc.runtime.open_gpu import OpenGpu
from mbc.runtime.output import DeviceOutput
from mbc.runtime.pinned import address_of
from mbc.runtime.turns import refuse_copy

Array = NDArray[Any]

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
    if not plan.is_timed:
        raise MbcError("MBC168", "precision fp64 runs on the CPU only", 'choose another precision, or device="cpu"')
    if folder is None or not (folder / LIBRARY_FILE).is_file():
        where = f"'{folder}' has no {LIBRARY_FILE}" if folder is not None else "a plan alone has no library"
        report_not_built(f"{where}: it was not built for a GPU")
    return Cuda(plan, places, folder, membership, listener, allocate, canaries=canaries, eager=eager, prefetch=prefetch)


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """Device memory that another machine gives back."""

    memory: Any

    def __int__(self) -> int:
        return int(self.memory)

    def free(self) -> None:
        """Leave the memory to its owner."""


class Cuda(OpenGpu):
    """A machine (`mbc/runtime/machine.py`) on one GPU, used from the thread that opened it."""

    device = "cuda"

    def __init__(
        self, plan: Plan, places: Places, folder: Path, membership: Membership | None, listener: int | None,
        allocate: Callable[[int], Allocation] | None, *, canaries: bool, eager: bool, prefetch: bool,
    ) -> None:  # fmt: skip
        """Take the memory, load the library, and capture the graphs; for the arguments see `open_cuda`."""
        super().__init__(plan)
        self._places, self._membership, self._eager, self._listener = places, membership, eager, listener
        self._observer: Observer | None = None
        try:
            self._take(membership, allocate, canaries, prefetch)
            self._build(folder)
        except BaseException:
            self._closed.detach()
            self._resources.free(together=False)
            raise

    @property
    def memory(self) -> Memory:
        """Bytes planned and taken."""
        predicted, host = self._plan.predictions, self._resources.host
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

    def gathered(self, part: Place, parameter: Place) -> Array:
        """Return the whole of a state of which this rank has a part. Collective.

        The parameter's bytes serve as the buffer, so that nothing is allocated: they have the size and layout of the
        whole state, and are restored afterwards.
        """
        assert self._connection is not None and self._membership is not None
        address = self._address(parameter)
        own = own_rows(parameter.shape[0], part.shape[0], self._membership.rank)
        row_bytes = parameter.size_bytes // parameter.shape[0]
        mine = stored_bytes(self.read(part)[: own.stop - own.start], part.dtype, part.layout)
        kept = self._download(address, parameter.size_bytes)
        try:
            if mine.size:
                self._upload(address + own.start * row_bytes, mine)
            self._connection.communicator.gather_parts(
                address, part.shape[0] * row_bytes, parameter.size_bytes, int(self._compute.handle)
            )
            self.wait()
            whole = self._download(address, parameter.size_bytes)
        finally:
            self._upload(address, kept)
        return loaded(whole, parameter.shape, part.dtype, part.layout)

    def output(self, place: Place, rows: int) -> Array | DeviceOutput:
        """Return the first rows of an output of `infer`, without a copy; valid until a program runs."""
        where = place, rows, self._address(place), self._compute, self._number
        shown = DeviceOutput(*where, partial(self.read, place), self._home.check)
        self._shown.append(shown)
        return shown

    def accumulate(self, control: bytes, number: int) -> None:
        """Run a mini-batch of a step that is not its last mini-batch; `number` counts from 0."""
        self._expire()
        self._steps.start(control, number)
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
        self._steps.start(control, self._plan.graph.optimizer.accumulate - 1)
        self._run("train")
        figures = self._steps.end(self._home, self._connection)
        if unchecked:
            self._check_overhead(before)
        return figures

    def run_half(self, half: str, control: bytes) -> None:
        """Queue one part of the training program."""
        self._expire()
        with self._steps.half(control):
            self._library.run(half, self._eager)

    @property
    def arena(self) -> Any:
        """The allocation of the arena, which another module may use as long as it exists."""
        return _Borrowed(self._resources.memory[0])

    def shared(self, place: Place) -> Any:
        """Return an object with DLPack over the memory of a place, which stays allocated while the object lives."""
        if place.space is Space.HOST:
            return canonical_view(self._bytes_at(place), place.shape, place.dtype, place.layout)
        allocation = self._resources.memory[0]

        def fetch() -> Array:
            assert allocation is not None  # held as long as the object
            return self.read(place)

        return DeviceOutput(place, place.shape[0], self._address(place), self._compute, self._number, fetch)

    def infer(self) -> None:
        """Queue the inference program."""
        self._expire()
        self._run("infer")

    def observe(self, observer: Observer | None) -> None:
        """Show each launch of the programs to `observer` from now on; None ends this."""
        self._observer = observer

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
            self.wait()
            self._closed()

    def _run(self, program: str) -> None:
        if self._observer is None:
            self._library.run(program, self._eager)
            return
        launches = self._plan.train.launches if program == "train" else self._plan.infer.launches
        self.wait()  # launches of other streams do not wait for the inputs
        for index in range(len(launches)):
            self._observer.before(self, program, index)
            self._library.run_launch(program, index)
            self._observer.after(self, program, index)

    def _build(self, folder: Path) -> None:
        """Load the library, and capture the graphs.

        Raises:
            MbcError: MBC155 if no memory is left beside the arena, and the errors of `Library`.
        """
        self._feeder = Feeder(self._driver, self._compute, self._driver.Stream(), self._landing_addresses())
        figures = [(place, self._address(place)) for place in (self._places.loss, *self._places.metrics.values())]
        control, mini_batches = self._address(self._places.control), self._plan.graph.optimizer.accumulate
        self._steps = QueuedSteps(self._driver, self._compute, self._feeder, control, figures, mini_batches)
        self._shown: list[DeviceOutput] = []
        self._library = Library(self._plan, folder)
        self._resources.library = self._library
        if self._part is not None:
            self._library.limit(self._part)
        if not self._eager:
            self._zero()
        try:
            self._library.create(
                self._arena, self._arena_bytes, address_of(self._resources.host), self._plan.predictions.host_bytes,
                0 if self._lent is None else self._lent.address, self._plan.predictions.peer_bytes,
                [int(stream.handle) for stream in self._streams], self._connected(),
            )  # fmt: skip
            # Without graphs nothing has to be prepared, and a memory checker then notices reads before the first write.
            if not self._eager:
                self._library.warm()
                self._library.capture(self._listener)
                self._zero()
        except MbcError as error:
            if _OUT_OF_MEMORY.search(error.message):
                raise self._nothing_left(error) from error
            raise
        self._overhead = self._measured_overhead()

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
        gpu = f"{platform.node()} {self._bus_address}"
        connection = Connection.open(self._membership, versions, gpu, ctas_of(self._plan.train))
        self._resources.communicator, self._connection = connection.communicator, connection
        for memory in self._resources.memory:
            if isinstance(memory, SymmetricMemory):
                memory.register(connection.communicator)
        return connection.interface

    def _expire(self) -> None:
        """Expire outputs that were left in the arena, before a program overwrites them."""
        while self._shown:
            self._shown.pop().expire()

    def _landing_addresses(self) -> dict[int, int]:
        """Return addresses of landing buffers by input buffer, one after another; none without prefetched inputs."""
        places = tuple(self._places.train_inputs.values()) if self._prefetch_bytes else ()
        starts = accumulate((rounded(place.size_bytes) for place in places), initial=self._landings)
        return {place.buffer: start for place, start in zip(places, starts, strict=False)}
