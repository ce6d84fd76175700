"""The exact outputs of one launch, and the largest error that correct rounding may cause.

Two evaluations in float64 use the values that the launch read. The first is exact. In the second, each value is off by
one unit roundoff wherever an implementation may round it. The distance of its outputs from the exact ones is the error
that one roundoff causes for *these* values, including cancellation in sums. The unit is

* for each operand in memory: the roundoff of fp32, in which kernels compute, times the root of the number of terms of
  the reduction (K of a GEMM), because partial sums are rounded, too;
* in addition, for operands of convolutions and GEMMs in tf32: the roundoff of tf32, 2^-11;
* in addition, for operands of attention: the roundoff of the working precision, because the second product reads the
  result of the first;
* for values that statistics and reductions in an epilogue read: the roundoff of the working precision, in which the
  value is stored;
* for filter gradients of bf16 and fp16 operands by cuDNN: the roundoff of these 16 bits. cuDNN has no engine that
  writes fp32, so that the result is widened (`mbc.kernels.widens`); this is the only exception for one provider;
* for a value that one member of a fused launch passes to the next: the roundoff of fp32, or that of the working
  precision if a matrix product reads the value, because tensor cores do. The result of a convolution or GEMM inside a
  launch is rounded to the working precision in both evaluations, as kernels do; in the second it is rounded to the
  other side if it is nearly halfway between two numbers.

Choices of a launch (the sign of a ReLU's input, the first largest element of a pooling window) may differ if the exact
values are closer to each other than `SURE` times the error that rounding causes: there the second evaluation makes the
other choice. Everywhere else the choice must be the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbc.equivalence.float64 import Arithmetic, Array
from mbc.ir.graph import Operation
from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.base import Call, OpKind
from mbc.ops.fused import Fused, Member, gives_product, product_in, rounded_products
from mbc.ops.pooling import MaxPool

# The largest relative error of one rounding to nearest.
ROUNDOFFS = {DType.FP64: 2.0**-53, DType.FP32: 2.0**-24, DType.FP16: 2.0**-11, DType.BF16: 2.0**-8}
TF32_ROUNDOFF = 2.0**-11
# Half of the smallest difference of two numbers, which is the largest error of an underflow.
UNDERFLOW = {DType.FP64: 0.0, DType.FP32: 2.0**-126, DType.FP16: 2.0**-25, DType.BF16: 2.0**-126}
SURE = 16.0
# Kinds that move, choose or compare numbers without computing new ones.
MOVES = frozenset(
    (
        "relu", "relu_backward", "relu_mask", "relu_backward_masked", "relu6", "relu6_backward",
        "clamp", "clamp_backward", "indicator", "select", "relation",
        "concat", "channel_slice", "split", "rearrange", "strided_slice", "pad", "upsample", "max_pool",
        "flatten", "unflatten", "cast", "concat_statistics", "guard", "copy_control",
    )
)  # fmt: skip
# Kinds of several products, where tensor cores read the results of earlier products.
_PRODUCTS_OF_PRODUCTS = frozenset(("attention", "attention_backward"))
_SIGN_OF_FIRST = frozenset(("relu", "leaky_relu", "relu_mask", "relu_backward", "leaky_relu_backward"))
_STORED = "stored"  # computed inside the launch, which also stores it
_FEW_ELEMENTS = 16  # in an output with fewer elements, the roundings of one random draw may nearly cancel
_DRAWS_OF_FEW = 4


@dataclass(frozen=True)
class Meant:
    """One output: its exact numbers, and its numbers with roundings in one or more random draws (`shaken`)."""

    exact: Array
    shaken: tuple[Array, ...]

    def __add__(self, other: Meant) -> Meant:
        """Return the sum of two outputs. If one output has a single draw, it is added to each draw of the other."""
        draws = max(len(self.shaken), len(other.shaken))
        ours, theirs = ((m.shaken * draws)[:draws] for m in (self, other))
        return Meant(self.exact + other.exact, tuple(x + y for x, y in zip(ours, theirs, strict=True)))


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of an operation or group.

    Attributes:
        arithmetic: Computes in float64.
        operation: The operation or group.
        stored: The type of each output.
        call: The rows that are evaluated, and the precision.
        parts: The number of evaluations over which the operation's sums are divided.
    """

    arithmetic: Arithmetic
    operation: Operation
    stored: tuple[DType, ...]
    call: Call
    parts: float

    def meant(self, inputs: Sequence[Array], product: Array | None) -> list[Meant]:
        """Return the outputs for canonical inputs.

        Args:
            inputs: The operands.
            product: The result of the first convolution or GEMM as the launch has stored it, if it does (see
                `hands_on_product`); the other members read it.
        """
        values = list(inputs)
        exact = self._exact(values, product)
        few = min(math.prod(exact[number].shape) for number in self.given) < _FEW_ELEMENTS
        draws = [self._shaken(values, exact, product) for _ in range(_DRAWS_OF_FEW if few else 1)]
        return [Meant(exact[number], tuple(draw[number] for draw in draws)) for number in self.given]

    @property
    def hands_on_product(self) -> bool:
        """True if the launch stores the result of its first convolution or GEMM, which the other members read."""
        return gives_product(self.operation.attributes)

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the group; an operation is the only member."""
        operation = self.operation
        if isinstance(operation.attributes, Fused):
            return operation.attributes.members
        count = len(operation.inputs)
        outputs = tuple(range(count, count + len(operation.outputs)))
        return (Member(operation.kind, operation.attributes, tuple(range(count)), outputs),)

    @property
    def given(self) -> tuple[int, ...]:
        """The numbers of the values that leave the launch."""
        attributes = self.operation.attributes
        return attributes.given if isinstance(attributes, Fused) else self.members[0].outputs

    def _exact(self, values: list[Array], product: Array | None) -> dict[int, Array]:
        """Return the results of all members by number; append the values that members read to `values`, the inputs."""
        results: dict[int, Array] = {}
        for member in self.members:
            outputs = self._evaluate(member, [values[n] for n in member.inputs])
            for number, value in zip(member.outputs, outputs, strict=True):
                results[number] = value
                values.append(self._stored_inside(member, value) if not self._given(number, product) else product)
        return results

    def _shaken(
        self, exact: Sequence[Array], made_exact: Mapping[int, Array], product: Array | None
    ) -> dict[int, Array]:
        """Return the results of all members by number, with each value off by a roundoff.

        Args:
            exact: The values that members read, without roundings.
            made_exact: The members' results, without roundings.
            product: The stored result of the first convolution or GEMM, if there is one.
        """
        count = len(self.operation.inputs)
        results: dict[int, Array] = {}
        values = list(exact[:count])
        made_by = dict.fromkeys(range(count), "")
        for member in self.members:
            terms = self._terms(member, [type_of(values[n]) for n in member.inputs])
            taken = [self._rounded(member, values[n], made_by[n], terms) for n in member.inputs]
            first = member.inputs[0]
            if member.kind in _SIGN_OF_FIRST and made_by[first] not in ("", _STORED, "relu", "leaky_relu"):
                taken[0] = self._other_side(exact[first], values[first], taken[0])
            outputs = list(self._evaluate(member, taken))
            if member.kind == "max_pool" and len(outputs) > 1 and made_by[first] not in ("", _STORED):
                index = exact[member.outputs[1]]
                unsure = self._unsure_positions(member, exact[first], values[first], index)
                outputs[1] = self.arithmetic.where(unsure, index ^ 255, index)  # any other position may be chosen
            for number, value in zip(member.outputs, outputs, strict=True):
                results[number] = value
                given = self._given(number, product)
                values.append(product if given else self._other_rounding(member, made_exact[number], value))
                made_by[number] = _STORED if given else member.kind
        return results

    def _given(self, number: int, product: Array | None) -> bool:
        """Return whether members read this value as `product`, which the launch has stored."""
        inside = product_in(self.operation.attributes)
        return product is not None and inside is not None and (number,) == inside.outputs

    def _is_rounded(self, member: Member) -> bool:
        """Return whether the launch rounds what a member passes on."""
        return member in rounded_products(self.operation.attributes)

    def _stored_inside(self, member: Member, value: Array) -> Array:
        """Return a value that a member passes on in a launch."""
        return self.arithmetic.stored(value, self.call.precision.working) if self._is_rounded(member) else value

    def _other_rounding(self, member: Member, exact: Array, value: Array) -> Array:
        """Return `value` rounded the other way wherever its error could cross a rounding boundary."""
        precision = self.call.precision
        if not self._is_rounded(member) or precision.working is precision.master:
            return value
        stored, where = self.arithmetic.stored, self.arithmetic.where
        reach, unit = SURE * spread(value - exact), ROUNDOFFS[precision.working] * abs(exact)
        reach = where(reach < unit, reach, unit)
        return stored(value + where(exact > stored(exact, precision.working), reach, -reach), precision.working)

    def _evaluate(self, member: Member, taken: Sequence[Array]) -> Sequence[Array]:
        types = _kind(member).shape(member.attributes, tuple(map(type_of, taken)))
        call = Call(types, self.call.first_row, self.call.batch, self.call.precision)
        outputs = self.arithmetic.evaluate(member.kind, member.attributes, taken, call)
        if member.kind != "max_pool" or len(outputs) == 1:
            return outputs
        # If several elements are equal once they are stored, the first counts as the largest.
        stored = [self.arithmetic.stored(taken[0], self._stored_as(member))]
        return outputs[0], self.arithmetic.evaluate(member.kind, member.attributes, stored, call)[1]

    def _stored_as(self, member: Member) -> DType:
        """Return the type of the first result of a member that leaves the launch."""
        return self.stored[self.given.index(member.outputs[0])]

    def _rounded(self, member: Member, value: Array, made_by: str, terms: float) -> Array:
        """Return an operand of a member as an implementation may read it.

        Args:
            member: The member.
            value: The operand.
            made_by: The kind of the member that computed the operand; empty for an operand in memory.
            terms: The number of terms of the member's sums.
        """
        if not is_floating(value):
            return value
        precision = self.call.precision
        if member.kind in MOVES:
            return value
        # Tensor cores read values that are computed inside a launch in the working precision. Statistics and reductions
        # in an epilogue read the result before it is stored.
        inside = ROUNDOFFS[precision.working] if made_by not in ("", _STORED) and _kind(member).flops else 0.0
        if made_by == _STORED and (_kind(member).reduces or _kind(member).accumulates):
            inside = ROUNDOFFS[precision.working]
        operand = TF32_ROUNDOFF if precision is Precision.TF32 and _kind(member).flops else 0.0
        if member.kind in _PRODUCTS_OF_PRODUCTS:
            inside = ROUNDOFFS[precision.working]
        return _off(self.arithmetic, value, inside + operand + ROUNDOFFS[precision.master] * math.sqrt(terms))

    def _terms(self, member: Member, inputs: Sequence[TensorType]) -> float:
        """Return the number of terms that are summed for an output of the member."""
        kind = _kind(member)
        outputs = kind.shape(member.attributes, tuple(inputs))
        if kind.flops is not None:
            terms = kind.flops(member.attributes, tuple(inputs), outputs) / 2 / outputs[0].elements
        else:
            terms = max(1.0, inputs[0].elements / outputs[0].elements)
        return terms * self.parts if kind.accumulates else terms

    def _other_side(self, exact: Array, shaken: Array, taken: Array) -> Array:
        """Return `taken` on the other side of zero wherever rounding may move it there."""
        where = self.arithmetic.where
        moved = abs(shaken - exact)
        reach = SURE * spread(moved) + 2 * moved
        across = where(exact > 0, -reach, reach + 0 * exact)
        return where(abs(exact) <= reach, across, taken)

    def _unsure_positions(self, member: Member, exact: Array, shaken: Array, index: Array) -> Array:
        """Return True for each window in which rounding may change the position of the first largest element."""
        a = member.attributes
        assert isinstance(a, MaxPool)
        arithmetic, dtype = self.arithmetic, self._stored_as(member)
        # A value that is zero with and without roundings is certainly zero: a ReLU computed it from a negative number.
        moved = abs(shaken - exact)
        reach = (SURE * spread(moved) + 2 * moved) * (abs(exact) + abs(shaken) > 0)
        low, high = (
            arithmetic.padded(a, arithmetic.stored(exact + side * reach, dtype), -math.inf) for side in (-1.0, 1.0)
        )
        chosen = 0.0
        for position, at in a.positions():
            chosen = chosen + arithmetic.where(index == position, low[at], 0.0)
        unsure = index != index
        for position, at in a.positions():
            greater = high[at] > chosen
            earlier = (high[at] == chosen) & (position < index)
            unsure = unsure | ((greater | earlier) & (index != position))
        return unsure


def rounded(arithmetic: Arithmetic, expected: Meant, dtype: DType) -> Meant:
    """Return an output that is rounded to a narrower type before it is stored in a wider type."""

    def off(value: Array) -> Array:
        return value + arithmetic.signs(value) * (ROUNDOFFS[dtype] * abs(value) + UNDERFLOW[dtype])

    return Meant(expected.exact, tuple(map(off, expected.shaken)))


def shaken(arithmetic: Arithmetic, value: Array, roundoff: float) -> Meant:
    """Return a value in memory with its roundoff."""
    return Meant(value, (_off(arithmetic, value, roundoff),))


def _off(arithmetic: Arithmetic, value: Array, roundoff: float) -> Array:
    return value * (1.0 + roundoff * arithmetic.signs(value)) if roundoff else value


def _kind(member: Member) -> OpKind:
    return KINDS[member.kind]


def is_floating(array: Array) -> bool:
    """Return whether an array has floating-point numbers, which are float64 here."""
    return str(array.dtype).endswith("float64")


def type_of(array: Array) -> TensorType:
    """Return the type of an array for a shape rule; floating-point numbers are fp64."""
    name = str(array.dtype)
    dtype = DType.FP64 if name.endswith("float64") else DType.INT32 if name.endswith("int32") else DType.UINT8
    return TensorType(tuple(array.shape), dtype)


def spread(d: Array) -> Array:
    """Return the size of differences around each element: their root mean square in its channel and in its row."""
    squares = d * d
    if d.ndim < 2:
        return squares.mean() ** 0.5
    channel = squares.mean(axis=(0, *range(2, d.ndim)), keepdims=True) ** 0.5
    return channel + squares.mean(axis=tuple(range(1, d.ndim)), keepdims=True) ** 0.5
