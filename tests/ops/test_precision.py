"""Operation by operation on identical float32 operands: float32 evaluation within 1e-5 of float64."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.ir.graph import Optimizer
from mbc.ir.types import Precision
from mbc.ops import KINDS
from mbc.ops.base import Array, Call
from mbc.passes.training_step import differentiate
from tests.ir.execution import draw, normalised, step, types_of
from tests.passes.test_training_step import NETWORKS


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_float32_is_within_a_hundred_thousandth_of_float64(name: str, optimizer: str) -> None:
    graph = differentiate(NETWORKS[name](), Optimizer(optimizer, momentum=0.9), Precision.FP32)
    env = step(graph, draw(graph, np.random.default_rng(8)))
    types = types_of(graph)
    for op in graph.train:
        evaluate = KINDS[op.kind].evaluate
        assert evaluate is not None
        call = Call(tuple(types[v] for v in op.outputs), 0, graph.batch, Precision.FP64)
        exact = evaluate(op.attributes, [_wide(env[v]) for v in op.inputs], call)
        for value, reference in zip(op.outputs, exact, strict=True):
            if reference.dtype == np.float64:
                assert normalised(env[value], reference) <= 1e-5, f"{op.name}: {value}"
            else:
                assert np.array_equal(env[value], reference), f"{op.name}: {value}"
