"""The program that the nodes read so far give, as rules read it and add to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import numpy as np

from mbc.interchange.from_onnx.infer import Values
from mbc.interchange.from_onnx.module_scopes import modules_of
from mbc.interchange.from_onnx.operator import Operator
from mbc.interchange.from_onnx.tensors import dtype_name
from mbc.interchange.program import FLOATING, Argument, Array, Dynamic, Held, Node, TensorMeta, TensorName
from mbc.interchange.refusal import printable
from mbc.interchange.steps import STATISTICS


class ProgramSoFar:
    """The program so far, and the graph that rules read (`Graph` of `mbc.interchange.from_onnx.operator`)."""

    def __init__(self, opsets: dict[str, int]) -> None:
        """Begin an empty program of operators of these sets, by domain."""
        self.opset = opsets[""]
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()
        self._makers: dict[str, Operator] = {}
        self._users: dict[str, list[Operator]] = defaultdict(list)
        self._given: set[str] = set()  # names of initializers
        self._values = Values(opsets, self._given)
        self._held: dict[str, Held] = {}
        self._keys: set[str] = set()
        self._arrays: dict[str, Array] = {}
        self._tensors: dict[str, TensorMeta] = {}
        self._nodes: list[list[Node]] = []  # the nodes of each operator
        self.current: Operator | None = None

    def begin(self, operator: Operator) -> None:
        """Begin the nodes of an operator, whose rule runs next."""
        self.current = operator
        self._nodes.append([])

    def array(self, value: str) -> Array | None:
        """Return the numbers of a constant or held value; None for other values."""
        return self._values.arrays.get(value)

    def is_initializer(self, value: str) -> bool:
        """Return whether a value is a weight of the file."""
        return value in self._given

    def shape(self, value: str) -> tuple[int | Dynamic, ...] | None:
        """Return the shape of a value; None if the shape is not known."""
        return self._values.shape(value)

    def dtype(self, value: str) -> str:
        """Return the type of a value's elements, with PyTorch's name."""
        return dtype_name(self._values.kind(value))

    def maker(self, value: str) -> Operator | None:
        """Return the operator that gives a value; None for inputs and constants."""
        return self._makers.get(value)

    def users(self, value: str) -> Sequence[Operator]:
        """Return the operators that take a value."""
        return self._users.get(value, ())

    def name(self, value: str) -> TensorName:
        """Return the program's name for a value, which is printable and unique."""
        if value not in self._names:
            wanted = printable(value) or "unnamed"
            self._names[value] = next(n for n in _numbered(wanted) if n not in self._taken)
            self._taken.add(self._names[value])
        return TensorName(self._names[value])

    def inner(self, user: Operator, shape: tuple[int, ...]) -> str:
        """Return the name of a new value of the shape `shape`, inside the node `user`."""
        value = f"{user.outputs[0]} before {len(self._names)}"
        self._tensors[self.name(value).name] = TensorMeta(shape, "float32")
        return value

    def weight(self, value: str, role: str, user: Operator, order: tuple[int, ...] = ()) -> TensorName:
        """Return held numbers as an operand; `role` is the state of a layer that they are, or empty for a tensor."""
        called = f"{value} transposed" if order else value
        modules = modules_of(user.name, user.metadata)
        if role and modules and self._is_uniform(value):
            called = f"{value} of {modules[-1].path}.{role}"
        name = self.name(called)
        if name.name in self._held:
            return name
        array = self._values.arrays[value]
        array = np.ascontiguousarray(np.transpose(array, order)) if order else array
        dtype = dtype_name(self._values.kind(value))
        trained = dtype in FLOATING and role not in STATISTICS and (role or value in self._given)
        kind = "parameter" if trained else "buffer"
        if array.size == 1 and not role:
            kind = "constant"
        key = self._key(value, role, user)
        meta = TensorMeta(array.shape, dtype, trained=kind == "parameter")
        self._held[name.name] = Held(key, kind, meta, name.name)
        self._arrays[name.name] = array
        return name

    def _is_uniform(self, value: str) -> bool:
        """Return True for a vector of equal numbers, which exporters keep once for all modules that begin with it."""
        array = self._values.arrays[value]
        return array.ndim == 1 and array.size > 1 and bool((array == array[0]).all())

    def hold(self, value: str, array: Array, kind: str) -> TensorName:
        """Return numbers as an operand that the file has in another form, or does not have.

        Args:
            value: The name of the numbers.
            array: The numbers.
            kind: `parameter`, `frozen` (a parameter that is not trained), `buffer` (a tensor of checkpoints) or
                `constant` (numbers that rules read).
        """
        name = self.name(value)
        if name.name not in self._held:
            dtype = "float32" if array.dtype.kind == "f" else "int64"
            meta = TensorMeta(array.shape, dtype, trained=kind == "parameter")
            key = next(n for n in _numbered(name.name) if n not in self._keys)
            self._keys.add(key)
            self._held[name.name] = Held(key, "parameter" if kind == "frozen" else kind, meta, name.name)
            self._arrays[name.name] = array
        return name

    def _key(self, value: str, role: str, user: Operator) -> str:
        """Return the key of constant numbers.

        It is their name in the file, or PyTorch's name if the exporter invented one.
        """
        own = printable(value)
        modules = modules_of(user.name, user.metadata)
        path = f"{modules[-1].path}.{role}" if modules else ""
        if role and modules and (not own.endswith(f".{role}") or (self._is_uniform(value) and own != path)):
            own = own if path in self._keys or path in self._given else path
        key = next(n for n in _numbered(own) if n not in self._keys)
        self._keys.add(key)
        return key

    def emit(self, user: Operator, target: str, arguments: Mapping[str, Argument], outputs: Sequence[str]) -> None:
        """Add an ATen operation to the program, as part of the node `user`."""
        self._nodes[-1].append(self._node(user, target, arguments, outputs))

    def _refusal(self, user: Operator, reason: str, remedy: str) -> Node:
        """Return the node of an operator that is refused, with all of its operands."""
        operands: dict[str, Argument] = {str(n): self.name(value) for n, value in enumerate(user.inputs) if value}
        return self._node(user, "onnx", operands, user.outputs, (reason, remedy))

    def _node(
        self,
        user: Operator,
        target: str,
        arguments: Mapping[str, Argument],
        outputs: Sequence[str],
        refusal: tuple[str, str] | None = None,
    ) -> Node:
        names = tuple(self.name(value).name for value in outputs if value)
        modules = modules_of(user.name, user.metadata)
        return Node(target, arguments, names, modules, None, user.name, printable(user.op, 40), refusal)


def _numbered(name: str) -> Iterator[str]:
    """Yield the name, then the name with numbers after it.

    Yields:
        `name`, `name_2`, `name_3` and so on.
    """
    yield name
    yield from (f"{name}_{number}" for number in count(2))
