"""The title and the cards of a page: those of a whole step, and of all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.compiler import compile_plan
from mbc.ir.graph import Ranks
from mbc.optimize.schedule.step_time import accumulate_us, step_us
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.report.html.diff_page import diff_page
from mbc.report.html.head import figures, plan_title, slowest
from mbc.report.html.notebook import plan_fragment
from mbc.report.html.plan_page import plan_page
from mbc.report.tables import OVERHEAD, measured_percent, totals_text
from mbc.source import Source
from mbc.units import show_size, show_time
from tests.report.pages import data_of
from tests.report.plans import CHAIN, PLANS, plans_of_unlike_gpus


@pytest.fixture(scope="module")
def accumulated() -> Plan:
    text = CHAIN.replace("sgd(momentum=0.9)", "sgd(momentum=0.9)  accumulate = 4")
    return compile_plan(Source("chain.mbc", text), Options(gpu="h200", settings=(("batch", "8"),)))


def ranks_of(plan: Plan) -> Ranks:
    assert plan.graph.ranks is not None
    return plan.graph.ranks


def test_throughput_and_step_are_those_of_all_mini_batches(accumulated):
    plan = accumulated
    whole_us = plan.predictions.train_us + 3 * accumulate_us(plan)
    by_name = {one.name: one for one in figures(plan)}
    step, last = by_name["training step, predicted"], by_name["last mini-batch of a step, predicted"]
    assert step.value.lstrip("~") == show_time(whole_us) and last.value.lstrip("~") == show_time(
        plan.predictions.train_us
    )
    assert step.note.startswith("32 rows in 4 mini-batches: 3 of ")
    per_second = f"{32e6 / whole_us:,.0f}"
    assert by_name["throughput"].value == f"{per_second} images/s"
    assert f"{per_second} samples/s" in totals_text(plan) and f"{per_second} images/s" in plan_fragment(plan)
    assert data_of(plan_page(plan))["plan"]["samples_per_s"] == pytest.approx(32e6 / whole_us)


def test_a_diff_compares_whole_steps(accumulated):
    kept = PLANS["kept"]()
    page = diff_page(kept, accumulated, "a", "b")
    whole_us = step_us(accumulated)
    assert f"The step takes ~{show_time(kept.predictions.train_us)} (" in page and ") by the first plan and" in page
    assert f" by the first plan and ~{show_time(whole_us)} (" in page and ") by the second" in page
    assert f"Its last mini-batch takes {show_time(kept.predictions.train_us)}, then " in page
    assert "Its last mini-batch" not in diff_page(kept, PLANS["recomputed"](), "a", "b")
    assert "of the last mini-batch of a step." in plan_page(accumulated)


def test_one_mini_batch_has_no_words_about_several():
    plan = PLANS["kept"]()
    by_name = {one.name: one for one in figures(plan)}
    assert "last mini-batch of a step, predicted" not in by_name
    assert by_name["training step, predicted"].value.lstrip("~") == show_time(plan.predictions.train_us)


def test_several_gpus_are_all_named_and_the_slowest_tells_the_step():
    plan, other = plans_of_unlike_gpus()
    assert step_us(plan) != step_us(other)
    rows = ranks_of(plan).rows
    gpus = f"{plan.target.gpu} {rows[0]} rows + {other.target.gpu} {rows[1]} rows"
    assert plan_title(plan, [other]).endswith(f"2 GPUs: {gpus}")
    assert plan_title(other, [plan]) == plan_title(plan, [other])
    assert plan_title(plan).endswith(f"{plan.target.gpu} {rows[0]} rows + another {rows[1]} rows")
    for pair in ((plan, other), (other, plan)):
        slow = max(pair, key=step_us)
        assert slowest(pair[0], pair[1:]) is slow
        by_name = {one.name: one for one in figures(pair[0], pair[1:])}
        step = by_name["training step, predicted"]
        assert step.value.lstrip("~") == show_time(step_us(slow)) and f"rank {ranks_of(slow).members[0]}" in step.note
        assert by_name["throughput"].value == f"{64e6 / step_us(slow):,.0f} images/s"
        assert gpus in by_name["GPUs"].note
        for one in pair:
            card = by_name[f"rank {ranks_of(one).members[0]}, {one.target.gpu}"]
            assert card.value.startswith(f"{rows[ranks_of(one).members[0]]} rows, ")
            assert show_time(step_us(one)) in card.value
            assert f"{show_size(one.predictions.arena_bytes)} arena" in card.note
            assert f"budget {show_size(one.budget_bytes)}" in card.note
    # Both sides of a diff name all GPUs, too, and which of them is compared.
    page = diff_page(plan, other, "a", "b", [other], [plan])
    assert f"{plan_title(plan, [other])}; compared: rank 0" in page
    assert f"{plan_title(plan, [other])}; compared: rank 1" in page


def test_equal_ranks_are_counted():
    plan, _ = plans_of_unlike_gpus()
    ranks = replace(ranks_of(plan), rows=(16, 16, 32), members=(0, 1))
    plan = replace(plan, graph=replace(plan.graph, ranks=ranks))
    assert plan_title(plan).endswith(f"3 GPUs: 2 x {plan.target.gpu} 16 rows + another 32 rows")


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (0.001, "under 1 %"), (0.5, "50 %"), (0.999, "over 99 %"), (1.0, "100 %")]
)
def test_a_partly_measured_request_is_not_complete(share, text):
    assert measured_percent(share) == text


def test_bounds_name_their_subject():
    plan = PLANS["kept"]()
    by_name = {one.name: one for one in figures(plan)}
    serial, least = by_name["best serial schedule"], by_name["least arena of any plan"]
    assert serial.note == "lower bound on one stream, for any budget"
    assert least.value == show_size(plan.bounds.floor_bytes)
    assert least.note.startswith(f"while {plan.bounds.floor_operation} runs")
    assert f" overhead ({OVERHEAD})" in by_name["device memory"].note
