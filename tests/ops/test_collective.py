"""Sums and gathers over ranks: shapes, refusals, and the calls to the other ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.base import Call, NoAttributes, ShapeError
from mbc.ops.collective import AllGather, AllReduce
from tests.ops.twins import Twins

SUM = KINDS["all_reduce"]
GRADIENT = TensorType((3, 4), DType.FP32)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP64])
@pytest.mark.parametrize("shape", [(3, 4), (1,), ()])
def test_a_sum_has_the_type_of_its_operand(dtype: DType, shape: tuple[int, ...]) -> None:
    assert SUM.shape(AllReduce(2), (TensorType(shape, dtype),)) == (TensorType(shape, dtype),)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.INT32])
def test_working_types_are_not_summed(dtype: DType) -> None:
    with pytest.raises(ShapeError, match="collectives are in the master type, but the operand is"):
        SUM.shape(AllReduce(2), (TensorType((3,), dtype),))


@pytest.mark.parametrize("ranks", [1, 0])
def test_one_rank_has_nothing_to_sum(ranks: int) -> None:
    with pytest.raises(ShapeError, match=f"a collective of {ranks} ranks"):
        SUM.shape(AllReduce(ranks), (GRADIENT,))


def test_the_other_ranks_are_asked_once_for_the_whole_array() -> None:
    assert SUM.evaluate is not None
    asked: list[np.ndarray] = []

    class Counting(Twins):
        def sum_on_host(self, array: np.ndarray) -> np.ndarray:
            asked.append(array)
            return 3 * array

    gradient = np.arange(12, dtype=np.float32).reshape(3, 4)
    (total,) = SUM.evaluate(AllReduce(3), (gradient,), Call((GRADIENT,), 0, 4, Precision.FP32, Counting()))
    assert len(asked) == 1 and np.array_equal(asked[0], gradient)
    assert np.array_equal(total, 3 * gradient)


def test_without_ranks_there_is_no_sum() -> None:
    assert SUM.evaluate is not None
    with pytest.raises(ValueError, match="there are none"):
        SUM.evaluate(AllReduce(2), (np.zeros((3, 4), np.float32),), Call((GRADIENT,), 0, 4, Precision.FP32))


def test_it_is_done_in_place_and_at_once() -> None:
    """A sum over ranks overwrites its operand, is not divided into rows, and has no gradient."""
    assert SUM.in_place == ((0, 0),) and SUM.reduces
    assert not SUM.divisible and not SUM.updates and SUM.gradient is None


GATHER, SUM_GATHERED = KINDS["all_gather"], KINDS["sum_gathered"]
VECTOR, MATRIX = TensorType((5,), DType.FP32), TensorType((3, 5), DType.FP32)


def test_gathered_values_have_an_axis_of_ranks_first() -> None:
    assert GATHER.shape(AllGather(3), (VECTOR, VECTOR)) == (MATRIX, MATRIX)
    assert SUM_GATHERED.shape(NoAttributes(), (MATRIX, MATRIX)) == (VECTOR, VECTOR)


def test_operands_of_one_gather_are_alike() -> None:
    with pytest.raises(ShapeError, match="operands of one collective differ"):
        GATHER.shape(AllGather(2), (VECTOR, GRADIENT))
    with pytest.raises(ShapeError, match="collectives are in the master type"):
        GATHER.shape(AllGather(2), (TensorType((5,), DType.BF16),))
    for operands in ((MATRIX, GRADIENT), (VECTOR, VECTOR)):
        with pytest.raises(ShapeError, match="are not gathered from the same ranks"):
            SUM_GATHERED.shape(NoAttributes(), operands)


def test_a_gather_and_its_sum() -> None:
    assert GATHER.evaluate is not None and SUM_GATHERED.evaluate is not None
    vectors = [np.random.default_rng(seed).normal(size=5).astype(np.float32) for seed in range(2)]
    call = Call((MATRIX, MATRIX), 0, 4, Precision.FP32, Twins())
    gathered = GATHER.evaluate(AllGather(2), vectors, call)
    assert [np.array_equal(g, [v, v]) for g, v in zip(gathered, vectors, strict=True)] == [True, True]
    summed = SUM_GATHERED.evaluate(NoAttributes(), gathered, call)
    assert [np.array_equal(s, 2 * v) for s, v in zip(summed, vectors, strict=True)] == [True, True]


ROWS = KINDS["gather_rows"]


def test_rows_of_all_ranks_are_adjacent() -> None:
    assert ROWS.evaluate is not None
    images, classes = TensorType((2, 3, 4), DType.BF16), TensorType((2, 5), DType.BF16)
    types = TensorType((4, 3, 4), DType.BF16), TensorType((4, 5), DType.BF16)
    assert ROWS.shape(AllGather(2), (images, classes)) == types
    arrays = [np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.arange(10, dtype=np.float32).reshape(2, 5)]
    gathered = ROWS.evaluate(AllGather(2), arrays, Call(types, 0, 2, Precision.BF16, Twins()))
    assert all(np.array_equal(rows, np.concatenate([a, a])) for rows, a in zip(gathered, arrays, strict=True))


def test_operands_gathered_together_have_equal_rows() -> None:
    with pytest.raises(ShapeError, match="these do not have the same rows"):
        ROWS.shape(AllGather(2), (GRADIENT, VECTOR))
    with pytest.raises(ShapeError, match="a collective of 1 ranks"):
        ROWS.shape(AllGather(1), (GRADIENT,))
