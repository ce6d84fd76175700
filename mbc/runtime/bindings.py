"""The places of a user's values in a plan's memory: inputs, states, outputs, loss and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.hardware.streams import Space
from mbc.ir.graph import Operation, Role
from mbc.ir.types import DType, Layout
from mbc.ops import KINDS
from mbc.ops.shard import parameters_of_sharded_states
from mbc.plan.model import Plan, Program


@dataclass(frozen=True, slots=True)
class Place:
    """Position and format of a whole value.

    Attributes:
        value: Name of the value.
        buffer: Index of its buffer in the plan.
        offset_bytes: Offset from the start of its space.
        size_bytes: Size of the value.
        shape: Canonical shape.
        layout: Order of the axes in memory.
        dtype: Type of the stored elements.
        space: The arena, except for some states of the optimizer.
    """

    value: str
    buffer: int
    offset_bytes: int
    size_bytes: int
    shape: tuple[int, ...]
    layout: Layout
    dtype: DType
    space: Space = Space.ARENA


@dataclass(frozen=True, slots=True)
class Places:
    """Every value that is written or read from outside, by name. Each program has its own inputs and outputs."""

    states: Mapping[str, Place]  # without the control block, and without sums that each step starts from 0
    control: Place
    train_inputs: Mapping[str, Place]
    infer_inputs: Mapping[str, Place]
    infer_outputs: Mapping[str, Place]  # by the name of the network's output
    loss: Place
    metrics: Mapping[str, Place]
    # For each state of which `states` has only this rank's part: the place of its parameter, which is as large as the
    # whole state.
    wholes: Mapping[str, Place]


def view_roots(operations: Iterable[Operation]) -> dict[str, str]:
    """Return the value whose bytes each view shares, by the name of the view."""
    roots: dict[str, str] = {}
    for operation in operations:
        if KINDS[operation.kind].view:
            source = operation.inputs[0]
            roots[operation.outputs[0]] = roots.get(source, source)
    return roots


def find_places(plan: Plan) -> Places:
    """Return the places of the inputs, states and outputs of `plan`.

    Raises:
        MbcError: MBC140 if a program has no buffer for one of the values.
    """
    graph = plan.graph
    roots = view_roots((*graph.train, *graph.infer))
    controls = [name for name, value in graph.values.items() if value.role is Role.CONTROL]

    def place(value: str, buffers: Iterable[int], what: str) -> Place:
        root = roots.get(value, value)
        for index in buffers:
            buffer = plan.buffers[index]
            if buffer.value == root and (buffer.space is Space.ARENA or graph.values[value].role.persistent):
                shape = graph.values[value].type.shape
                size_bytes = graph.values[value].type.elements * buffer.dtype.size_bytes
                return Place(
                    value, index, plan.offsets[index], size_bytes, shape, buffer.layout, buffer.dtype, buffer.space
                )
        raise MbcError("MBC140", f"the plan has no buffer for {what} '{value}'", "compile the network again")

    entry, infer_entry = plan.train.entry, plan.infer.entry
    held = {plan.buffers[index].value for index in entry}
    control = next((name for name in controls if name in held), "control")
    parameters = parameters_of_sharded_states(graph.train)
    infer_outputs = zip(graph.outputs, graph.infer_outputs, strict=True)
    return Places(
        states={
            state.value: place(state.value, entry, "state")
            for state in graph.states
            if graph.values[state.value].role not in (Role.CONTROL, Role.GRADIENT)
        },
        control=place(control, entry, "the control block"),
        train_inputs={name: place(name, entry, "input") for name in graph.inputs},
        infer_inputs={name: place(name, infer_entry, "input") for name in graph.infer_inputs},
        infer_outputs={name: place(value, plan.infer.exit, "output") for name, value in infer_outputs},
        loss=place(graph.loss, plan.train.exit, "the loss"),
        metrics={name: place(name, plan.train.exit, "metric") for name in graph.metrics},
        wholes={state: place(parameter, entry, "state") for state, parameter in parameters.items()},
    )


def persistent_buffers(plan: Plan, program: Program) -> tuple[int, ...]:
    """Return the buffers of states that a program reads from earlier steps."""
    values = plan.graph.values
    return tuple(
        index
        for index in program.entry
        if (name := plan.buffers[index].value) is not None and values[name].role.persistent
    )
