"""The arguments of a node of the program, by their names in ATen's schema.

Rules read numbers, shapes and operands here. Reading stands alone because it never changes the network that is built.
"""

from __future__ import annotations

import re
from typing import Protocol

from mbc.interchange.aten.operands import SLICE_ARGUMENTS, Operand, Refused, Untaken, Weight, indices_of
from mbc.interchange.aten.operation_schemas import Parameter, Required, schema_of
from mbc.interchange.program import Argument, Node, Opaque, TensorMeta, TensorName


class Tensors(Protocol):
    """The tensors of the program, as far as they are translated."""

    def operand(self, name: str) -> Operand:
        """Return the operand that represents a tensor of the program."""
        ...

    def meta(self, name: str) -> TensorMeta:
        """Return the shape, strides and type of a tensor of the program."""
        ...


# Arguments that no rule reads: the place of the bytes, the library that computes, and the type of the result, which is
# checked for every node.
_PLACEMENT = frozenset(("ScalarType", "Layout", "Device", "MemoryFormat", "Generator"))
_PLACEMENT_FLAGS = frozenset(("pin_memory", "non_blocking", "copy", "cudnn_enabled", "cudnn_enable", "implicit"))


class Arguments:
    """The arguments of one node.

    A rule reads every argument that may change the result; `check_all_read` refuses all others.
    """

    def __init__(self, node: Node, tensors: Tensors) -> None:
        """Create the arguments of a node; `tensors` knows the tensors that they name."""
        self.node = node
        self._tensors = tensors
        self._read: set[str] = set()

    def argument(self, name: str) -> Argument:
        """Return an argument as it is written; None if it is left out."""
        self._read.add(name)
        return self.node.arguments.get(name)

    def check_all_read(self) -> None:
        """Raise Refused if an argument that the rule has not read differs from its default in the schema.

        Raises:
            Refused: The rule does not read an argument that may change the result.
        """
        schema = schema_of(self.node.target)
        parameters = {} if schema is None else {p.name: p for p in schema.parameters}
        for name, value in self.node.arguments.items():
            parameter = parameters.get(name)
            if name in self._read or (parameter is not None and _is_default(value, parameter)):
                continue
            raise Refused(f"its argument '{name}' is {_shown(value)}, which is not supported", "leave it out")

    def operand(self, name: str) -> Operand:
        """Return the operand that represents a tensor argument.

        Raises:
            Refused: The argument is no tensor.
        """
        return self._operand(self._name(name))

    def _name(self, name: str) -> TensorName:
        value = self.argument(name)
        if not isinstance(value, TensorName):
            raise Refused(f"its argument '{name}' is no tensor", "give it a tensor")
        return value

    def _operand(self, name: TensorName) -> Operand:
        operand = self._tensors.operand(name.name)
        if isinstance(operand, Untaken):
            raise Refused(operand.reason, operand.remedy)
        return operand

    def optional(self, name: str) -> Operand | None:
        """Return the operand that stands for a tensor; None if the argument is left out."""
        return None if self.argument(name) is None else self.operand(name)

    def operands(self, name: str) -> tuple[Operand, ...]:
        """Return the operands of an argument that is a list of tensors."""
        return tuple(operand for operand in self.optional_operands(name) if operand is not None)

    def optional_operands(self, name: str) -> tuple[Operand | None, ...]:
        """Return the operands of an argument that is a list of tensors, with None for each item that is left out."""
        value = self.argument(name)
        items = value if isinstance(value, tuple) else ()
        return tuple(self._operand(item) if isinstance(item, TensorName) else None for item in items)

    def is_tensor(self, name: str) -> bool:
        """Return whether an argument is a tensor."""
        return isinstance(self.node.arguments.get(name), TensorName)

    def weight(self, name: str) -> Weight:
        """Return an argument that is a parameter, buffer or constant.

        Raises:
            Refused: The argument is computed.
        """
        operand = self.operand(name)
        if not isinstance(operand, Weight):
            raise Refused(f"its {name} is computed, not a parameter", "hold it as a parameter of the module")
        return operand

    def optional_weight(self, name: str) -> Weight | None:
        """Return an argument that is a parameter, buffer or constant; None if it is left out."""
        return None if self.argument(name) is None else self.weight(name)

    def integer(self, name: str, default: int) -> int:
        """Return an integer argument, or `default` if it is left out."""
        return int(self._number(name, default))

    def real(self, name: str, default: float) -> float:
        """Return a real argument, or `default` if it is left out."""
        return float(self._number(name, default))

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean argument, or `default` if it is left out."""
        return bool(self._number(name, default))

    def text(self, name: str, default: str) -> str:
        """Return a text argument, or `default` if there is no text."""
        value = self.argument(name)
        return value if isinstance(value, str) else default

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return an argument that is a list of integers; one integer gives a list of one.

        Raises:
            Refused: An item depends on data.
        """
        value = self.argument(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
            raise Refused(f"its '{name}' is not known before it runs", "export it with fixed sizes")
        return tuple(item for item in value if isinstance(item, int))

    def slice_of(self, size: int) -> range:
        """Return the indices along a dimension of `size` elements that the arguments start, end and step take."""
        return indices_of(size, *(self.integer(n, d) for n, d in zip(SLICE_ARGUMENTS, (0, size, 1), strict=True)))

    @property
    def rank(self) -> int:
        """Number of spatial axes that the operation's name says: 2 for `aten.conv2d.default`."""
        (digit,) = re.findall(r"(\d)d\b", self.node.target)
        return int(digit)

    def per_axis(self, name: str, default: int) -> tuple[int, ...]:
        """Return an argument that has a number for each spatial axis; one integer stands for all of them.

        Raises:
            Refused: There is another number of integers.
        """
        numbers = self.ints(name) or (default,)
        numbers = numbers * self.rank if len(numbers) == 1 else numbers
        if len(numbers) != self.rank:
            raise Refused(f"its '{name}' has {len(numbers)} numbers", f"give one for each of {self.rank} axes")
        return numbers

    def _number(self, name: str, default: float) -> float:
        """Return an argument that is a number, or `default` if it is left out.

        Raises:
            Refused: The number depends on data.
        """
        value = self.argument(name)
        if value is None:
            return default
        if isinstance(value, Opaque) or not isinstance(value, int | float):
            raise Refused(f"its '{name}' is not known before it runs", "export it with a fixed number")
        return value

    def ignore(self, *names: str) -> None:
        """Mark arguments as read that do not change the result of this call."""
        self._read.update(names)

    def shape_said_by(self, *names: str) -> tuple[int, ...]:
        """Return the shape of the first result, and mark the arguments as read that determine only this shape."""
        self._read.update(names)
        return self.result_shape

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the first output, as the program states it."""
        return self._tensors.meta(self.node.outputs[0]).sizes

    @property
    def result_dtype(self) -> str:
        """The type of the first output, as the program states it."""
        return self._tensors.meta(self.node.outputs[0]).dtype

    def dtype_of(self, name: str) -> str:
        """Return the type of an argument that is a tensor, as the program states it.

        Raises:
            Refused: The argument is no tensor.
        """
        return self._tensors.meta(self._name(name).name).dtype


def _is_default(value: Argument, parameter: Parameter) -> bool:
    """Return True if an argument cannot change the result: it is the schema's default, or only places the bytes."""
    if parameter.type.rstrip("?") in _PLACEMENT or parameter.name in _PLACEMENT_FLAGS:
        return True
    default = parameter.default
    if isinstance(default, Required):
        return False
    if isinstance(value, tuple) and isinstance(default, int | float):
        return all(item == default for item in value)  # one number stands for all axes
    return value == default


def _shown(value: Argument) -> str:
    if isinstance(value, TensorName):
        return "a tensor"
    return value.what if isinstance(value, Opaque) else str(list(value) if isinstance(value, tuple) else value)
