"""What `mbc diff` prints of figures, and what its page says of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.options import Options
from mbc.plan.diff import Change, PlanDiff, diff_plans
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import COPY_STREAMS
from mbc.plan.schema import content_checksum
from mbc.report.differences import diff_text
from mbc.report.documents import plan_document
from mbc.report.html.diff_page import diff_page
from mbc.report.html.diff_words import diff_answers
from mbc.report.html.facts import facts_of
from mbc.report.html.head import figures
from mbc.report.tables import heading
from mbc.source import Source
from mbc.units import show_time
from tests.report.plans import CHAIN, PLANS


def test_a_plan_that_names_no_engine_of_cudnn_does_not_say_none():
    text = diff_text(PlanDiff((Change("cudnn", 0, 91900),), (), (), ()), "a", "b")
    (row,) = (line for line in text.splitlines() if line.startswith("cuDNN"))
    assert row.split()[1:3] == ["any", "9.19.0"]


def test_figures_are_called_as_on_the_page_of_a_plan():
    page = diff_page(PLANS["kept"](), PLANS["recomputed"](), "a", "b")
    named = re.findall(r"<tr><td>(.*?)</td>", page)
    assert {"training step", "training step, at least", "arena", "budget", "peak live bytes"} <= set(named)
    assert not {"train", "train low", "train high", "live", "floor", "fastest", "least"} & set(named)
    text = diff_text(diff_plans(PLANS["kept"](), PLANS["recomputed"]()), "a", "b", width=200)
    heads = [re.split(" {2,}", line)[0] for line in text.split("\n\n")[0].splitlines()]
    assert set(named) <= set(heads), "the terminal calls them so, too"


def test_what_was_set_is_told():
    loose, tight = PLANS["kept"](), PLANS["recomputed"]()
    ((name, said),) = tight.settings
    assert (name, loose.settings) == ("memory.device", ())
    assert "\nset: " not in heading(loose) and heading(tight).endswith(f"\nset: memory.device={said}")
    assert plan_document(tight)["settings"] == {name: said}
    again = load_plan(dump_plan(tight), "plan.json")
    assert again == tight and '\n"settings":' not in dump_plan(loose)
    assert not [one for one in figures(loose) if "set in place" in one.name]
    (card,) = (one.value for one in figures(again) if "set in place" in one.name)
    assert card == tight.settings_text == f"memory.device={said}"
    diff = diff_plans(loose, tight)
    (change,) = (change for change in diff.totals if change.name == "settings")
    assert (change.before, change.after) == ("", card)
    answer = diff_answers(diff, *(facts_of(plan, plan.train) for plan in (loose, tight)))[0]
    assert answer.details[0].text == f"settings (--set): none, then {card}"
    # What nothing else says, such as the depth of a network, stands for itself.
    deeper = replace(loose, settings=(("depth", "50"),))
    only = diff_answers(diff_plans(loose, deeper), *(facts_of(plan, plan.train) for plan in (loose, deeper)))[0]
    assert "They were planned for something else: settings (--set)." in only.answer


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
