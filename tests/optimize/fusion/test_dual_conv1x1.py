"""Two 1x1 GEMMs in one launch, for x and its gradient, before the reductions of batch normalisation.

They are used if they were measured, with equal results; recomputed values are not kept.
"""

from __future__ import annotations

from collections import Counter

import pytest

from mbc.kernels.cuda.conv import conv1x1, conv1x1_bn_backward, dual_conv1x1
from mbc.optimize import effort
from mbc.optimize.search.profiling_requests import needs
from mbc.options import Policy
from mbc.plan.model import Kernel, Plan
from tests.optimize.fusion.test_fused_gradients import SOURCE, Measured, planned
from tests.optimize.planned import H200, graph_of, trained

SHARE = 0.65  # of the arena without a limit
MAKERS = conv1x1.NOT_STORED[0].bitwise_equal_to
KERNELS = (*conv1x1.NOT_STORED, conv1x1_bn_backward.KERNELS[-1], *dual_conv1x1.KERNELS)
LAYERS = tuple(f"bottleneck{i}.wide" for i in range(3))  # whose images are larger than their weights


def launched(plan: Plan) -> Counter[str]:
    """Return the number of launches of each kernel that recomputes values without writing them."""
    names = (launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel))
    return Counter(name for name in names if name in {kernel.name for kernel in KERNELS})


def kept(plan: Plan) -> set[str]:
    """Return the layers whose results are read after the loss."""
    layer_of = {value: o.name for o in graph_of(SOURCE).train if o.name in LAYERS for value in o.outputs}
    behind = next(i for i, launch in enumerate(plan.train.launches) if "backward" in "".join(launch.operations))
    values = (plan.buffers[a.buffer].value for launch in plan.train.launches[behind:] for a in launch.accesses)
    return {layer_of[value] for value in values if value in layer_of}


@pytest.mark.parametrize("signs", [False, True], ids=["by output", "by masks"])
def test_neither_is_written(signs: bool):
    """One of two added gradients is computed inside the launch; the other one, of `down`, has its own launch."""
    plan, without = planned(Measured(inside=True, signs=signs)), planned(Measured(signs=signs))
    form = "_masked" if signs else ""
    assert launched(plan) == {f"dual_conv1x1_add_relu_bn_reduce{form}": 3, "conv1x1_unstored_bn_reduce": 1}
    assert kept(without) == set(LAYERS) and not kept(plan) and not launched(without)
    works = {launch.operations[:1]: launch.work for launch in reversed(plan.train.launches)}
    makers = [works[layer,] for layer in LAYERS]
    assert {maker.name for maker in makers if isinstance(maker, Kernel)} <= set(MAKERS)
    assert plan.predictions.train_us < without.predictions.train_us
    assert trained(plan) == trained(without)


def test_fused_rematerialization_of_relus_output(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(effort, "SLOW_STEP_WORK", 0)  # otherwise a step without fusion groups is faster
    plan = planned(Measured(inside=True), SHARE)
    assert launched(plan)["dual_conv1x1_add_relu_remat_bn_reduce_two_grads"]
    assert plan.bounds.within_budget_us <= plan.predictions.train_us
    assert trained(plan) == trained(planned(Measured()))


def test_all_are_asked_for():
    """These launches are also requested for a network in which nothing is added to the last block's gradient."""
    steps = graph_of(SOURCE), graph_of(SOURCE.replace("bottleneck(2)", "bottleneck()"))
    kinds = {need.undivided.kind for step in steps for need in needs(step, H200, Policy.UNDIVIDED)}
    assert {kernel.kind for kernel in KERNELS} - kinds == set()
