"""Planning warns of the plans that it returns, and of no plan that it only compares or tries."""

from __future__ import annotations

import pytest

from mbc import planner
from mbc.compiler import compile_plans, try_plan
from mbc.options import Options, RankGpu
from mbc.plan.model import Plan
from mbc.source import Source
from tests.optimize.planned import NETWORKS

SOURCE = Source("net.mbc", NETWORKS["residual"])
SERIAL = frozenset({"concurrent_stream"})


@pytest.fixture
def warned_of(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans that are examined for a warning."""
    plans: list[Plan] = []
    monkeypatch.setattr(planner, "warn_without_room", lambda plan, _: plans.append(plan))
    return plans


def test_trials_for_the_rows_of_unlike_gpus_are_not_warned_of(warned_of: list[Plan]) -> None:
    gpus = (RankGpu("h200"), RankGpu("t4"))
    returned = compile_plans(SOURCE, Options(gpus=2, rank_gpus=gpus, without=SERIAL))
    assert len(returned) == 2 and tuple(warned_of) == returned


def test_a_probe_is_not_warned_of(warned_of: list[Plan]) -> None:
    options = Options("h200", without=SERIAL)
    try_plan(SOURCE, options)
    assert not warned_of
    assert compile_plans(SOURCE, options) == tuple(warned_of)
