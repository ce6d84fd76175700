"""The interface of a machine that runs a module's plan: a GPU (`cuda.py`) or NumPy (`cpu.py` through `Host`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.streams import Space
from mbc.ops.base import NO_OTHER_RANKS
from mbc.ops.shard import whole_from
from mbc.plan.cut import parts_before_last
from mbc.plan.model import Plan
from mbc.runtime.arguments import shown
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.bindings import Place, Places
from mbc.runtime.cpu import Interpreter
from mbc.runtime.launch_order import Transfers
from mbc.runtime.membership import Membership
from mbc.runtime.output import DeviceOutput
from mbc.units import show_size

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes that a module was planned to take, and that it takes.

    Attributes:
        arena_planned: Planned size of the arena.
        arena_taken: Size of the arena.
        overhead_planned: Device memory that the plan reserves outside the arena: for the context, library handles,
            loaded code and executable graphs.
        overhead_taken: Device memory taken outside the arena; None on the CPU, or if it cannot be measured.
        host_planned: Planned host memory for the plan's copies.
        host_taken: Host memory for the plan's copies, pinned if there is a GPU.
        staging_taken: Other pinned host memory, to feed inputs.
        prefetch_taken: Device memory beside the arena in which the inputs of the next step arrive.
        peer_planned: Planned memory of another GPU.
        peer_taken: Memory of another GPU.
    """

    arena_planned: int
    arena_taken: int
    overhead_planned: int
    overhead_taken: int | None
    host_planned: int
    host_taken: int
    staging_taken: int = 0
    prefetch_taken: int = 0
    peer_planned: int = 0
    peer_taken: int = 0

    def __str__(self) -> str:
        """Return the sizes in one line; planned host and peer memory only if there is any."""
        taken = "not measured" if self.overhead_taken is None else show_size(self.overhead_taken)
        ahead = f" inputs of the next step {show_size(self.prefetch_taken)}," if self.prefetch_taken else ""
        text = (
            f"arena {show_size(self.arena_taken)} (planned {show_size(self.arena_planned)}),{ahead}"
            f" overhead {taken} (reserved {show_size(self.overhead_planned)})"
        )
        if self.host_planned:
            text += f", host memory {show_size(self.host_taken)} (planned {show_size(self.host_planned)})"
        if self.peer_planned:
            text += f", another GPU's memory {show_size(self.peer_taken)} (planned {show_size(self.peer_planned)})"
        if self.staging_taken:
            text += f", {show_size(self.staging_taken)} pinned to feed inputs"
        return text


class Figures:
    """The figures of a step, first the loss, then the metrics; they are fetched when a caller reads them."""

    def __init__(
        self, fetch: Callable[[], tuple[float, ...]], idle_s: Callable[[], float | None] = lambda: None
    ) -> None:
        """Keep two functions until a caller reads the figures.

        Args:
            fetch: Waits for the step and returns the loss and the metrics.
            idle_s: Returns the seconds for which the device was idle before the step, or None.
        """
        self._fetch: tuple[Callable[[], tuple[float, ...]], Callable[[], float | None]] | None = fetch, idle_s
        self._values: tuple[float, ...] = ()
        self._idle_s: float | None = None

    @property
    def values(self) -> tuple[float, ...]:
        """The loss and the metrics; reading them waits for the step."""
        fetch = self._fetch
        if fetch is not None:
            values, idle_s = fetch
            self._values, self._idle_s = values(), idle_s()
            self._fetch = None  # only now: another thread may read the figures meanwhile
        return self._values

    @property
    def idle_s(self) -> float | None:
        """Seconds for which the device was idle between the step before and this one, or None if unknown.

        Reading it waits for the step.
        """
        _ = self.values
        return self._idle_s

    def __deepcopy__(self, _: object) -> Figures:
        """Return the object itself: the figures of a step do not change, and can be fetched for this object only."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Return a pickle of the values, without the functions that fetch them."""
        return Figures.of, (self.values, self.idle_s)

    @staticmethod
    def of(values: tuple[float, ...], idle_s: float | None) -> Figures:
        """Return figures that need no machine any more."""
        return Figures(lambda: values, lambda: idle_s)


class Allocation(Protocol):
    """Device memory."""

    def __int__(self) -> int:
        """Return the address."""
        ...

    def free(self) -> None:
        """Give the memory back."""
        ...


class Observer(Protocol):
    """Looks at the memory of a machine before and after every launch of a program (`train` or `infer`)."""

    def before(self, machine: Machine, program: str, index: int) -> None:
        """Handle the moment before launch `index` starts."""
        ...

    def after(self, machine: Machine, program: str, index: int) -> None:
        """Handle the moment after launch `index` has ended."""
        ...


class Machine(Protocol):
    """Runs the programs of a plan over its arena."""

    @property
    def device(self) -> str:
        """The kind of device: `cuda` or `cpu`."""
        ...

    @property
    def stream(self) -> int | None:
        """Handle of the stream that reads device arrays; None on the CPU."""
        ...

    @property
    def memory(self) -> Memory:
        """Bytes planned and taken."""
        ...

    def feed(self, place: Place, array: Array | DeviceArray) -> None:
        """Fill the first rows of an input of the program that runs next, and the other rows with zeros.

        The copy may still be queued when the call returns.
        """
        ...

    def write(self, place: Place, array: Array) -> None:
        """Store a canonical array."""
        ...

    def read(self, place: Place) -> Array:
        """Return the canonical array at a place, after all work that was started."""
        ...

    def gathered(self, part: Place, parameter: Place) -> Array:
        """Return the whole of a state of which this rank has a part. Collective.

        Args:
            part: Place of this rank's part.
            parameter: Place of the state's parameter, which has the shape of the whole state.
        """
        ...

    def output(self, place: Place, rows: int) -> Array | DeviceOutput:
        """Return the first rows of an output of `infer`; on a GPU without a copy, valid until a program runs."""
        ...

    def accumulate(self, control: bytes, number: int) -> None:
        """Add the gradients of a mini-batch that is not the last one of its step.

        This runs a part of the training program.

        Args:
            control: Bytes that are put at the start of the control block.
            number: Number of the mini-batch in its step, from 0.
        """
        ...

    def train(self, control: bytes) -> Figures:
        """Put `control` at the start of the control block and run the training program."""
        ...

    def infer(self) -> None:
        """Run the inference program."""
        ...

    def run_half(self, half: str, control: bytes) -> None:
        """Put `control` at the start of the control block and run a part of the step (`mbc.plan.cut`)."""
        ...

    def lent(self) -> AbstractContextManager[None]:
        """Let the calling thread use the machine within this context, while the thread that opened it waits."""
        ...

    @property
    def arena(self) -> Any:
        """The memory of the arena, over which another module of at most its size can be opened."""
        ...

    def shared(self, place: Place) -> Any:
        """Return an object with DLPack over the memory of a place; the object keeps that memory alive."""
        ...

    def observe(self, observer: Observer | None) -> None:
        """Run programs launch by launch from now on, wait for each launch, and call `observer` before and after it.

        None ends the observation.
        """
        ...

    @property
    def arena_address(self) -> int | None:
        """Address of the arena in device memory; None if the arena is in host memory."""
        ...

    def memory_bytes(self, space: Space, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop) of a space; a copy if they are in device memory."""
        ...

    def wait(self) -> None:
        """Wait for all work that was started."""
        ...

    def check_home(self) -> None:
        """Raise MBC235 in a process or thread in which the machine cannot be used."""
        ...

    def twin(self) -> Machine:
        """Return another machine with equal bytes in memory of its own, or raise MBC234 if there cannot be one."""
        ...

    def close(self) -> None:
        """Give back all resources."""
        ...


class Host:
    """The interpreter as a machine."""

    device = "cpu"
    stream: int | None = None

    def __init__(
        self, plan: Plan, places: Places, *, shadow: bool, transfers: Transfers, membership: Membership | None = None,
        arena: NDArray[np.uint8] | None = None,
    ) -> None:  # fmt: skip
        """Create an interpreter of `plan`.

        Args:
            plan: The plan to run.
            places: Where the plan's inputs, states and outputs are.
            shadow: Whether the owner of every byte is checked.
            transfers: When the launches of streams other than the compute stream run.
            membership: The ranks that share a mini-batch; None for one process.
            arena: Memory of another machine for the arena; None allocates it.
        """
        self._plan = plan
        self._places = places
        self._collectives = NO_OTHER_RANKS if membership is None else membership
        self._interpreter = Interpreter(
            plan, shadow=shadow, transfers=transfers, collectives=self._collectives, arena=arena
        )
        self._figures = (places.loss, *places.metrics.values())
        self._observer: Observer | None = None

    @property
    def memory(self) -> Memory:
        """Bytes planned and taken."""
        predicted = self._plan.predictions
        taken = self._interpreter.arena.nbytes
        host, peer = (self._interpreter.space(space).nbytes for space in (Space.HOST, Space.PEER))
        return Memory(
            predicted.arena_bytes, taken, predicted.overhead_bytes, None, predicted.host_bytes, host,
            peer_planned=predicted.peer_bytes, peer_taken=peer,
        )  # fmt: skip

    def feed(self, place: Place, array: Array | DeviceArray) -> None:
        """Write an input, followed by rows of zeros.

        Raises:
            TypeError: The array is in a GPU's memory.
        """
        if isinstance(array, DeviceArray):
            raise TypeError("the interpreter reads arrays in host memory only")
        if array.shape != place.shape:
            array = padded(array, place.shape)
        self._interpreter.write(place, array)

    def write(self, place: Place, array: Array) -> None:
        """Store a canonical array."""
        self._interpreter.write(place, array)

    def read(self, place: Place) -> Array:
        """Return a copy of the canonical array at a place."""
        return self._interpreter.read(place)

    def gathered(self, part: Place, parameter: Place) -> Array:
        """Return the whole of a state of which this rank has a part. Collective."""
        return whole_from(self._collectives.gather_on_host(self.read(part)), parameter.shape[0])

    def output(self, place: Place, rows: int) -> Array | DeviceOutput:
        """Return a copy of the first rows of an output, which cannot be written to."""
        # A view of the arena would change unnoticed while a caller holds it.
        array = self._interpreter.read(place)[:rows]
        array.flags.writeable = False
        return array

    def accumulate(self, control: bytes, number: int) -> None:
        """Run a mini-batch of a step that is not its last mini-batch."""
        self._put(control)
        for part in parts_before_last(self._plan.graph):  # observers see its launches in `train`, of which it is a part
            self._interpreter.run(part)

    def train(self, control: bytes) -> Figures:
        """Return the figures of a run of the training program."""
        self._put(control)
        self._run("train")
        values = tuple(float(self._interpreter.read(place)[0]) for place in self._figures)
        return Figures(lambda: values)

    def _put(self, control: bytes) -> None:
        start = self._places.control.offset_bytes
        self._interpreter.arena[start : start + len(control)] = np.frombuffer(control, np.uint8)

    def infer(self) -> None:
        """Run the inference program."""
        self._run("infer")

    def run_half(self, half: str, control: bytes) -> None:
        """Run one part of a training program."""
        self._put(control)
        self._interpreter.run(half)

    def lent(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: all threads see the host's memory."""
        return nullcontext()

    @property
    def arena(self) -> Any:
        """The arena's bytes."""
        return self._interpreter.arena

    def shared(self, place: Place) -> Any:
        """Return an array over the memory of a place."""
        return self._interpreter.shared(place)

    def observe(self, observer: Observer | None) -> None:
        """Show each launch of the programs to `observer` from now on; None ends this."""
        self._observer = observer

    arena_address: int | None = None

    def memory_bytes(self, space: Space, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop) of a space, without a copy."""
        return self._interpreter.space(space)[start:stop]

    def _run(self, program: str) -> None:
        if self._observer is None:
            self._interpreter.run(program)
            return
        launches = self._plan.train.launches if program == "train" else self._plan.infer.launches
        for index in range(len(launches)):
            self._observer.before(self, program, index)
            self._interpreter.run_launch(program, index)
            self._observer.after(self, program, index)

    def wait(self) -> None:
        """Return at once: each call computes until it is done."""

    def check_home(self) -> None:
        """Accept every thread and process: all threads see the host's memory, and a forked process has its own copy."""

    def twin(self) -> Host:
        """Return another machine with equal bytes in memory of its own."""
        other = copy(self)
        other._interpreter = self._interpreter.twin()
        return other

    def close(self) -> None:
        """Do nothing: Python frees the memory."""


def padded(array: Array, shape: tuple[int, ...]) -> Array:
    """Return the array followed by rows of zeros, up to `shape`."""
    whole = np.zeros(shape, array.dtype)
    whole[: array.shape[0]] = array
    return whole


def state_place(states: Mapping[str, Place], name: str) -> Place:
    """Return the place of state `name`.

    Raises:
        MbcError: MBC165 if there is no such state, with the most similar name.
    """
    if not isinstance(cast(object, name), str):
        raise MbcError("MBC165", f"there is no state {shown(name)}", "pass a state's name: see net.states")
    if name in states:
        return states[name]
    import difflib

    near = difflib.get_close_matches(name, states, 1)
    remedy = f"did you mean '{near[0]}'?" if near else "see net.states for the names"
    raise MbcError("MBC165", f"there is no state '{name}'", remedy)
