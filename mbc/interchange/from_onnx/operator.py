"""One node of an ONNX graph, and what a rule writes it as: nodes of ATen operations.

A family of rules is a file with a table `RULES`: the operator's name to a function that takes an `Operator` and emits
nodes. `NOT_TAKEN` names operators that nothing here is like, with what would do instead.

An `Operator` notes which attributes and inputs are read. The reader refuses a node that gives its rule anything else,
unless it is the default of ONNX's schema (`Operator.unread`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from mbc.interchange.aten.base import Refused
from mbc.interchange.from_onnx.package import onnx
from mbc.interchange.program import Argument, Array, Dynamic, TensorMeta, TensorName
from mbc.interchange.pt2 import printable

NEWEST = "export it with a newer opset_version"


class Graph(Protocol):
    """What rules look at and write into; `mbc.interchange.from_onnx.read` implements it."""

    opset: int
    current: Operator | None  # whose rule runs

    def array(self, value: str) -> Array | None: ...

    def is_initializer(self, value: str) -> bool: ...

    def shape(self, value: str) -> tuple[int | Dynamic, ...] | None: ...

    def dtype(self, value: str) -> str: ...

    def maker(self, value: str) -> Operator | None: ...

    def users(self, value: str) -> Sequence[Operator]: ...

    def name(self, value: str) -> TensorName: ...

    def weight(self, value: str, role: str, user: Operator, order: tuple[int, ...] = ()) -> TensorName: ...

    def hold(self, value: str, array: Array, kind: str) -> TensorName: ...

    def emit(self, user: Operator, target: str, arguments: Mapping[str, Argument], outputs: Sequence[str]) -> None: ...

    def inner(self, user: Operator, shape: tuple[int, ...]) -> str: ...


class Operator:
    """A node. Values are called as in the file; an input that is left out is empty."""

    def __init__(self, node: Any, graph: Graph, number: int) -> None:
        self.graph = graph
        self.op = str(node.op_type)
        self.domain = str(node.domain)
        self.name = printable(str(node.name), 80) or f"{printable(self.op, 40)}_{number}"
        self.inputs: tuple[str, ...] = tuple(node.input)
        self.outputs: tuple[str, ...] = tuple(node.output)
        self.metadata: Mapping[str, str] = {str(p.key): str(p.value) for p in node.metadata_props}
        self.is_part = False
        self._attributes = {str(a.name): a for a in node.attribute}
        # What was read: by the node's own rule, and by the rules of others, which counts where the node is their part.
        self._read: set[str | int] = set()
        self._read_by_others: set[str | int] = set()

    def _note(self, what: str | int) -> None:
        (self._read if self.graph.current is self else self._read_by_others).add(what)

    # ---- inputs ----

    def input(self, position: int) -> str:
        """The value at a position; empty where there is none."""
        self._note(position)
        return self._at(position)

    @property
    def operands(self) -> tuple[str, ...]:
        """All inputs."""
        for position in range(len(self.inputs)):
            self._note(position)
        return self.inputs

    def _at(self, position: int) -> str:
        return self.inputs[position] if position < len(self.inputs) else ""

    def tensor(self, position: int = 0) -> TensorName:
        """An operand, of the network or held."""
        value = self.input(position)
        if not value:
            raise Refused(f"its operand {position} is missing", "export the model again")
        if self.graph.array(value) is not None:
            return self.graph.weight(value, "", self)
        return self.graph.name(value)

    def held(self, position: int, role: str, order: tuple[int, ...] = ()) -> TensorName | None:
        """A parameter or statistic, transposed by `order`. None where it is left out."""
        value = self.input(position)
        if not value:
            return None
        if self.graph.array(value) is None:
            return self.graph.name(value)  # ATen's rule says that it is computed
        return self.graph.weight(value, role, self, order)

    def bias(self, position: int = 2) -> TensorName | None:
        """The offset of a layer. None also for zeros that an exporter put where there is none."""
        value = self.input(position)
        array = self.graph.array(value)
        if array is not None and not self.graph.is_initializer(value) and not array.any():
            return None
        return self.held(position, "bias")

    def sizes(self, position: int = 0) -> tuple[int, ...]:
        """The shape of an operand, whose numbers are not read by that."""
        return self._static(self._at(position))

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self._static(self.outputs[0])

    def _static(self, value: str) -> tuple[int, ...]:
        shape = self.graph.shape(value)
        meta = TensorMeta(shape or (), "")
        if shape is None or not meta.static:
            raise Refused("a shape here is not known before it runs", "export it with fixed sizes, but for the batch")
        return meta.sizes

    def constant(self, position: int, what: str) -> Array | None:
        """Numbers that have to be known. None where they are left out."""
        value = self.input(position)
        if not value:
            return None
        array = self.graph.array(value)
        if array is None:
            raise Refused(f"its {what} is computed while it runs", "export it with fixed sizes and numbers")
        return array

    def number(self, position: int) -> float | None:
        """An operand that is one known number. None for any other one."""
        array = self.graph.array(self.input(position))
        if array is None or array.size != 1 or array.dtype.kind not in "fiu":
            return None
        return shortest(array.reshape(-1)[0])

    # ---- attributes ----

    def has(self, name: str) -> bool:
        self._note(name)
        return name in self._attributes

    def ignore(self, *what: str | int) -> None:
        """Attributes and inputs that change nothing here; a comment beside the call says why."""
        for one in what:
            self._note(one)

    def unread(self) -> tuple[str, str] | None:
        """Return why the node cannot be taken, and what would do instead, where it says more than was read of it.

        An attribute that was not read must have the default of ONNX's schema; an input that was not read must be left
        out. What the rules of other nodes read counts where this node is a part of a layer that they are all of.
        """
        read = self._read | self._read_by_others if self.is_part else self._read
        schema = self._schema()
        helper = onnx().helper
        for name, attribute in self._attributes.items():
            value = helper.get_attribute_value(attribute)
            if name not in read and not _is_default(schema, name, value):
                reason = f"its attribute '{printable(name, 40)}' is {_shown(value)}, which is not taken"
                return reason, "write it by operators that do so, as docs/import.md lists them"
        for position, value in enumerate(self.inputs):
            if value and position not in read:
                names = [] if schema is None else [str(i.name) for i in schema.inputs]
                name = names[position] if position < len(names) else str(position)
                return f"its input '{name}' is not taken", "compute it by operators that docs/import.md lists"
        return None

    def _schema(self) -> Any:
        try:
            return onnx().defs.get_schema(self.op, self.graph.opset, "")
        except onnx().defs.SchemaError:
            return None

    def _value(self, name: str) -> Any:
        self._note(name)
        attribute = self._attributes.get(name)
        return None if attribute is None else onnx().helper.get_attribute_value(attribute)

    def integer(self, name: str, default: int) -> int:
        value = self._value(name)
        if value is not None and not isinstance(value, int):
            raise Refused(f"its '{name}' is damaged", "export the model again")
        return default if value is None else value

    def real(self, name: str, default: float) -> float:
        value = self._value(name)
        if value is not None and not isinstance(value, int | float):
            raise Refused(f"its '{name}' is damaged", "export the model again")
        return default if value is None else shortest(np.float32(value))

    def text(self, name: str, default: str) -> str:
        value = self._value(name)
        return printable(value.decode("utf-8", "replace"), 40) if isinstance(value, bytes) else default

    def ints(self, name: str, position: int | None = None) -> tuple[int, ...] | None:
        """Whole numbers: an attribute, or in newer opsets an operand. None where they are left out."""
        value = self._value(name)
        if value is None and position is not None:
            array = self.constant(position, f"'{name}'")
            return None if array is None else tuple(int(item) for item in array.reshape(-1))
        if value is None:
            return None
        items = list(cast("Sequence[object]", value)) if isinstance(value, Sequence) else [value]
        if not all(isinstance(item, int) for item in items):
            raise Refused(f"its '{name}' is damaged", "export the model again")
        return tuple(item for item in items if isinstance(item, int))

    # ---- results ----

    def emit(self, target: str, /, **arguments: Argument) -> None:
        """The node's result is that of this ATen operation; nobody may use any other one."""
        self.emit_all(1, target, **arguments)

    def emit_all(self, results: int, target: str, /, **arguments: Argument) -> None:
        """The node's first `results` results are those of this ATen operation; nobody may use any other one."""
        self._check_unused(set(range(results)))
        self.graph.emit(self, target, arguments, self.outputs[:results])

    def give(self, *names: TensorName | None) -> None:
        """The node's results are these tensors; nobody may use one that is None or not among them."""
        self._check_unused({number for number, name in enumerate(names) if name is not None})
        for value, name in zip(self.outputs, names, strict=False):
            if value and name is not None:
                self.graph.emit(self, "aten.alias.default", {"self": name}, (value,))

    def _check_unused(self, given: set[int]) -> None:
        for number, value in enumerate(self.outputs):
            if number not in given and value and self.graph.users(value):
                schema = self._schema()
                names = [] if schema is None else [str(o.name) for o in schema.outputs]
                name = names[number] if number < len(names) else str(number)
                raise Refused(f"its output '{name}' is used", f"use its output '{names[0] if names else 0}' alone")

    def part(self) -> None:
        """The node is a part of a layer, and a later one is all of it."""
        self.is_part = True
        self.emit_all(len(self.outputs), "onnx.part")

    def step(self, target: str, shape: tuple[int, ...], /, **arguments: Argument) -> TensorName:
        """An operation before that, with a result of its own."""
        value = self.graph.inner(self, shape)
        self.graph.emit(self, target, arguments, (value,))
        return self.graph.name(value)


Rule = Callable[[Operator], None]


def _is_default(schema: Any, name: str, value: object) -> bool:
    """Whether the schema gives an attribute this value where it is left out."""
    if schema is None or name not in schema.attributes:
        return False
    default = schema.attributes[name].default_value
    if not default.name:
        return False
    wanted = onnx().helper.get_attribute_value(default)
    return type(wanted) is type(value) and wanted == value


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return f"'{printable(value.decode('utf-8', 'replace'), 40)}'"
    return printable(str(value), 40)


def shortest(number: Any) -> float:
    """A number of fp32 as the shortest decimal that is it: 0.1 rather than 0.10000000149."""
    return float(str(number))
