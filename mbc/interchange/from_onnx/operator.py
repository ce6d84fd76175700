"""One node of an ONNX graph, and the methods by which a rule translates it to ATen operations.

A family of rules is a file with a table `RULES`, which maps the operator's name to a function that takes an `Operator`
and emits nodes. `NOT_TAKEN` names operators for which the language has no layer, with a remedy.

An `Operator` records which attributes and inputs are read. The reader refuses a node with any other attribute or input,
unless an attribute has the default of ONNX's schema (`Operator.unread`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx.package import onnx
from mbc.interchange.program import Argument, Array, Dynamic, TensorMeta, TensorName
from mbc.interchange.refusal import LISTED, printable


class Graph(Protocol):
    """The graph that rules read and emit nodes into; `mbc.interchange.from_onnx.program_so_far` implements it."""

    opset: int
    current: Operator | None  # the operator whose rule runs

    def array(self, value: str) -> Array | None:
        """Return the numbers of a constant or held value; None for other values."""
        ...

    def is_initializer(self, value: str) -> bool:
        """Return whether a value is a weight of the file."""
        ...

    def shape(self, value: str) -> tuple[int | Dynamic, ...] | None:
        """Return the shape of a value; None if the shape is not known."""
        ...

    def dtype(self, value: str) -> str:
        """Return the type of a value's elements, with PyTorch's name."""
        ...

    def maker(self, value: str) -> Operator | None:
        """Return the operator that gives a value; None for inputs and constants."""
        ...

    def users(self, value: str) -> Sequence[Operator]:
        """Return the operators that take a value."""
        ...

    def name(self, value: str) -> TensorName:
        """Return the program's name for a value."""
        ...

    def weight(self, value: str, role: str, user: Operator, order: tuple[int, ...] = ()) -> TensorName:
        """Return a held value as an operand of `user`, transposed by `order`.

        Args:
            value: The value's name in the file.
            role: The state of a layer that the value is, such as `weight`; empty for a tensor.
            user: The operator that takes the value.
            order: The order of axes; empty for the order of the file.
        """
        ...

    def hold(self, value: str, array: Array, kind: str) -> TensorName:
        """Add numbers to the program that are not in the file, and return them as an operand."""
        ...

    def emit(self, user: Operator, target: str, arguments: Mapping[str, Argument], outputs: Sequence[str]) -> None:
        """Add an ATen operation to the program, as part of the node `user`."""
        ...

    def inner(self, user: Operator, shape: tuple[int, ...]) -> str:
        """Return the name of a new value of the shape `shape`, inside the node `user`."""
        ...


class Operator:
    """One node of an ONNX graph.

    Values have the names of the file; an input that is left out is an empty text.
    """

    def __init__(self, node: Any, graph: Graph, number: int) -> None:
        """Create the operator of the node with this number."""
        self.graph = graph
        self.op = str(node.op_type)
        self.domain = str(node.domain)
        self.name = printable(str(node.name), 80) or f"{printable(self.op, 40)}_{number}"
        self.inputs: tuple[str, ...] = tuple(node.input)
        self.outputs: tuple[str, ...] = tuple(node.output)
        self.metadata: Mapping[str, str] = {str(p.key): str(p.value) for p in node.metadata_props}
        self.is_part = False
        self._attributes = {str(a.name): a for a in node.attribute}
        # Attributes and inputs that were read: by the node's own rule, and by the rules of other nodes, which counts if
        # the node is part of their layer.
        self._read: set[str | int] = set()
        self._read_by_others: set[str | int] = set()

    def _note(self, what: str | int) -> None:
        (self._read if self.graph.current is self else self._read_by_others).add(what)

    # ---- inputs ----

    def input(self, position: int) -> str:
        """Return the value at a position; empty if there is none."""
        self._note(position)
        return self._at(position)

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of all inputs."""
        for position in range(len(self.inputs)):
            self._note(position)
        return self.inputs

    def _at(self, position: int) -> str:
        return self.inputs[position] if position < len(self.inputs) else ""

    def tensor(self, position: int = 0) -> TensorName:
        """Return an operand of the network, or an operand that the file holds.

        Raises:
            Refused: The operand is missing.
        """
        value = self.input(position)
        if not value:
            raise Refused(f"its operand {position} is missing", "export the model again")
        if self.graph.array(value) is not None:
            return self.graph.weight(value, "", self)
        return self.graph.name(value)

    def held(self, position: int, role: str, order: tuple[int, ...] = ()) -> TensorName | None:
        """Return a parameter or statistic, transposed by `order`; None if it is left out."""
        value = self.input(position)
        if not value:
            return None
        if self.graph.array(value) is None:
            return self.graph.name(value)  # ATen's rule refuses it as computed
        return self.graph.weight(value, role, self, order)

    def bias(self, position: int = 2) -> TensorName | None:
        """Return the offset of a layer; None if it is left out, or zeros that an exporter added."""
        value = self.input(position)
        array = self.graph.array(value)
        if array is not None and not self.graph.is_initializer(value) and not array.any():
            return None
        return self.held(position, "bias")

    def sizes(self, position: int = 0) -> tuple[int, ...]:
        """Return the shape of an operand, without marking the operand as read."""
        return self._static(self._at(position))

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self._static(self.outputs[0])

    def _static(self, value: str) -> tuple[int, ...]:
        shape = self.graph.shape(value)
        meta = TensorMeta(shape or (), "")
        if shape is None or not meta.static:
            raise Refused(
                "one of its shapes depends on data or on a dynamic size",
                "export it with fixed sizes except for the batch",
            )
        return meta.sizes

    def constant(self, position: int, what: str) -> Array | None:
        """Return an operand that must be constant; None if it is left out.

        Args:
            position: The operand's position.
            what: The operand's name in messages.

        Raises:
            Refused: The operand is computed.
        """
        value = self.input(position)
        if not value:
            return None
        array = self.graph.array(value)
        if array is None:
            raise Refused(f"its {what} is computed in each step", "export it with fixed sizes and numbers")
        return array

    def number(self, position: int) -> float | None:
        """Return an operand that is one constant number; None for any other operand."""
        array = self.graph.array(self.input(position))
        if array is None or array.size != 1 or array.dtype.kind not in "fiu":
            return None
        return shortest(array.reshape(-1)[0])

    # ---- attributes ----

    def has(self, name: str) -> bool:
        """Return whether the node has an attribute."""
        self._note(name)
        return name in self._attributes

    def ignore(self, *what: str | int) -> None:
        """Mark attributes and inputs as read that change nothing here; a comment beside the call gives the reason."""
        for one in what:
            self._note(one)

    def unread(self) -> tuple[str, str] | None:
        """Return the reason why the node is refused, and a remedy; None if all of the node was read.

        An attribute that was not read must have the default of ONNX's schema; an input that was not read must be left
        out. If the node is part of a larger layer, the rule of the layer's last node may have read it.
        """
        read = self._read | self._read_by_others if self.is_part else self._read
        schema = self._schema()
        helper = onnx().helper
        for name, attribute in self._attributes.items():
            value = helper.get_attribute_value(attribute)
            if name not in read and not _is_default(schema, name, value):
                reason = f"its attribute '{printable(name, 40)}' is {_shown(value)}, which is not supported"
                return reason, f"use operators that mbc supports: {LISTED}"
        for position, value in enumerate(self.inputs):
            if value and position not in read:
                names = [] if schema is None else [str(i.name) for i in schema.inputs]
                name = names[position] if position < len(names) else str(position)
                return f"its input '{name}' is not supported", f"use operators that mbc supports: {LISTED}"
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
        """Return an integer attribute, or `default` if it is left out.

        Raises:
            Refused: The attribute has another type.
        """
        value = self._value(name)
        if value is not None and not isinstance(value, int):
            raise Refused(f"its '{name}' is damaged", "export the model again")
        return default if value is None else value

    def real(self, name: str, default: float) -> float:
        """Return a real attribute, or `default` if it is left out.

        Raises:
            Refused: The attribute has another type.
        """
        value = self._value(name)
        if value is not None and not isinstance(value, int | float):
            raise Refused(f"its '{name}' is damaged", "export the model again")
        return default if value is None else shortest(np.float32(value))

    def declared_real(self, name: str) -> float:
        """Return a real attribute, or the default of ONNX's schema if it is left out."""
        schema = self._schema()
        default = schema.attributes[name].default_value.f if schema is not None and name in schema.attributes else 0.0
        return self.real(name, shortest(np.float32(default)))

    def text(self, name: str, default: str) -> str:
        """Return a text attribute, or `default` if it is left out."""
        value = self._value(name)
        return printable(value.decode("utf-8", "replace"), 40) if isinstance(value, bytes) else default

    def ints(self, name: str, position: int | None = None) -> tuple[int, ...] | None:
        """Return integers: an attribute, or in newer opsets the operand at `position`; None if they are left out.

        Raises:
            Refused: An item is no integer.
        """
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
        """Emit an ATen operation whose result is the node's first result; the other results must be unused."""
        self.emit_all(1, target, **arguments)

    def emit_all(self, results: int, target: str, /, **arguments: Argument) -> None:
        """Emit an ATen operation whose results are the node's first `results` results; the others must be unused."""
        self._check_unused(set(range(results)))
        self.graph.emit(self, target, arguments, self.outputs[:results])

    def give(self, *names: TensorName | None) -> None:
        """Make these tensors the node's results; a result that is None or not among them must be unused."""
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
        """Mark the node as part of a layer that a later node emits."""
        self.is_part = True
        self.emit_all(len(self.outputs), "onnx.part")

    def step(self, target: str, shape: tuple[int, ...], /, **arguments: Argument) -> TensorName:
        """Emit an ATen operation before the node's result, and return its own result.

        Args:
            target: The ATen operation.
            shape: The shape of the result.
            **arguments: The arguments of the operation.

        Returns:
            The result of the operation.
        """
        value = self.graph.inner(self, shape)
        self.graph.emit(self, target, arguments, (value,))
        return self.graph.name(value)


Rule = Callable[[Operator], None]


def _is_default(schema: Any, name: str, value: object) -> bool:
    """Return whether a value is the default that the schema gives an attribute."""
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
    """Return a number of fp32 as the shortest decimal that rounds to it: 0.1 instead of 0.10000000149."""
    return float(str(number))
