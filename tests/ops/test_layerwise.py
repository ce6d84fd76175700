"""LARS and LAMB against their definitions, written again in float64, over 50 steps of a network and alone."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.ir.types import DType, TensorType
from mbc.ops import KINDS
from mbc.ops.base import Array, ShapeError
from mbc.ops.control_record import CONTROL_TYPE
from mbc.ops.layerwise import LarsRatio
from mbc.ops.update import AdamW, Sgd
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.module import Module
from mbc.source import Source
from tests.runtime.nets import SMALL, batch

RATE = 0.05
LARS = {"momentum": 0.9, "weight_decay": 0.01, "trust": 0.02, "eps": 1e-8}
LAMB = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.05}


@cache
def plan_of(optimizer: str, precision: str = "fp64") -> Plan:
    text = SMALL.replace(" |> dropout(0.2)", "").replace("sgd(momentum=0.9, weight_decay=1e-3)", optimizer)
    return compile_plan(Source("small.mbc", text), Options(gpu="h200", settings=(("train.precision", precision),)))


def written(name: str, settings: dict[str, float]) -> str:
    given = ", ".join(f"{key}={value}" for key, value in settings.items())
    return f'{name}({given}) no_decay = norm_and_bias groups = group("head.weight", rate=2)'


def lars(p: Array, g: Array, memory: list[Array], decay: float, rate: float, step: int) -> Array:
    """Compute definition 1 of You et al. 2017; a parameter without weight decay is not adapted, as in timm."""
    (v,) = memory
    norm, gradient = np.sqrt((p * p).sum()), np.sqrt((g * g).sum())
    local = LARS["trust"] * norm / (gradient + decay * norm + LARS["eps"]) if decay and norm and gradient else 1.0
    v[...] = LARS["momentum"] * v + local * (g + decay * p)
    return p - rate * v


def lamb(p: Array, g: Array, memory: list[Array], decay: float, rate: float, step: int) -> Array:
    """Compute algorithm 2 of You et al. 2019, with bias correction and phi the identity."""
    m, v = memory
    m[...] = LAMB["beta1"] * m + (1 - LAMB["beta1"]) * g
    v[...] = LAMB["beta2"] * v + (1 - LAMB["beta2"]) * g**2
    r = m / (1 - LAMB["beta1"] ** step) / (np.sqrt(v / (1 - LAMB["beta2"] ** step)) + LAMB["eps"])
    u = r + decay * p
    norm, length = np.linalg.norm(p.ravel()), np.linalg.norm(u.ravel())
    return p - rate * (norm / length if decay and norm and length else 1.0) * u


@pytest.mark.parametrize(
    ("name", "precision"), [("lars", "fp64"), ("lamb", "fp64"), ("lars", "fp32"), ("lamb", "fp32")]
)
def test_fifty_steps_are_those_of_the_definition(name: str, precision: str):
    settings, rule = {"lars": (LARS, lars), "lamb": (LAMB, lamb)}[name]
    net = Module(plan_of(written(name, settings), precision), seed=3, device="cpu", shadow=False)
    # The gradients of the same weights, by a plan of the network that shows them in a momentum of zero.
    shown = Module(plan_of("sgd(momentum=0.9)"), seed=3, device="cpu", shadow=False)
    parameters = {n: array.astype(np.float64) for n, array in net.state_dict().items() if "running" not in n}
    memories = {n: [np.zeros_like(p) for _ in range(1 if name == "lars" else 2)] for n, p in parameters.items()}
    limit = 1e-10 if precision == "fp64" else 2e-4
    for step in range(1, 51):
        data = batch(step)
        for n, p in parameters.items():
            shown.set_state(n, p)
            shown.set_state(f"{n}.momentum", np.zeros_like(p))
        shown.step(*data, lr=0.0)
        for n, p in parameters.items():
            decay = settings["weight_decay"] if p.ndim > 1 else 0.0
            rate = RATE * (2 if n == "head.weight" else 1)
            parameters[n] = rule(p, shown.state(f"{n}.momentum"), memories[n], decay, rate, step)
        net.step(*data, lr=RATE)
    for n, p in parameters.items():
        np.testing.assert_allclose(net.state(n), p, rtol=limit, atol=limit, err_msg=n)


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_plans_are_verified_and_compute_each_ratio_in_one_launch(optimizer: str, precision: str):
    plan = plan_of(f"{optimizer} no_decay = norm_and_bias clip_norm = 1 ema = 0.9 accumulate = 2", precision)
    verify_plan(plan)
    launches = [x for x in plan.train.launches if any(name.endswith(".ratio") for name in x.operations)]
    assert [len(x.operations) for x in launches] == [3]
    kinds = {op.inputs[0]: op.kind for op in plan.graph.train if op.name.endswith(".update")}
    plain = "sgd_update" if optimizer == "lars" else "adamw_update"
    assert kinds["head.weight"] == f"{optimizer}_update" and kinds["head.bias"] == kinds["bn0.weight"] == plain


def test_operands_that_do_not_fit():
    p, ratio, other = (TensorType(shape, DType.FP32) for shape in ((3, 4), (1,), (4, 3)))
    for kind, attributes, inputs in (
        ("lars_ratio", LarsRatio(0.001, 1e-8, 0.1), (p, other, CONTROL_TYPE)),
        ("lars_update", Sgd(0.9), (p, p, CONTROL_TYPE, ratio)),
        ("lars_update", Sgd(), (p, p, CONTROL_TYPE, p)),
        ("lamb_ratio", AdamW(), (p, p, CONTROL_TYPE, p, other)),
        ("lamb_update", AdamW(), (p, CONTROL_TYPE, p, other, ratio)),
        ("lamb_update", AdamW(), (p, CONTROL_TYPE, p, p, other)),
    ):
        with pytest.raises(ShapeError):
            KINDS[kind].shape(attributes, inputs)
