"""Biases before an instance norm: dropped, with a gradient of zero; all other results are the same."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.ir.graph import Network
from mbc.passes import training_step
from tests.ir.execution import draw, step
from tests.passes.small import graph

NORMED = "  y = image |> conv(4, 3, bias=true) |> instance_norm |> relu |> conv(3, 1, bias=true)"


def test_a_step_is_the_same_without_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    short = graph(NORMED, "fp64")

    def unchanged(network: Network) -> tuple[Network, tuple[str, ...]]:
        return network, ()

    monkeypatch.setattr(training_step, "without_vain_biases", unchanged)
    plain = graph(NORMED, "fp64")
    assert [sum(op.kind == "bias_add" for op in of.train) for of in (plain, short)] == [3, 2]
    given = draw(plain, np.random.default_rng(5))
    actual, wanted = step(short, given), step(plain, given)
    assert dict(short.updates).keys() == dict(plain.updates).keys()
    for state, after in plain.updates:
        np.testing.assert_allclose(actual[dict(short.updates)[state]], wanted[after], 1e-9, 1e-12, err_msg=state)
    for name in plain.outputs:
        np.testing.assert_allclose(actual[name], wanted[name], 1e-9, 1e-12)


@pytest.mark.parametrize(
    "body",
    [
        "  y = image |> conv(4, 3, bias=true) |> bn |> relu",
        "  a = image |> conv(4, 3, bias=true)\n  y = (a |> instance_norm, a) |> add",
        "  y = image |> conv(4, 3, bias=true) |> group_norm(2)",
    ],
)
def test_other_biases_stay(body: str) -> None:
    assert sum(op.kind == "bias_add" for op in graph(body).train) == 2
