"""Tensors that belong to no layer: their names, their initial values, and where they may stand."""

from __future__ import annotations

import pytest

from mbc.frontend.lower import Lowered, lower
from mbc.frontend.parse import parse
from mbc.ir.graph import Initializer, Optimizer, ParameterGroup, Role
from mbc.ir.parameter_groups import settings_of
from mbc.ir.types import DType, Precision
from mbc.passes.training_step import differentiate
from mbc.source import Source


def lowered(body: str, before: str = "") -> Lowered:
    text = f"""{before}
network n(batch = 4) {{
  input x[batch, 3, 2, 2] : float
  input target[batch] : class
  {body}
  logits = y |> linear(5) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}}"""
    return lower(parse(Source("n.mbc", text)))


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("y = x * parameter(3)", ["parameter0"]),
        ("y = x * parameter(3) @gamma", ["gamma"]),
        ("gamma = parameter(3)\n  y = x * gamma + gamma", ["gamma"]),
        ("y = x + parameter((1, 3, 2, 2)) + parameter((2, 2))", ["parameter0", "parameter1"]),
        ("y = (x, parameter(3)) |> mul", ["parameter0"]),
        ("y = x |> scaled", ["scaled0.gamma"]),
    ],
)
def test_a_free_parameter_has_the_name_it_is_bound_to(body: str, names: list[str]) -> None:
    network = lowered(body, "block scaled on x {\n  return x * parameter(3, value=0.5) @gamma\n}").network
    assert [s.value for s in network.states] == [*names, "head.weight", "head.bias"]
    assert all(network.values[name].role is Role.PARAMETER for name in names)


def test_free_tensors_start_with_their_initial_value() -> None:
    body = "y = x * parameter(3, value=0.25) + parameter((1, 3, 2, 2), std=0.02) + constant((2, 2), 1.5) @shift"
    network = lowered(body).network
    starts = {s.value: s.initializer for s in network.states}
    assert starts["parameter0"] == Initializer("constant", 0.25)
    assert starts["parameter1"] == Initializer("normal", 0.02)
    assert starts["shift"] == Initializer("constant", 1.5)
    assert network.values["shift"].role is Role.STATISTIC


def test_groups_and_weight_decay_see_a_free_parameter() -> None:
    network = lowered("y = x * parameter(3) @gamma").network
    groups = (ParameterGroup("gam*", rate=0.5),)
    optimizer = Optimizer(weight_decay=1.0, no_decay="norm_and_bias", groups=groups)
    settings = settings_of(optimizer, network.values["gamma"])
    assert (settings.rate, settings.weight_decay) == (0.5, 0.0)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_its_gradient_is_of_the_type_of_parameters(precision: Precision) -> None:
    """The gradient is fp32 for a parameter used along an axis, added to a row, or passed through an operation."""
    body = "g = parameter(3)\n  p = parameter((1, 3, 2, 2))\n  y = x * g + (p |> tanh) + p"
    graph = differentiate(lowered(body).network, Optimizer(), precision)
    for name in ("g", "p"):
        (update,) = (op for op in graph.train if op.name == f"{name}.update")
        assert graph.values[update.inputs[1]].type.dtype is DType.FP32
    assert dict(graph.updates)["g"] == "next.g"


def test_constants_do_not_change() -> None:
    graph = differentiate(lowered("y = x * constant(3, 2)").network, Optimizer(), Precision.FP32)
    assert "constant0" not in dict(graph.updates)
    assert "constant0" in {s.value for s in graph.states}
