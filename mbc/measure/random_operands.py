"""Random operands for any kind of operation: valid values, so that a kernel does its usual work.

Class numbers are in range, positions are within their window, and the control block says that the step counts. Vectors,
also those of each sample, probabilities and states are positive, so that they are valid as a mean, a scale and a
variance.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import Attributes
from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.base import Request
from mbc.measure.random_pool import numbers, stored_numbers
from mbc.ops.base import OpKind, ShapeError
from mbc.ops.control_record import CONTROL_TYPE, control_record
from mbc.ops.fused import SEVERAL, Fused, weights_of
from mbc.ops.pooling import MaxPool
from mbc.ops.shard import UPDATES_OF_PARTS
from mbc.ops.weighted_cross_entropy import ClassWeights
from mbc.ops.window import Window
from mbc.profile.signature import asked_kind
from mbc.runtime.formats import STORED, stored_bytes

FEW_ELEMENTS = 1 << 17  # approximate number of elements that are compared on the host
FEW_STATES = 4099  # approximate number of elements of a state that are compared
MOST_FEW_ROWS = 3
MANY_ELEMENTS = 1 << 22  # of a larger row only some planes are compared, with about a quarter as many elements
FEW_PLANES = 8  # the number of compared planes is a multiple of this number
_ALL = Fraction(1)
_REMEDY = "report it; until then the time of the operation is estimated instead of measured"

Array = NDArray[Any]


def values(request: Request, index: int, count: int) -> Array:
    """Return `count` random elements of input `index`: flat, read-only, rounded to the input's type."""
    tensor = request.inputs[index]
    if tensor == CONTROL_TYPE:
        return np.resize(_control(), count)
    if tensor.dtype is DType.INT32:
        return _whole(index, count, _classes(request), tensor.dtype)
    if tensor.dtype is DType.UINT8:
        return _whole(index, count, _positions(request), tensor.dtype)
    return numbers(tensor.dtype, count, index, _is_positive(request, index))


def stored_values(request: Request, index: int, count: int) -> NDArray[np.uint8]:
    """Return the elements of `values` as the bytes of a buffer."""
    tensor = request.inputs[index]
    if tensor == CONTROL_TYPE or tensor.dtype in (DType.INT32, DType.UINT8):
        return stored_bytes(values(request, index, count), tensor.dtype, Layout.CHANNELS_FIRST)
    return stored_numbers(tensor.dtype, count, index, _is_positive(request, index))


def _is_positive(request: Request, index: int) -> bool:
    kind = asked_kind(request)
    probable = kind is not None and index in kind.probabilities
    of_channels = math.prod(request.inputs[index].shape[2:]) == 1 and len(request.inputs[index].shape) not in (0, 2)
    return of_channels or probable or _updates(request)


@lru_cache(maxsize=32)
def _whole(index: int, count: int, end: int, dtype: DType) -> Array:
    """Return random whole numbers from 0 to `end` - 1."""
    drawn = np.random.default_rng(index).integers(0, end, count).astype(STORED[dtype])
    drawn.flags.writeable = False
    return drawn


def few(request: Request, planes: bool = True) -> Request:
    """Return the same operation on few rows (of a state: few elements), which the host computes quickly.

    Args:
        request: The operation.
        planes: Whether planes of large rows, such as volumes, are also left out, where the sizes of all operands
            allow it.
    """
    kind, rows = asked_kind(request), _few_rows(request)
    kept = _few_planes(request.inputs[0]) if planes and not _updates(request) else _ALL
    if kind is None:  # a change of layout or type: its operands have one shape
        inputs, outputs = (tuple(_thin(t.with_rows(rows), kept) for t in o) for o in (request.inputs, request.outputs))
        return replace(request, inputs=inputs, outputs=outputs)
    if kept != _ALL:
        with suppress(ShapeError):
            return _with(request, kind, _of_rows(request, kind, rows, kept), _thin_attributes(request.attributes, kept))
    try:
        if request.kind.removesuffix(SEVERAL) in UPDATES_OF_PARTS:
            # A part has fewer rows than the whole: all rows stay, with just enough elements each to have a layout.
            inputs = tuple(t if t == CONTROL_TYPE else _narrow(t) for t in request.inputs)
        elif _updates(request):
            inputs = tuple(t if t == CONTROL_TYPE else _short(t) for t in request.inputs)
        else:
            inputs = _of_rows(request, kind, rows)
        return _with(request, kind, inputs, request.attributes)
    except ShapeError as error:
        raise MbcError("MBC087", f"{request.kind} cannot be checked on few rows: {error}", _REMEDY) from error


def _with(request: Request, kind: OpKind, inputs: tuple[TensorType, ...], attributes: Attributes) -> Request:
    return replace(request, attributes=attributes, inputs=inputs, outputs=kind.shape(attributes, inputs))


def _of_rows(request: Request, kind: OpKind, rows: int, kept: Fraction = _ALL) -> tuple[TensorType, ...]:
    """Return the inputs with `rows` rows each, and with the part `kept` of the planes of each row."""
    # Filters may number as many as the rows, but have no rows. Nor have the tables and biases of attention.
    weights = {*weights_of(request.attributes), *kind.working_inputs}
    weights |= {*(kind.rowless(request.attributes, len(request.inputs)) if kind.rowless else ())}
    return tuple(
        _thin(t.with_rows(rows), kept) if i not in weights and has_rows(request, t) else t
        for i, t in enumerate(request.inputs)
    )


def _few_planes(tensor: TensorType) -> Fraction:
    """Return which part of the planes along the first spatial axis is compared."""
    row = tensor.elements // tensor.shape[0]
    if len(tensor.shape) < 4 or row <= MANY_ELEMENTS:
        return _ALL
    depth = tensor.shape[2]
    planes = -(-depth * MANY_ELEMENTS // (4 * row * FEW_PLANES)) * FEW_PLANES
    return min(_ALL, Fraction(planes, depth))


def _thin(tensor: TensorType, kept: Fraction) -> TensorType:
    """Return a tensor with the part `kept` of its planes. Vectors, and tensors of one plane, stay as they are.

    Raises:
        ShapeError: The part is not a whole number of planes.
    """
    if len(tensor.shape) < 4 or tensor.shape[2] == 1:
        return tensor
    shape = (*tensor.shape[:2], _whole_planes(tensor.shape[2], kept), *tensor.shape[3:])
    return TensorType(shape, tensor.dtype)


def _whole_planes(depth: int, kept: Fraction) -> int:
    planes = depth * kept
    if planes.denominator != 1:
        raise ShapeError(f"{kept} of {depth} planes are not a whole number")
    return planes.numerator


def _thin_attributes(attributes: Attributes, kept: Fraction) -> Attributes:
    """Return the attributes of an operation, or of all members of a group, for a part of the planes."""
    if isinstance(attributes, Fused):
        members = (replace(m, attributes=_thin_attributes(m.attributes, kept)) for m in attributes.members)
        return replace(attributes, members=tuple(members))
    if isinstance(attributes, Window):
        return replace(attributes, size=(_whole_planes(attributes.size[0], kept), *attributes.size[1:]))
    return attributes


def has_rows(request: Request, operand: TensorType) -> bool:
    """Return whether the operand has the rows of the first operand. Vectors over channels and states have none."""
    first = request.inputs[0]
    if operand == CONTROL_TYPE or operand.shape[0] != first.shape[0]:
        return False
    # Statistics of attention have the blocks of a row beside its heads.
    return len(operand.shape) >= len(first.shape) or operand.dtype is DType.INT32


def _few_rows(request: Request) -> int:
    first = request.inputs[0]
    return max(1, min(MOST_FEW_ROWS, first.shape[0], FEW_ELEMENTS * first.shape[0] // max(1, first.elements)))


def _short(tensor: TensorType) -> TensorType:
    """Return a part of a state along its first axis, which may have the same layouts."""
    return tensor.with_rows(max(1, min(tensor.shape[0], FEW_STATES * tensor.shape[0] // tensor.elements)))


def _narrow(tensor: TensorType) -> TensorType:
    return TensorType((tensor.shape[0], *(min(2, size) for size in tensor.shape[1:])), tensor.dtype)


def _updates(request: Request) -> bool:
    kind = asked_kind(request)
    return kind is not None and bool(kind.updates)


def _classes(request: Request) -> int:
    """Return the number of classes of a loss: the second axis of its logits."""
    if isinstance(request.attributes, ClassWeights):
        return request.attributes.classes
    logits = request.inputs[0]
    return logits.shape[1] if len(logits.shape) > 1 else 2


def _positions(request: Request) -> int:
    """Return the number of positions in a pooling window; for other bytes 256."""
    a = request.attributes
    return math.prod(a.kernel) if isinstance(a, MaxPool) else 256


def _control() -> Array:
    """Return a control block as in the middle of a training."""
    block = np.zeros(CONTROL_TYPE.shape, np.uint8)
    record = control_record(block)
    for name, value in {
        "step": 3,
        "seed": 0x123456789ABC,
        "learning_rate": 1e-3,
        "training": 1,
        "loss_scale": 1.0,
        "gradient_scale": 1.0,
        "proceed": 1,
        "updates": 5,
    }.items():
        record[name] = value
    return block
