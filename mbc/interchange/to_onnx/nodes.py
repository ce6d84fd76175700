"""What a rule of an operation is given, and the nodes, constants and weights that it writes.

A family of rules is a file with a table `RULES`: a kind of operation to a function that takes an `Operator`, and
appends nodes whose last one gives the operation's first result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mbc.interchange.from_onnx.package import onnx
from mbc.ir.graph import Operation, Role, TrainingGraph
from mbc.ops.base import Array
from mbc.ops.normalization import UpdateRunning


class NotExported(Exception):
    """An operation that ONNX, or this export of it, has nothing for: why, and what would do instead."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Nodes:
    """The ONNX graph in the making. Constants of one content are one initializer."""

    def __init__(self, graph: TrainingGraph) -> None:
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
        self.shapes: dict[str, tuple[int, ...]] = {}  # of states that are written in another one
        self._named: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._last: dict[str, Any] = {}
        self._inner = 0
        self._nodes_of: Counter[str] = Counter()

    def shape(self, value: str) -> tuple[int, ...]:
        return self.graph.values[value].type.shape

    def constant(self, array: Array) -> str:
        """The initializer that has these numbers."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._named:
            self._named[key] = f"mbc.constant.{len(self._named)}"
            self.constants[self._named[key]] = array
        return self._named[key]

    def maker(self, value: str) -> Any:
        """The node that gives a value, where nobody but one operation takes that; else None."""
        return self._last.get(value) if self.uses[value] == 1 else None

    def append(self, kind: str, inputs: Sequence[str], output: str, name: str, attributes: Mapping[str, Any]) -> str:
        """One node; an empty `output` is a value between two nodes of one operation."""
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
        """Give the node that makes `value` one more input, and its result another name."""
        node = self._last.pop(value)
        node.input.append(more)
        node.output[0] = output
        self._last[output] = node


class Operator:
    """One operation of the evaluation graph."""

    def __init__(self, op: Operation, nodes: Nodes) -> None:
        self.op = op
        self.nodes = nodes
        self.a: Any = op.attributes
        self.inputs = op.inputs
        self.outputs = op.outputs
        self.name = op.name.removeprefix("infer.")

    def shape(self, position: int = 0) -> tuple[int, ...]:
        """Of an operand, rows included."""
        return self.nodes.shape(self.inputs[position])

    @property
    def result(self) -> tuple[int, ...]:
        return self.nodes.shape(self.outputs[0])

    def floats(self, values: float | Sequence[float] | Array) -> str:
        return self.nodes.constant(np.array(values, np.float32))

    def whole(self, *values: int) -> str:
        return self.nodes.constant(np.array(values, np.int64))

    def step(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node before the last one; returns what it gives."""
        return self.nodes.append(kind, inputs, "", self.name, attributes)

    def last(self, kind: str, *inputs: str, **attributes: Any) -> None:
        """The node that gives the operation's result."""
        self.nodes.append(kind, inputs, self.outputs[0], self.name, attributes)

    def state(self, value: str, shape: tuple[int, ...]) -> str:
        """A value without rows in another shape: a state that nobody else takes is written in that one."""
        if shape == self.nodes.shape(value):
            return value
        if self.nodes.graph.values[value].role is Role.INTERMEDIATE or self.nodes.uses[value] > 1:
            return self.step("Reshape", value, self.whole(*shape))
        self.nodes.shapes[value] = shape
        return value

    def reshaped(self, value: str, sample: Sequence[int]) -> str:
        """Rows of another shape, however many there are."""
        return self.step("Reshape", value, self.whole(0, *sample))


Rule = Callable[[Operator], None]
