"""Squeeze-excitation, stochastic depth, layer and group normalisation, resizing: planned, within budgets, trained."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from mbc.source import Source
from tests.runtime.nets import MOBILE


@functools.cache
def planned(share: float = 0.0) -> Plan:
    """Return the plan within a share of the arena of the plan without a limit; 0: no limit."""
    settings: tuple[tuple[str, str], ...] = ()
    if share:
        free = planned().predictions
        settings = (("memory.device", f"{free.overhead_bytes + int(share * free.arena_bytes)} B"),)
    options = Options(gpu="h200", settings=settings, without=frozenset(("offload",)))
    return compile_plan(Source("mobile.mbc", MOBILE), options)


def losses(plan: Plan, steps: int = 8) -> list[float]:
    rng = np.random.default_rng(0)
    image, target = rng.standard_normal((8, 3, 8, 8)).astype(np.float32), rng.integers(0, 5, 8)
    with Module(plan, seed=1, device="cpu") as net:
        return [float(net.step(image, target, lr=0.05)) for _ in range(steps)]


def test_it_trains():
    history = losses(planned())
    assert history[-1] < 0.5 * history[0]


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_within_a_budget_it_computes_the_same(share: float):
    plan = planned(share)
    assert plan.predictions.arena_bytes <= share * planned().predictions.arena_bytes
    np.testing.assert_allclose(losses(plan, 2), losses(planned(), 2), rtol=1e-5)
