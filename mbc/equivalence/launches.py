"""Checks each launch of a plan alone: its results for the values of a real step, against float64.

The step runs launch by launch, and waits after each. The operands of a launch are copied before it; after it, its
results are compared with those of `Evaluation`. So the error of a launch does not count against later launches, which
read its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbc.equivalence.deviation import Deviation, Tally
from mbc.equivalence.float64 import Arithmetic, InNumpy
from mbc.equivalence.rounding_model import ROUNDOFFS, Evaluation, Meant, rounded, shaken
from mbc.equivalence.run_step import random_inputs
from mbc.errors import MbcError
from mbc.ir.graph import Operation
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.providers import widens
from mbc.ops.base import Call
from mbc.ops.fused import kind_of, sums
from mbc.plan.group import operation_of, title
from mbc.plan.model import Access, Copy, Kernel, Launch, Mode, Plan
from mbc.runtime.bindings import view_roots
from mbc.runtime.machine import Machine
from mbc.runtime.module import Module
from mbc.runtime.shadow import Region, access_region

Array = Any

LEARNING_RATE = 1e-3
_MOST_SKIPPED = 32  # steps in which fp16 may search for its loss scale


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The errors of one launch. `kernel` is its provider and name, or `copy`; `rows` are rows of the mini-batch."""

    program: str
    index: int
    name: str
    kind: str
    kernel: str
    rows: tuple[int, int]
    divided: bool  # the launch computes only some rows
    outputs: tuple[Deviation, ...]

    @property
    def passed(self) -> bool:
        """True if all outputs passed."""
        return all(output.passed for output in self.outputs)

    @property
    def badness(self) -> float:
        """The largest measure of all outputs, divided by its limit."""
        return max((output.badness for output in self.outputs), default=0.0)


@dataclass(frozen=True, slots=True)
class Checked:
    """The results of all launches; `device` ran them, and `reference` computed in float64."""

    device: str
    reference: str
    loss: float
    launches: tuple[LaunchResult, ...]

    @property
    def passed(self) -> bool:
        """True if all launches passed."""
        return all(launch.passed for launch in self.launches)

    @property
    def worst(self) -> tuple[LaunchResult, ...]:
        """All launches, the worst first."""
        return tuple(sorted(self.launches, key=lambda launch: (-launch.badness, launch.program, launch.index)))


def check_launches(
    subject: Plan | Path, device: str, steps: int, seed: int, say: Callable[[str], None] = lambda _: None
) -> Checked:
    """Return the errors of all launches of a training step and of an inference pass after it.

    Args:
        subject: A plan (on the CPU), or the folder of a package.
        device: `cpu` or `cuda`.
        steps: The number of the step that is checked; skipped steps of fp16 do not count.
        seed: The seed of parameters and inputs.
        say: Called with a line on each launch.

    Raises:
        MbcError: MBC197 if a step before it is skipped (in fp16 more than 32 steps); MBC250 if float64 does not fit
            into memory.
    """
    # No CUDA graph: the launches run one by one in any case, and warming up a large plan takes as long as a step.
    with Module(subject, seed=seed, device=device, eager=True, prefetch=False) as net:

        def inputs() -> dict[str, Array]:
            return random_inputs(graph, seed, int(net.control["step"]))

        graph = net.plan.graph
        arithmetic, memory = _reference(net.device, seed)
        skipped = 0
        while net.control["updates"] < steps - 1:
            before = net.control["updates"]
            loss = float(net.step(lr=LEARNING_RATE, **inputs()))
            skipped += net.control["updates"] == before
            if skipped and (graph.precision is not Precision.FP16 or skipped > _MOST_SKIPPED):
                raise MbcError(
                    "MBC197",
                    f"the loss of step {net.control['step']} is {loss}, so there is nothing to compare",
                    "choose another --seed, or a precision with a wider range",
                )
        watch = Watch(net.plan, arithmetic, memory, say)
        net.observe(watch)
        given = inputs()
        loss = float(net.step(lr=LEARNING_RATE, **given))
        net.forward(*(given[name] for name in graph.infer_inputs))
        return Checked(net.device, f"{arithmetic.name} in float64", loss, tuple(watch.results))


def _reference(device: str, seed: int) -> tuple[Arithmetic, Callable[[Machine, Region], Array]]:
    """Return the arithmetic, and a function that returns the bytes of a region: PyTorch's on a GPU, if possible."""
    if device == "cuda":
        try:
            from mbc.equivalence.in_torch import InTorch, device_bytes, has_gpu
        except ModuleNotFoundError:  # PyTorch is not installed
            pass
        else:
            if has_gpu():
                return InTorch(seed, "cuda"), device_bytes
    return InNumpy(seed), lambda machine, region: machine.memory_bytes(region.space, region.start, region.stop)


@dataclass(frozen=True, slots=True)
class Operand:
    """One access as an array.

    `shape` is the shape of all its rows. `stored_shape` is the shape of the value in memory, of which the operand may
    be a view.
    """

    value: str
    region: Region
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: DType
    layout: Layout
    per_sample: bool
    mode: Mode

    def load(self, arithmetic: Arithmetic, data: Array, rows: slice) -> Array:
        """Return some rows of the operand; all of an operand that is not per sample."""
        if not self.per_sample:
            rows = slice(0, self.shape[0])
        row_bytes = (self.region.stop - self.region.start) // self.stored_shape[0]
        count = len(range(*rows.indices(self.shape[0])))
        part = data[rows.start * row_bytes : (rows.start + count) * row_bytes]
        loaded = arithmetic.load(part, (count, *self.stored_shape[1:]), self.dtype, self.layout)
        return loaded.reshape((count, *self.shape[1:]))


class Watch:
    """Compares each launch with float64 while a module runs."""

    def __init__(
        self, plan: Plan, arithmetic: Arithmetic, memory: Callable[[Machine, Region], Array], say: Callable[[str], None]
    ) -> None:
        """Create an observer of a module with this plan.

        Args:
            plan: The plan.
            arithmetic: Computes in float64.
            memory: Returns the bytes of a region.
            say: Called with a line on each launch.
        """
        self.results: list[LaunchResult] = []
        self._plan, self._arithmetic, self._memory, self._say = plan, arithmetic, memory, say
        self._operations = {operation.name: operation for operation in (*plan.graph.train, *plan.graph.infer)}
        self._roots = view_roots(self._operations.values())
        self._read: dict[int, Array] = {}
        self._chunk_bytes = arithmetic.chunk_bytes

    def before(self, machine: Machine, program: str, index: int) -> None:
        """Copy the operands that the launch reads or adds to, because it may write over them."""
        launch = self._launches(program)[index]
        self._read = {
            position: self._arithmetic.copy(self._memory(machine, access_region(self._plan, access)))
            for position, access in enumerate(launch.accesses)
            if access.mode is not Mode.WRITE
        }

    def after(self, machine: Machine, program: str, index: int) -> None:
        """Compare the results of the launch."""
        launches = self._launches(program)
        launch = launches[index]
        operation = operation_of(launch, self._operations, self._plan.buffers) if launch.operations else None
        operands = self._operands(launch, operation)
        written = {
            position: self._memory(machine, operand.region)
            for position, operand in enumerate(operands)
            if operand.mode is not Mode.READ
        }
        name = title(launch.operations) or operands[0].value
        self._say(f"{program} {index + 1} of {len(launches)}: {name}")
        provider = launch.work.provider if isinstance(launch.work, Kernel) else ""
        deviations = self._compared(name, operation, operands, written, provider)
        rows = next((o.region.rows for o in operands if o.per_sample), None)
        span = (0, 1) if rows is None else (rows.start, rows.stop)
        divided = rows is not None and rows.count < self._plan.graph.batch
        work = launch.work
        kernel, kind = (
            ("copy", "copy") if isinstance(work, Copy) else
            (f"{work.provider} {work.name}", operation.kind if operation is not None else "conversion")
        )  # fmt: skip
        self.results.append(LaunchResult(program, index, name, kind, kernel, span, divided, deviations))
        self._read = {}

    def _launches(self, program: str) -> Sequence[Launch]:
        return (self._plan.train if program == "train" else self._plan.infer).launches

    def _compared(
        self,
        name: str,
        operation: Operation | None,
        operands: Sequence[Operand],
        written: Mapping[int, Array],
        provider: str,
    ) -> tuple[Deviation, ...]:
        """Return the errors of all outputs. They are computed in smaller parts if float64 does not fit into memory.

        Raises:
            MbcError: MBC250 if a single row does not fit.
        """
        arithmetic = self._arithmetic
        for self._chunk_bytes in (arithmetic.chunk_bytes, arithmetic.chunk_bytes // 16, 0):
            try:
                if operation is None:
                    return self._moved(operands, written)
                return self._computed(operation, operands, written, provider)
            except arithmetic.out_of_memory:
                arithmetic.release()
        raise MbcError(
            "MBC250",
            f"the operands of '{name}' in float64 take more memory than is free beside the arena",
            "end other programs that use it, or check on a machine with more memory",
        )

    def _moved(self, operands: Sequence[Operand], written: Mapping[int, Array]) -> tuple[Deviation, ...]:
        """Return the error of a copy or conversion."""
        source, target = operands
        tally = Tally(target.value, target.dtype)
        for rows in self._slices(source.shape[0], math.prod(source.shape[1:]) * 2):
            exact = source.load(self._arithmetic, self._read[0], rows)
            tally.add(self._arithmetic, target.load(self._arithmetic, written[1], rows), Meant(exact, (exact,)))
        return (tally.deviation,)

    def _computed(
        self, operation: Operation, operands: Sequence[Operand], written: Mapping[int, Array], provider: str
    ) -> tuple[Deviation, ...]:
        count = len(operation.inputs)
        inputs, outputs = operands[:count], operands[count:]
        arithmetic = self._arithmetic
        tallies = [Tally(o.value, o.dtype) for o in outputs]
        rows = next((o.shape[0] for o in operands if o.per_sample), 1)
        first_row = next((o.region.rows.start for o in operands if o.per_sample), 0)
        slices = [slice(0, rows)]
        if kind_of(operation).divisible:
            per_row = sum(math.prod(o.shape[1:]) for o in operands if o.per_sample)
            slices = list(self._slices(rows, per_row * len(operation.name.split("+"))))
        stored = tuple(o.dtype for o in outputs)
        summed = sums(operation.kind, operation.attributes, len(outputs))
        totals: dict[int, Meant] = {}
        for part in slices:
            call = Call((), first_row + part.start, self._plan.graph.batch, self._plan.graph.precision)
            evaluation = Evaluation(arithmetic, operation, stored, call, len(slices))
            taken = [o.load(arithmetic, self._read[i], part) for i, o in enumerate(inputs)]
            product = outputs[0].load(arithmetic, written[count], part) if evaluation.hands_on_product else None
            for number, expected in enumerate(evaluation.meant(taken, product)):
                if summed[number]:
                    totals[number] = expected if number not in totals else totals[number] + expected
                else:
                    written_part = outputs[number].load(arithmetic, written[count + number], part)
                    tallies[number].add(arithmetic, written_part, expected)
        for number, expected in totals.items():
            output, whole = outputs[number], slice(0, outputs[number].shape[0])
            if widens(provider, operation.kind, self._plan.graph.precision):
                expected = rounded(arithmetic, expected, self._plan.graph.precision.working)
            if output.mode is Mode.ACCUMULATE:
                before = output.load(arithmetic, self._read[count + number], whole)
                expected = expected + shaken(arithmetic, before, ROUNDOFFS[self._plan.graph.precision.master])
            tallies[number].add(arithmetic, output.load(arithmetic, written[count + number], whole), expected)
        return tuple(tally.deviation for tally in tallies)

    def _slices(self, rows: int, row_elements: int) -> list[slice]:
        """Return slices of the rows, of which each fits into memory in float64."""
        step = max(1, self._chunk_bytes // (8 * 4 * max(1, row_elements)))
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _operands(self, launch: Launch, operation: Operation | None) -> tuple[Operand, ...]:
        """Return the inputs and outputs of the launch, without its workspace."""
        if operation is None:
            # Both buffers hold the same value, in shapes with the same number of bytes.
            name = self._plan.buffers[launch.accesses[1].buffer].value
            assert name is not None
            return tuple(self._operand(name, name, access) for access in launch.accesses)
        names = (*operation.inputs, *operation.outputs)
        loaded: list[Operand] = []
        for name, access in zip(names, launch.accesses, strict=False):
            held = self._plan.buffers[access.buffer].value
            assert held is not None
            loaded.append(self._operand(name, held, access))
        return tuple(loaded)

    def _operand(self, name: str, held: str, access: Access) -> Operand:
        buffer, values = self._plan.buffers[access.buffer], self._plan.graph.values
        value = values[name]

        def shape(of: str) -> tuple[int, ...]:
            type_ = values[of].type
            return type_.with_rows(access.rows.count).shape if value.per_sample else type_.shape

        return Operand(
            name, access_region(self._plan, access), shape(name), shape(held), buffer.dtype, buffer.layout,
            value.per_sample, access.mode,
        )  # fmt: skip
