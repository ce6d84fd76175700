"""Timelines: copies cost the time by which they lengthen the predicted step; a larger budget regains this time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mbc.analysis.roofline import Bound
from mbc.hardware.streams import COPY_STREAMS, Stream
from mbc.ops import KINDS
from mbc.optimize.schedule.contention import COPY_WAIT_US
from mbc.report.html.answers import answers
from mbc.report.html.facts import Facts, facts_of
from mbc.report.html.larger_budget import absent_values, kept_with, time_saved
from mbc.report.tables import kinds_table
from mbc.report.techniques import techniques_text
from mbc.report.timeline import stalls
from mbc.units import show_time
from tests.report.plans import PLANS


@pytest.fixture(scope="module")
def facts() -> Facts:
    plan = PLANS["offloaded"]()
    return facts_of(plan, plan.train)


def _kernels_us(facts: Facts) -> float:
    return sum(launch.work.time_us for launch in facts.program.launches if launch.stream is Stream.COMPUTE)


def test_copies_cost_the_time_beyond_the_kernels(facts):
    launches, costs = facts.program.launches, facts.costs
    assert {launch.stream for launch in launches} == {Stream.COMPUTE, Stream.TO_HOST, Stream.TO_DEVICE}
    assert costs.copies == sum(launch.stream in COPY_STREAMS for launch in launches) > 0
    assert costs.total_us == pytest.approx(facts.times.total_us - _kernels_us(facts))
    # Kernels at either end of a wait for a copy take longer, but that is not waiting.
    beside = {i for pair in facts.program.waits for i in pair if launches[i].stream is Stream.COMPUTE}
    assert costs.synchronised == len(beside) > 0
    assert costs.synchronise_us == pytest.approx(COPY_WAIT_US * len(beside))
    assert costs.stall_us == sum(stall.time_us for stall in stalls(facts.program, facts.times))
    assert costs.synchronise_us + costs.stall_us <= costs.total_us
    assert sum(costs.by_copy.values()) == pytest.approx(costs.synchronise_us + costs.stall_us)
    assert sum(map(costs.of, facts.techniques.offloaded)) == pytest.approx(sum(costs.by_copy.values()))


def test_terminal_and_page_agree_on_the_cost_of_copies(facts):
    said = f"copies cost about {show_time(facts.costs.total_us)}"
    each = f"{facts.costs.synchronised} kernels take {show_time(COPY_WAIT_US)} longer each to synchronise with them"
    terminal = techniques_text(facts.plan, facts.program, 140)
    page = next(one.answer for one in answers(facts) if "recomputed or offloaded" in one.question)
    for text in (terminal, page):
        assert said in text and each in text


def test_the_slowest_parts_come_first(facts):
    first = answers(facts)[0]
    kernels_us = _kernels_us(facts)
    said = f"All kernels, serially, take ~{show_time(kernels_us)}: "
    assert first.question == "What takes the time?" and first.answer.startswith(said)
    products = {op.name for op in facts.plan.graph.train if KINDS[op.kind].flops is not None}
    products_us = sum(one.work.time_us for one in facts.program.launches if products & set(one.operations))
    shares = first.answer.removeprefix(said).split(". ")[0].split(", ")
    assert f"convolutions and GEMMs ~{show_time(products_us)} ({100 * products_us / kernels_us:.0f} %)" in shares
    assert sum(int(re.findall(r"\((\d+) %\)", share)[0]) for share in shares) == pytest.approx(100, abs=2)
    recompute_us = sum(one.time_us for one in facts.techniques.recomputed)
    assert (
        f" {show_time(recompute_us)} of this are recomputing. Copies cost about {show_time(facts.costs.total_us)}"
        in first.answer
    )
    memory_us = sum(one.summary.time_us for one in facts.limits if one.bound is Bound.MEMORY)
    limit_us = sum(one.limit_us for one in facts.limits if one.bound is not Bound.LINK)
    assert f"By nearest limit: memory for {show_time(memory_us)}, arithmetic for " in first.answer
    assert first.answer.endswith(f"Together the kernels take {kernels_us / limit_us:.2f} times their limits.")
    kinds = kinds_table(facts.summaries, None)
    assert len(first.details) == 6 and all(line.text.split(" ")[0] in kinds for line in first.details[:5])


def test_without_copies_nothing_is_said_of_them():
    plan = PLANS["recomputed"]()
    assert facts_of(plan, plan.train).costs.copies == 0 and "copies" not in techniques_text(plan, plan.train, 140)


def test_a_larger_budget_saves_recomputing_and_copies(facts):
    absent = absent_values(facts)
    assert kept_with(facts, absent, 1 << 40) == absent, "all fit a budget without end"
    recompute_us = sum(one.time_us for one in facts.techniques.recomputed)
    assert recompute_us > 0 < facts.costs.total_us
    assert time_saved(facts, absent) == pytest.approx(recompute_us + facts.costs.total_us)
    more = next(one.answer for one in answers(facts) if "more memory gain" in one.question)
    gain_us = min(time_saved(facts, absent), facts.plan.predictions.train_us - facts.plan.bounds.fastest_us)
    assert gain_us > recompute_us and more.startswith(f"About {show_time(gain_us)}, ")
    assert f": all {len(absent)} absent values, " in more and "`mbc fit --curve` plans each budget" in more


def test_larger_workspaces_fit_at_every_launch(facts):
    absent = absent_values(facts)
    more_bytes = sum(one.saved_bytes for one in absent) // 3
    kept = kept_with(facts, absent, more_bytes)
    assert 0 < len(kept) < len(absent)
    limit, total = facts.plan.arena_budget_bytes + more_bytes, facts.curve.total_bytes
    live = [t + sum(k.saved_bytes for k in kept if k.of.absent[0] <= i < k.of.absent[1]) for i, t in enumerate(total)]
    assert max(live) <= limit
    assert 0 < time_saved(facts, kept) < time_saved(facts, absent)
    none = replace(facts, plan=replace(facts.plan, budget_bytes=facts.plan.budget_bytes - facts.curve.peak_bytes))
    assert kept_with(none, absent, 0) == []
