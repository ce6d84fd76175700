"""The figures of `mbc diff`, printed and on its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.hardware.streams import COPY_STREAMS
from mbc.ir.types import Precision
from mbc.options import Options
from mbc.plan.diff import Change, PlanDiff, diff_plans
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Plan
from mbc.plan.schema import content_checksum
from mbc.report.differences import diff_text, total_rows
from mbc.report.documents import plan_document
from mbc.report.html.diff_page import diff_page
from mbc.report.html.diff_words import diff_answers
from mbc.report.html.facts import facts_of
from mbc.report.html.head import figures
from mbc.report.html.packed_rows import rows_of
from mbc.report.step_times import compared_steps
from mbc.report.tables import NO_TIMES, heading, profile_of
from mbc.source import Source
from mbc.units import show_time
from tests.report.pages import data_of
from tests.report.plans import CHAIN, PLANS


def predicted(plan: Plan, time_us: float, range_us: tuple[float, float], measured_share: float) -> Plan:
    low_us, high_us = range_us
    figures = replace(plan.predictions, train_us=time_us, train_low_us=low_us, train_high_us=high_us)
    return replace(plan, predictions=replace(figures, measured_share=measured_share))


def test_a_plan_that_names_no_engine_of_cudnn_does_not_say_none():
    plans = PLANS["kept"](), PLANS["kept"]()
    text = diff_text(PlanDiff((Change("cudnn", 0, 91900),), (), (), (), plans), "a", "b")
    (row,) = (line for line in text.splitlines() if line.startswith("cuDNN"))
    assert row.split()[1:3] == ["any", "9.19.0"]


def test_figures_are_called_as_on_the_page_of_a_plan():
    page = diff_page(PLANS["kept"](), PLANS["recomputed"](), "a", "b")
    named = re.findall(r"<tr><td>(.*?)</td>", page)
    assert {"training step", "training step, range", "arena", "budget", "peak live bytes"} <= set(named)
    assert not {"train", "train low", "train high", "live", "floor", "fastest", "least"} & set(named)
    text = diff_text(diff_plans(PLANS["kept"](), PLANS["recomputed"]()), "a", "b", width=200)
    heads = [re.split(" {2,}", line)[0] for line in text.split("\n\n")[0].splitlines()]
    assert set(named) <= set(heads), "the terminal calls them so, too"


def test_settings_are_reported():
    loose, tight = PLANS["kept"](), PLANS["recomputed"]()
    ((name, said),) = tight.settings
    assert (name, loose.settings) == ("memory.device", ())
    assert "\nset: " not in heading(loose) and heading(tight).endswith(f"\nset: memory.device={said}")
    assert plan_document(tight)["settings"] == {name: said}
    again = load_plan(dump_plan(tight), "plan.json")
    assert again == tight and '\n"settings":' not in dump_plan(loose)
    assert not [one for one in figures(loose) if "settings that replace" in one.name]
    (card,) = (one.value for one in figures(again) if "settings that replace" in one.name)
    assert card == tight.settings_text == f"memory.device={said}"
    diff = diff_plans(loose, tight)
    (change,) = (change for change in diff.totals if change.name == "settings")
    assert (change.before, change.after) == ("", card)
    answer = diff_answers(diff, *(facts_of(plan, plan.train) for plan in (loose, tight)))[0]
    assert answer.details[0].text == f"settings (--set): none, then {card}"
    # Settings that no other figure shows, such as the depth of a network, are listed.
    deeper = replace(loose, settings=(("depth", "50"),))
    only = diff_answers(diff_plans(loose, deeper), *(facts_of(plan, plan.train) for plan in (loose, deeper)))[0]
    assert "They were planned for different inputs: settings (--set)." in only.answer


def test_settings_of_a_compilation_are_those_that_count():
    plan = compile_plan(Source("chain.mbc", CHAIN), Options(gpu="h200", settings=(("batch", "8"), ("batch", " 4 \n"))))
    assert plan.settings == (("batch", "4"),) and plan.graph.batch == 4


@pytest.mark.parametrize("settings", ["batch=4", [["batch"]], [["batch", 4]], [["batch", "\u001b"]]])
def test_settings_that_are_none_are_refused(settings):
    document = json.loads(dump_plan(PLANS["kept"]()))
    document["settings"] = settings
    document["checksum"] = content_checksum(document)
    with pytest.raises(MbcError) as caught:
        load_plan(json.dumps(document), "plan.json")
    assert caught.value.code == "MBC115" and "settings" in caught.value.message


def test_unlike_measured_shares_are_reported_without_a_verdict():
    plan = predicted(PLANS["kept"](), 6000.0, (5700.0, 6400.0), 0.73)
    other = predicted(plan, 5350.0, (2260.0, 13900.0), 0.0)
    step = "~6.00 ms (5.70 to 6.40 ms; 73 % of it measured) by {}"
    guessed = "~5.35 ms (2.26 to 13.9 ms; 0 % of it measured) by {}"
    said = f"It is unknown which plan is faster: the step takes {step} and {guessed}, and these ranges overlap."
    assert said.format("a", "b") in diff_text(diff_plans(plan, other), "a", "b")
    page = diff_page(plan, other, "a", "b")
    assert said.format("the first plan", "the second") in page
    # Both steps are above it, and the range is one row without a change in percent.
    assert "<div>~5.35 ms (2.26 to 13.9 ms; 0 % of it measured) a step</div>" in page
    rows = {row[0]: row[1:] for row in total_rows(diff_plans(plan, other))}
    assert rows["training step, range"] == ("5.70 to 6.40 ms", "2.26 to 13.9 ms", "")
    assert rows["training step"][:2] == ("~6.00 ms", "~5.35 ms")
    assert not {"training step, at least", "training step, at most"} & set(rows)


def test_plans_in_fp64_are_not_compared_by_time():
    plan = PLANS["kept"]()
    double = replace(plan, graph=replace(plan.graph, precision=Precision.FP64))
    said = "The plans cannot be compared by time: {} in fp64, which is for the CPU."
    assert compared_steps((plan, double), ("a", "b")) == said.format("b is")
    assert compared_steps((double, double), ("a", "b")) == said.format("a and b are")


def test_apart_ranges_and_one_profile_tell_which_plan_is_faster():
    plan = predicted(PLANS["kept"](), 6000.0, (5700.0, 6400.0), 0.73)
    apart = predicted(plan, 3000.0, (2000.0, 5000.0), 0.0)
    assert compared_steps((plan, apart), ("a", "b")).endswith("0 % of it measured) by b: -50.00 %.")
    assert ": -50.00 %." in diff_text(diff_plans(plan, apart), "a", "b"), "said, since what was measured differs"
    # Errors of one profile are alike: these two compare better than their ranges say.
    alike = predicted(plan, 5800.0, (5500.0, 6200.0), 0.7)
    assert compared_steps((plan, alike), ("a", "b")).startswith("The step takes ~6.00 ms (5.70 to 6.40 ms; 73 %")
    assert "The step takes" not in diff_text(diff_plans(plan, alike), "a", "b")
    elsewhere = replace(alike, target=replace(alike.target, gpu="another"))
    assert compared_steps((plan, elsewhere), ("a", "b")).startswith("It is unknown which plan is faster")


def test_a_profile_without_a_time_of_the_step_says_so():
    plan = predicted(PLANS["kept"](), 6000.0, (5700.0, 6400.0), 0.73)
    bare = predicted(plan, 6000.0, (5700.0, 6400.0), 0.0)
    assert profile_of(plan) == plan.target.profile
    profile = f"{plan.target.profile} ({NO_TIMES})"
    assert profile_of(bare) == profile and heading(bare).endswith(f"profile: {profile}")
    (card,) = (one for one in figures(bare) if one.name == "GPU")
    assert card.note == profile
    assert f"profile of b: {profile}" in diff_text(diff_plans(plan, bare), "a", "b")


def test_estimates_are_marked_in_the_table_of_operations():
    plan, other = PLANS["kept"](), PLANS["recomputed"]()
    data = data_of(diff_page(plan, other, "a", "b"))
    diff = diff_plans(plan, other)
    shown = {(row["program"], row["name"]): row for row in rows_of(data["changes"], data["texts"])}
    assert diff.operations and any(change.after.estimated for change in diff.operations)
    for change in diff.operations:
        row = shown[change.program, change.name]
        assert (row["before_estimated"], row["after_estimated"]) == (change.before.estimated, change.after.estimated)
    for program, one in diff.only_after:
        row = shown[program, one.name]
        assert (row["before_estimated"], row["after_estimated"]) == (False, one.estimated)


def test_differences_of_time_alone_are_summed_by_program():
    plan = PLANS["kept"]()
    slower = [
        replace(launch, work=replace(launch.work, time_us=launch.work.time_us + 2.0)) for launch in plan.train.launches
    ]
    infer = [
        replace(launch, work=replace(launch.work, time_us=launch.work.time_us + 1.0)) for launch in plan.infer.launches
    ]
    other = replace(
        plan, train=replace(plan.train, launches=tuple(slower)), infer=replace(plan.infer, launches=tuple(infer))
    )
    text = diff_text(diff_plans(plan, other), "a", "b")
    gains = f"by +{show_time(2.0 * len(slower))} in the training step and +{show_time(1.0 * len(infer))} in inference"
    assert f"operations differ in time only, {gains} together" in text


def test_a_diff_sums_time_by_family_first():
    kept, offloaded = (facts_of(plan, plan.train) for plan in (PLANS["kept"](), PLANS["offloaded"]()))
    by_question = {one.question: one for one in diff_answers(diff_plans(kept.plan, offloaded.plan), kept, offloaded)}
    where = by_question["Where did the time go?"]
    recompute_us = sum(one.time_us for one in offloaded.techniques.recomputed)
    copies_us = sum(one.work.time_us for one in offloaded.program.launches if one.stream in COPY_STREAMS)
    assert recompute_us > 0 and copies_us > offloaded.costs.total_us > 0, "most of them kernels hide"
    assert f"recomputing +{show_time(recompute_us)}, other kernels " in where.answer
    assert f"copies +{show_time(offloaded.costs.total_us)}" in where.answer
    assert not [line for line in where.details if line.text.startswith("copy")]
    memory = by_question["Where did the memory go?"].answer
    assert f"of live bytes at {show_time(kept.times.starts_us[kept.peak])}, in the backward pass, in launch" in memory
    moved = by_question["Which values are kept, recomputed or offloaded differently?"].details
    assert moved[-1].text.startswith("8 of ") and len(moved) == 9
