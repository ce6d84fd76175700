"""Activations, clamps and choices have PyTorch's values and gradients, also at kinks, ties, infinities and NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mbc.ir.graph import Optimizer
from mbc.ir.types import Precision
from mbc.ops.base import ShapeError
from mbc.passes.training_step import differentiate
from tests.ir.execution import new_control, step
from tests.ir.networks import Writer

torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
F = torch.nn.functional

# Kinks of the functions below lie at these, and ties between the two lists.
X = [-4.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 6.0, 30.0, -30.0]
Y = [0.5, -3.0, -2.0, -0.5, 0.0, 0.0, -0.25, 0.0, 1.0, 5.0, 3.0, -6.0, 30.0, 1.0]

Apply = Callable[[Writer, str, str], str]
CASES: dict[str, tuple[Apply, Callable[[Any, Any], Any]]] = {
    **{
        f"leaky_relu {slope}": (
            lambda w, x, y, slope=slope: w("leaky_relu", x, slope=slope),
            lambda x, y, slope=slope: F.leaky_relu(x, slope),
        )
        for slope in (0.2, 0.0, -0.3)
    },
    **{
        f"elu {a} {s} {i}": (
            lambda w, x, y, a=a, s=s, i=i: w("elu", x, alpha=a, scale=s, input_scale=i),
            lambda x, y, a=a, s=s, i=i: torch.ops.aten.elu(x, a, s, i),
        )
        for a, s, i in ((1.0, 1.0, 1.0), (-0.7, 1.0, 1.0), (0.0, 2.0, 1.0), (0.4, 1.5, 0.3), (0.4, 1.0, -0.2))
    },
    **{
        f"celu {a}": (lambda w, x, y, a=a: w("celu", x, alpha=a), lambda x, y, a=a: F.celu(x, a))
        for a in (1.0, 0.25, -8.0)  # whose inverses are exact: PyTorch rounds these to fp32
    },
    "selu": (lambda w, x, y: w("selu", x), lambda x, y: F.selu(x)),
    **{
        f"softplus {b} {t}": (
            lambda w, x, y, b=b, t=t: w("softplus", x, beta=b, threshold=t),
            lambda x, y, b=b, t=t: F.softplus(x, b, t),
        )
        for b, t in ((1.0, 20.0), (2.0, 1.0), (0.5, -1.0), (-1.0, 3.0))
    },
    "logsigmoid": (lambda w, x, y: w("logsigmoid", x), lambda x, y: F.logsigmoid(x)),
    "softsign": (lambda w, x, y: w("softsign", x), lambda x, y: F.softsign(x)),
    "tanhshrink": (lambda w, x, y: w("tanhshrink", x), lambda x, y: F.tanhshrink(x)),
    "softshrink": (lambda w, x, y: w("softshrink", x), lambda x, y: F.softshrink(x)),
    "softshrink 0": (lambda w, x, y: w("softshrink", x, threshold=0.0), lambda x, y: F.softshrink(x, 0.0)),
    "hardshrink": (lambda w, x, y: w("hardshrink", x), lambda x, y: F.hardshrink(x)),
    "hardshrink -1": (lambda w, x, y: w("hardshrink", x, threshold=-1.0), lambda x, y: F.hardshrink(x, -1.0)),
    "threshold": (lambda w, x, y: w("threshold", x, threshold=0.5, value=-2.0), lambda x, y: F.threshold(x, 0.5, -2.0)),
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
    "masked_fill": (
        lambda w, x, y: w("masked_fill", x, y, value=-1.5),
        lambda x, y: x.masked_fill(y != 0, -1.5),
    ),
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
