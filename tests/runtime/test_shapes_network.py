"""Free parameters, broadcasting, operations on shapes and along axes: planned, within budgets, divided, trained."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.hardware.streams import Space
from mbc.ir.types import Precision
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from mbc.source import Source
from tests.runtime.nets import SHAPES


@functools.cache
def planned(share: float = 0.0, precision: str = "fp32", micro_batch: int = 0, offload: bool = True) -> Plan:
    """Return the plan within a share of the arena of the plan without a limit; 0: no limit."""
    settings: tuple[tuple[str, str], ...] = (("train.precision", precision),)
    if share:
        free = planned(precision=precision).predictions
        settings += (("memory.device", f"{free.overhead_bytes + int(share * free.arena_bytes)} B"),)
    without = frozenset(() if offload else ("offload",))
    options = Options(gpu="h200", settings=settings, micro_batch=micro_batch, without=without)
    return compile_plan(Source("shapes.mbc", SHAPES), options)


def losses(plan: Plan, steps: int = 8) -> list[float]:
    rng = np.random.default_rng(0)
    image, target = rng.standard_normal((8, 3, 12, 12)).astype(np.float32), rng.integers(0, 5, 8)
    with Module(plan, seed=1, device="cpu") as net:
        return [float(net.step(image, target, lr=0.02)) for _ in range(steps)]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_it_trains(precision: Precision):
    history = losses(planned(precision=precision))
    assert history[-1] < 0.5 * history[0]


@pytest.mark.parametrize("offload", [False, True])
def test_within_a_budget_it_computes_the_same(offload: bool):
    plan = planned(0.7, offload=offload)
    assert plan.predictions.arena_bytes <= 0.7 * planned().predictions.arena_bytes
    if not offload:
        assert all(buffer.space is Space.ARENA for buffer in plan.buffers)
    np.testing.assert_allclose(losses(plan, 2), losses(planned(), 2), rtol=1e-5)


def test_in_micro_batches_it_computes_the_same():
    np.testing.assert_allclose(losses(planned(micro_batch=4), 2), losses(planned(), 2), rtol=1e-5)


def test_a_checkpoint_has_the_names_of_free_parameters():
    with Module(planned(), seed=1, device="cpu") as net:
        names = set(net.state_dict())
    assert {"position", "layer_scaled0.gamma"} <= names
