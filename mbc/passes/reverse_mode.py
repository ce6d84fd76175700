"""Reverse-mode differentiation: backward operations are appended in reverse order, and gradients are summed at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops import KINDS
from mbc.ops.base import NoAttributes
from mbc.ops.matrix import Cast
from mbc.passes.graph_builder import GraphBuilder


class Backward:
    """The implementation of `mbc.ops.base.Gradients`, with the gradients so far."""

    def __init__(
        self,
        builder: GraphBuilder,
        weights: Mapping[str, float],
        parameters: Collection[str],
        control: str,
        casts: Mapping[str, str],
    ) -> None:
        """Take the forward pass, which is all operations of `builder`.

        Args:
            builder: The graph under construction.
            weights: The weight of each loss in the total.
            parameters: The trained parameters.
            control: Name of the control block.
            casts: Values that are another value in the working type. A gradient of the first is a gradient of the
                second, in the master type.
        """
        self._builder = builder
        self._weights = weights
        self._parameters = parameters
        self._control = control
        self._casts = casts
        self._gradients: dict[str, str] = {}
        self._of_outputs: dict[str, str] = {}  # gradients of the current operation's outputs
        self._forward = tuple(builder.operations)
        self._producers = {output: op for op in self._forward for output in op.outputs}
        self._needed = self._find_needed()
        self._path = [op for op in self._forward if self._on_path(op)]
        # Number of contributions to each gradient: the last sum gets the plain name.
        self._uses = Counter(self._root(v) for op in self._path for v in op.inputs if self._root(v) in self._needed)
        self._arrived: Counter[str] = Counter()
        self._parts: Counter[str] = Counter()
        self._current = self._path[-1] if self._path else None

    def needs(self, value: str) -> bool:
        """Return whether the gradient of this value is needed."""
        return self._root(value) in self._needed

    def type(self, value: str) -> TensorType:
        """Return the type of a value."""
        return self._builder.type(value)

    def has_rows(self, value: str) -> bool:
        """Return whether the first dimension of this value counts samples."""
        return self._builder.values[value].per_sample

    def producer(self, value: str) -> Operation | None:
        """Return the operation of the forward pass that computes a value; None for inputs and states."""
        return self._producers.get(value)

    def of_output(self, value: str) -> str | None:
        """Return the gradient of an output of the differentiated operation; None if no loss depends on the output."""
        return self._of_outputs.get(value)

    def weight(self, loss: str) -> float:
        """Return the weight of this loss in the total, without the loss scale."""
        return self._weights[loss]

    def emit(self, kind: str, attributes: Attributes, inputs: Sequence[str], *of: str) -> tuple[str, ...]:
        """Append an operation whose outputs are the gradients of the values `of`, and return their names."""
        forward = self._current
        assert forward is not None
        rest = kind.removeprefix(f"{forward.kind}_")
        suffix = rest[rest.index("backward") :] if "backward" in rest else f"backward_{rest}"
        names = [self._name(self._root(v)) for v in of]
        return self._builder.emit(kind, attributes, inputs, f"{forward.name}.{suffix}", names, forward.span)

    def run(self) -> dict[str, str]:
        """Append the backward pass, and return the gradients of `parameters` in the order of their completion."""
        for op in reversed(self._path):
            self._current = op
            self._of_outputs = {v: self._gradients.pop(v) for v in op.outputs if v in self._gradients}
            rule = KINDS[op.kind].gradient
            is_loss = op.outputs[0] in self._weights
            if rule is None or op.outputs[0] in self._casts or not (is_loss or self._of_outputs):
                continue
            dy = next(iter(self._of_outputs.values()), self._control)
            for value, gradient in zip(op.inputs, rule(self, op, dy), strict=True):
                self._arrive(self._root(value), gradient)
        return {v: g for v, g in self._gradients.items() if v in self._parameters}

    def _root(self, value: str) -> str:
        return self._casts.get(value, value)

    def _find_needed(self) -> set[str]:
        """Return the values that depend on a trained parameter and on which a loss depends."""
        trained = set(self._parameters)
        for op in self._forward:
            if KINDS[op.kind].gradient is not None and not trained.isdisjoint(op.inputs):
                trained.update(op.outputs)
        reached = set(self._weights)
        for op in reversed(self._forward):
            if not reached.isdisjoint(op.outputs):
                reached.update(op.inputs)
        return trained & reached

    def _on_path(self, op: Operation) -> bool:
        return (
            KINDS[op.kind].gradient is not None
            and any(v in self._needed for v in op.outputs)
            and op.outputs[0] not in self._casts
        )

    def _name(self, value: str) -> str:
        if self._uses[value] <= 1:
            return f"d.{value}"
        self._parts[value] += 1
        return f"d.{value}.part{self._parts[value]}"

    def _arrive(self, value: str, gradient: str | None) -> None:
        if value not in self._needed:
            return
        self._arrived[value] += 1
        if gradient is None:
            return
        gradient = self._in_type_of(value, gradient)
        # Removing and adding again moves a gradient to the place where it became complete.
        total = self._gradients.pop(value, None)
        if total is not None:
            last = self._arrived[value] == self._uses[value]
            name = f"d.{value}" if last else f"d.{value}.sum{self._arrived[value]}"
            span = self._current.span if self._current else None
            (gradient,) = self._builder.emit("add", NoAttributes(), (total, gradient), f"{name}.add", (name,), span)
        self._gradients[value] = gradient

    def _in_type_of(self, value: str, gradient: str) -> str:
        """Return a gradient in the type of its value.

        The gradient of a parameter that is read like any tensor comes in the working type; that of a working copy that
        was reshaped comes in the type of parameters.
        """
        wanted = self._builder.type(value).dtype
        if self._builder.type(gradient).dtype is wanted:
            return gradient
        span = self._current.span if self._current else None
        name = f"{wanted}.{gradient}"
        return self._builder.emit("cast", Cast(wanted.value), (gradient,), name, (name,), span)[0]
