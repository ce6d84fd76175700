"""Activations, clamps and choices have PyTorch's values and gradients, also at kinks, ties, infinities and NaN."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mbc.ir.graph import Optimizer
from mbc.ir.types import Precision
from mbc.ops import LAYERS
from mbc.ops.base import Layer, ShapeError
from mbc.passes.training_step import differentiate
from tests.ir.execution import new_control, step
from tests.ir.networks import Writer

torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
F = torch.nn.functional
declared: Any = importlib.import_module("mbc.equivalence.torch_functions").declared

# The functions below have kinks at these values, and the two lists have ties.
X = [-4.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 6.0, 30.0, -30.0]
Y = [0.5, -3.0, -2.0, -0.5, 0.0, 0.0, -0.25, 0.0, 1.0, 5.0, 3.0, -6.0, 30.0, 1.0]

Apply = Callable[[Writer, str, str], str]
# Settings other than the defaults with which the layers of one tensor are compared.
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "leaky_relu": ({"slope": 0.2}, {"slope": 0.0}, {"slope": -0.3}),
    "elu": (
        {},
        {"alpha": -0.7},
        {"alpha": 0.0, "scale": 2.0},
        {"alpha": 0.4, "scale": 1.5, "input_scale": 0.3},
        {"alpha": 0.4, "input_scale": -0.2},
    ),
    "celu": ({}, {"alpha": 0.25}, {"alpha": -8.0}),  # whose inverses are exact: PyTorch rounds these to fp32
    "softplus": (
        {},
        {"beta": 2.0, "threshold": 1.0},
        {"beta": 0.5, "threshold": -1.0},
        {"beta": -1.0, "threshold": 3.0},
    ),
    "softshrink": ({}, {"threshold": 0.0}),
    "hardshrink": ({}, {"threshold": -1.0}),
    "threshold": ({"threshold": 0.5, "value": -2.0},),
    "pow": ({"exponent": 3.0}, {"exponent": -1.0}),
}


def _declared(layer: Layer, chosen: dict[str, Any]) -> tuple[Apply, Callable[[Any, Any], Any]]:
    settings = {parameter.name: parameter.default for parameter in layer.parameters} | chosen
    reference = declared(layer.calls)
    return lambda w, x, y: w(layer.name, x, **chosen), lambda x, y: reference(SimpleNamespace(**settings), x)


CASES: dict[str, tuple[Apply, Callable[[Any, Any], Any]]] = {
    **{
        " ".join((layer.name, *map(str, chosen.values()))): _declared(layer, chosen)
        for layer in LAYERS.values()
        if layer.calls.torch and layer.inputs == (1, 1)
        for chosen in SETTINGS.get(layer.name, ({},))
    },
    "pow 0": (lambda w, x, y: w("mul", w("pow", x, exponent=0.0), x), lambda x, y: x**0 * x),
    "glu": (lambda w, x, y: w("glu", w("concat", x, y)), lambda x, y: F.glu(torch.cat((x, y), 1), 1)),
    "log_softmax": (lambda w, x, y: w("log_softmax", x), lambda x, y: F.log_softmax(x, 1)),
    **{
        f"clamp {least} {most}": (
            lambda w, x, y, a=least, b=most: w("clamp", x, min=a, max=b),
            lambda x, y, a=least, b=most: torch.clamp(x, a, b),
        )
        for least, most in ((-1.0, 3.0), (-math.inf, 0.5), (0.0, math.inf), (2.0, -1.0))
    },
    "hardtanh": (lambda w, x, y: w("hardtanh", x), lambda x, y: F.hardtanh(x)),
    "hardtanh 0 6": (lambda w, x, y: w("hardtanh", x, min=0.0, max=6.0), lambda x, y: F.hardtanh(x, 0.0, 6.0)),
    "maximum": (lambda w, x, y: w("maximum", x, y), lambda x, y: torch.maximum(x, y)),
    "minimum": (lambda w, x, y: w("minimum", x, y), lambda x, y: torch.minimum(x, y)),
    "maximum of itself": (lambda w, x, y: w("maximum", x, x), lambda x, y: torch.maximum(x, x)),
    **{
        f"where {operator}": (
            lambda w, x, y, o=operator: w("where", w("compare", x, y, operator=o), x, w("indicator", y, operator=o)),
            lambda x, y, o=operator: torch.where(getattr(torch, o)(x, y), x, getattr(torch, o)(y, 0.0).to(x.dtype)),
        )
        for operator in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    "masked_fill": (lambda w, x, y: w("masked_fill", x, y, value=-1.5), lambda x, y: x.masked_fill(y != 0, -1.5)),
}


def _ours(apply: Apply, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    w = Writer(1)
    result = apply(w, w.parameter("x", 1, x.size), w.parameter("y", 1, y.size))
    share = w.input("share", *w.type(result).shape[1:])
    wanted = w.input("wanted", *w.type(result).shape[1:])
    network = w.finish((result,), ((w("mse", w("mul", result, share), wanted), 1.0),))
    graph = differentiate(network, Optimizer(), Precision.FP64)
    size = w.type(result).elements
    shares = np.linspace(0.5, 1.5, size)[None]
    start = {"x": x[None], "y": y[None], "share": shares, "wanted": np.full((1, size), 0.125)}
    env = step(graph, start, new_control())
    updates = {op.inputs[0]: env[op.inputs[1]] for op in graph.train if op.kind == "sgd_update"}
    return env[graph.outputs[0]], updates.get("x", np.zeros((1, x.size))), updates.get("y", np.zeros((1, y.size)))


def _theirs(apply: Callable[[Any, Any], Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    a, b = (torch.tensor(v[None], requires_grad=True) for v in (x, y))
    result = apply(a, b)
    share = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64)
    F.mse_loss(result * share, torch.full_like(result, 0.125)).backward()
    zero = torch.zeros_like(a)
    return (
        result.detach().numpy(),
        (a.grad if a.grad is not None else zero).numpy(),
        (b.grad if b.grad is not None else zero).numpy(),
    )


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_at_kinks_are_those_of_pytorch(case: str) -> None:
    ours, theirs = CASES[case]
    x, y = np.array(X), np.array(Y)
    for mine, reference in zip(_ours(ours, x, y), _theirs(theirs, x, y), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=3e-8 if "softplus" in case else 1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_values_of_infinities_and_nan_are_those_of_pytorch(case: str) -> None:
    ours, theirs = CASES[case]
    x, y = (np.array(values) for values in ([math.nan, 1.0, math.inf, -math.inf], [1.0, math.nan, 1.0, 2.0]))
    if case in ("log_softmax", "softsign", "leaky_relu 0.0"):
        return  # inf / inf, inf - inf and 0 * inf: of no use to a training either way
    with np.errstate(all="ignore"):
        mine = _ours(ours, x, y)[0]
    np.testing.assert_allclose(mine, _theirs(theirs, x, y)[0], rtol=1e-12)


def test_glu_needs_two_halves() -> None:
    w = Writer(2)
    with pytest.raises(ShapeError, match="which cannot be divided into two halves"):
        w("glu", w.input("x", 3))
