"""Plans of ranks that share a mini-batch, within budgets and without some techniques.

The verifier proves each plan. Each plan fits, and sums every gradient once, in buckets that all ranks share.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from mbc.compiler import compile_plans
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.search.search import Limits, search
from mbc.options import TECHNIQUES, Options
from mbc.plan.collectives import collective_of, is_bucket, is_collective
from mbc.plan.file import dump_plan
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.plan.verify_ranks import verify_ranks
from mbc.source import Source
from tests.optimize.planned import NETWORKS
from tests.optimize.shared import kept, shared_table, sums_of

SERIAL = frozenset({"concurrent_stream"})


def budget(whole: Plan, share: float) -> int:
    """Return a budget: the least memory of all plans, plus a share of the rest of the memory without a limit."""
    least = whole.bounds.floor_bytes
    return whole.predictions.overhead_bytes + least + int(share * (whole.predictions.arena_bytes - least))


def within(name: str, share: float, without: frozenset[str] = SERIAL) -> Plan:
    available = budget(kept(name), share)
    plan = search(shared_table(name), Limits(available, without=without))
    verify_plan(plan)
    verify_ranks((plan,))
    assert plan.predictions.arena_bytes + plan.predictions.overhead_bytes <= available
    return plan


def summed(plan: Plan) -> list[str]:
    return sorted(name for launch in plan.train.launches if is_bucket(launch) for name in launch.operations)


@pytest.mark.parametrize("name", ["residual", "synchronised"])
def test_a_plan_does_not_depend_on_earlier_searches_of_its_table(name: str) -> None:
    rows = shared_table(name)
    table = CandidateTable(rows.graph, rows.device, rows.providers, rows.profile, rows.rules)
    within_least = Limits(budget(kept(name), 0.7), operation_bytes=0, without=SERIAL)
    first = search(table, within_least)
    assert search(table, Limits(without=SERIAL)) == search(rows, Limits(without=SERIAL))
    assert search(table, within_least) == first


def gathered(plan: Plan) -> list[str]:
    """Return the gathered values in order; each must be gathered once, even if it is recomputed."""
    launches = (w for w in plan.train.launches if is_collective(w) and not is_bucket(w))
    return [name for launch in launches for name in launch.operations]


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("residual", 0.8),
        ("dense", 0.6),
        ("synchronised", 0.7),
        *(
            pytest.param(name, share, marks=pytest.mark.exhaustive)
            for name, shares in (("residual", (0.5, 0.3)), ("dense", (0.2,)), ("digits", (0.8, 0.3)), ("vgg", (0.4,)))
            for share in shares
        ),
    ],
)
def test_smaller_budgets_are_kept_to(name: str, share: float) -> None:
    plan = within(name, share)
    assert gathered(plan) == [op.name for op in plan.graph.train if op.kind == "all_gather"]
    sums = sorted(op.name for op in plan.graph.train if op.kind == "all_reduce")
    assert summed(plan) == sums == summed(kept(name))
    # Less than is kept without a limit, so that something was recomputed, offloaded or given less workspace.
    assert plan.train != kept(name).train


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_without_a_technique(technique: str) -> None:
    """The budget is so small that techniques are needed."""
    plan = within("residual", 0.8, SERIAL | {technique})
    assert summed(plan) == summed(kept("residual"))


def table_with(name: str, **rules: object) -> CandidateTable:
    """Return candidates with changed rules."""
    table = shared_table(name)
    changed = replace(table.rules, **rules)  # type: ignore[arg-type]
    return CandidateTable(table.graph, table.device, table.providers, None, changed)


@pytest.mark.parametrize(
    "rules", [{"deterministic": True}, {"providers": ("cudnn", "mbc")}, {"micro_batch": 8}], ids=str
)
def test_other_rules(rules: dict[str, object]) -> None:
    """Rules about providers and micro-batches do not apply to sums over ranks."""
    plan = search(table_with("digits", **rules), Limits(1 << 40))
    verify_plan(plan)
    verify_ranks((plan,))
    assert summed(plan) == summed(kept("digits"))


@pytest.mark.parametrize("share", [1.0, pytest.param(0.6, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("gpus", [2, 3])
def test_ranks_of_other_rows_sum_alike(gpus: int, share: float) -> None:
    """There are 7 rows on two GPUs, 8 on three. Each plan has its own search, with the buckets of the first plan."""
    source = Source("residual.mbc", NETWORKS["residual"])
    settings = (("batch", str(5 + gpus)), ("train.precision", "bf16"))
    plans = compile_plans(source, Options("h200", settings, gpus))
    if share < 1:
        limit = max(budget(plan, share) for plan in plans)
        settings = (*settings, ("memory.device", f"{limit}B"))
        plans = compile_plans(source, Options("h200", settings, gpus))
    assert len(plans) == 2
    for plan in plans:
        verify_plan(plan)
    verify_ranks(plans)
    assert sums_of(plans[0]) == sums_of(plans[1])


def test_several_plans_sum_after_all_their_gathers() -> None:
    """Otherwise each plan could choose another order of gathers and sums, depending on its kernels."""
    source = Source("residual.mbc", NETWORKS["residual"])
    settings = (("train.precision", "bf16"), ("train.sync_batch_norm", "true"))
    one = compile_plans(source, Options("h200", (*settings, ("batch", "8")), 2))
    several = compile_plans(source, Options("h200", (*settings, ("batch", "7")), 2))
    assert (len(one), len(several)) == (1, 2)
    for plan in several:
        works = [work for work in map(collective_of, plan.train.launches) if work is not None]
        kinds = [work.name for work in works]
        assert kinds == sorted(kinds) and set(kinds) == {"all_gather", "all_reduce"}


def test_the_same_plan_in_every_process() -> None:
    script = (
        "from tests.optimize.conftest import plain_starts\n"
        "from tests.optimize.search.test_shared_within_budget import within\n"
        "from mbc.plan.file import dump_plan\n"
        "with plain_starts():\n"
        "    print(dump_plan(within('dense', 0.6)), end='')\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert outputs == {dump_plan(within("dense", 0.6))}
