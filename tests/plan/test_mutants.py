"""Plans of the search, changed a little: they are refused, or shown to compute the same results.

`benchmarks/plan_mutants.py` tries many more.
"""

from __future__ import annotations

import pytest

from tests.plan.campaign import KINDS, PLANS, Outcome, outcome, plan_of_kind

SEEDS = 3  # of each kind and plan: some 550 mutants that are others than their plans


@pytest.mark.parametrize("kind", KINDS)
def test_no_mutant_passes_unexplained(kind: str) -> None:
    outcomes = {(name, seed): outcome(name, kind, seed) for name in PLANS for seed in range(SEEDS)}
    wrong = {key: why for key, (what, why) in outcomes.items() if what is Outcome.WRONG}
    assert not wrong


def test_plans_are_those_that_were_tried() -> None:
    launches = {name: plan_of_kind(name).train.launches for name in PLANS}
    assert sum(len(launch.operations) > 1 for launch in launches["fused"]) > 5
    assert {"to_host", "to_device"} <= {launch.stream for launch in launches["offloading"]}
    names = [launch.operations for launch in launches["recomputing"] if launch.operations]
    assert len(names) > len(set(names)), "some operation runs twice"
    assert sum(launch.operations == launches["divided"][0].operations for launch in launches["divided"]) > 1
    assert sum(launch.stream == "concurrent" for launch in launches["concurrent"]) > 5
    assert any(getattr(launch.work, "measured", False) for launch in launches["measured"])
