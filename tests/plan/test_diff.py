from __future__ import annotations

from dataclasses import replace

from mbc.plan.diff import diff_plans
from mbc.plan.model import Kernel
from mbc.plan.summary import summarise
from tests.plan.chains import random_plan

PLAN = random_plan(3)


def test_a_plan_and_itself():
    diff = diff_plans(PLAN, PLAN)
    assert diff.same and not diff.operations


def test_totals():
    faster = replace(
        PLAN,
        target=replace(PLAN.target, gpu="T4", profile="a profile of a T4"),
        predictions=replace(PLAN.predictions, train_us=1.5, overhead_bytes=7),
    )
    changes = {c.name: (c.before, c.after) for c in diff_plans(PLAN, faster).totals}
    assert changes == {
        "gpu": ("H200", "T4"),
        "profile": ("", "a profile of a T4"),
        "train_us": (PLAN.predictions.train_us, 1.5),
        "overhead_bytes": (400_000_000, 7),
    }


def test_an_operation_with_another_kernel():
    index = next(i for i, x in enumerate(PLAN.train.launches) if x.operations == ("l0",))
    launches = list(PLAN.train.launches)
    launches[index] = replace(launches[index], work=Kernel("cublaslt", "gemm", (("tile", 4),), 99.0, True))
    other = replace(PLAN, train=replace(PLAN.train, launches=tuple(launches)))
    (change,) = diff_plans(PLAN, other).operations
    assert (change.program, change.name, change.kind) == ("train", "l0", "linear")
    assert change.differs == ("kernel", "time") and not change.only_time
    assert "cublaslt/gemm tile=4" in change.after.kernels


def test_division_workspace_and_operations_of_one_plan_only():
    diff = diff_plans(random_plan(3), random_plan(4))
    aspects = {aspect for change in diff.operations for aspect in change.differs}
    assert {"micro_batches", "workspace", "time"} <= aspects
    names = {summary.name for _, summary in diff.only_before}
    assert names and names.isdisjoint(summary.name for _, summary in diff.only_after)


def test_summaries_cover_every_launch():
    for seed in range(10):
        plan = random_plan(seed)
        summaries = summarise(plan, plan.train)
        assert sum(len(s.micro_batches) for s in summaries) == len(plan.train.launches)
        assert abs(sum(s.time_us for s in summaries) - sum(x.work.time_us for x in plan.train.launches)) < 1e-6
        assert [s.first_launch for s in summaries] == sorted(s.first_launch for s in summaries)
        assert len({s.name for s in summaries}) == len(summaries)
        for s in summaries:
            assert s.kind in ("convert", "copy") or sum(s.micro_batches) == plan.graph.batch * (
                1 if len(s.micro_batches) == 1 or sum(s.micro_batches) == plan.graph.batch else 0
            )
