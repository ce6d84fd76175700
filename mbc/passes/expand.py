"""Writes the operations of a Network into a training or an inference graph, in the types of a precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mbc.ir.graph import Attributes, Operation, Ranks, Role
from mbc.ir.types import DType, TensorType
from mbc.ops import KINDS
from mbc.ops.matrix import Cast
from mbc.passes.build import GraphBuilder
from mbc.source import Span

FLOATING = (DType.FP64, DType.FP32, DType.BF16, DType.FP16)


@dataclass(frozen=True)
class Deferred:
    """An operation that changes a state, and so runs at the end of the step."""

    kind: str
    attributes: Attributes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    name: str
    span: Span | None


class Expander:
    """Implements `mbc.ops.base.Expansion`, and casts what is not stored in the working type."""

    def __init__(
        self,
        builder: GraphBuilder,
        control: str,
        working: DType,
        needs: Callable[[str], bool],
        training: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self.deferred: list[Deferred] = []
        self.casts: dict[str, str] = {}  # what each cast value was cast from
        self._builder = builder
        self._control = control
        self._working = working
        self._needs = needs
        self._training = training
        self._ranks = ranks
        self._cast: dict[str, str] = {}
        self._of: dict[str, str] = {}  # values of the Network -> values of this graph
        self._source: dict[str, str] = {}  # and back
        self._span: Span | None = None

    @property
    def control(self) -> str:
        return self._control

    @property
    def ranks(self) -> Ranks | None:
        return self._ranks

    @property
    def working(self) -> DType:
        return self._working

    def type(self, value: str) -> TensorType:
        return self._builder.type(value)

    def needs(self, value: str) -> bool:
        return self._training and self._needs(self._source.get(value, value))

    def working_copy(self, state: str) -> str:
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
            # Where an operation vanishes (dropout in inference) its output is a value that stands for itself already.
            self._source.setdefault(now, was)

    def read(self, value: str) -> str:
        """What a value of the Network is called here; inputs come in the working type."""
        here = self._of.get(value, value)
        return self._working_copy(here) if self._builder.values[here].role is Role.INPUT else here

    def emit(
        self, kind: str, attributes: Attributes, inputs: Sequence[str], outputs: Sequence[str], name: str
    ) -> tuple[str, ...]:
        op_kind = KINDS[kind]
        operands = [self._working_copy(v) if i in op_kind.working_inputs else v for i, v in enumerate(inputs)]
        if op_kind.updates:
            self.deferred.append(Deferred(kind, attributes, tuple(operands), tuple(outputs), name, self._span))
            return tuple(outputs)
        return self._builder.emit(kind, attributes, operands, name, outputs, self._span)

    def update(self, state: str, value: str) -> None:
        # The deferred operation says by its kind's `updates` which state each output is the next version of.
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
