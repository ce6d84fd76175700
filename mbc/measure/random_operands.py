"""Random operands for any kind of operation: values that it may meet, so that a kernel does its usual work.

Class numbers lie in range, positions within their window, the control block says that the step counts, and vectors,
probabilities and states are positive, which makes them valid as a mean, a scale and a variance alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.base import Request
from mbc.measure.random_pool import numbers, stored_numbers
from mbc.ops.base import ShapeError
from mbc.ops.control import CONTROL_TYPE, control_record
from mbc.ops.fused import SEVERAL, leading_products
from mbc.ops.pooling import MaxPool
from mbc.ops.shard import UPDATES_OF_PARTS
from mbc.ops.weighted_cross_entropy import ClassWeights
from mbc.profile.signature import asked_kind
from mbc.runtime.formats import STORED, stored_bytes

FEW_ELEMENTS = 1 << 17  # of one row, about what is compared on the host
FEW_STATES = 4099  # elements of a state that is compared, about
MOST_FEW_ROWS = 3

Array = NDArray[Any]


def values(request: Request, index: int, count: int) -> Array:
    """`count` random elements of input `index`, flat, as NumPy computes with them, rounded as their type does. Not to
    be written to."""
    tensor = request.inputs[index]
    if tensor == CONTROL_TYPE:
        return np.resize(_control(), count)
    if tensor.dtype is DType.INT32:
        return _whole(index, count, _classes(request), tensor.dtype)
    if tensor.dtype is DType.UINT8:
        return _whole(index, count, _positions(request), tensor.dtype)
    return numbers(tensor.dtype, count, index, _is_positive(request, index))


def stored_values(request: Request, index: int, count: int) -> NDArray[np.uint8]:
    """The same as the bytes of a buffer."""
    tensor = request.inputs[index]
    if tensor == CONTROL_TYPE or tensor.dtype in (DType.INT32, DType.UINT8):
        return stored_bytes(values(request, index, count), tensor.dtype, Layout.CHANNELS_FIRST)
    return stored_numbers(tensor.dtype, count, index, _is_positive(request, index))


def _is_positive(request: Request, index: int) -> bool:
    kind = asked_kind(request)
    probable = kind is not None and index in kind.probabilities
    return len(request.inputs[index].shape) == 1 or probable or _updates(request)


@lru_cache(maxsize=32)
def _whole(index: int, count: int, end: int, dtype: DType) -> Array:
    """Random whole numbers from 0 to `end`, without it."""
    drawn = np.random.default_rng(index).integers(0, end, count).astype(STORED[dtype])
    drawn.flags.writeable = False
    return drawn


def few(request: Request) -> Request:
    """The same operation on few rows (of a state: few elements), which the host can compute in no time."""
    kind = asked_kind(request)
    if kind is None:  # a change of layout or type: its operands have one shape
        rows = _few_rows(request)
        return replace(
            request,
            inputs=tuple(t.with_rows(rows) for t in request.inputs),
            outputs=tuple(t.with_rows(rows) for t in request.outputs),
        )
    if request.kind.removesuffix(SEVERAL) in UPDATES_OF_PARTS:
        # A part has fewer rows than the whole: all rows stay, with so few elements that they still have a layout.
        inputs = tuple(t if t == CONTROL_TYPE else _narrow(t) for t in request.inputs)
    elif _updates(request):
        inputs = tuple(t if t == CONTROL_TYPE else _short(t) for t in request.inputs)
    else:
        # May have as many filters as there are rows; of attention, and of its bias, tables and biases have none either.
        weights = {*range(1, 2 * leading_products(request.attributes), 2), *kind.working_inputs}
        weights |= {*(kind.rowless(request.attributes, len(request.inputs)) if kind.rowless else ())}
        rows = _few_rows(request)
        inputs = tuple(
            t.with_rows(rows) if i not in weights and has_rows(request, t) else t for i, t in enumerate(request.inputs)
        )
    try:
        outputs = kind.shape(request.attributes, inputs)
    except ShapeError as error:
        raise MbcError("MBC087", f"no small {request.kind} can be made to compare with: {error}") from error
    return replace(request, inputs=inputs, outputs=outputs)


def has_rows(request: Request, operand: TensorType) -> bool:
    """Whether the operand has the rows of the first one: vectors over channels and states have none."""
    first = request.inputs[0]
    if operand == CONTROL_TYPE or operand.shape[0] != first.shape[0]:
        return False
    # Statistics of attention have the blocks of a row beside its heads.
    return len(operand.shape) >= len(first.shape) or operand.dtype is DType.INT32


def _few_rows(request: Request) -> int:
    first = request.inputs[0]
    return max(1, min(MOST_FEW_ROWS, first.shape[0], FEW_ELEMENTS * first.shape[0] // max(1, first.elements)))


def _short(tensor: TensorType) -> TensorType:
    """A part of a state along its first axis: it may lie in the same layouts."""
    return tensor.with_rows(max(1, min(tensor.shape[0], FEW_STATES * tensor.shape[0] // tensor.elements)))


def _narrow(tensor: TensorType) -> TensorType:
    return TensorType((tensor.shape[0], *(min(2, size) for size in tensor.shape[1:])), tensor.dtype)


def _updates(request: Request) -> bool:
    known = asked_kind(request)
    return known is not None and bool(known.updates)


def _classes(request: Request) -> int:
    """Of a loss: the second axis of its logits."""
    if isinstance(request.attributes, ClassWeights):
        return request.attributes.classes
    logits = request.inputs[0]
    return logits.shape[1] if len(logits.shape) > 1 else 2


def _positions(request: Request) -> int:
    """In a pooling window; of bytes that are no positions, as many as one can hold."""
    a = request.attributes
    return a.kernel[0] * a.kernel[1] if isinstance(a, MaxPool) else 256


def _control() -> Array:
    """A block as it stands in the middle of training."""
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
