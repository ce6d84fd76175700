"""Writes the operations of a Network into a training or an inference graph, in the types of a precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mbc.ir.graph import Attributes, Operation, Ranks, Role
from mbc.ir.types import DType, TensorType
from mbc.ops import KINDS
from mbc.ops.matrix import Cast
from mbc.passes.graph_builder import GraphBuilder
from mbc.source import Span

FLOATING = (DType.FP64, DType.FP32, DType.BF16, DType.FP16)


@dataclass(frozen=True)
class Deferred:
    """An operation that changes a state, and therefore runs at the end of the step."""

    kind: str
    attributes: Attributes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    name: str
    span: Span | None


class Expander:
    """The implementation of `mbc.ops.base.Expansion`, which also casts operands to the working type."""

    def __init__(
        self,
        builder: GraphBuilder,
        control: str,
        working: DType,
        needs: Callable[[str], bool],
        training: bool,
        ranks: Ranks | None = None,
    ) -> None:
        """Take the graph and its types.

        Args:
            builder: The graph under construction.
            control: Name of the control block.
            working: Element type of activations.
            needs: Returns whether the gradient of a value of the Network will be needed.
            training: Whether the graph is a training graph.
            ranks: Ranks that share the mini-batch; None for one GPU.
        """
        self.deferred: list[Deferred] = []
        self.casts: dict[str, str] = {}  # by cast value: the original value
        self._builder = builder
        self._control = control
        self._working = working
        self._needs = needs
        self._training = training
        self._ranks = ranks
        self._cast: dict[str, str] = {}
        self._of: dict[str, str] = {}  # values of the Network -> values of this graph
        self._source: dict[str, str] = {}  # values of this graph -> values of the Network
        self._span: Span | None = None

    @property
    def control(self) -> str:
        """Name of the control block's value."""
        return self._control

    @property
    def ranks(self) -> Ranks | None:
        """Ranks that share the mini-batch; None for one GPU."""
        return self._ranks

    @property
    def working(self) -> DType:
        """Element type of activations."""
        return self._working

    def type(self, value: str) -> TensorType:
        """Return the type of a value."""
        return self._builder.type(value)

    def needs(self, value: str) -> bool:
        """Return whether the gradient of this value will be needed; always False in an inference graph."""
        return self._training and self._needs(self._source.get(value, value))

    def working_copy(self, state: str) -> str:
        """Return a copy of a state in the working type, or the state itself if it has that type."""
        return self._working_copy(state)

    def write(self, op: Operation) -> None:
        """Write one operation of the Network."""
        self._span = op.span
        kind = KINDS[op.kind]
        here = replace(op, inputs=tuple(self.read(v) for v in op.inputs))
        if kind.expand is not None:
            outputs = kind.expand(self, here, self._training)
        else:
            outputs = self.emit(op.kind, op.attributes, here.inputs, op.outputs, op.name)
        for was, now in zip(op.outputs, outputs, strict=True):
            self._of[was] = now
            # If an operation vanishes (dropout in inference), its output is a value that is already in the table.
            self._source.setdefault(now, was)

    def read(self, value: str) -> str:
        """Return the value of this graph for a value of the Network; an input is cast to the working type."""
        here = self._of.get(value, value)
        return self._working_copy(here) if self._builder.values[here].role is Role.INPUT else here

    def emit(
        self, kind: str, attributes: Attributes, inputs: Sequence[str], outputs: Sequence[str], name: str
    ) -> tuple[str, ...]:
        """Append an operation, or defer it if its kind updates a state, and return the names of its outputs."""
        op_kind = KINDS[kind]
        operands = [self._working_copy(v) if i in op_kind.working_inputs else v for i, v in enumerate(inputs)]
        if op_kind.updates:
            self.deferred.append(Deferred(kind, attributes, tuple(operands), tuple(outputs), name, self._span))
            return tuple(outputs)
        return self._builder.emit(kind, attributes, operands, name, outputs, self._span)

    def update(self, state: str, value: str) -> None:
        """Check that the last deferred operation computes `value` as the next version of `state`."""
        # The `updates` of the deferred operation's kind say which state each output is the next version of.
        assert any(state in d.inputs and value in d.outputs for d in self.deferred[-1:])

    def _working_copy(self, value: str) -> str:
        kind = self._builder.type(value)
        state = self._builder.values[value]
        if kind.dtype not in FLOATING or kind.dtype is self._working:
            return value
        if value not in self._cast:
            name = f"{self._working}.{value}"
            (copy,) = self._builder.emit("cast", Cast(self._working.value), (value,), name, span=state.span)
            self._cast[value] = copy
            self.casts[copy] = value
        return self._cast[value]
