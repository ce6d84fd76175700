"""Construction of a graph: appends operations, with shape inference and unique names."""

from __future__ import annotations

from collections.abc import Container, Sequence

from mbc.ir.graph import Attributes, Operation, Role, Value
from mbc.ir.types import TensorType
from mbc.ops import KINDS
from mbc.source import Span


class GraphBuilder:
    """A graph under construction: `values` by name, and `operations` in order.

    Two programs over the same values are two builders that share one `values`.
    """

    def __init__(self, values: dict[str, Value] | None = None, prefix: str = "") -> None:
        """Begin without operations.

        Args:
            values: Values that the graph shares with another one.
            prefix: Prefix of the names of operations and their outputs.
        """
        self.values: dict[str, Value] = {} if values is None else values
        self.operations: list[Operation] = []
        self._prefix = prefix
        self._names: set[str] = set()
        self._value_counts: dict[str, int] = {}
        self._name_counts: dict[str, int] = {}

    def type(self, value: str) -> TensorType:
        """Return the shape and element type of a value."""
        return self.values[value].type

    def declare(
        self,
        name: str,
        type: TensorType,
        role: Role = Role.INTERMEDIATE,
        per_sample: bool = False,
        span: Span | None = None,
    ) -> str:
        """Add a value that no operation computes, and return its name, which is `name` unless that is taken."""
        unique = _unique(name, self.values, self._value_counts)
        self.values[unique] = Value(unique, type, role, per_sample, span)
        return unique

    def emit(
        self,
        kind: str,
        attributes: Attributes,
        inputs: Sequence[str],
        name: str,
        outputs: Sequence[str] = (),
        span: Span | None = None,
    ) -> tuple[str, ...]:
        """Append an operation, and return the names of its outputs.

        Outputs get the names `outputs`, else that of the operation (further ones `<name>.1`, …). A number is appended
        to a name that is taken. An output has rows if an input has, unless the kind reduces.

        Raises:
            ShapeError: The operands do not fit together.
        """
        op_kind = KINDS[kind]
        types = op_kind.shape(attributes, tuple(self.values[v].type for v in inputs))
        per_sample = not op_kind.reduces and any(self.values[v].per_sample for v in inputs)
        unique = _unique(f"{self._prefix}{name}", self._names, self._name_counts)
        self._names.add(unique)
        names: list[str] = []
        for number, output_type in enumerate(types):
            wanted = outputs[number] if number < len(outputs) else f"{name}.{number}" if number else name
            names.append(self.declare(f"{self._prefix}{wanted}", output_type, per_sample=per_sample, span=span))
        self.operations.append(Operation(unique, kind, tuple(inputs), tuple(names), attributes, span))
        return tuple(names)


def _unique(name: str, taken: Container[str], counts: dict[str, int]) -> str:
    """Return `name`, or `name` with the next free number.

    `counts` holds the last number of each name, so that many equal names do not take quadratic time.
    """
    if name not in taken:
        return name
    while True:
        counts[name] = counts.get(name, 1) + 1
        candidate = f"{name}.{counts[name]}"
        if candidate not in taken:
            return candidate


def live_operations(operations: Sequence[Operation], wanted: Sequence[str]) -> list[Operation]:
    """Return the operations on which the values `wanted` depend, in their order."""
    needed = set(wanted)
    kept: list[Operation] = []
    for op in reversed(operations):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    kept.reverse()
    return kept
