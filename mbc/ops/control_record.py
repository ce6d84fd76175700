"""The control block as the interpreter sees it."""

from __future__ import annotations

import numpy as np

from mbc.ir.control import CONTROL_BYTES, CONTROL_FIELDS
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, ShapeError

CONTROL_TYPE = TensorType((CONTROL_BYTES,), DType.UINT8)

RECORD = np.dtype(
    {
        "names": [name for name, _, _ in CONTROL_FIELDS],
        "formats": [kind for _, kind, _ in CONTROL_FIELDS],
        "offsets": [offset for _, _, offset in CONTROL_FIELDS],
        "itemsize": CONTROL_BYTES,
    }
)


def control_record(block: Array) -> Array:
    """Return the uint8[256] block as a NumPy record of no dimensions; writing to a field writes to `block`."""
    return block.view(RECORD).reshape(())


def control_shape(control: TensorType) -> None:
    """Raise ShapeError unless this is the type of a control block.

    Raises:
        ShapeError: The type is another one.
    """
    if control != CONTROL_TYPE:
        raise ShapeError(f"{control} is not a control block, which is {CONTROL_TYPE}")
