"""Formulas of a rule as Python expressions.

For example, `(x - x.amax(1)).exp()` emits the operations that compute it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx.operator import Operator
from mbc.interchange.program import Argument, Array, TensorName
from mbc.ops.window import MOST_AXES

_MOST_SLICES = 64  # most slices for one constant index


@dataclass(frozen=True, slots=True)
class Expression:
    """A tensor that the rule of an operator computes: its name in the program, and its shape."""

    op: Operator
    name: TensorName
    shape: tuple[int, ...]

    @staticmethod
    def of(op: Operator, position: int = 0) -> Expression:
        """Return an operand of the network, or an operand that the file holds."""
        return Expression(op, op.tensor(position), op.sizes(position))

    def give(self, *others: Expression | None) -> None:
        """Make this tensor the operator's first result, and others the next results.

        Raises:
            Refused: The shape differs from the shape that the file states.
        """
        if self.shape != self.op.result:
            raise Refused(
                f"the file states the shape {list(self.op.result)}, but the operator computes {list(self.shape)}",
                "export it again",
            )
        self.op.give(self.name, *(None if other is None else other.name for other in others))

    def _step(self, target: str, shape: Sequence[int], /, **arguments: Argument) -> Expression:
        return Expression(self.op, self.op.step(target, tuple(shape), **arguments), tuple(shape))

    def apply(self, function: str, /, **arguments: Argument) -> Expression:
        """Return a function of each element, such as `relu`, `exp` or `sigmoid`."""
        return self._step(f"aten.{function}.default", self.shape, self=self.name, **arguments)

    # ---- arithmetic ----

    def _combined(self, operator: str, other: Expression | float) -> Expression:
        if isinstance(other, Expression):
            shape = np.broadcast_shapes(self.shape, other.shape)
            return self._step(f"aten.{operator}.Tensor", shape, self=self.name, other=other.name)
        return self._step(f"aten.{operator}.Scalar", self.shape, self=self.name, other=float(other))

    def __add__(self, other: Expression | float) -> Expression:
        """Return the sum of this and another tensor or a number."""
        return self if other == 0.0 else self._combined("add", other)

    def __sub__(self, other: Expression | float) -> Expression:
        """Return the difference of this and another tensor or a number."""
        return self if other == 0.0 else self._combined("sub", other)

    def __mul__(self, other: Expression | float) -> Expression:
        """Return the product of this and another tensor or a number."""
        return self if other == 1.0 else self._combined("mul", other)

    def __truediv__(self, other: Expression | float) -> Expression:
        """Return the quotient of this and another tensor or a number."""
        return self if other == 1.0 else self._combined("div", other)

    def __rsub__(self, other: float) -> Expression:
        """Return a number minus this tensor."""
        return self._step("aten.rsub.Scalar", self.shape, self=self.name, other=float(other))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Expression:
        """Return this tensor with the opposite sign."""
        return self.apply("neg")

    def __pow__(self, exponent: float) -> Expression:
        """Return this tensor raised to a number."""
        if exponent == 1.0:
            return self
        return self._step("aten.pow.Tensor_Scalar", self.shape, self=self.name, exponent=float(exponent))

    # ---- choices ----

    def combine(self, function: str, other: Expression) -> Expression:
        """Return the `maximum` or `minimum` of this and another tensor."""
        shape = np.broadcast_shapes(self.shape, other.shape)
        return self._step(f"aten.{function}.default", shape, self=self.name, other=other.name)

    def compare(self, operator: str, number: float) -> Expression:
        """Return 1 where a comparison (`lt`, `gt`) with a number is true, else 0."""
        return self._step(f"aten.{operator}.Scalar", self.shape, self=self.name, other=number)

    def choose(self, taken: Expression, number: float) -> Expression:
        """Return `taken` where this tensor is 1, else a number."""
        return self._step(
            "aten.where.ScalarOther", taken.shape, condition=self.name, self=taken.name, other=number
        )  # fmt: skip

    # ---- axes ----

    def reduce(self, kind: str, axes: Sequence[int], keep: bool = True) -> Expression:
        """Return the `mean`, `sum` or `amax` over axes."""
        targets = {"mean": "aten.mean.dim", "sum": "aten.sum.dim_IntList", "amax": "aten.amax.default"}
        dims = tuple(axis % len(self.shape) for axis in axes)
        shape = [1 if a in dims else n for a, n in enumerate(self.shape) if keep or a not in dims]
        return self._step(targets[kind], shape, self=self.name, dim=dims, keepdim=keep)

    def reshape(self, shape: Sequence[int]) -> Expression:
        """Return the tensor in another shape."""
        return self if tuple(shape) == self.shape else self._step("aten.reshape.default", shape, self=self.name)

    def view(self, shape: Sequence[int]) -> Expression:
        """Return held numbers in another shape."""
        return self._step("aten.view.default", shape, self=self.name)

    def over(self, function: str, axis: int) -> Expression:
        """Return `softmax` or `log_softmax` along an axis."""
        return self._step(f"aten.{function}.int", self.shape, self=self.name, dim=axis)

    def permute(self, order: Sequence[int]) -> Expression:
        """Return the tensor with its axes in another order."""
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
        """Return this tensor and others, concatenated along an axis."""
        parts = (self, *others)
        shape = list(self.shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        return self._step("aten.cat.default", shape, tensors=tuple(part.name for part in parts), dim=axis)

    def matmul(self, other: Expression) -> Expression:
        """Return the matrix product of this and another tensor."""
        shape = (*self.shape[:-1], other.shape[-1])
        return self._step("aten.matmul.default", shape, self=self.name, other=other.name)

    def around(self, axis: int) -> tuple[int, int, int, int]:
        """Return a shape with one axis alone.

        The axes before it, except the samples, become one axis, and those after it, too.
        """
        rows, *before = self.shape[:axis]
        return rows, math.prod(before), self.shape[axis], math.prod(self.shape[axis + 1 :])

    def times_matrix(self, axis: int, matrix: Array) -> Expression:
        """Return the products of a constant matrix [m, n] and the n elements along any axis."""
        output, size = matrix.shape
        key = f"{self.op.outputs[0]}.axis{axis}.weight"
        weight = self.op.graph.hold(key, matrix.astype(np.float32).reshape(output, size, 1, 1), "frozen")
        return self.convolved(axis, weight, output)

    def convolved(self, axis: int, weight: TensorName, output: int) -> Expression:
        """Return the products of a held matrix and the elements along an axis.

        Args:
            axis: The axis.
            weight: The matrix, as filters [m, n, 1, 1].
            output: The size of the axis in the result, m.
        """
        rows, before, size, behind = self.around(axis)
        x = self.reshape((rows, before, size, behind)).permute((0, 2, 1, 3))
        product = x._step(
            "aten.conv2d.default", (rows, output, before, behind),
            input=x.name, weight=weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1,
        )  # fmt: skip
        return product.permute((0, 2, 1, 3)).reshape((*self.shape[:axis], output, *self.shape[axis + 1 :]))

    def padded(
        self, before: Sequence[int], after: Sequence[int], mode: str = "constant", value: float = 0.0
    ) -> Expression:
        """Return the tensor with more (or, by negative numbers, fewer) elements around its last axes.

        Images of one to three axes are padded as images; in other tensors each axis is padded as the height of images.

        Args:
            before: The number of elements before each of the last axes.
            after: The number of elements after each of them.
            mode: `constant`, `reflect`, `replicate` or `circular`.
            value: The number that `constant` pads with.
        """
        first = len(self.shape) - len(before)
        if first == 2 and len(before) <= MOST_AXES:
            return self._padded_image(before, after, mode, value)
        result = self
        for axis, (front, back) in enumerate(zip(before, after, strict=True), first):
            if front or back:
                image = result.reshape(result.around(axis))._padded_image((front, 0), (back, 0), mode, value)
                result = image.reshape(
                    (*result.shape[:axis], result.shape[axis] + front + back, *result.shape[axis + 1 :])
                )
        return result

    def _padded_image(self, before: Sequence[int], after: Sequence[int], mode: str, value: float) -> Expression:
        sides = tuple(zip(before, after, strict=True))
        shape = (*self.shape[:2], *(n + sum(pair) for n, pair in zip(self.shape[2:], sides, strict=True)))
        pads = tuple(side for pair in reversed(sides) for side in pair)  # PyTorch begins with the last axis
        more: dict[str, Argument] = {"value": value} if value else {}
        return (
            self._step("aten.pad.default", shape, input=self.name, pad=pads, mode=mode, **more) if any(pads) else self
        )

    def take(self, axis: int, indices: Sequence[int]) -> Expression:
        """Return the elements of an axis with these indices, in this order, as slices that are joined.

        Raises:
            Refused: Too many slices are necessary.
        """
        runs: list[list[int]] = []
        for index in indices:
            run = runs[-1] if runs else []
            step = index - run[-1] if run else 0
            if run and step > 0 and (len(run) == 1 or step == run[1] - run[0]):
                run.append(index)
            else:
                runs.append([index])
        if len(runs) > _MOST_SLICES:
            raise Refused(f"it takes {len(indices)} elements along an axis in an irregular order", "take slices")
        parts = [self.slice(axis, run[0], run[-1] + 1, run[1] - run[0] if len(run) > 1 else 1) for run in runs]
        return parts[0].join(parts[1:], axis) if len(parts) > 1 else parts[0]

    def constant(self, what: str, array: Array) -> Expression:
        """Return numbers that this operator needs and the file does not hold."""
        name = self.op.graph.hold(f"{self.op.outputs[0]}.{what}", array.astype(np.float32), "buffer")
        return Expression(self.op, name, array.shape)
