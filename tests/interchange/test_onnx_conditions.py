"""ONNX operators that choose: comparisons, conditions, bounds and functions by cases, beside ONNX's own evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.interchange.importing import import_model
from tests.interchange.models import forward
from tests.interchange.onnx_files import evaluated, model, node, written
from tests.interchange.test_onnx_standard import computed, drawn, refusal, taken

NUMBERS = {"zero": np.float32(0), "half": np.float32(0.5), "two": np.float32(2), "least": np.float32(-0.3)}
INFINITE = {"inf": np.float32(np.inf), "none": np.float32(-np.inf), "most": np.finfo(np.float32).max}


@pytest.mark.parametrize(
    "bounds",
    [
        ("least", "half"),
        ("", "half"),
        ("least", ""),
        ("zero", "inf"),
        ("none", "two"),
        ("zero", "two"),
        ("least", "most"),
    ],
)
def test_clip_to_any_interval(bounds: tuple[str, str], tmp_path: Path) -> None:
    held = {name: array for name, array in {**NUMBERS, **INFINITE}.items() if name in bounds}
    taken(tmp_path, node("Clip", ["h", *bounds], ["y"]), drawn(2, 3, 4, 4), held)


def test_clip_to_no_interval(tmp_path: Path) -> None:
    message = refusal(tmp_path, node("Clip", ["h", "two", "half"], ["y"]), drawn(2, 3), NUMBERS)
    assert "it clamps to 2 … 0.5, which is no interval" in message


@pytest.mark.parametrize("kind", ["Max", "Min"])
@pytest.mark.parametrize("inputs", [["h", "p"], ["half", "h"], ["h", "p", "h", "least"], ["h"]])
def test_largest_and_smallest_of_several(kind: str, inputs: list[str], tmp_path: Path) -> None:
    held = {name: array for name, array in {**NUMBERS, "p": drawn(1, 3, 1, 4)}.items() if name in inputs}
    taken(tmp_path, node(kind, inputs, ["y"]), drawn(2, 3, 4, 4), held)


def _chosen(path: Path, nodes: list[Any], x: np.ndarray[Any, Any]) -> None:
    """Import nodes from `h` to `y` after a product with a parameter, and compare with ONNX's evaluator."""
    onnx_model = model(
        [node("Mul", ["x", "ones"], ["h"], name="first"), *nodes],
        {"ones": np.ones((1, *x.shape[1:]), np.float32), "p": drawn(1, *x.shape[1:]), **NUMBERS},
        shape=x.shape,
    )
    imported = import_model(written(path, onnx_model), "net", "mse")
    (output,), (wanted,) = forward(imported, x), evaluated(onnx_model, x)
    assert output.shape == wanted.shape and np.allclose(output, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"])
@pytest.mark.parametrize("operands", [("h", "zero"), ("half", "h"), ("h", "p"), ("h", "r")])
@pytest.mark.parametrize("chosen", [("h", "zero"), ("two", "h"), ("r", "h"), ("two", "half")])
def test_conditions_choose(kind: str, operands: tuple[str, str], chosen: tuple[str, str], tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["h"], ["r"]), node(kind, operands, ["c"]), node("Where", ["c", *chosen], ["w"]),
        node("Add", ["w", "h"], ["y"], name="last"),
    ]  # fmt: skip
    _chosen(tmp_path, nodes, drawn(2, 3, 4, 4))


def test_masked_scores_are_recognised(tmp_path: Path) -> None:
    """Exporters guard in this way rows whose scores are all -inf."""
    x = drawn(2, 3, 4, 4)
    x[0, 1] = -np.inf
    nodes = [
        node("ReduceMax", ["h", "last"], ["m"]), node("Equal", ["m", "none"], ["c"]),
        node("Where", ["c", "two", "h"], ["y"], name="choice"),
    ]  # fmt: skip
    ones = np.ones((1, 3, 4, 4), np.float32)
    held = {"ones": ones, "last": np.array([3]), **NUMBERS, **INFINITE}
    onnx_model = model([node("Mul", ["x", "ones"], ["h"], name="first"), *nodes], held, shape=x.shape)
    imported = import_model(written(tmp_path, onnx_model), "net", "mse")
    (output,), (wanted,) = forward(imported, x), evaluated(onnx_model, x)
    assert np.array_equal(output, wanted)


def test_conditions_are_joined_and_become_numbers(tmp_path: Path) -> None:
    nodes = [
        node("Less", ["h", "half"], ["a"]), node("Greater", ["h", "least"], ["b"]), node("And", ["a", "b"], ["c"]),
        node("Not", ["c"], ["d"]), node("Or", ["d", "a"], ["e"]), node("Where", ["e", "h", "two"], ["w"]),
        node("Cast", ["c"], ["n"], to=1), node("Mul", ["n", "w"], ["y"], name="last"),
    ]  # fmt: skip
    _chosen(tmp_path, nodes, drawn(2, 3, 4, 4))


@pytest.mark.parametrize(
    "last",
    [
        node("HardSigmoid", ["h"], ["y"]), node("HardSigmoid", ["h"], ["y"], alpha=0.5, beta=0.1),
        node("ThresholdedRelu", ["h"], ["y"]), node("ThresholdedRelu", ["h"], ["y"], alpha=-0.5),
        node("Shrink", ["h"], ["y"]), node("Shrink", ["h"], ["y"], lambd=0.7, bias=0.7),
        node("Shrink", ["h"], ["y"], lambd=0.4, bias=0.9), node("LpNormalization", ["h"], ["y"], axis=2),
    ],
)  # fmt: skip
def test_functions_by_cases(last: Any, tmp_path: Path) -> None:
    taken(tmp_path, last, 2 * drawn(2, 3, 4, 4))


def test_a_norm_of_absolute_values(tmp_path: Path) -> None:
    x = drawn(2, 3, 4)
    output = computed(tmp_path, node("LpNormalization", ["h"], ["y"], axis=1, p=1), x)
    assert np.allclose(output, x / np.abs(x).sum(1, keepdims=True), rtol=1e-5)


def test_a_norm_of_zero_gives_zero(tmp_path: Path) -> None:
    x = drawn(2, 3, 4)
    x[0, 1] = 0.0
    taken(tmp_path, node("LpNormalization", ["h"], ["y"], axis=-1), x, opset=22)


def test_a_power_of_zero_is_one(tmp_path: Path) -> None:
    _chosen(tmp_path, [node("Pow", ["h", "zero"], ["one"]), node("Add", ["one", "h"], ["y"])], drawn(2, 3, 4, 4))
