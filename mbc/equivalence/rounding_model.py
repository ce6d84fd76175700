"""What the outputs of one launch must be, and how far correct rounding may take them from that.

Both are evaluations in float64 of the very values that the launch read. The first is exact. In the second every value
is off by one unit roundoff wherever an implementation may round it: how far its outputs are from the exact ones is what
one roundoff does to *these* values, cancellation in sums included. The unit is

* for every operand that is read from memory, that of fp32, in which kernels compute, times the root of the number of
  terms of their reduction (K of a GEMM): partial sums are rounded, too;
* for the operands of convolutions and GEMMs in tf32 besides that its own, 2^-11;
* for those of attention besides that of the working precision: of its products the second reads what the first gave;
* for what statistics and reductions in an epilogue read, that of the working precision, to which it is then stored;
* for filter gradients of bf16 and fp16 operands through cuDNN their 16 bits: it has no engine that writes fp32, so the
  result is widened (`mbc.kernels.widens`), the one named exception;
* for what one member of a fused launch hands to the next, that of fp32, too; but that of the working precision for what
  a matrix product reads, since tensor cores do. What a convolution or GEMM passes on inside a launch is rounded to the
  working precision in both evaluations, as kernels do, in the second to the other side where it is nearly halfway
  between two numbers.

What a launch chooses (the sign of what a ReLU reads, the first largest of a pooling window) may come out otherwise
where the exact values are nearer to each other than `SURE` times what rounding does to them: there the second
evaluation takes the other choice. Everywhere else the choice must be the exact one.
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
from mbc.ops.fused import Fused, Member, gives_product
from mbc.ops.pooling import MaxPool, window_positions

# Largest relative error of one rounding to nearest.
ROUNDOFFS = {DType.FP64: 2.0**-53, DType.FP32: 2.0**-24, DType.FP16: 2.0**-11, DType.BF16: 2.0**-8}
TF32_ROUNDOFF = 2.0**-11
# Half of the least difference of two numbers, which limits what underflow does.
UNDERFLOW = {DType.FP64: 0.0, DType.FP32: 2.0**-126, DType.FP16: 2.0**-25, DType.BF16: 2.0**-126}
SURE = 16.0
# Kinds that move, choose or compare numbers, and compute none.
MOVES = frozenset(
    (
        "relu", "relu_backward", "relu_mask", "relu_backward_masked", "relu6", "relu6_backward",
        "clamp", "clamp_backward", "indicator", "select", "relation",
        "concat", "channel_slice", "split", "rearrange", "strided_slice", "pad", "upsample", "max_pool",
        "flatten", "unflatten", "cast", "concat_statistics", "guard",
    )
)  # fmt: skip
# Kinds of several products, of which later ones read on tensor cores what earlier ones gave.
_PRODUCTS_OF_PRODUCTS = frozenset(("attention", "attention_backward"))
_SIGN_OF_FIRST = frozenset(("relu", "leaky_relu", "relu_mask", "relu_backward", "leaky_relu_backward"))
_STORED = "stored"  # made inside the launch, which stores it, too
_FEW_ELEMENTS = 16  # of an output: one random draw of roundings may nearly cancel
_DRAWS_OF_FEW = 4


@dataclass(frozen=True)
class Meant:
    """One output. `shaken`: with roundings, in some random draws."""

    exact: Array
    shaken: tuple[Array, ...]

    def __add__(self, other: Meant) -> Meant:
        """Of two sums; one may have a single draw for all of the other's."""
        draws = max(len(self.shaken), len(other.shaken))
        ours, theirs = ((m.shaken * draws)[:draws] for m in (self, other))
        return Meant(self.exact + other.exact, tuple(x + y for x, y in zip(ours, theirs, strict=True)))


@dataclass(frozen=True)
class Evaluation:
    """Of an operation or group. `parts`: of how many such evaluations its sums are the sum. `stored`: the type of each
    output."""

    arithmetic: Arithmetic
    operation: Operation
    stored: tuple[DType, ...]
    call: Call
    parts: float

    def meant(self, inputs: Sequence[Array], product: Array | None) -> list[Meant]:
        """The outputs for canonical inputs. `product`: what the launch has stored of its first member where it gives
        that (see `hands_on_product`): the other members read it as it is."""
        values = list(inputs)
        exact = self._exact(values, product)
        few = min(math.prod(exact[number].shape) for number in self.given) < _FEW_ELEMENTS
        draws = [self._shaken(values, exact, product) for _ in range(_DRAWS_OF_FEW if few else 1)]
        return [Meant(exact[number], tuple(draw[number] for draw in draws)) for number in self.given]

    @property
    def hands_on_product(self) -> bool:
        return gives_product(self.operation.attributes)

    @property
    def members(self) -> tuple[Member, ...]:
        operation = self.operation
        if isinstance(operation.attributes, Fused):
            return operation.attributes.members
        count = len(operation.inputs)
        outputs = tuple(range(count, count + len(operation.outputs)))
        return (Member(operation.kind, operation.attributes, tuple(range(count)), outputs),)

    @property
    def given(self) -> tuple[int, ...]:
        attributes = self.operation.attributes
        return attributes.given if isinstance(attributes, Fused) else self.members[0].outputs

    def _exact(self, values: list[Array], product: Array | None) -> dict[int, Array]:
        """Appends to `values`, which are the inputs, what the members read; the results of all members by number."""
        results: dict[int, Array] = {}
        for member in self.members:
            made = self._evaluate(member, [values[n] for n in member.inputs])
            for number, value in zip(member.outputs, made, strict=True):
                results[number] = value
                values.append(self._stored_inside(member, value) if not self._given(number, product) else product)
        return results

    def _shaken(
        self, exact: Sequence[Array], made_exact: Mapping[int, Array], product: Array | None
    ) -> dict[int, Array]:
        """The results of all members, every value off by a roundoff. `exact`: what they read without that,
        `made_exact`: their results."""
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
            made = list(self._evaluate(member, taken))
            if member.kind == "max_pool" and len(made) > 1 and made_by[first] not in ("", _STORED):
                index = exact[member.outputs[1]]
                unsure = self._unsure_positions(member, exact[first], values[first], index)
                made[1] = self.arithmetic.where(unsure, index ^ 255, index)  # any other position will do
            for number, value in zip(member.outputs, made, strict=True):
                results[number] = value
                given = self._given(number, product)
                values.append(product if given else self._other_rounding(member, made_exact[number], value))
                made_by[number] = _STORED if given else member.kind
        return results

    def _given(self, number: int, product: Array | None) -> bool:
        """Whether this value is read as `product`, which the launch has stored."""
        return product is not None and number == len(self.operation.inputs)

    def _stored_inside(self, member: Member, value: Array) -> Array:
        """What a member passes on inside a launch: of a convolution or GEMM what would be stored of it."""
        return value if _kind(member).flops is None else self.arithmetic.stored(value, self.call.precision.working)

    def _other_rounding(self, member: Member, exact: Array, value: Array) -> Array:
        """The same of a value that is off: wherever that may make it another number, the other one."""
        precision = self.call.precision
        if _kind(member).flops is None or precision.working is precision.master:
            return value
        stored, where = self.arithmetic.stored, self.arithmetic.where
        reach, unit = SURE * spread(value - exact), ROUNDOFFS[precision.working] * abs(exact)
        reach = where(reach < unit, reach, unit)
        return stored(value + where(exact > stored(exact, precision.working), reach, -reach), precision.working)

    def _evaluate(self, member: Member, taken: Sequence[Array]) -> Sequence[Array]:
        types = _kind(member).shape(member.attributes, tuple(map(type_of, taken)))
        call = Call(types, self.call.first_row, self.call.batch, self.call.precision)
        made = self.arithmetic.evaluate(member.kind, member.attributes, taken, call)
        if member.kind != "max_pool" or len(made) == 1:
            return made
        # Of elements that are stored as equal ones the first is the largest.
        stored = [self.arithmetic.stored(taken[0], self._stored_as(member))]
        return made[0], self.arithmetic.evaluate(member.kind, member.attributes, stored, call)[1]

    def _stored_as(self, member: Member) -> DType:
        """The type of the first result of a member that leaves the launch."""
        return self.stored[self.given.index(member.outputs[0])]

    def _rounded(self, member: Member, value: Array, made_by: str, terms: float) -> Array:
        """What an implementation may read for an operand of a member; `made_by`: the kind of the member that it is
        from, "" where it is read from memory."""
        if not is_floating(value):
            return value
        precision = self.call.precision
        if member.kind in MOVES:
            return value
        # Tensor cores read what is computed inside a launch in the working precision. Statistics and reductions in an
        # epilogue are of the result before it is stored.
        inside = ROUNDOFFS[precision.working] if made_by not in ("", _STORED) and _kind(member).flops else 0.0
        if made_by == _STORED and (_kind(member).reduces or _kind(member).accumulates):
            inside = ROUNDOFFS[precision.working]
        operand = TF32_ROUNDOFF if precision is Precision.TF32 and _kind(member).flops else 0.0
        if member.kind in _PRODUCTS_OF_PRODUCTS:
            inside = ROUNDOFFS[precision.working]
        return _off(self.arithmetic, value, inside + operand + ROUNDOFFS[precision.master] * math.sqrt(terms))

    def _terms(self, member: Member, inputs: Sequence[TensorType]) -> float:
        """How many terms are summed up for an output of the member."""
        kind = _kind(member)
        outputs = kind.shape(member.attributes, tuple(inputs))
        if kind.flops is not None:
            terms = kind.flops(member.attributes, tuple(inputs), outputs) / 2 / outputs[0].elements
        else:
            terms = max(1.0, inputs[0].elements / outputs[0].elements)
        return terms * self.parts if kind.accumulates else terms

    def _other_side(self, exact: Array, shaken: Array, taken: Array) -> Array:
        """`taken`, on the other side of zero wherever rounding may bring it there."""
        where = self.arithmetic.where
        moved = abs(shaken - exact)
        reach = SURE * spread(moved) + 2 * moved
        across = where(exact > 0, -reach, reach + 0 * exact)
        return where(abs(exact) <= reach, across, taken)

    def _unsure_positions(self, member: Member, exact: Array, shaken: Array, index: Array) -> Array:
        """In which windows another element than that at `index` may come out as the first largest one."""
        a = member.attributes
        assert isinstance(a, MaxPool)
        arithmetic, dtype = self.arithmetic, self._stored_as(member)
        # What is zero with and without roundings is so for sure: a ReLU made it of a negative number.
        moved = abs(shaken - exact)
        reach = (SURE * spread(moved) + 2 * moved) * (abs(exact) + abs(shaken) > 0)
        low, high = (
            arithmetic.padded(a, arithmetic.stored(exact + side * reach, dtype), -math.inf) for side in (-1.0, 1.0)
        )
        chosen = 0.0
        for position, at in window_positions(a):
            chosen = chosen + arithmetic.where(index == position, low[at], 0.0)
        unsure = index != index
        for position, at in window_positions(a):
            greater = high[at] > chosen
            earlier = (high[at] == chosen) & (position < index)
            unsure = unsure | ((greater | earlier) & (index != position))
        return unsure


def rounded(arithmetic: Arithmetic, made: Meant, dtype: DType) -> Meant:
    """A result that was rounded to a narrower type before it was stored in a wider one."""

    def off(value: Array) -> Array:
        return value + arithmetic.signs(value) * (ROUNDOFFS[dtype] * abs(value) + UNDERFLOW[dtype])

    return Meant(made.exact, tuple(map(off, made.shaken)))


def shaken(arithmetic: Arithmetic, value: Array, roundoff: float) -> Meant:
    """A value that is read from memory."""
    return Meant(value, (_off(arithmetic, value, roundoff),))


def _off(arithmetic: Arithmetic, value: Array, roundoff: float) -> Array:
    return value * (1.0 + roundoff * arithmetic.signs(value)) if roundoff else value


def _kind(member: Member) -> OpKind:
    return KINDS[member.kind]


def is_floating(array: Array) -> bool:
    return str(array.dtype).endswith("float64")


def type_of(array: Array) -> TensorType:
    """What an array is to a shape rule: floating ones are fp64."""
    name = str(array.dtype)
    dtype = DType.FP64 if name.endswith("float64") else DType.INT32 if name.endswith("int32") else DType.UINT8
    return TensorType(tuple(array.shape), dtype)


def spread(d: Array) -> Array:
    """How large differences are around each element: their root mean square along its channel and along its row."""
    squares = d * d
    if d.ndim < 2:
        return squares.mean() ** 0.5
    channel = squares.mean(axis=(0, *range(2, d.ndim)), keepdims=True) ** 0.5
    return channel + squares.mean(axis=tuple(range(1, d.ndim)), keepdims=True) ** 0.5
