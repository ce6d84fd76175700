"""The interface of a machine that runs a module's plan: a GPU (`cuda.py`) or NumPy (`cpu.py` through `Host`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.streams import Space
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.bindings import Place
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
