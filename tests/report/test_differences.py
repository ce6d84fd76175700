"""What `mbc diff` prints of figures, and what its page says of them."""

from __future__ import annotations

import re

from mbc.plan.diff import Change, PlanDiff, diff_plans
from mbc.plan.model import COPY_STREAMS
from mbc.report.differences import diff_text
from mbc.report.html.diff_page import diff_page
from mbc.report.html.diff_words import diff_answers
from mbc.report.html.facts import facts_of
from mbc.units import show_time
from tests.report.plans import PLANS


def test_a_plan_that_names_no_engine_of_cudnn_does_not_say_none():
    text = diff_text(PlanDiff((Change("cudnn", 0, 91900),), (), (), ()), "a", "b")
    (row,) = (line for line in text.splitlines() if line.startswith("cudnn"))
    assert row.split()[1:3] == ["any", "9.19.0"]


def test_figures_are_called_as_on_the_page_of_a_plan():
    page = diff_page(PLANS["kept"](), PLANS["recomputed"](), "a", "b")
    named = re.findall(r"<tr><td>(.*?)</td>", page)
    assert {"training step", "training step, at least", "arena", "budget", "peak live bytes"} <= set(named)
    assert not {"train", "train low", "train high", "live", "floor", "fastest", "least"} & set(named)


def test_unlike_measured_shares_are_told_without_judging_the_difference():
    text = diff_text(PlanDiff((Change("measured_share", 0.99, 0.68),), (), (), ()), "a", "b")
    assert "note: 99 % of the step of a is measured, 68 % of that of b: their times differ in part by errors" in text
    assert "note:" not in diff_text(PlanDiff((Change("measured_share", 0.99, 0.9),), (), (), ()), "a", "b")


def test_a_diff_sums_time_by_family_first():
    kept, offloaded = (facts_of(plan, plan.train) for plan in (PLANS["kept"](), PLANS["offloaded"]()))
    told = {one.question: one for one in diff_answers(diff_plans(kept.plan, offloaded.plan), kept, offloaded)}
    where = told["Where did the time go?"]
    recompute_us = sum(one.time_us for one in offloaded.techniques.recomputed)
    copies_us = sum(one.work.time_us for one in offloaded.program.launches if one.stream in COPY_STREAMS)
    assert recompute_us > 0 and copies_us > 0
    assert f"recomputing +{show_time(recompute_us)}, other kernels " in where.answer
    assert f"copies +{show_time(copies_us)}" in where.answer
    moved = told["What is kept, recomputed or offloaded otherwise?"].details
    assert moved[-1].text.startswith("8 of ") and len(moved) == 9
