"""Fusion groups: several operations as one, with its inputs, outputs and meaning.

A group is an `Operation` of its own, whose attributes hold its members and their wiring. Code that handles an operation
without its graph (requests, profiles, the interpreter) handles a group as well. Graphs hold no groups, because the plan
chooses which operations are fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, takewhile
from typing import Any, Self, cast

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import DType, TensorType
from mbc.ops import KINDS
from mbc.ops.base import Array, Call, OpKind
from mbc.ops.rounding import stored

SEPARATOR = "+"  # no name of an operation or kind contains it
SEVERAL = "*"  # follows a kind that is repeated


@dataclass(frozen=True, slots=True)
class Member:
    """One operation of a group.

    `inputs` and `outputs` are numbers of values: the group's inputs come first, then the outputs of each member in
    order.
    """

    kind: str
    attributes: Attributes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fused(Attributes):
    """Members of a group, in an order that can be executed, and the numbers of its outputs (`given`)."""

    members: tuple[Member, ...]
    given: tuple[int, ...]

    def with_rows(self, rows: int, before: int) -> Self:
        """Return the attributes for `rows` rows instead of `before`."""
        return replace(
            self, members=tuple(replace(m, attributes=m.attributes.with_rows(rows, before)) for m in self.members)
        )


def join(operations: Sequence[Operation], outputs: Sequence[str]) -> Operation:
    """Return a group as one operation.

    Its inputs are the values that other operations compute, each once.

    Args:
        operations: The members in an order that can be executed.
        outputs: The outputs of the group.
    """
    results = {name for operation in operations for name in operation.outputs}
    outside = dict.fromkeys(name for o in operations for name in o.inputs if name not in results)
    inside = [name for operation in operations for name in operation.outputs]
    numbers = {name: number for number, name in enumerate((*outside, *inside))}
    members = tuple(
        Member(o.kind, o.attributes, tuple(numbers[v] for v in o.inputs), tuple(numbers[v] for v in o.outputs))
        for o in operations
    )
    wanted = frozenset(outputs)
    leaving = [name for name in inside if name in wanted]
    return Operation(
        SEPARATOR.join(operation.name for operation in operations),
        joined_kind([operation.kind for operation in operations]),
        tuple(outside),
        tuple(leaving),
        Fused(members, tuple(numbers[name] for name in leaving)),
        operations[0].span,
    )


def joined_kind(kinds: Sequence[str]) -> str:
    """Return the kind of a group: the kinds of its members, repeated kinds once."""
    runs = ((kind, len(list(run))) for kind, run in groupby(kinds))
    return SEPARATOR.join(kind + SEVERAL if count > 1 else kind for kind, count in runs)


def names_of(operation: Operation) -> tuple[str, ...]:
    """Return the names of the operations of the graph that `operation` stands for: its own, or those of its members."""
    return tuple(operation.name.split(SEPARATOR)) if isinstance(operation.attributes, Fused) else (operation.name,)


def kind_of(operation: Operation) -> OpKind:
    """Return the `OpKind` of an operation or a group."""
    return launch_kind(operation.kind, operation.attributes)


def launch_kind(kind: str, attributes: Attributes) -> OpKind:
    """Return the `OpKind` of an operation or a group.

    Raises:
        KeyError: The kind is neither.
    """
    return _composed(kind, attributes) if isinstance(attributes, Fused) else KINDS[kind]


def sums(kind: str, attributes: Attributes, outputs: int) -> tuple[bool, ...]:
    """Return whether each output of an operation or a group is a sum into which other rows can be accumulated."""
    if not isinstance(attributes, Fused):
        return (KINDS[kind].accumulates,) * outputs
    summed = {value for member in attributes.members if KINDS[member.kind].accumulates for value in member.outputs}
    return tuple(value in summed for value in attributes.given)


def read_fused(fields: Mapping[str, Any]) -> Fused:
    """Return the attributes whose `dataclasses.asdict` is `fields`.

    Raises:
        KeyError: A kind or a field is unknown or missing.
        TypeError: A value has the wrong type.
    """

    def member(about: Mapping[str, Any]) -> Member:
        settings: Mapping[str, Any] = about["attributes"]
        attributes = KINDS[about["kind"]].attributes(**{name: _frozen(value) for name, value in settings.items()})
        return Member(about["kind"], attributes, tuple(about["inputs"]), tuple(about["outputs"]))

    return Fused(tuple(map(member, fields["members"])), tuple(fields["given"]))


def _frozen(value: object) -> object:
    """Return a JSON value with tuples instead of lists, as attributes have them."""
    return tuple(map(_frozen, cast("list[object]", value))) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=4096)
def _composed(kind: str, attributes: Fused) -> OpKind:
    members = [KINDS[member.kind] for member in attributes.members]
    in_place, updates = _sharing(attributes)
    # A reduction over the whole mini-batch must be complete before a member reads it.
    summed = {value for m in attributes.members if KINDS[m.kind].accumulates for value in m.outputs}
    independent = summed.isdisjoint(value for member in attributes.members for value in member.inputs)
    return OpKind(
        kind,
        Fused,
        _shape,
        _evaluate,
        divisible=independent and all(member.divisible for member in members),
        accumulates=independent and any(member.accumulates for member in members),
        in_place=in_place,
        updates=updates,
        reduces=all(member.reduces for member in members),
        reads=_reads,
    )


def _sharing(a: Fused) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return the pairs (output, input) of the group that may share bytes (in place), and those that must.

    In place is transitive: an output may overwrite a value inside the group, and hence the input that this may
    overwrite.
    """
    may: dict[int, set[int]] = {}  # value -> inputs of the group
    must: dict[int, int] = {}
    results = {value for member in a.members for value in member.outputs}
    for member in a.members:
        kind = KINDS[member.kind]
        for output, source in (*kind.in_place, *kind.updates):
            if output < len(member.outputs) and source < len(member.inputs):
                value, old = member.outputs[output], member.inputs[source]
                may.setdefault(value, set()).update(may.get(old, set()) if old in results else {old})
                if (output, source) in kind.updates:
                    must[value] = old
    in_place = [(i, old) for i, value in enumerate(a.given) if value not in must for old in sorted(may.get(value, ()))]
    updates = [(i, must[value]) for i, value in enumerate(a.given) if value in must]
    return tuple(in_place), tuple(updates)


def _reads(a: Fused, inputs: tuple[TensorType, ...]) -> tuple[float, ...]:
    """Return the largest share of each input that a member reads."""
    shares = [0.0] * len(inputs)
    types = list(inputs)
    for member in a.members:
        kind, taken = KINDS[member.kind], tuple(types[n] for n in member.inputs)
        read = kind.reads(member.attributes, taken) if kind.reads else (1.0,) * len(taken)
        for number, share in zip(member.inputs, read, strict=True):
            if number < len(inputs):
                shares[number] = max(shares[number], share)
        types += kind.shape(member.attributes, taken)
    return tuple(shares)


def _shape(a: Fused, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    types = list(inputs)
    for member in a.members:
        types += KINDS[member.kind].shape(member.attributes, tuple(types[n] for n in member.inputs))
    return tuple(types[n] for n in a.given)


def _evaluate(a: Fused, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the outputs of a group, whose members are evaluated one after another.

    Values inside the group are not rounded to their storage type, with two exceptions. The input of a pool is rounded,
    because the first of equal stored elements wins. Results of convolutions and GEMMs with which a group begins, or
    which it stores, are rounded, because kernels round them to their storage type before the epilogue.
    """
    return _continue(a, inputs, call)


def leading_products(attributes: Attributes) -> int:
    """Return the number of convolutions or GEMMs with which a group begins.

    Each takes the next two operands of the group, of which the second are weights.
    """
    if not isinstance(attributes, Fused):
        return 0
    return sum(1 for _ in takewhile(lambda member: KINDS[member.kind].flops is not None, attributes.members))


def weights_of(attributes: Attributes) -> frozenset[int]:
    """Return the numbers of a group's inputs that are weights of its members."""
    members = attributes.members if isinstance(attributes, Fused) else ()
    return frozenset(member.inputs[i] for member in members for i in KINDS[member.kind].working_inputs)


def has_product(attributes: Attributes) -> bool:
    """Return whether these are attributes of a group that begins with a convolution or GEMM."""
    return leading_products(attributes) > 0


def product_in(attributes: Attributes) -> Member | None:
    """Return the first convolution or GEMM of a group, which other members may precede."""
    members = attributes.members if isinstance(attributes, Fused) else ()
    return next((member for member in members if KINDS[member.kind].flops is not None), None)


def gives_product(attributes: Attributes) -> bool:
    """Return whether the first output of a group is the result of its first convolution or GEMM.

    A filter gradient, which is a sum over rows, does not count.
    """
    product = product_in(attributes)
    if not isinstance(attributes, Fused) or product is None or KINDS[product.kind].accumulates:
        return False
    return product.outputs == attributes.given[:1]


def rounded_products(attributes: Attributes) -> tuple[Member, ...]:
    """Return the convolutions and GEMMs whose results the kernels of a group round before other members read them."""
    inside = product_in(attributes)
    if not isinstance(attributes, Fused) or inside is None:
        return ()
    return attributes.members[: leading_products(attributes)] or ((inside,) if gives_product(attributes) else ())


def rounds_inside(attributes: Attributes) -> bool:
    """Return whether a group sums values that it rounds and does not store.

    They are the result of a convolution with which the group begins, or what a filter gradient in the group reads. Then
    elements that are rounded differently show only in the sums.
    """
    product = product_in(attributes)
    if not isinstance(attributes, Fused) or product is None or gives_product(attributes):
        return False
    if not has_product(attributes):
        return KINDS[product.kind].accumulates
    return any(KINDS[member.kind].accumulates for member in attributes.members)


def evaluate_epilogue(a: Fused, inputs: Sequence[Array], product: Array, call: Call) -> tuple[Array, ...]:
    """Return the outputs of a group, given the stored result of its first convolution or GEMM."""
    return _continue(a, inputs, call, product)


def _continue(a: Fused, inputs: Sequence[Array], call: Call, product: Array | None = None) -> tuple[Array, ...]:
    values = list(inputs)
    given = dict(zip(a.given, call.outputs, strict=True))
    inside, rounded = product_in(a), rounded_products(a)
    for member in a.members:
        if product is not None and member is inside:
            values.append(product)
            continue
        kind = KINDS[member.kind]
        assert kind.evaluate is not None
        taken = [values[n] for n in member.inputs]
        if member.kind == "max_pool":  # the last member
            taken = [stored(value, given[member.outputs[0]].dtype) for value in taken]
        types = kind.shape(member.attributes, tuple(map(_type_of, taken)))
        results = kind.evaluate(member.attributes, taken, replace(call, outputs=types))
        values += [stored(value, call.precision.working) for value in results] if member in rounded else results
    return tuple(values[n] for n in a.given)


def _type_of(array: Array) -> TensorType:
    types = {np.dtype(np.float64): DType.FP64, np.dtype(np.int32): DType.INT32, np.dtype(np.uint8): DType.UINT8}
    return TensorType(array.shape, types.get(array.dtype, DType.FP32))
