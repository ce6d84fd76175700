"""What a module needs of that which runs its plan: a GPU (`cuda.py`) or NumPy (`cpu.py` through `Host`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.streams import Space
from mbc.ops.base import NO_OTHER_RANKS
from mbc.ops.shard import whole_from
from mbc.plan.accumulation import ACCUMULATE
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
    """Bytes a module was planned to take, and takes. `overhead` is device memory outside the arena: context, library
    handles, loaded code, executable graphs; None where it does not apply or cannot be told. `host` is the memory that
    the plan's copies go to, pinned where there is a GPU; `staging` what is pinned beside it, to feed inputs;
    `prefetch` device memory beside the arena, where inputs of the next step arrive; `peer` memory of another GPU."""

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
    """What a step reports, loss first, then the metrics; fetched when somebody looks."""

    def __init__(
        self, fetch: Callable[[], tuple[float, ...]], idle_s: Callable[[], float | None] = lambda: None
    ) -> None:
        self._fetch: tuple[Callable[[], tuple[float, ...]], Callable[[], float | None]] | None = fetch, idle_s
        self._values: tuple[float, ...] = ()
        self._idle_s: float | None = None

    @property
    def values(self) -> tuple[float, ...]:
        """Waits for the step where it is still running."""
        fetch = self._fetch
        if fetch is not None:
            values, idle_s = fetch
            self._values, self._idle_s = values(), idle_s()
            self._fetch = None  # only now: another thread may look meanwhile
        return self._values

    @property
    def idle_s(self) -> float | None:
        """How long the device had nothing to do between the step before and this one; None where that is not known.
        Waits as `values` does."""
        _ = self.values
        return self._idle_s

    def __deepcopy__(self, _: object) -> Figures:
        """Itself: what a step has reported does not change, and where it is fetched from is known for this one only."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Figures.of, (self.values, self.idle_s)

    @staticmethod
    def of(values: tuple[float, ...], idle_s: float | None) -> Figures:
        """Figures that need no machine any more."""
        return Figures(lambda: values, lambda: idle_s)


class Observer(Protocol):
    """Looks at the memory of a machine around every launch of a program (`train` or `infer`)."""

    def before(self, machine: Machine, program: str, index: int) -> None: ...

    def after(self, machine: Machine, program: str, index: int) -> None:
        """The launch is over."""
        ...


class Machine(Protocol):
    """Runs the two programs of a plan over its arena."""

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        ...

    @property
    def stream(self) -> int | None:
        """Handle of the stream that reads device arrays; None where there are none."""
        ...

    @property
    def memory(self) -> Memory: ...

    def feed(self, place: Place, array: Array | DeviceArray) -> None:
        """Fill the first rows of an input of the program that runs next, the rest with zeros; maybe not yet done."""
        ...

    def write(self, place: Place, array: Array) -> None:
        """Store a canonical array."""
        ...

    def read(self, place: Place) -> Array:
        """The canonical array at a place, after everything that was started."""
        ...

    def gathered(self, part: Place, parameter: Place) -> Array:
        """Collective: the whole of a state of which this rank has a part, as a canonical array of the shape of its
        `parameter`."""
        ...

    def output(self, place: Place, rows: int) -> Array | DeviceOutput:
        """The first rows of an output of `infer`, on a GPU without a copy: there it holds until a program runs."""
        ...

    def accumulate(self, control: bytes, number: int) -> None:
        """Put `control` at the start of the control block and run the part of the training program that mini-batch
        `number`, from 0, of a step runs that is not its last one."""
        ...

    def train(self, control: bytes) -> Figures:
        """Put `control` at the start of the control block and run the training program."""
        ...

    def infer(self) -> None: ...

    def observe(self, observer: Observer | None) -> None:
        """From now on programs run launch by launch, in the plan's order, each waited for and shown to `observer`; as
        always again with None."""
        ...

    @property
    def arena_address(self) -> int | None:
        """Of the device memory that the plan is laid out in; None where it is the host's."""
        ...

    def memory_bytes(self, space: Space, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes [start, stop) of a space; a copy where it is device memory."""
        ...

    def wait(self) -> None:
        """For everything that was started."""
        ...

    def check_home(self) -> None:
        """MBC235 in a process or a thread where it cannot be used."""
        ...

    def twin(self) -> Machine:
        """Another one with the same bytes in memory of its own; MBC234 where there cannot be one."""
        ...

    def close(self) -> None:
        """Give back what was taken."""
        ...


class Host:
    """The interpreter as a machine."""

    device = "cpu"
    stream: int | None = None

    def __init__(
        self, plan: Plan, places: Places, *, shadow: bool, transfers: Transfers, membership: Membership | None = None
    ) -> None:
        self._plan = plan
        self._places = places
        self._collectives = NO_OTHER_RANKS if membership is None else membership
        self._interpreter = Interpreter(plan, shadow=shadow, transfers=transfers, collectives=self._collectives)
        self._figures = (places.loss, *places.metrics.values())
        self._observer: Observer | None = None

    @property
    def memory(self) -> Memory:
        predicted = self._plan.predictions
        taken = self._interpreter.arena.nbytes
        host, peer = (self._interpreter.space(space).nbytes for space in (Space.HOST, Space.PEER))
        return Memory(
            predicted.arena_bytes, taken, predicted.overhead_bytes, None, predicted.host_bytes, host,
            peer_planned=predicted.peer_bytes, peer_taken=peer,
        )  # fmt: skip

    def feed(self, place: Place, array: Array | DeviceArray) -> None:
        if isinstance(array, DeviceArray):
            raise TypeError("the interpreter reads arrays in host memory only")
        if array.shape != place.shape:
            array = padded(array, place.shape)
        self._interpreter.write(place, array)

    def write(self, place: Place, array: Array) -> None:
        self._interpreter.write(place, array)

    def read(self, place: Place) -> Array:
        return self._interpreter.read(place)

    def gathered(self, part: Place, parameter: Place) -> Array:
        return whole_from(self._collectives.gather_on_host(self.read(part)), parameter.shape[0])

    def output(self, place: Place, rows: int) -> Array | DeviceOutput:
        # A view of the arena would change under the hands of whoever holds it, and nobody could tell.
        array = self._interpreter.read(place)[:rows]
        array.flags.writeable = False
        return array

    def accumulate(self, control: bytes, number: int) -> None:
        self._put(control)
        self._interpreter.run(ACCUMULATE)  # its launches are watched in `train`, of which it is a part

    def train(self, control: bytes) -> Figures:
        self._put(control)
        self._run("train")
        values = tuple(float(self._interpreter.read(place)[0]) for place in self._figures)
        return Figures(lambda: values)

    def _put(self, control: bytes) -> None:
        start = self._places.control.offset_bytes
        self._interpreter.arena[start : start + len(control)] = np.frombuffer(control, np.uint8)

    def infer(self) -> None:
        self._run("infer")

    def observe(self, observer: Observer | None) -> None:
        self._observer = observer

    arena_address: int | None = None

    def memory_bytes(self, space: Space, start: int, stop: int) -> NDArray[np.uint8]:
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
        """Nothing runs behind a call."""

    def check_home(self) -> None:
        """Memory of the host is there in every thread, and a forked process has a copy of its own."""

    def twin(self) -> Host:
        other = copy(self)
        other._interpreter = self._interpreter.twin()
        return other

    def close(self) -> None:
        """Nothing was taken but memory."""


def padded(array: Array, shape: tuple[int, ...]) -> Array:
    """The array followed by rows of zeros, up to `shape`."""
    whole = np.zeros(shape, array.dtype)
    whole[: array.shape[0]] = array
    return whole


def state_place(states: Mapping[str, Place], name: str) -> Place:
    """The place of state `name`; MBC165 with the nearest known name."""
    if not isinstance(cast(object, name), str):
        raise MbcError("MBC165", f"there is no state {shown(name)}", "pass the name of one: see net.states")
    if name in states:
        return states[name]
    import difflib

    near = difflib.get_close_matches(name, states, 1)
    remedy = f"did you mean '{near[0]}'?" if near else "see net.states for the names"
    raise MbcError("MBC165", f"there is no state '{name}'", remedy)
