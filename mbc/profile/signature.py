"""A request as text, and the family of requests that differ only in their number of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from mbc.ir.graph import Attributes
from mbc.ir.optional import written
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Request
from mbc.ops import KINDS
from mbc.ops.base import NoAttributes, OpKind
from mbc.ops.fused import Fused, launch_kind, read_fused

Shelf = tuple[str, str, str]  # kind, precision, and extents of the first operand behind its rows: `64, 56, 56`
# In a signature these follow the attributes, in this order.
_INPUTS, _KIND, _PRECISION = '"inputs":[', '"kind":"', '"precision":"'


def signature(request: Request) -> str:
    """Return a text that equal requests, and only they, have in common: JSON with sorted keys."""
    return json.dumps(
        {
            "kind": request.kind,
            "attributes": written(request.attributes),
            "inputs": [str(t) for t in request.inputs],
            "outputs": [str(t) for t in request.outputs],
            "precision": request.precision.value,
        },
        sort_keys=True,
        separators=(",", ":"),
    )


def read_signature(text: str) -> Request:
    """Return the request whose signature `text` is.

    Raises:
        ValueError: The text is not a signature, or of an unknown kind.
    """
    try:
        fields: Mapping[str, Any] = json.loads(text)
        return Request(
            fields["kind"],
            _attributes(fields["kind"], fields["attributes"]),
            tuple(map(_type, fields["inputs"])),
            tuple(map(_type, fields["outputs"])),
            Precision(fields["precision"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{text}' describes no operation: {error}") from error


def shelf_of(request: Request) -> Shelf:
    """Return what requests of a family have in common, by which a profile groups its requests."""
    first = str(request.inputs[0]) if request.inputs else ""
    return request.kind, request.precision.value, _behind_rows(first)


def shelf_of_signature(text: str) -> Shelf:
    """Return `shelf_of` of the signature's request without reading all of it: a profile has tens of thousands."""
    at = text.rfind(_KIND)
    inputs = text[text.rfind(_INPUTS, 0, at) + len(_INPUTS) : at]
    behind = text[at + len(_KIND) :]
    precision = behind[behind.rfind(_PRECISION) + len(_PRECISION) :]
    return behind.partition('"')[0], precision.partition('"')[0], _behind_rows(inputs)


def _behind_rows(types: str) -> str:
    """Return the extents of the first type behind its first one, an empty text if there are none."""
    return types.partition("]")[0].partition(", ")[2]


def _attributes(kind: str, fields: Mapping[str, Any]) -> Attributes:
    if "members" in fields:
        return read_fused(fields)
    operation = KINDS.get(kind)
    # A conversion is a launch without an operation.
    attributes: type[Attributes] = NoAttributes if operation is None else operation.attributes
    return attributes(**{name: _setting(value) for name, value in fields.items()})


def asked_kind(request: Request) -> OpKind | None:
    """Return the operation or fused operation that a request runs, None for a change of layout or type."""
    if isinstance(request.attributes, Fused):
        return launch_kind(request.kind, request.attributes)
    return KINDS.get(request.kind)


def _setting(value: object) -> object:
    return tuple(map(_setting, cast("list[object]", value))) if isinstance(value, list) else value


@lru_cache(maxsize=65536)
def _type(text: str) -> TensorType:
    dtype, _, shape = text.rstrip("]").partition("[")
    return TensorType(tuple(int(size) for size in shape.split(",") if size.strip()), DType(dtype))


def rows_of(request: Request) -> int:
    """Return the number of rows of one kernel call: the first dimension of the first operand, 1 for a scalar."""
    shape = request.inputs[0].shape
    return shape[0] if shape else 1


def with_rows(request: Request, rows: int) -> Request:
    """Return the same operation on another number of rows, or of another mini-batch; 0 stands for its whole family.

    A request whose kind has no rows is returned unchanged. Weights and vectors keep their first dimension, because it
    belongs to channels.
    """
    kind = asked_kind(request)
    if kind is None or not _has_rows(kind, request.attributes):
        return request
    here = rows_of(request)
    whole_inputs, whole_outputs = _rowless(kind, request.attributes, len(request.inputs), len(request.outputs))

    def sized(types: tuple[TensorType, ...], whole: frozenset[int]) -> tuple[TensorType, ...]:
        least = len(request.inputs[0].shape) if kind.broadcasts else 2
        return tuple(
            t.with_rows(rows) if i not in whole and len(t.shape) >= least and t.shape[0] == here else t
            for i, t in enumerate(types)
        )

    return replace(
        request,
        attributes=request.attributes.with_rows(rows, here),
        inputs=sized(request.inputs, whole_inputs),
        outputs=sized(request.outputs, whole_outputs),
    )


@lru_cache(maxsize=4096)
def _has_rows(kind: OpKind, attributes: Attributes) -> bool:
    """Return whether rows can be counted: the operation is divisible, or reduces over the mini-batch.

    A fused operation has rows if all its members have.
    """
    if isinstance(attributes, Fused):
        return all(_has_rows(KINDS[member.kind], member.attributes) for member in attributes.members)
    return not kind.view and not kind.updates and (kind.divisible or kind.reduces)


@lru_cache(maxsize=4096)
def _rowless(kind: OpKind, attributes: Attributes, inputs: int, outputs: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the indices of inputs and of outputs that have no rows whatever their shape.

    In a fused operation these are the values that have no rows for any of its members.
    """
    if not isinstance(attributes, Fused):
        rowless = kind.rowless(attributes, inputs) if kind.rowless else ()
        return frozenset((*kind.working_inputs, *rowless)), frozenset(range(outputs) if kind.reduces else ())
    values: set[int] = set()
    for member in attributes.members:
        sides = _rowless(KINDS[member.kind], member.attributes, len(member.inputs), len(member.outputs))
        for operands, whole in zip((member.inputs, member.outputs), sides, strict=True):
            values.update(operands[i] for i in whole if i < len(operands))
    given = frozenset(i for i, value in enumerate(attributes.given) if value in values)
    return frozenset(value for value in values if value < inputs), given


def described(request: Request) -> str:
    """Return a short text that identifies an operation: `convolution bf16 [128, 64, 56, 56] 3x3/2`."""
    kernel: tuple[int, ...] = getattr(request.attributes, "kernel", ())
    stride: tuple[int, ...] = getattr(request.attributes, "stride", ())
    window = f" {'x'.join(map(str, kernel))}" if kernel else ""
    step = f"/{max(stride)}" if max(stride, default=1) > 1 else ""
    return f"{request.kind} {request.precision} {list(request.inputs[0].shape)}{window}{step}"
