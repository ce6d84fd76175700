"""The optimizer, metrics, GPU, precision and source that a plan names must agree with its graph and kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from mbc.compiler import compile_plan, compile_plans
from mbc.errors import MbcError
from mbc.ir.graph import Optimizer, ParameterGroup, State
from mbc.ir.types import Precision
from mbc.optimize.search.search import Limits, search
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.plan.verify_source import verify_source
from mbc.source import Source, Span
from tests.optimize.planned import planned_table
from tests.plan.campaign import ACCUMULATING, plan_of_kind
from tests.plan.mutate_graph import of_source

SGD = "sgd(momentum=0.9, nesterov=true, weight_decay=1e-2)"
LAMB = "lamb(beta1=0.8, beta2=0.95, eps=1e-5, weight_decay=0.02)"
LARS = "lars(momentum=0.8, weight_decay=1e-3, trust=2e-3, eps=1e-6)"
PLANS = {
    kind: search(planned_table(ACCUMULATING.replace(SGD, said), "accumulating"), Limits(1 << 40))
    for kind, said in (("sgd", SGD), ("adamw", LAMB.replace("lamb", "adamw")), ("lars", LARS), ("lamb", LAMB))
}
OTHER: dict[str, Any] = {
    "kind": "rmsprop",
    "no_decay": "",
    "groups": (ParameterGroup("linear*", 3.0),),
    "frozen": ("stem.*", "linear*"),
    "accumulate": 3,
}


def refused(plan: Plan, code: str, *words: str) -> None:
    with pytest.raises(MbcError) as caught:
        verify_plan(plan)
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in caught.value.message, caught.value


def with_optimizer(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, graph=replace(plan.graph, optimizer=replace(plan.graph.optimizer, **changes)))


@pytest.mark.parametrize("field", [field.name for field in fields(Optimizer)])
@pytest.mark.parametrize("kind", PLANS)
def test_each_field_of_the_optimizer_is_that_of_the_updates(kind: str, field: str) -> None:
    plan = PLANS[kind]
    verify_plan(plan)
    value = getattr(plan.graph.optimizer, field)
    other = OTHER[field] if field in OTHER else not value if isinstance(value, bool) else value + 0.25
    refused(with_optimizer(plan, **{field: other}), "MBC137")


def test_three_mini_batches_of_a_step_of_two() -> None:
    plan = with_optimizer(PLANS["sgd"], accumulate=3)
    refused(plan, "MBC137", "operation 'guard'", "its accumulate is 2, the optimizer's is 3")
    plain = plan_of_kind("recomputing")
    refused(with_optimizer(plain, accumulate=2), "MBC137", "its accumulate is 1, the optimizer's is 2")


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lars", "lamb"])
def test_the_kind_of_the_optimizer_is_that_of_the_updates(kind: str) -> None:
    for other, plan in PLANS.items():
        if other != kind:
            refused(with_optimizer(plan, kind=kind), "MBC137")


def test_a_guard_that_does_not_look_at_a_gradient() -> None:
    plan = PLANS["sgd"]
    train = tuple(replace(op, inputs=op.inputs[:-1]) if op.kind == "guard" else op for op in plan.graph.train)
    refused(replace(plan, graph=replace(plan.graph, train=train)), "MBC137", "it does not read ", "that updates")


def test_the_loss_scale_is_that_of_the_precision() -> None:
    graph = PLANS["sgd"].graph
    states = tuple(
        State(s.value, replace(s.initializer, value=2.0)) if s.value == "control" else s for s in graph.states
    )
    refused(replace(PLANS["sgd"], graph=replace(graph, states=states)), "MBC137", "the loss scale starts at 1.0")


@pytest.mark.parametrize("metric", ["next.control", "control", "logits", "image", "sum", "loss"])
def test_metrics_are_numbers_that_the_step_computes(metric: str) -> None:
    plan = plan_of_kind("recomputing")
    graph = plan.graph
    name = {"sum": next(op.outputs[0] for op in graph.train if op.kind == "sgd_update"), "loss": graph.loss}.get(
        metric, metric if metric in graph.values else graph.outputs[0]
    )
    refused(replace(plan, graph=replace(graph, metrics=(name,))), "MBC062", f"'{name}' is used as a metric")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "sm_75"}, "with architecture sm_75, but that GPU has sm_90"),
        ({"multiprocessors": 66}, "with multiprocessors 66, but that GPU has 132"),
        ({"gpu": "Tesla T4"}, "with architecture sm_90, but that GPU has sm_75"),
    ],
)
def test_the_gpu_is_the_plans(change: dict[str, Any], said: str) -> None:
    plan = plan_of_kind("recomputing")
    refused(replace(plan, target=replace(plan.target, **change)), "MBC138", said)


def test_kernels_of_another_architecture_are_refused() -> None:
    """Check an unknown GPU: its kernels say on what architecture they run."""
    plan = plan_of_kind("measured")
    target = replace(plan.target, gpu="NVIDIA Something", architecture="sm_60")
    refused(replace(plan, target=target), "MBC133", "cannot run it")


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.FP64])
def test_values_have_the_types_of_the_precision(precision: Precision) -> None:
    plan = plan_of_kind("fused" if precision is not Precision.BF16 else "recomputing")
    changed = replace(plan, graph=replace(plan.graph, precision=precision))
    with pytest.raises(MbcError) as caught:
        verify_plan(changed)
    assert caught.value.code in ("MBC133", "MBC137", "MBC138")  # kernels, the first loss scale, or types say so
    single = replace(plan, graph=replace(plan.graph, precision=Precision.FP64))
    refused(single, "MBC138", "the plan is of precision fp64, but ")


def test_the_source_gives_the_graph() -> None:
    source = Source("n.mbc", ACCUMULATING)
    asked = (("batch", "6"), ("train.ema", "none"), ("train.precision", "tf32"))
    for options in (Options("t4"), Options("h200", asked), Options("h200", (("batch", "12"),), gpus=3)):
        for plan in compile_plans(source, options):
            assert verify_source(load_plan(dump_plan(plan), "plan.json"))


@pytest.mark.parametrize(
    ("was", "new", "said"),
    [
        ("conv(4, 3, pad=1) @stem", "conv(5, 3, pad=1) @stem", "which has another value"),
        ("|> relu |> global", "|> gelu |> global", "is in the plan only"),
        ("momentum=0.9", "momentum=0.8", "which has another operation of a step, "),
        ("accumulate = 2", "accumulate = 3", "which has another operation of a step, "),
        ("@stem", "@stem |> nonsense", "has a source that does not compile: "),
    ],
)
def test_another_source_is_refused(was: str, new: str, said: str) -> None:
    plan = compile_plan(Source("n.mbc", ACCUMULATING), Options("t4"))
    assert ACCUMULATING.count(was) == 1
    with pytest.raises(MbcError, match="the plan of 'accumulating'") as caught:
        verify_source(of_source(plan, Source("n.mbc", ACCUMULATING.replace(was, new))))
    assert caught.value.code == "MBC139"
    assert said in caught.value.message


def test_another_setting_or_version_is_refused() -> None:
    plan = replace(compile_plan(Source("n.mbc", ACCUMULATING), Options("t4")), version="0.0.1")
    with pytest.raises(MbcError, match="the source's is") as caught:
        verify_source(replace(plan, settings=(("train.precision", "tf32"),)))
    assert caught.value.code == "MBC139"
    assert caught.value.remedy.startswith("verify it with mbc 0.0.1, which wrote it")


def test_a_plan_without_a_source_has_none_to_compare() -> None:
    plan = compile_plan(Source("n.mbc", ACCUMULATING), Options("t4"))
    graph = plan.graph
    values = {name: replace(value, span=None) for name, value in graph.values.items()}
    train, infer = (tuple(replace(op, span=None) for op in part) for part in (graph.train, graph.infer))
    bare = replace(plan, graph=replace(graph, values=values, train=train, infer=infer))
    assert not verify_source(bare)
    other = replace(graph.train[0], span=Span(Source("other.mbc", "network x {}"), 1, 1))
    two = replace(plan, graph=replace(graph, train=(other, *graph.train[1:])))
    with pytest.raises(MbcError, match="has 2 sources: "):
        verify_source(two)
