"""A module whose step runs in two halves, so that another program computes the loss between them (`mbc.plan.cut`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.streams import Space
from mbc.ir.control import CONTROL_FIELDS
from mbc.ir.kept_gradients import gradients_of
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.plan.cut import ADD, BACKWARD, FORWARD, cut, given_at_cut
from mbc.plan.model import Plan
from mbc.runtime.arrays import check_rows, wanted_inputs
from mbc.runtime.bindings import Place
from mbc.runtime.machine import Allocation
from mbc.runtime.module import Module


class Halves(Module):
    """A module of a plan whose loss another program computes.

    `begin` computes the outputs of a mini-batch; `finish` computes the gradients of all trained parameters from the
    gradients of the outputs. Without an optimizer, parameters, statistics and gradients are shared with the caller, who
    updates them; with one, `finish` updates the parameters.

    Attributes:
        gradients: The place of each gradient, by the trained parameter, or by the input if these have gradients; empty
            with an optimizer.
        outputs: The place of each output between the halves, in the order of the source.
        kept: The places of all bytes outside of states that `begin` leaves for `finish`, without names.
        read_again: Parameters and statistics that `finish` reads, which must be those of `begin`.
    """

    def __init__(
        self, subject: str | Path | Plan, seed: int = 0, device: str = "auto",
        allocate: Callable[[int], Allocation] | None = None, arena_of: Halves | None = None,
    ) -> None:  # fmt: skip
        """Open the network.

        Args:
            subject: As in `Module`.
            seed: As in `Module`.
            device: As in `Module`.
            allocate: Returns device memory of so many bytes for the arena; None for CUDA's own allocator.
            arena_of: Another module in whose arena this one runs, with states at the same places.

        Raises:
            MbcError: MBC239 if the plan computes its own loss and has an optimizer, and the errors of `Module`.
        """
        super().__init__(subject, seed, device, prefetch=False, allocate=allocate, arena_of=arena_of)
        plan = self._plan
        halves = cut(plan)
        if halves is None:
            self.close()
            raise MbcError(
                "MBC239",
                f"the step of network '{plan.graph.name}' has the optimizer {plan.graph.optimizer.kind}",
                "write train { optimizer = none } to compute gradients alone, or inner_product as its loss",
            )
        given = given_at_cut(plan.graph)
        self._first = tuple(w for w in self._train_inputs if w.name not in given)
        self._second = wanted_inputs(plan.graph, given)
        pairs = zip(plan.graph.outputs, halves.outputs, strict=True)
        self.outputs = tuple(_place(plan, name, index) for name, index in pairs)
        self.kept = tuple(_bytes(*region) for region in halves.kept)
        self.read_again = halves.read_again
        entry = {plan.buffers[index].value: index for index in plan.train.entry}
        kept = gradients_of(plan.graph)
        self.gradients: Mapping[str, Place] = {p: _place(plan, state, entry[state]) for p, state in kept.items()}

    def same_states(self, plan: Plan) -> bool:
        """Return whether a plan fits into this module's arena, with all states at the same places."""
        ours, theirs = _persistent(self._plan), _persistent(plan)
        return ours == theirs and plan.predictions.arena_bytes <= self._plan.predictions.arena_bytes

    @property
    def layouts(self) -> tuple[tuple[str, str], ...]:
        """The layout of each state, by its name."""
        return tuple((name, place[1].value) for name, place in _persistent(self._plan).items())

    @property
    def loss_scale(self) -> Place | None:
        """The place of the loss scale, by which the caller multiplies gradients for `finish`; None if there is none."""
        if self._plan.graph.precision is not Precision.FP16:
            return None
        (offset,) = (offset for name, _, offset in CONTROL_FIELDS if name == "loss_scale")
        start = self._places.control.offset_bytes + offset
        return replace(self._places.control, offset_bytes=start, size_bytes=4, shape=(1,), dtype=DType.FP32)

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of the inputs of `begin`."""
        return tuple(wanted.name for wanted in self._first)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the inputs of `finish`: the gradients of the outputs, or the targets of the source's own losses."""
        return tuple(wanted.name for wanted in self._second)

    def begin(self, *inputs: object) -> int:
        """Compute the outputs of one mini-batch, and without an optimizer update the running statistics.

        Args:
            *inputs: The inputs on which outputs depend, in the order of the source, with exactly `batch` rows.

        Returns:
            The number of the mini-batch, for `finish`.

        Raises:
            MbcError: The errors of `Module.step`.
        """
        with self._turns:
            arrays = self._received(self._first, inputs, {})
            check_rows(self._first, arrays, self.batch, exact=True)
            self._hand(self._machine, self._first, self._places.train_inputs, arrays)
            with self._changing() as machine:
                machine.run_half(FORWARD, self._next_control(0.0, 0))
            return self._steps

    def finish(
        self, given: Sequence[object], add: bool = False, number: int | None = None, rate: float | None = 0.0
    ) -> None:
        """Compute the gradients of one mini-batch, once, and update the parameters if there is an optimizer.

        A step that accumulates the gradients of several mini-batches updates the parameters with the last one.

        Args:
            given: The inputs that `given` names, in that order.
            add: Add to the gradients that are there; False overwrites them.
            number: Number of the mini-batch, whose bytes are at the places of `kept`; None for that of the last
                `begin`.
            rate: The learning rate of the update; None for each mini-batch but the last one of its step.

        Raises:
            MbcError: The errors of `Module.step`.
        """
        with self._turns:
            arrays = self._received(self._second, tuple(given), {})
            check_rows(self._second, arrays, self.batch, exact=True)
            self._hand(self._machine, self._second, self._places.train_inputs, arrays)
            part = ADD if rate is None else BACKWARD
            with self._changing() as machine:
                machine.run_half(part, self._control_of(number or self._steps, rate or 0.0, int(add)))

    def follow(self, other: Halves) -> None:
        """Draw the random numbers that another module would draw next."""
        self._steps = other._steps

    def lent(self) -> AbstractContextManager[None]:
        """Return a context within which the calling thread may use the module, while the one that opened it waits."""
        return self._opened_machine.lent()

    def copied(self, place: Place) -> Any:
        """Return a copy of an output in host memory, in canonical layout."""
        with self._turns:
            return self._machine.read(place)


def _persistent(plan: Plan) -> dict[str, tuple[int, Layout, TensorType]]:
    """Return offset, layout and type of each state, by its name."""
    values = ((index, plan.buffers[index].value) for index in plan.train.entry)
    return {
        name: (plan.offsets[index], plan.buffers[index].layout, plan.graph.values[name].type)
        for index, name in values
        if name is not None and plan.graph.values[name].role.persistent
    }


def _bytes(space: Space, start: int, stop: int) -> Place:
    size = stop - start
    return Place("", -1, start, size, (size,), Layout.CHANNELS_FIRST, DType.UINT8, space)


def _place(plan: Plan, name: str, index: int) -> Place:
    buffer, kind = plan.buffers[index], plan.graph.values[name].type
    size_bytes = kind.elements * buffer.dtype.size_bytes
    return Place(name, index, plan.offsets[index], size_bytes, kind.shape, buffer.layout, buffer.dtype, buffer.space)
