"""What `mbc diff` prints of single figures."""

from __future__ import annotations

from mbc.plan.diff import Change, PlanDiff
from mbc.report.differences import diff_text


def test_a_plan_that_names_no_engine_of_cudnn_does_not_say_none():
    text = diff_text(PlanDiff((Change("cudnn", 0, 91900),), (), (), ()), "a", "b")
    (row,) = (line for line in text.splitlines() if line.startswith("cudnn"))
    assert row.split()[1:3] == ["any", "9.19.0"]
