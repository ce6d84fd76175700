"""Operators for which ONNX's evaluator deviates from ONNX's definition are not checked by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.interchange.from_onnx.check_onnx import check_onnx
from mbc.interchange.importing import import_model
from tests.interchange.models import nn, torch
from tests.interchange.onnx_files import evaluated, model, node, written

X = np.random.default_rng(0).normal(size=(2, 6, 8, 9)).astype(np.float32)
ROWS = X[:, :, 0]


def _max_pool(x: Any) -> Any:
    return nn.functional.max_pool2d(nn.functional.pad(x, (0, 0, 1, 1), value=-np.inf), 3, 1)


@pytest.mark.parametrize(
    "last, x, wanted",
    [
        (node("LpNormalization", ["h"], ["y"], p=1), X, lambda x: x / x.abs().sum(-1, keepdim=True)),
        (
            node("LRN", ["h"], ["y"], size=3, bias=2.0, alpha=0.5),
            X,
            lambda x: nn.functional.local_response_norm(x, 3, 0.5, 0.75, 2.0),
        ),
        (node("MaxPool", ["h"], ["y"], kernel_shape=[3, 3], pads=[1, 0, 1, 0]), X, _max_pool),
        (node("GlobalMaxPool", ["h"], ["y"]), ROWS, lambda x: x.amax(2, keepdim=True)),
        (node("Softmax", ["h"], ["y"], axis=1), X, lambda x: x.flatten(1).softmax(1).reshape(x.shape)),
    ],
    ids=["LpNormalization", "LRN", "MaxPool", "GlobalMaxPool", "Softmax"],
)
def test_operators_the_evaluator_misreads_are_not_checked(last: Any, x: Any, wanted: Any, tmp_path: Path) -> None:
    ones = np.ones((1, *x.shape[1:]), np.float32)
    nodes = [node("Mul", ["x", "ones"], ["h"], name="first"), last]
    opset = 11 if last.op_type == "Softmax" else 20
    onnx_model = model(nodes, {"ones": ones}, shape=x.shape, opset=opset)
    right, (theirs,) = wanted(torch.from_numpy(x)).numpy(), evaluated(onnx_model, x)
    assert theirs.shape != right.shape or not np.allclose(theirs, right, rtol=1e-3), "the evaluator is mended"
    file = written(tmp_path, onnx_model)
    imported = import_model(file, "net", "mse")
    assert not check_onnx(file, None, imported.network, imported.source, None)
    with pytest.raises(MbcError, match=f"MBC346: .* does not compute {last.op_type} as ONNX defines it"):
        check_onnx(file, None, imported.network, imported.source, True)


def test_correct_operators_are_checked(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["h"]), node("MaxPool", ["h"], ["p"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Softmax", ["p"], ["y"], axis=1),
    ]  # fmt: skip
    file = written(tmp_path, model(nodes, {"w": np.ones((3, 6, 1, 1), np.float32)}, shape=X.shape))
    imported = import_model(file, "net", "mse")
    assert check_onnx(file, None, imported.network, imported.source, True)
