"""Values that are not finite, in trainings that recompute, offload, keep states in host memory and update early."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from mbc.ir.graph import Role
from mbc.ops import KINDS
from mbc.plan.model import Copy, Plan
from mbc.runtime.launch_order import Transfers
from mbc.runtime.module import Module
from tests.optimize.planned import kept_plan
from tests.optimize.remat.test_apply_decisions import everything_at_once


def test_the_plans_do_all_of_it() -> None:
    for network in ("residual", "dense"):
        plan = everything_at_once(network)
        kinds = {operation.name: operation.kind for operation in plan.graph.train}
        names = [name for launch in plan.train.launches for name in launch.operations]
        updates = [KINDS[kinds[name]].updates != () for name in names]
        assert any(isinstance(launch.work, Copy) for launch in plan.train.launches)
        assert len(names) > len(set(names)), "something is recomputed"
        last = max(i for i, updating in enumerate(updates) if not updating)
        assert updates[:last].count(True) > 1, "beside the guard, a parameter is updated before the last gradient"


def inputs(plan: Plan, seed: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(seed)
    for name in plan.graph.inputs:
        kind = plan.graph.values[name].type
        if name == "image":
            yield generator.normal(size=kind.shape).astype(np.float32)
        else:
            yield generator.integers(0, 3, kind.shape)


def states(net: Module) -> dict[str, np.ndarray]:
    return {name: net.state(name) for name in net.states}


@pytest.mark.parametrize("transfers", list(Transfers))
@pytest.mark.parametrize("network", ["residual", "dense"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(network: str, transfers: Transfers, bad: float) -> None:
    plan = everything_at_once(network)
    net = Module(plan, device="cpu", transfers=transfers)
    other = Module(kept_plan(network), device="cpu")
    for module in (net, other):
        module.step(*inputs(plan, 1), lr=0.1)
    before = states(net)
    image, *rest = inputs(plan, 2)
    image[0, 0, 0, 0] = bad
    assert not math.isfinite(net.step(image, *rest, lr=0.1))
    other.step(image, *rest, lr=0.1)
    assert net.control["skipped"] == 1 and net.control["updates"] == 1
    for name, array in before.items():
        np.testing.assert_array_equal(array, net.state(name), err_msg=name)
    # Then it continues as if nothing had happened.
    assert float(net.step(*inputs(plan, 3), lr=0.1)) == float(other.step(*inputs(plan, 3), lr=0.1))
    for name, array in states(other).items():
        np.testing.assert_array_equal(array, net.state(name), err_msg=name)


@pytest.mark.parametrize("transfers", list(Transfers))
def test_a_gradient_that_is_not_finite_stops_every_further_update(transfers: Transfers) -> None:
    """A loss is finite, but a gradient is not: the states that it reaches are lost, and later steps change nothing."""
    plan = everything_at_once("residual")
    net = Module(plan, device="cpu", transfers=transfers)
    parameters = [n for n in net.states if plan.graph.values[n].role is Role.PARAMETER]
    last = next(n for n in parameters if n.endswith("weight") and len(net.states[n]) == 2)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], net.states[last])
    net.set_state(last, (1e36 * signs).astype(np.float32))
    for name in parameters:  # batch norm divides by the small deviation that these make
        if "conv" in name and name.endswith("weight"):
            net.set_state(name, net.state(name) / 100)
    assert math.isfinite(net.step(*inputs(plan, 1), lr=0.1))
    spoilt = {name for name in net.states if not np.isfinite(net.state(name)).all()}
    assert {"conv0.weight", "conv0.weight.momentum"} <= spoilt < set(net.states)
    before = states(net)
    for seed in (2, 3):
        assert not math.isfinite(net.step(*inputs(plan, seed), lr=0.1))
    assert net.control["skipped"] == 2
    for name, array in before.items():
        np.testing.assert_array_equal(array, net.state(name), err_msg=name)
