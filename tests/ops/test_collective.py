"""Sums over ranks: shapes, refusals, and what is asked of the other ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.base import Call, ShapeError
from mbc.ops.collective import AllReduce

SUM = KINDS["all_reduce"]
GRADIENT = TensorType((3, 4), DType.FP32)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP64])
@pytest.mark.parametrize("shape", [(3, 4), (1,), ()])
def test_a_sum_has_the_type_of_its_operand(dtype: DType, shape: tuple[int, ...]) -> None:
    assert SUM.shape(AllReduce(2), (TensorType(shape, dtype),)) == (TensorType(shape, dtype),)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.INT32])
def test_working_types_are_not_summed(dtype: DType) -> None:
    with pytest.raises(ShapeError, match="sums over ranks are in the master type, but the operand is"):
        SUM.shape(AllReduce(2), (TensorType((3,), dtype),))


@pytest.mark.parametrize("ranks", [1, 0])
def test_one_rank_has_nothing_to_sum(ranks: int) -> None:
    with pytest.raises(ShapeError, match=f"a sum over {ranks} ranks"):
        SUM.shape(AllReduce(ranks), (GRADIENT,))


def test_the_other_ranks_are_asked_once_for_the_whole_array() -> None:
    assert SUM.evaluate is not None
    asked: list[np.ndarray] = []

    def sum_over_ranks(array: np.ndarray) -> np.ndarray:
        asked.append(array)
        return 3 * array

    gradient = np.arange(12, dtype=np.float32).reshape(3, 4)
    (found,) = SUM.evaluate(AllReduce(3), (gradient,), Call((GRADIENT,), 0, 4, Precision.FP32, sum_over_ranks))
    assert len(asked) == 1 and np.array_equal(asked[0], gradient)
    assert np.array_equal(found, 3 * gradient)


def test_without_ranks_there_is_no_sum() -> None:
    assert SUM.evaluate is not None
    with pytest.raises(ValueError, match="there are none"):
        SUM.evaluate(AllReduce(2), (np.zeros((3, 4), np.float32),), Call((GRADIENT,), 0, 4, Precision.FP32))


def test_it_is_done_in_place_and_at_once() -> None:
    """It overwrites its operand, needs all of it, and no backward pass goes through it."""
    assert SUM.in_place == ((0, 0),) and SUM.reduces
    assert not SUM.divisible and not SUM.updates and SUM.gradient is None
