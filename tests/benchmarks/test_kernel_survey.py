"""The plans that benchmarks/kernel_survey.py makes, and the kernels that it counts in them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kernel_survey
from modules import example, examples
from record import Results


def test_every_example_is_planned_in_every_precision_once_and_without_a_budget_first():
    cases = list(kernel_survey.cases(kernel_survey.networks(())))
    names = [case.name for case in cases]
    assert len(names) == len(set(names))
    for job in examples():
        for precision in kernel_survey.PRECISIONS:
            assert {case.gpu for case in cases if (case.job, case.precision) == (job, precision)} == {"h200", "h100"}
    assert {"resnet depth=50 256 bf16 h200", "resnet depth=50 128 bf16 h100 in 40%"} <= set(names)
    within = [bool(case.share) for case in cases]
    assert within == sorted(within)
    assert {case.free.name for case in cases} == {case.name for case in cases if not case.share}


def test_a_row_counts_launches_by_kernel():
    kept = Results("kernel_survey", {}, {})
    free = kernel_survey.Case(example("digits"), 8, "bf16", "h200")
    row = kept.rows[free.name] = {"name": free.name, **kernel_survey.row_of(free, kept)}
    assert row["kernels"]["guard"] == 1 and row["kernels"]["bias_add"] > 1 and row["arena_bytes"] > 0
    refused = kernel_survey.row_of(kernel_survey.Case(free.job, 8, "bf16", "h200", share=0.01), kept)
    assert refused["refused"] == "MBC203" and not refused["kernels"]
    deleted = {"name": "older", "kernels": {"guard": 2, "no_kernel_of_today": 1}}
    evidence = kernel_survey.evidence([row, {"name": "other", **refused}, deleted], {"older"})
    chosen = {row["name"]: row for row in evidence}
    assert (chosen["guard"]["plans"], chosen["guard"]["imported"]) == (2, 1) and chosen["attention"]["plans"] == 0
    assert chosen["dropout"]["only"] and not chosen["bias_add_relu"]["only"] and not chosen["attention"]["only"]
    plans = [row["plans"] for row in evidence]
    assert plans == sorted(plans) and set(chosen) == set(kernel_survey.KERNELS)


def test_measurements_of_the_bundled_profiles_count_as_evidence():
    measured = kernel_survey.in_profiles()
    assert measured["relu"] and all(factor is None or factor >= 1 for row in measured.values() for factor in row)
