"""The operation that a rule receives, and the nodes, constants and weights of an ONNX graph.

A family of rules is a file with a table `RULES`, which maps a kind of operation to a function that takes an `Operator`
and appends nodes. The last node gives the operation's first result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mbc.interchange.from_onnx.package import onnx
from mbc.ir.graph import Operation, Role, TrainingGraph
from mbc.ops.base import Array
from mbc.ops.batch_normalize import UpdateRunning


class NotExported(Exception):
    """An operation that ONNX does not have, or that this export does not support, with the reason and a remedy."""

    def __init__(self, reason: str, remedy: str) -> None:
        """Create the refusal of an operation.

        Args:
            reason: Why the operation is not exported; its subject is the operation.
            remedy: How to change the network, in the imperative.
        """
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Nodes:
    """The nodes of an ONNX graph so far; equal constants are one initializer."""

    def __init__(self, graph: TrainingGraph) -> None:
        """Create a graph without nodes for an evaluation graph."""
        self.graph = graph
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.uses = Counter(value for op in graph.infer for value in op.inputs)
        self.uses.update(graph.infer_outputs)
        self.momenta = {
            statistic: op.attributes.momentum
            for op in graph.train
            if isinstance(op.attributes, UpdateRunning)
            for statistic in op.inputs[:2]
        }
        self.shapes: dict[str, tuple[int, ...]] = {}  # of states that are written in another shape
        self._named: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._last: dict[str, Any] = {}
        self._inner = 0
        self._nodes_of: Counter[str] = Counter()

    def shape(self, value: str) -> tuple[int, ...]:
        """Return the shape of a value, samples included."""
        return self.graph.values[value].type.shape

    def constant(self, array: Array) -> str:
        """Return the name of the initializer with these numbers."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._named:
            self._named[key] = f"mbc.constant.{len(self._named)}"
            self.constants[self._named[key]] = array
        return self._named[key]

    def maker(self, value: str) -> Any:
        """Return the node that gives a value if only one operation takes the value, else None."""
        return self._last.get(value) if self.uses[value] == 1 else None

    def append(self, kind: str, inputs: Sequence[str], output: str, name: str, attributes: Mapping[str, Any]) -> str:
        """Return the result of a new node. If `output` is empty, the result is an intermediate value of the operation.

        Args:
            kind: ONNX's operator.
            inputs: The names of the inputs.
            output: The name of the result, or an empty text.
            name: The name of the operation that the node belongs to.
            attributes: The operator's attributes.
        """
        if not output:
            self._inner += 1
            output = f"{name}.inner{self._inner}"
        self._nodes_of[name] += 1
        called = f"{name}.{kind}" if self._nodes_of[name] == 1 else f"{name}.{kind}{self._nodes_of[name]}"
        node = onnx().helper.make_node(kind, list(inputs), [output], name=called, **attributes)
        self.nodes.append(node)
        self._last[output] = node
        return output

    def widen(self, value: str, more: str, output: str) -> None:
        """Add an input to the node that computes `value`, and rename its result."""
        node = self._last.pop(value)
        node.input.append(more)
        node.output[0] = output
        self._last[output] = node


class Operator:
    """One operation of the evaluation graph."""

    def __init__(self, op: Operation, nodes: Nodes) -> None:
        """Create the operator of an operation that appends to `nodes`."""
        self.op = op
        self.nodes = nodes
        self.a: Any = op.attributes
        self.inputs = op.inputs
        self.outputs = op.outputs
        self.name = op.name.removeprefix("infer.")

    def shape(self, position: int = 0) -> tuple[int, ...]:
        """Return the shape of an operand, samples included."""
        return self.nodes.shape(self.inputs[position])

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the first result, samples included."""
        return self.nodes.shape(self.outputs[0])

    def floats(self, values: float | Sequence[float] | Array) -> str:
        """Return a constant of fp32."""
        return self.nodes.constant(np.array(values, np.float32))

    def whole(self, *values: int) -> str:
        """Return a constant of int64."""
        return self.nodes.constant(np.array(values, np.int64))

    def step(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Return the result of a node that is not the last of its operation."""
        return self.nodes.append(kind, inputs, "", self.name, attributes)

    def last(self, kind: str, *inputs: str, **attributes: Any) -> None:
        """Append the node that gives the operation's result."""
        self.nodes.append(kind, inputs, self.outputs[0], self.name, attributes)

    def state(self, value: str, shape: tuple[int, ...]) -> str:
        """Return a value without samples in another shape; a state with no other user is written in this shape."""
        if shape == self.nodes.shape(value):
            return value
        if self.nodes.graph.values[value].role is Role.INTERMEDIATE or self.nodes.uses[value] > 1:
            return self.step("Reshape", value, self.whole(*shape))
        self.nodes.shapes[value] = shape
        return value

    def reshaped(self, value: str, sample: Sequence[int]) -> str:
        """Return samples of another shape, for any number of samples."""
        return self.step("Reshape", value, self.whole(0, *sample))


Rule = Callable[[Operator], None]
