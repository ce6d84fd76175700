"""Formulas of a rule as they are written: `(x - x.amax(1)).exp()` appends the operations that compute it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mbc.interchange.aten.base import Refused
from mbc.interchange.from_onnx.operator import Operator
from mbc.interchange.program import Argument, Array, TensorName


@dataclass(frozen=True, slots=True)
class Expression:
    """A tensor in the making, for the operator whose rule runs: its name in the program, and its shape."""

    op: Operator
    name: TensorName
    shape: tuple[int, ...]

    @staticmethod
    def of(op: Operator, position: int = 0) -> Expression:
        """Return an operand of the network, or one that the file holds."""
        return Expression(op, op.tensor(position), op.sizes(position))

    def give(self) -> None:
        """Make this the operator's result."""
        if self.shape != self.op.result:
            raise Refused(f"it gives {list(self.op.result)}, computed here as {list(self.shape)}", "export it again")
        self.op.emit("aten.alias.default", self=self.name)

    def _step(self, target: str, shape: Sequence[int], /, **arguments: Argument) -> Expression:
        return Expression(self.op, self.op.step(target, tuple(shape), **arguments), tuple(shape))

    def apply(self, function: str, /, **arguments: Argument) -> Expression:
        """Return a function of each element: `relu`, `exp`, `sigmoid`."""
        return self._step(f"aten.{function}.default", self.shape, self=self.name, **arguments)

    # ---- arithmetic ----

    def _combined(self, operator: str, other: Expression | float) -> Expression:
        if isinstance(other, Expression):
            shape = np.broadcast_shapes(self.shape, other.shape)
            return self._step(f"aten.{operator}.Tensor", shape, self=self.name, other=other.name)
        return self._step(f"aten.{operator}.Scalar", self.shape, self=self.name, other=float(other))

    def __add__(self, other: Expression | float) -> Expression:
        return self if other == 0.0 else self._combined("add", other)

    def __sub__(self, other: Expression | float) -> Expression:
        return self if other == 0.0 else self._combined("sub", other)

    def __mul__(self, other: Expression | float) -> Expression:
        return self if other == 1.0 else self._combined("mul", other)

    def __truediv__(self, other: Expression | float) -> Expression:
        return self if other == 1.0 else self._combined("div", other)

    def __rsub__(self, other: float) -> Expression:
        return self._step("aten.rsub.Scalar", self.shape, self=self.name, other=float(other))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Expression:
        return self.apply("neg")

    def __pow__(self, exponent: float) -> Expression:
        if exponent == 1.0:
            return self
        return self._step("aten.pow.Tensor_Scalar", self.shape, self=self.name, exponent=float(exponent))

    # ---- axes ----

    def reduce(self, kind: str, axes: Sequence[int], keep: bool = True) -> Expression:
        """Return `mean`, `sum` or `amax` over axes."""
        targets = {"mean": "aten.mean.dim", "sum": "aten.sum.dim_IntList", "amax": "aten.amax.default"}
        dims = tuple(axis % len(self.shape) for axis in axes)
        shape = [1 if a in dims else n for a, n in enumerate(self.shape) if keep or a not in dims]
        return self._step(targets[kind], shape, self=self.name, dim=dims, keepdim=keep)

    def reshape(self, shape: Sequence[int]) -> Expression:
        return self if tuple(shape) == self.shape else self._step("aten.reshape.default", shape, self=self.name)

    def permute(self, order: Sequence[int]) -> Expression:
        shape = [self.shape[axis] for axis in order]
        return self._step("aten.permute.default", shape, self=self.name, dims=tuple(order))

    def slice(self, axis: int, start: int, stop: int, step: int = 1) -> Expression:
        """Return the elements from `start` to `stop`, both within the axis."""
        if (start, stop, step) == (0, self.shape[axis], 1):
            return self
        shape = list(self.shape)
        shape[axis] = len(range(start, stop, step))
        return self._step("aten.slice.Tensor", shape, self=self.name, dim=axis, start=start, end=stop, step=step)

    def join(self, others: Sequence[Expression], axis: int) -> Expression:
        """Return this and others one after another."""
        parts = (self, *others)
        shape = list(self.shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        return self._step("aten.cat.default", shape, tensors=tuple(part.name for part in parts), dim=axis)

    def matmul(self, other: Expression) -> Expression:
        shape = (*self.shape[:-1], other.shape[-1])
        return self._step("aten.matmul.default", shape, self=self.name, other=other.name)

    def around(self, axis: int) -> tuple[int, int, int, int]:
        """Return the shape with one axis alone: samples, all before it, it, and all behind it."""
        rows, *before = self.shape[:axis]
        return rows, math.prod(before), self.shape[axis], math.prod(self.shape[axis + 1 :])

    def times_matrix(self, axis: int, matrix: Array) -> Expression:
        """Return the products of a constant matrix [m, n] and the n elements along an axis, whichever it is."""
        rows, before, size, behind = self.around(axis)
        output = len(matrix)
        key = f"{self.op.outputs[0]}.axis{axis}.weight"
        weight = self.op.graph.hold(key, matrix.astype(np.float32).reshape(output, size, 1, 1), "frozen")
        x = self.reshape((rows, before, size, behind)).permute((0, 2, 1, 3))
        made = x._step(
            "aten.conv2d.default", (rows, output, before, behind),
            input=x.name, weight=weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1,
        )  # fmt: skip
        return made.permute((0, 2, 1, 3)).reshape((*self.shape[:axis], output, *self.shape[axis + 1 :]))

    def constant(self, what: str, array: Array) -> Expression:
        """Return numbers that this operator needs and the file does not hold."""
        name = self.op.graph.hold(f"{self.op.outputs[0]}.{what}", array.astype(np.float32), "buffer")
        return Expression(self.op, name, array.shape)
