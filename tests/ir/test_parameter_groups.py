"""The parameters that a group names, and the settings of each parameter's update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.ir.graph import Optimizer, ParameterGroup, TrainingGraph
from mbc.ir.parameter_groups import NORM_AND_BIAS, is_trained, matches, settings_of
from mbc.ir.text import optimizer_summary, optimizer_text
from mbc.ir.types import Precision
from mbc.ops.update import AdamW, Guard, Sgd
from mbc.passes.check_graph import verify_training
from mbc.passes.training_step import differentiate
from tests.ir.execution import draw, new_control, parameter_gradients, step
from tests.ir.networks import small
from tests.passes.test_training_step import NETWORKS

GROUPS = (
    ParameterGroup("head.*", rate=10.0),
    ParameterGroup("*.bias", weight_decay=0.5),
    ParameterGroup("head.bias", 2.0),
)
RULE = Optimizer(momentum=0.9, weight_decay=0.1, no_decay=NORM_AND_BIAS, groups=GROUPS)


def graph_of(rule: Optimizer) -> TrainingGraph:
    graph = differentiate(small(), rule, Precision.FP32)
    verify_training(graph)
    return graph


@pytest.mark.parametrize(
    ("pattern", "name", "matching"),
    [
        ("head.*", "head.weight", True),
        ("head", "head.weight", False),
        ("*.bias", "layer1.conv2.bias", True),
        ("layer[12].*", "layer3.conv.weight", False),
        ("conv?.weight", "conv1.weight", True),
        ("HEAD.*", "head.weight", False),
    ],
)
def test_patterns_fit_whole_names(pattern: str, name: str, matching: bool) -> None:
    assert matches(name, pattern) is matching


def test_the_last_group_that_gives_a_setting_counts() -> None:
    values = small().values
    names = ("conv1.weight", "bn1.weight", "bn1.bias", "head.bias")
    settings = {name: settings_of(RULE, values[name]) for name in names}
    assert {name: (s.rate, s.weight_decay) for name, s in settings.items()} == {
        "conv1.weight": (1.0, 0.1),
        "bn1.weight": (1.0, 0.0),
        "bn1.bias": (1.0, 0.5),
        "head.bias": (2.0, 0.5),
    }


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_every_update_has_the_settings_of_its_parameter(kind: str) -> None:
    graph = graph_of(Optimizer(kind, 0.9, weight_decay=0.1, no_decay=NORM_AND_BIAS, groups=GROUPS))
    attributes = {op.inputs[0]: op.attributes for op in graph.train if op.kind == f"{kind}_update"}
    assert len(attributes) == 5
    for name, a in attributes.items():
        assert isinstance(a, (Sgd, AdamW))
        own = settings_of(RULE, graph.values[name])
        assert (a.rate, a.weight_decay) == (own.rate, own.weight_decay)


def test_the_text_has_the_differences_and_nothing_else() -> None:
    groups = 'group("head.*", rate=10), group("*.bias", weight_decay=0.5), group("head.bias", rate=2)'
    beside = f"no_decay=norm_and_bias, {groups}"
    assert optimizer_text(RULE) == f"sgd(momentum=0.9, nesterov=false, weight_decay=0.1), {beside}"
    assert optimizer_summary(RULE) == f"sgd, {beside}"
    assert optimizer_summary(Optimizer("adamw")) == "adamw"
    assert optimizer_summary(Optimizer(frozen=("head.*", "bn1.*"))) == 'sgd, frozen=("head.*", "bn1.*")'
    assert optimizer_summary(Optimizer(clip_norm=1.0, clip_value=0.5)) == "sgd, clip_norm=1, clip_value=0.5"
    assert optimizer_summary(Optimizer(ema=0.9999, accumulate=4)) == "sgd, ema=0.9999, accumulate=4"


def test_frozen_parameters_have_no_gradient_update_or_momentum() -> None:
    graph = graph_of(replace(RULE, groups=(), frozen=("conv1.*", "bn1.bias")))
    assert {op.inputs[0] for op in graph.train if op.kind == "sgd_update"} == {"bn1.weight", "head.weight", "head.bias"}
    changed = {state for state, _ in graph.updates}
    assert {"bn1.running_mean", "bn1.running_var"} < changed
    assert changed.isdisjoint({"conv1.weight", "bn1.bias"}) and "conv1.weight.momentum" not in graph.values
    assert {"conv1.weight", "bn1.bias"} < {state.value for state in graph.states}
    names = {op.name for op in graph.train}
    assert "conv1.backward_filter" not in names and "bn1.backward" not in names
    assert "bn1.backward_reduce" in names  # for the gradient of bn1.weight


def test_nothing_before_the_first_trained_parameter_has_a_backward_pass() -> None:
    graph = graph_of(Optimizer(frozen=("conv1.*", "bn1.*")))
    assert {op.name for op in graph.train if "backward" in op.kind} == {"loss1.backward", "head.backward_filter"}
    assert not any(op.kind == "max_pool" and len(op.outputs) > 1 for op in graph.train)  # no indices are kept


def test_a_loss_of_frozen_parameters_is_refused() -> None:
    with pytest.raises(MbcError, match=r"MBC051.*depends on no parameter that is not frozen"):
        differentiate(small(), Optimizer(frozen=("*",)), Precision.FP32)


@pytest.mark.parametrize("frozen", [("conv*.weight",), ("bn*",), ("*.bias", "bn1.*"), ("*1.*", "*2.*", "embed.*")])
@pytest.mark.parametrize("name", ["residual_two_losses", "shared_layers", "unet"])
def test_other_gradients_do_not_change(name: str, frozen: tuple[str, ...]) -> None:
    network = NETWORKS[name]()
    whole = differentiate(network, Optimizer(), Precision.FP64)
    rule = Optimizer(frozen=frozen)
    graph = differentiate(network, rule, Precision.FP64)
    verify_training(graph)
    start = draw(whole, np.random.default_rng(4))
    control = new_control(step=9, seed=3)
    everything, some = (parameter_gradients(g, step(g, start, control)) for g in (whole, graph))
    assert set(some) == {p for p in everything if is_trained(rule, network.values[p])} != set(everything)
    assert all(np.array_equal(some[p], everything[p]) for p in some)


def test_a_clipped_norm_sees_all_gradients_and_a_clipped_value_none() -> None:
    for precision, clip, seen in (("fp32", "clip_norm", 5), ("fp32", "clip_value", 0), ("fp16", "clip_norm", 5)):
        rule = replace(Optimizer(), **{clip: 0.5})
        graph = differentiate(small(), rule, Precision(precision))
        verify_training(graph)
        (guard,) = (op for op in graph.train if op.kind == "guard")
        assert guard.attributes == Guard(rule.clip_norm)
        assert len(guard.inputs[2:]) == seen
        assert {op.attributes for op in graph.train if op.kind == "sgd_update"} == {Sgd(clip_value=rule.clip_value)}
