"""The machine that runs a module's plan with NumPy, in memory of the host."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.streams import Space
from mbc.ops.base import NO_OTHER_RANKS
from mbc.ops.shard import whole_from
from mbc.plan.cut import parts_before_last
from mbc.plan.model import Plan
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.bindings import Place, Places
from mbc.runtime.cpu import Interpreter
from mbc.runtime.launch_order import Transfers
from mbc.runtime.machine import Array, Figures, Memory, Observer
from mbc.runtime.membership import Membership
from mbc.runtime.output import DeviceOutput


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
