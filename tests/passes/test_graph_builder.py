"""Names, types and rows of the operations that a builder appends."""

from __future__ import annotations

import pytest

from mbc.ir.graph import Role
from mbc.ir.types import DType, TensorType
from mbc.ops.base import NoAttributes, ShapeError
from mbc.passes.graph_builder import GraphBuilder, live_operations

IMAGE = TensorType((2, 3, 4, 4), DType.FP32)


def test_names_are_unique_and_prefixed() -> None:
    b = GraphBuilder(prefix="infer.")
    b.declare("x", IMAGE, Role.INPUT, per_sample=True)
    names = [b.emit("relu", NoAttributes(), ("x",), "relu")[0] for _ in range(3)]
    assert names == ["infer.relu", "infer.relu.2", "infer.relu.3"]
    assert [op.name for op in b.operations] == names


def test_rows_follow_the_inputs_except_through_a_reduction() -> None:
    b = GraphBuilder()
    b.declare("x", IMAGE, Role.INPUT, per_sample=True)
    (y,) = b.emit("relu", NoAttributes(), ("x",), "y")
    mean, variance = b.emit("batch_statistics", NoAttributes(), (y,), "s", ("mean", "variance"))
    assert b.values[y].per_sample and not b.values[mean].per_sample
    assert b.type(variance) == TensorType((3,), DType.FP32)


def test_operands_that_do_not_fit_are_refused_with_both_shapes() -> None:
    b = GraphBuilder()
    b.declare("x", IMAGE)
    b.declare("y", TensorType((2, 3, 4, 5), DType.FP32))
    with pytest.raises(ShapeError, match=r"the shapes fp32\[2, 3, 4, 4\] and fp32\[2, 3, 4, 5\] differ"):
        b.emit("add", NoAttributes(), ("x", "y"), "sum")
    assert b.operations == [] and set(b.values) == {"x", "y"}


def test_live_operations_keep_their_order() -> None:
    b = GraphBuilder()
    b.declare("x", IMAGE)
    for name in ("a", "b", "c"):
        b.emit("relu", NoAttributes(), ("a" if name == "c" else "x",), name)
    assert [op.name for op in live_operations(b.operations, ("c",))] == ["a", "c"]
