from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from mbc.ablation import Ablation
from mbc.fit import Probe
from mbc.fit import figures as figures_of
from mbc.hardware.streams import Stream
from mbc.plan.diff import diff_plans
from mbc.plan.memory import memory_curve
from mbc.plan.model import Kernel
from mbc.plan.summary import settings_words, summarise
from mbc.report.ablation import ablation_text
from mbc.report.columns import Column, cut, render
from mbc.report.differences import diff_text
from mbc.report.documents import diff_document, plan_document
from mbc.report.fit import batch_line
from mbc.report.html.answers import answers
from mbc.report.html.facts import facts_of
from mbc.report.html.head import figures
from mbc.report.html.packed_rows import Texts, rows_of
from mbc.report.html.program_data import program_data
from mbc.report.memory import sparkline
from mbc.report.show import plan_text
from mbc.report.tables import micro_batches, operations_table, over, totals_text
from mbc.units import show_range, show_time
from tests.plan.chains import random_plan
from tests.report.plans import PLANS

PLAN = random_plan(3, (Stream.COMPUTE, Stream.TO_HOST, Stream.TO_DEVICE))


def test_columns_are_aligned():
    text = render((Column("name"), Column("bytes", right=True)), [("a", "1"), ("bcd", "1000000")])
    assert text == "name    bytes\n----  -------\na           1\nbcd   1000000"


def test_tables_shrink_to_the_terminal():
    columns = (Column("name", shrinks=True), Column("kernel", shrinks=True), Column("time", right=True))
    rows = [("a" * 60, "b" * 30, "1.00 us")]
    for width in (200, 90, 60, 40):
        assert max(map(len, render(columns, rows, width).splitlines())) <= width
    assert "…" in render(columns, rows, 60)
    assert max(map(len, render(columns, rows, 5).splitlines())) == 8 + 8 + 7 + 4  # what must stay stays


@pytest.mark.parametrize(
    "width, text", [(20, "layer1.0.conv1"), (14, "layer1.0.conv1"), (9, "laye…onv1"), (1, "…"), (0, "")]
)
def test_cut(width, text):
    assert cut("layer1.0.conv1", width) == text
    assert cut("cudnn/convolution deterministic=0 engine=-1", 33) == "cudnn/convolution…engine=-1"


def test_rows_that_differ_in_the_middle_are_cut_apart():
    names = [f"stage.0.unit.{unit}.basic0.statistics" for unit in range(3)]
    table = render((Column("operation", shrinks=True, least=8),), [(name,) for name in names], 24).splitlines()[2:]
    assert len(set(table)) == 3 and all(len(line) == 24 and "…" in line for line in table)


def test_micro_batches():
    assert micro_batches((256,)) == "256"
    assert micro_batches((64, 64, 64, 64)) == "4 x 64"
    assert micro_batches((64, 64, 64, 32)) == "3 x 64 + 32"
    assert micro_batches((64, 64), 1) == "2 x 64 (1 recomputed)"


def test_recomputing_runs_are_distinguished_from_micro_batches():
    plan = PLANS["offloaded"]()
    facts = facts_of(plan, plan.train)
    again = facts.recomputing
    named = {one.name: one for one in facts.summaries}
    assert again and all(0 < count < len(named[name].micro_batches) for name, count in again.items())
    rows = rows_of(program_data(facts, texts := Texts())["operations"], texts.all)
    text = plan_text(plan, width=400)
    for row in rows:
        one = named[row["name"]]
        assert row["runs"] == micro_batches(one.micro_batches, again.get(one.name, 0))
        assert ("recomputed)" in row["runs"]) == (one.name in again)
    shown = {line.split("  ")[0]: line for line in operations_table(facts.summaries, 400, None, again).splitlines()}
    assert all(f"({count} recomputed)" in shown[name] and shown[name] in text for name, count in again.items())
    # A sentence gives the time of one run, and says what all runs lose.
    limit = max((one for one in facts.limits if one.summary.name in again), key=lambda one: one.limit_us)
    name = limit.summary.name
    answer = next(one for one in answers(replace(facts, limits=(limit,))) if "roofline" in one.question)
    runs, lost = len(limit.summary.micro_batches), show_time(limit.lost_us)
    assert f"{show_time(limit.summary.time_us / runs)} a run where " in answer.answer
    assert f"; run {runs} times, {again[name]} of them to recompute, it loses ~{lost} in all." in answer.answer
    assert f" lost in {runs} runs, {again[name]} of them to recompute (" in answer.details[0].text


def test_the_page_says_everything():
    text = plan_text(PLAN, width=160)
    for word in (
        "chain: training step, batch 3, fp32, sgd", "for H200 (sm_90", "l0.filter", "linear_backward_filter",
        "2 + 1", "~", "6..26", "parameters", "gradients", "the peak is at launch", "all of it",
        "inputs of the next step",
        "reserved, never measured", "peak live bytes", "plan over bound", "lower bound of the arena, set by ", "▁",
    ):  # fmt: skip
        assert word in text, word
    assert f"{PLAN.predictions.arena_bytes:,} bytes, exact" in text
    assert "\nprofile: none: nothing was measured on such a GPU, and times are estimated\n" in text
    target = replace(PLAN.target, profile="NVIDIA H200, driver 580.1, cuDNN 9.19.0, 2026-11-21")
    assert f"\nprofile: {target.profile}\n" in plan_text(replace(PLAN, target=target), width=160)
    p = PLAN.predictions
    assert f"{show_range(p.train_low_us, p.train_high_us)}; " in text
    assert show_range(p.infer_low_us, p.infer_high_us) in text


@pytest.mark.parametrize("name", PLANS)
def test_settings_of_kernels_hold_no_number_that_stands_for_something_else(name):
    plan = PLANS[name]()
    kernels = [kernel for one in summarise(plan, plan.train) for kernel in one.kernels]
    chosen_later = [
        launch for launch in plan.train.launches
        if isinstance(launch.work, Kernel) and ("engine", -1) in launch.work.settings
    ]  # fmt: skip
    assert bool(chosen_later) == any("engine=heuristics" in kernel for kernel in kernels)
    assert not [kernel for kernel in kernels if "=-" in kernel or "layout=" in kernel]
    assert "=-" not in plan_text(plan, width=400)


def test_words_of_settings():
    assert settings_words((("deterministic", 1), ("engine", -1), ("layout", 1))) == ["engine=heuristics"]
    assert settings_words((("deterministic", 0), ("engine", -1))) == ["deterministic=0", "engine=heuristics"]
    assert settings_words((("engine", 960), ("knob2", 7), ("layout", 0))) == ["engine=960", "knob2=7"]


def test_more_than_twice_a_bound_is_a_factor():
    assert [over(figure, 100) for figure in (90, 100, 112.5, 199.9, 200, 2448.5)] == [
        "-10.00 %", "0.00 %", "12.50 %", "99.90 %", "2.0x", "24.5x",
    ]  # fmt: skip
    assert over(1.0, 0.0) == "-"


def test_estimates_are_marked():
    summaries = summarise(PLAN, PLAN.train)
    lines = operations_table(summaries, None).splitlines()[2:]
    for summary, line in zip(summaries, lines, strict=True):
        assert ("~" in line) == summary.estimated


def test_limit_keeps_the_slowest_in_program_order():
    summaries = summarise(PLAN, PLAN.train)
    lines = operations_table(summaries, None, limit=4).splitlines()
    shown = [line.split()[0] for line in lines[2:-1]]
    slowest = sorted(summaries, key=lambda s: -s.time_us)[:4]
    assert shown == [s.name for s in summaries if s in slowest]
    assert lines[-1].startswith(f"… and {len(summaries) - 4} faster operations that take ~")


def test_collectives_without_times_have_streams_and_no_column_of_times():
    summaries = [replace(s, time_us=0.0, stream=Stream.COLLECTIVE) for s in summarise(PLAN, PLAN.train)]
    head, _, *rows = operations_table(summaries, None).splitlines()
    assert "stream" in head.split() and not {"time", "layout"} & set(head.split())
    assert all(row[head.index("stream") :].startswith("collective ") for row in rows)


def test_by_kind():
    text = plan_text(PLAN, by_kind=True)
    assert "linear_backward_filter" in text and "share" in text and "l0.filter" not in text


def test_inference():
    text = plan_text(PLAN, infer=True)
    assert "chain: inference" in text and "i.relu0" in text and "l0.filter" not in text


def test_narrow_tables_leave_columns_out():
    columns = (Column("name"), Column("kind", optional=2), Column("layout", optional=1))
    rows = [("a" * 10, "b" * 10, "c" * 10)]
    assert render(columns, rows, 34).splitlines()[0].split() == ["name", "kind", "layout"]
    assert render(columns, rows, 33).splitlines()[0].split() == ["name", "layout"]
    assert render(columns, rows, 20).splitlines()[0].split() == ["name"]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_width(width):
    table = operations_table(summarise(PLAN, PLAN.train), width)
    assert max(map(len, table.splitlines())) <= width


def test_measured_plan_has_no_mark():
    p = PLAN.predictions
    predictions = replace(
        p, train_low_us=p.train_us, train_high_us=p.train_us, infer_low_us=p.infer_us, infer_high_us=p.infer_us
    )
    plan = replace(PLAN, predictions=replace(predictions, measured_share=1.0, overhead_measured=True))
    text = plan_text(plan)
    assert "~" not in text[text.index("in all") :] and " to " not in text[text.index("in all") :]
    assert "100 % of the step measured" in text and re.search("overhead +381.5 MiB  measured", text)


def test_rates_below_ten_have_decimals():
    small = PLANS["small"]()
    plan = replace(small, predictions=replace(small.predictions, train_us=small.graph.batch * 1e6 / 0.4))
    assert "; 0.400 samples/s, " in totals_text(plan)
    assert next(one.value for one in figures(plan) if one.name == "throughput") == "0.400 images/s"
    assert ", ~0.400 images/s, takes" in batch_line(Probe(plan.graph.batch, figures_of(plan), None))
    assert "  0.400" in ablation_text([Ablation(frozenset(), figures_of(plan), fits=True)])


def test_sparkline():
    assert sparkline([0, 1, 4, 8], 10) == " ▁▄█"
    assert sparkline([0, 0, 1000, 1], 2) == " █"
    assert sparkline([1, 2], 2, top=8) == "▁▂"
    assert sparkline([], 5) == ""
    assert sparkline([0, 0], 5) == "  "


def test_plan_document():
    document = json.loads(json.dumps(plan_document(PLAN, memory=True)))
    curve = memory_curve(PLAN, PLAN.train)
    assert document["train"]["peak"]["bytes"] == max(curve.total_bytes)
    assert sum(document["train"]["peak"]["by_kind"].values()) == max(curve.total_bytes)
    assert len(document["train"]["memory"]) == document["train"]["launches"] == len(PLAN.train.launches)
    assert document["above_bounds"]["arena_over_live"] >= 0
    assert {"name", "kernels", "micro_batches", "time_us", "workspace_bytes", "lifetime"} <= set(
        document["train"]["operations"][0]
    )


def test_diff_text():
    other = random_plan(4)
    diff = diff_plans(PLAN, other)
    text = diff_text(diff, "a.json", "b.json", width=100)
    for word in (
        "in all",
        "a.json",
        "launches of the step",
        "micro-batches",
        "workspace",
        "in time only",
        "only in b.json",
    ):
        assert word in text, word
    assert max(map(len, diff_text(diff, "a.json", "b.json", width=100).split("only in")[0].splitlines())) <= 100
    limited = diff_text(diff, "a.json", "b.json", limit=2)
    assert "more operations" in limited and "more" in limited.splitlines()[-1]
    assert len(diff_text(diff, "a.json", "b.json", with_times=True)) > len(text) - 200


def test_diff_of_equal_plans():
    assert diff_text(diff_plans(PLAN, PLAN), "a", "b") == "a and b run the same: no figure and no operation differs"


def test_diff_document():
    document = json.loads(json.dumps(diff_document(diff_plans(PLAN, random_plan(4)))))
    assert document["same"] is False
    assert document["totals"]["arena_bytes"]["before"] == PLAN.predictions.arena_bytes
    assert document["operations"][0]["differs"]
    assert document["only_before"] and document["only_after"]
