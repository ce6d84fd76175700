"""A sharded optimizer: parts of tensors, their sums, their updates, and the gathered result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mbc.ir.graph import Attributes
from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.base import NO_OTHER_RANKS, Call, Collectives, NoAttributes, ShapeError
from mbc.ops.collective import AllGather
from mbc.ops.control_record import control_record
from mbc.ops.shard import ReduceScatter, own_rows, part_from, part_of, whole_from
from mbc.ops.update import AdamW, Sgd

Array = NDArray[Any]
CONTROL = TensorType((256,), DType.UINT8)


def fp32(*shape: int) -> TensorType:
    return TensorType(shape, DType.FP32)


class RankOf:
    """One of several ranks, whose arrays are equal except for the factor rank + 1."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum_on_host(self, array: Array) -> Array:
        return array / (self.rank + 1) * sum(range(1, self.size + 1))

    def gather_on_host(self, array: Array) -> Array:
        return np.stack([array / (self.rank + 1) * (rank + 1) for rank in range(self.size)])


def run(
    kind: str, a: Attributes, arrays: list[Array], types: tuple[TensorType, ...], ranks: Collectives = NO_OTHER_RANKS
) -> tuple[Array, ...]:
    evaluate = KINDS[kind].evaluate
    assert evaluate is not None
    return evaluate(a, arrays, Call(types, 0, 4, Precision.FP32, ranks))


@pytest.mark.parametrize(("rows", "ranks"), [(2, 2), (8, 2), (7, 2), (7, 3), (4, 3), (64, 3), (2, 5)])
def test_parts_are_all_rows_each_once(rows: int, ranks: int) -> None:
    whole = np.arange(rows * 6, dtype=np.float32).reshape(rows, 2, 3)
    part_rows = part_of(fp32(rows, 2, 3), ranks).shape[0]
    taken = [row for rank in range(ranks) for row in range(rows)[own_rows(rows, part_rows, rank)]]
    assert taken == list(range(rows))
    parts = np.stack([part_from(whole, part_rows, rank) for rank in range(ranks)])
    assert parts.shape == (ranks, part_rows, 2, 3)
    assert np.array_equal(whole_from(parts, rows), whole)
    assert not parts.reshape(-1, 2, 3)[rows:].any()  # padding


@pytest.mark.parametrize(("rows", "ranks"), [(8, 2), (7, 3), (4, 3)])
def test_each_rank_keeps_its_part_of_the_sum(rows: int, ranks: int) -> None:
    whole = np.random.default_rng(1).normal(0, 1, (rows, 3))
    (type_,) = KINDS["reduce_scatter"].shape(ReduceScatter(ranks), (TensorType((rows, 3), DType.FP64),))
    for rank in range(ranks):
        own = whole * (rank + 1)
        (part,) = run("reduce_scatter", ReduceScatter(ranks), [own], (type_,), RankOf(rank, ranks))
        assert part.shape == type_.shape
        np.testing.assert_allclose(part, part_from(whole * sum(range(1, ranks + 1)), type_.shape[0], rank), rtol=1e-15)


def test_new_parts_replace_the_old_parameter() -> None:
    gather = KINDS["gather_parts"]
    assert gather.shape(AllGather(3), (fp32(3, 2), fp32(7, 2))) == (fp32(7, 2),) and gather.updates == ((0, 1),)
    part = np.arange(6, dtype=np.float32).reshape(3, 2)
    (whole,) = run("gather_parts", AllGather(3), [part, np.zeros((7, 2), np.float32)], (fp32(7, 2),), RankOf(0, 3))
    assert np.array_equal(whole, np.concatenate([part, 2 * part, 3 * part])[:7])


def control(rank: int, proceed: int) -> Array:
    block = np.zeros(256, np.uint8)
    for name, value in {
        "rank": rank, "proceed": proceed, "gradient_scale": 2.0, "learning_rate": 0.1, "updates": 3
    }.items():  # fmt: skip
        control_record(block)[name] = value
    return block


@pytest.mark.parametrize("proceed", [0, 1])
@pytest.mark.parametrize("whole_gradient", [False, True])
@pytest.mark.parametrize(("rows", "ranks"), [(8, 2), (7, 3), (4, 3)])
@pytest.mark.parametrize("a", [Sgd(0.9, True, 0.01), AdamW(weight_decay=0.1, clip_value=0.3)], ids=["sgd", "adamw"])
def test_the_parts_of_all_ranks_are_updated_as_the_whole(
    a: Sgd | AdamW, rows: int, ranks: int, whole_gradient: bool, proceed: int
) -> None:
    draws = np.random.default_rng(rows)
    kind = "sgd_update" if isinstance(a, Sgd) else "adamw_update"
    states = 1 if isinstance(a, Sgd) else 2
    parameter, gradient, *old = (draws.uniform(0.1, 1, (rows, 2)).astype(np.float32) for _ in range(2 + states))
    wanted = run(kind, a, [parameter, gradient, control(0, proceed), *old], (fp32(rows, 2),) * (1 + states))
    part = part_of(fp32(rows, 2), ranks)
    types = (fp32(rows, 2), fp32(rows, 2) if whole_gradient else part, CONTROL, *(part,) * states)
    types_of_part = KINDS[f"{kind}_part"].shape(a, types)
    assert types_of_part == (part,) * (1 + states)
    updated: list[tuple[Array, ...]] = []
    for rank in range(ranks):
        given = gradient if whole_gradient else part_from(gradient, part.shape[0], rank)
        own = [part_from(state, part.shape[0], rank) for state in old]
        updated.append(run(f"{kind}_part", a, [parameter, given, control(rank, proceed), *own], types_of_part))
    for of_ranks, whole in zip(zip(*updated, strict=True), wanted, strict=True):
        padded = np.stack(of_ranks)
        assert np.array_equal(whole_from(padded, rows), whole)
        assert not padded.reshape(-1, 2)[rows:].any()


def test_the_norm_of_norms_is_that_of_all() -> None:
    draws = np.random.default_rng(2)
    arrays = [draws.normal(0, 1, shape) for shape in ((3, 4), (5,), (2, 2, 2))]
    types, one = tuple(TensorType(a.shape, DType.FP64) for a in arrays), (TensorType((1,), DType.FP64),)
    assert KINDS["norm"].shape(NoAttributes(), types) == KINDS["norm"].shape(NoAttributes(), types[:1]) == one
    norms = [run("norm", NoAttributes(), some, one)[0][0] for some in (arrays[:1], arrays[1:])]
    assert np.hypot(*norms) == pytest.approx(np.linalg.norm(np.concatenate([a.ravel() for a in arrays])), rel=1e-14)
    assert np.isnan(run("norm", NoAttributes(), [np.array([np.nan, 1.0])], one)[0]).all()


@pytest.mark.parametrize(
    ("kind", "a", "inputs", "message"),
    [
        ("reduce_scatter", ReduceScatter(2), (fp32(),), "has no rows to cut into 2 parts"),
        ("reduce_scatter", ReduceScatter(2), (fp32(1, 8),), "has no rows to cut into 2 parts"),
        ("reduce_scatter", ReduceScatter(1), (fp32(4),), "a collective of 1 ranks"),
        ("reduce_scatter", ReduceScatter(2), (TensorType((4,), DType.BF16),), "collectives are in the master type"),
        ("gather_parts", AllGather(2), (fp32(3, 2), fp32(8, 2)), "is not a part of"),
        ("sgd_update_part", Sgd(), (fp32(8), fp32(4), CONTROL), "sgd without momentum has no states to shard"),
        ("sgd_update_part", Sgd(0.9), (fp32(8), fp32(4), CONTROL, fp32(8)), "is not a part of parameter"),
        ("sgd_update_part", Sgd(0.9), (fp32(8), fp32(3), CONTROL, fp32(4)), "fits neither parameter"),
        ("adamw_update_part", AdamW(), (fp32(8), fp32(4), CONTROL, fp32(4)), "adamw has two states"),
        (
            "adamw_update_part",
            AdamW(),
            (fp32(8), fp32(4), CONTROL, fp32(4), fp32(3)),
            "not parts of an optimizer's states",
        ),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, a: Attributes, inputs: tuple[TensorType, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        KINDS[kind].shape(a, inputs)
