"""Compares an imported network with its model: the interpreter runs the network in float64.

Random layers (dropout, stochastic depth) drop nothing here; they must drop nothing in the model, either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.interchange.program import Array, Node, Program, TensorName
from mbc.interchange.steps import Imported
from mbc.interchange.translate import translate
from mbc.interchange.write import write_source
from mbc.ir.graph import Operation, Optimizer, Role, TrainingGraph
from mbc.ir.types import DType, Precision
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.ops.control_record import CONTROL_TYPE, control_record
from mbc.ops.random import Dropout
from mbc.passes.training_step import differentiate
from mbc.source import Source

MOST_SECONDS = 10.0  # largest estimated time of a check that the user did not ask for
TOLERANCE = 1e-6  # largest relative distance in float64, about a thousand times the rounding error
# A gradient below this share of the largest one is a rounding error: the exact gradient of a bias before a batch norm
# is 0.
_NOISE = 1e-4
_FLOPS_PER_S, _ELEMENTS_PER_S = 4e9, 2e7  # of NumPy and torch together on one core, in float64
_NUMPY = {DType.INT32: np.int32, DType.UINT8: np.uint8}


@dataclass(frozen=True, slots=True)
class Numbers:
    """The results of a step: outputs in order, the sum of the losses, gradients and new statistics by state."""

    outputs: tuple[Array, ...]
    loss: float | None = None
    gradients: Mapping[str, Array] = field(default_factory=dict[str, Array])
    statistics: Mapping[str, Array] = field(default_factory=dict[str, Array])


def training_graph(source: str, rows: int) -> TrainingGraph:
    """Return the training graph of a source in fp64 for `rows` samples; nothing is clipped or dropped."""
    lowered = lower(parse(Source("the written source", source)), (("batch", str(rows)),))
    graph = differentiate(lowered.network, Optimizer(frozen=lowered.optimizer.frozen), Precision.FP64)
    return replace(graph, train=tuple(map(_quiet, graph.train)))


def _quiet(operation: Operation) -> Operation:
    attributes = operation.attributes
    if isinstance(attributes, Dropout):
        return replace(operation, attributes=replace(attributes, probability=0.0))
    return operation


def seconds_of(graph: TrainingGraph) -> float:
    """Return the estimated largest time of a check, from the FLOPs of a step and the number of its elements."""
    flops = elements = 0
    for operation in graph.train:
        kinds = [tuple(graph.values[name].type for name in names) for names in (operation.inputs, operation.outputs)]
        counted = KINDS[operation.kind].flops
        flops += counted(operation.attributes, *kinds) if counted is not None else 0
        elements += sum(kind.elements for kind in kinds[1])
    return flops / _FLOPS_PER_S + elements / _ELEMENTS_PER_S


def step_of(graph: TrainingGraph, states: Mapping[str, Array], inputs: Sequence[Array]) -> Numbers:
    """Return the results of a training step for inputs and targets."""
    updates = {op.inputs[0]: op.inputs[1] for op in graph.train if op.kind == "sgd_update"}
    statistics = {state: update for state, update in graph.updates if graph.values[state].role is Role.STATISTIC}
    roles = {state.value: graph.values[state.value].role for state in graph.states}
    unchanged = {state: array for state, array in states.items() if roles.get(state) is Role.STATISTIC}
    kept = {*graph.outputs, graph.loss, *updates.values(), *statistics.values()}
    operations = [op for op in graph.train if op.kind != "sgd_update"]
    given = {**states, **dict(zip(graph.inputs, inputs, strict=True))}
    env = _run(graph, operations, given, kept)
    return Numbers(
        tuple(env[name] for name in graph.outputs),
        float(env[graph.loss].reshape(-1)[0]),
        {state: env[value] for state, value in updates.items()},
        unchanged | {state: env[value] for state, value in statistics.items()},
    )


def evaluation_of(graph: TrainingGraph, states: Mapping[str, Array], inputs: Sequence[Array]) -> Numbers:
    """Return the results of the network in evaluation mode."""
    given = {**states, **dict(zip(graph.inputs, inputs, strict=False))}  # targets are not read
    env = _run(graph, graph.infer, given, {*graph.infer_outputs})
    return Numbers(tuple(env[name] for name in graph.infer_outputs))


def _run(
    graph: TrainingGraph, operations: Sequence[Operation], given: Mapping[str, Array], kept: set[str]
) -> dict[str, Array]:
    """Return the values in `kept`; every other value is freed after its last use.

    Raises:
        MbcError: MBC346 if an operation cannot be evaluated.
    """
    last = {value: number for number, op in enumerate(operations) for value in op.inputs}
    env = {
        name: array.astype(_NUMPY.get(graph.values[name].type.dtype, np.float64))
        for name, array in given.items()
        if name in graph.values
    }
    block = np.zeros(CONTROL_TYPE.shape, np.uint8)
    control_record(block)["loss_scale"] = 1.0
    env |= {name: block for name, value in graph.values.items() if value.role is Role.CONTROL}
    for number, op in enumerate(operations):
        evaluate = KINDS[op.kind].evaluate
        if evaluate is None:
            report_unchecked(f"operations of the kind '{op.kind}' are not evaluated")
        call = Call(tuple(graph.values[v].type for v in op.outputs), 0, graph.batch, graph.precision)
        with np.errstate(all="ignore"):
            env.update(zip(op.outputs, evaluate(op.attributes, [env[v] for v in op.inputs], call), strict=True))
        for value in (*op.inputs, *op.outputs):
            if last.get(value, -1) <= number and value not in kept:
                env.pop(value, None)
    return env


def deviations(ours: Numbers, theirs: Numbers, tolerance: float = TOLERANCE) -> Iterator[str]:
    """Yield a description of each difference between the network and the model, outputs first.

    Yields:
        A sentence without a full stop, such as "output 1 is 1.2e-3 off, relative to the model's".
    """
    if len(ours.outputs) != len(theirs.outputs):
        yield f"the model returns {len(theirs.outputs)} tensors, and the network {len(ours.outputs)}"
        return
    for number, (computed, wanted) in enumerate(zip(ours.outputs, theirs.outputs, strict=True), 1):
        yield from _deviation(f"output {number}", computed, wanted, tolerance)
    if ours.loss is not None and theirs.loss is not None:
        yield from _deviation("the loss", np.array(ours.loss), np.array(theirs.loss), tolerance)
    for what, computed, wanted in (
        ("gradient", ours.gradients, theirs.gradients),
        ("statistic", ours.statistics, theirs.statistics),
    ):
        largest = max((_norm(array) for array in wanted.values()), default=0.0)
        for name, array in wanted.items():
            if name in computed:
                yield from _deviation(f"the {what} of '{name}'", computed[name], array, tolerance, _NOISE * largest)
            elif _norm(array) > _NOISE * largest:
                yield f"the {what} of '{name}' is missing"


def _deviation(what: str, computed: Array, wanted: Array, tolerance: float, noise: float = 0.0) -> Iterator[str]:
    if computed.size != wanted.size:
        yield f"{what} is {list(computed.shape)}, and the model's {list(wanted.shape)}"
        return
    exact = np.asarray(wanted, np.float64).reshape(-1)
    finite = np.isfinite(exact)
    apart = _norm(np.asarray(computed, np.float64).reshape(-1)[finite] - exact[finite])
    norm = _norm(exact[finite]) + noise
    if not apart <= tolerance * norm:
        yield f"{what} is {apart / norm if norm else math.inf:.1e} off, relative to the model's"


def _norm(array: Array) -> float:
    return float(np.linalg.norm(np.asarray(array, np.float64).reshape(-1)))


def report_deviation(what: str, place: Node | None) -> NoReturn:
    """Raise MBC345 for a deviation.

    Args:
        what: The deviation, as `deviations` describes it.
        place: The first operation whose result differs, if there is one.

    Raises:
        MbcError: MBC345.
    """
    shown = "" if place is None else f"; {describe(place)} is the first operation whose result differs"
    raise MbcError(
        "MBC345",
        f"the imported network computes something else than the model: {what}{shown}",
        "this is a mistake of mbc: please report it, and train the model in PyTorch until it is fixed",
    )


def describe(node: Node) -> str:
    """Return an operation with its module and the line of the model's code, for a message."""
    module = f" in '{node.modules[-1].path}' ({node.modules[-1].name})" if node.modules else ""
    line = "" if node.line is None else f" at {node.line.file}:{node.line.number}: {node.line.code}"
    return f"{node.shown or node.target}{module}{line}"


UNCHECKED = "MBC346"


def cannot_check(reason: str, remedy: str = "import it without a check") -> MbcError:
    """Return MBC346 for a check that cannot be made."""
    return MbcError(UNCHECKED, f"the import cannot be checked: {reason}", remedy)


def report_unchecked(
    reason: str, remedy: str = "import it without a check", cause: BaseException | None = None
) -> NoReturn:
    """Raise MBC346 for a check that cannot be made.

    Raises:
        MbcError: MBC346.
    """
    error = cannot_check(reason, remedy)
    raise error from cause


class Search:
    """The search for the first operation of a program whose result differs although its operands agree."""

    def __init__(
        self, program: Program, wanted: Mapping[str, Array], inputs: Sequence[Array], training: bool, tolerance: float
    ) -> None:
        """Prepare the search.

        Args:
            program: The program that was imported.
            wanted: The tensors of the program by name, with the values that they had when they were computed.
            inputs: The inputs that the program ran with.
            training: Whether the program is in training mode.
            tolerance: The largest distance of results that agree, relative to the norm of the program's result.
        """
        self._program, self._wanted, self._tolerance = program, wanted, tolerance
        self._inputs = dict(zip(program.inputs, inputs, strict=True))
        self._training = training
        self._makers = {name: number for number, node in enumerate(program.nodes) for name in node.outputs}
        self._is_different: dict[int, bool | None] = {}

    def first(self) -> Node | None:
        """Return the first operation whose result differs; None if no comparable operation differs."""
        ends = [self._makers[name] for name in self._program.outputs if name in self._makers]
        current = next((end for end in ends if self._differs(end)), None)
        while current is not None:
            before = self._before(current)
            if not before:
                break
            current = self._earliest([*sorted(before), current])
            wrong = next((n for n in self._read_by(current) if self._differs(n)), None)
            if wrong is None:
                break
            current = wrong
        return None if current is None else self._program.nodes[current]

    def _earliest(self, ordered: Sequence[int]) -> int:
        """Return an operation that differs, by bisection; the last of the given operations differs."""
        low, high = -1, len(ordered) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._differs(ordered[middle]):
                high = middle
            else:
                low = middle
        return ordered[high]

    def _read_by(self, number: int) -> list[int]:
        """Return the operations whose results an operation reads.

        An operation that cannot be compared is replaced by the operations whose results it reads.
        """
        reached: list[int] = []
        for other in self._direct(number):
            reached += [other] if self._differs(other) is not None else self._read_by(other)
        return reached

    def _direct(self, number: int) -> list[int]:
        arguments = self._program.nodes[number].arguments.values()
        items = [item for a in arguments for item in (a if isinstance(a, tuple) else (a,))]
        names = (item.name for item in items if isinstance(item, TensorName))
        return sorted({self._makers[name] for name in names if name in self._makers} - {number})

    def _before(self, number: int) -> set[int]:
        """Return all operations that an operation depends on."""
        reached: set[int] = set()
        waiting = self._direct(number)
        while waiting:
            other = waiting.pop()
            if other not in reached:
                reached.add(other)
                waiting += self._direct(other)
        return reached

    def _differs(self, number: int) -> bool | None:
        """Return whether the first result of an operation differs; None if the network has no such value."""
        if number not in self._is_different:
            self._is_different[number] = self._compare(number)
        return self._is_different[number]

    def _compare(self, number: int) -> bool | None:
        name = next((n for n in self._program.nodes[number].outputs if n in self._wanted), None)
        if name is None:
            return None
        part = replace(self._program, nodes=self._program.nodes[: number + 1], outputs=(name,), mutated=())
        try:
            network = translate(part, "part")
            rows = network.inputs[0][1][0]
            graph = training_graph(write_source(network, "mse", "A part.", flat=True), rows)
            computed = self._computed(network, graph)
        except MbcError:
            return None
        return any(_deviation(name, computed, self._wanted[name], self._tolerance))

    def _computed(self, network: Imported, graph: TrainingGraph) -> Array:
        given = [self._inputs[name] for name, _ in network.inputs]
        if not self._training:
            return evaluation_of(graph, network.arrays, given).outputs[0]
        (output,) = graph.outputs
        makers = {value: op for op in graph.train for value in op.outputs}
        needed, waiting = set[str](), [output]
        while waiting:
            value = waiting.pop()
            if value in makers and makers[value].name not in needed:
                needed.add(makers[value].name)
                waiting += makers[value].inputs
        operations = [op for op in graph.train if op.name in needed]
        names = graph.inputs[: len(given)]
        env = _run(graph, operations, {**network.arrays, **dict(zip(names, given, strict=True))}, {output})
        return env[output]
