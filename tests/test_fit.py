"""Searches for the largest batch and over budgets; arithmetic replaces planning."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest

from mbc.ablation import Ablation
from mbc.compiler import compile_plan
from mbc.errors import BudgetError, MbcError
from mbc.fit import LEAST_STEP, Batches, Search, budget_curve, largest_batch, own_batch, with_batch, with_budget
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.options import UNLIMITED_BYTES, Options, Overrides
from mbc.plan.file import dump_plan
from mbc.pytorch.nnunet.prospects import LEAST_BUDGET_RATIO, least_budget
from mbc.report.ablation import ablation_text
from mbc.report.fit import batch_line, batches_document, batches_text, budget_line, budgets_text, reason, within
from mbc.report.tables import HOST
from mbc.source import Source
from mbc.units import show_enough, show_size
from tests.plan.chains import random_plan

PLAN = random_plan(3)
OVERHEAD_BYTES = PLAN.predictions.overhead_bytes
ROW_BYTES, FIXED_BYTES = 1000, 5000


class Planner:
    """A planner whose smallest plans take FIXED_BYTES + ROW_BYTES a row, and overhead; the floor is a tenth of that.

    A step that saves no memory takes `whole` times as many bytes a row. Each byte that a step saves takes `saving_us`.
    """

    def __init__(self, budget_bytes, batch=1, whole=1.0, saving_us=0.0):
        self.budget_bytes, self.batch, self.asked = budget_bytes, batch, []
        self.whole, self.saving_us = whole, saving_us

    def at_batch(self, batch):
        self.asked.append(batch)
        return self.plan(batch, self.budget_bytes)

    def at_budget(self, budget_bytes):
        self.asked.append(budget_bytes)
        return self.plan(self.batch, budget_bytes)

    def plan(self, batch, budget_bytes):
        smallest, whole = FIXED_BYTES + ROW_BYTES * batch, FIXED_BYTES + int(self.whole * ROW_BYTES) * batch
        floor = smallest // 10
        if smallest + OVERHEAD_BYTES > budget_bytes:
            raise BudgetError(
                "MBC204", "too much", "", needed_bytes=smallest + OVERHEAD_BYTES, floor_bytes=floor + OVERHEAD_BYTES
            )
        arena = min(whole, budget_bytes - OVERHEAD_BYTES)
        least_us = 1e4 + 10.0 * batch + 0.001 * batch**2
        return replace(
            PLAN,
            graph=replace(PLAN.graph, batch=batch),
            budget_bytes=budget_bytes,
            predictions=replace(
                PLAN.predictions, arena_bytes=arena, train_us=least_us + self.saving_us * (whole - arena)
            ),
            bounds=replace(
                PLAN.bounds, floor_bytes=floor, fastest_us=least_us, within_budget_us=0.0, critical_path_us=0.0
            ),
        )


@pytest.fixture(autouse=True)
def saved(monkeypatch):
    """Let a plan save memory where its step takes longer than its lower bound: no launch of PLAN says so."""
    monkeypatch.setattr("mbc.fit.saves_memory", lambda plan: plan.predictions.train_us > plan.bounds.fastest_us)


def test_few_counts_are_tried_between_fitting_and_not():
    planner = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * 770)
    assert largest_batch(planner.at_batch, Batches(512)).largest.batch == 770
    assert len([batch for batch in planner.asked if 512 < batch < 1024]) <= 4


@pytest.mark.parametrize("most", [512, 513, 770, 1000, 1023])
def test_refusals_that_tell_nothing_of_the_rows_cost_little_more_than_bisection(most):
    planner = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * most)

    def barely(batch):
        try:
            return planner.at_batch(batch)
        except BudgetError as error:
            error.needed_bytes = planner.budget_bytes + 1
            raise

    assert largest_batch(barely, Batches(512)).largest.batch == most
    assert len([batch for batch in planner.asked if 512 < batch < 1024]) <= 9 + 3

    def speechless(batch):
        if batch > most:
            raise MbcError("MBC210", "too much in host memory")
        return planner.at_batch(batch)

    assert largest_batch(speechless, Batches(512)).largest.batch == most


def test_the_fastest_need_not_be_the_largest():
    planner = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * 20000)
    fit = largest_batch(planner.at_batch, Batches(256))
    assert fit.largest.batch == 20000
    assert fit.fastest.images_per_s == max(p.figures.images_per_s for p in fit.probes if p.figures)
    assert fit.fastest.batch < 20000
    text = batches_text(fit)
    assert "largest batch in" in text and ": 20000, " in text and "fastest of these: " in text
    assert "MBC204: the smallest plan found takes" in text


@pytest.mark.parametrize("ratio", [1.0, LEAST_STEP, 2.0])
@pytest.mark.parametrize("seed", range(50))
def test_brackets_of_drawn_networks(seed, ratio):
    """The largest batch fits, the next larger one that was tried does not, and few are tried."""
    random = Random(seed)
    multiple = random.randint(1, 8)
    most, start = random.randint(multiple, 3000), random.randint(1, 4000)
    power, bend = random.uniform(0.5, 2.0), random.uniform(0.0, 0.001)
    planner = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * most)

    def plan_at(batch):
        try:
            return planner.at_batch(batch)
        except BudgetError as error:
            error.needed_bytes = int(planner.budget_bytes * (batch / most) ** power * (1.0 + bend * batch)) + 1
            raise

    fit = largest_batch(plan_at, Batches(start, multiple, ratio=ratio))
    assert fit.refused is not None and fit.largest.batch <= most < fit.refused
    assert ratio > 1.0 or fit.refused == fit.largest.batch + multiple
    assert fit.untried == (fit.refused > fit.largest.batch + multiple)
    assert all(batch % multiple == 0 for batch in planner.asked)
    assert len(planner.asked) == len(set(planner.asked)) <= 12 + 12 + 5


@pytest.mark.parametrize(("start", "multiple", "largest"), [(8, 4, 28), (64, 4, 28), (8, 1, 30), (1, 40, 40)])
def test_no_larger_batch_is_tried_than_asked_for(start, multiple, largest):
    planner = Planner(1 << 40)
    fit = largest_batch(planner.at_batch, Batches(start, multiple, most=30))
    assert fit.largest.batch == max(planner.asked) == largest


@pytest.mark.parametrize("seed", range(50))
def test_the_largest_batch_is_within_an_eighth_where_memory_is_affine(seed):
    random = Random(seed)
    most, start, whole = random.randint(8, 3000), random.randint(1, 4000), random.choice((1.0, 1.5, 3.0, 8.0))
    planner = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * most, whole=whole, saving_us=0.01)
    fit = largest_batch(planner.at_batch, Batches(start, ratio=LEAST_STEP))
    assert most / LEAST_STEP - 1 <= fit.largest.batch <= most


@pytest.mark.parametrize("seed", range(50))
def test_a_search_ends_where_more_rows_fit_and_fewer_do_not(seed):
    random = Random(seed)
    fitting = {1, *(batch for batch in range(2, 5000) if random.random() < 0.5)}
    planner = Planner(1 << 40)

    def plan_at(batch):
        if batch in fitting:
            return planner.at_batch(batch)
        planner.asked.append(batch)
        raise BudgetError("MBC204", "too much", "", needed_bytes=random.choice((1, 10**13)), floor_bytes=1)

    fit = largest_batch(plan_at, Batches(64))
    assert fit.finished and len(planner.asked) == len(set(planner.asked)) < 40
    assert fit.largest.batch == max(fitting.intersection(planner.asked))
    assert fit.refused is not None and fit.refused not in fitting


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("saving_us", [0.0001, 0.01, 0.1])
@pytest.mark.parametrize("whole", [1.1, 1.7, 3.0, 5.0])
def test_the_fastest_batch_of_all_is_among_the_rows(whole, saving_us, multiple):
    for most in (150, 1020):
        planner = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * most, whole=whole, saving_us=saving_us)
        fit = largest_batch(planner.at_batch, Batches(64, multiple))
        every = [planner.plan(batch, planner.budget_bytes) for batch in range(8, most + 1, multiple)]
        best = max(plan.graph.batch / plan.predictions.train_us for plan in every) * 1e6
        assert fit.fastest.images_per_s > best / LEAST_STEP
        assert fit.fastest.images_per_s == max(p.figures.images_per_s for p in fit.probes if p.figures)
        assert fit.largest.batch == most // multiple * multiple


def test_where_memory_slows_nothing_no_batch_is_tried_for_its_speed():
    asked = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * 1020)
    fit = largest_batch(asked.at_batch, Batches(512))
    below = {probe.at for probe in fit.probes if probe.at < 512}
    assert below == {256, 128}


def test_nothing_fits():
    planner = Planner(OVERHEAD_BYTES + FIXED_BYTES)
    with pytest.raises(MbcError) as caught:
        largest_batch(planner.at_batch, Batches(100, 4))
    assert caught.value.code == "MBC194"
    needed, floor = FIXED_BYTES + 4 * ROW_BYTES + OVERHEAD_BYTES, (FIXED_BYTES + 4 * ROW_BYTES) // 10 + OVERHEAD_BYTES
    assert "not even a batch of 4" in caught.value.message
    assert f"the lower bound of all plans is {show_size(floor)}" in caught.value.remedy
    assert f"raise --memory to {show_enough(needed)}, which the smallest plan" in caught.value.remedy


def test_a_search_that_ends_before_anything_is_refused_says_at_least():
    fit = largest_batch(Planner(1 << 62).at_batch, Batches(64))
    assert fit.largest.batch == 1 << 20 and fit.at_least
    assert ": at least 1048576, " in batches_text(fit) and "larger batches were not tried" in batches_text(fit)
    assert batches_document(fit)["at_least"]
    fit = largest_batch(Planner(OVERHEAD_BYTES + FIXED_BYTES + 9 * ROW_BYTES).at_batch, Batches())
    assert not fit.at_least and "at least" not in batches_text(fit)


def test_fewer_rows_than_a_micro_batch_are_not_tried():
    fit = largest_batch(Planner(OVERHEAD_BYTES + FIXED_BYTES + 20 * ROW_BYTES).at_batch, Batches(4, least=8))
    assert fit.largest.batch == 20 and min(probe.at for probe in fit.probes) == 8
    with pytest.raises(MbcError, match="not even a batch of 8"):
        largest_batch(Planner(OVERHEAD_BYTES + FIXED_BYTES + 4 * ROW_BYTES).at_batch, Batches(64, least=8))


def test_errors_that_no_batch_avoids_are_raised():
    def wrong(batch):
        raise MbcError("MBC021", "no such setting")

    with pytest.raises(MbcError) as caught:
        largest_batch(wrong, Batches(8))
    assert caught.value.code == "MBC021"

    def nothing_runs(batch):
        raise MbcError("MBC200", "no kernel can run 'x'")

    with pytest.raises(MbcError) as caught:
        largest_batch(nothing_runs, Batches(8))
    assert caught.value.code == "MBC200"


def test_budgets_from_the_floor_to_no_limit():
    planner = Planner(0, batch=50)
    curve = budget_curve(planner.at_budget, 5)
    floor, most = curve.unlimited.floor_bytes, curve.unlimited.needed_bytes
    assert curve.probes[0].at == floor and curve.probes[-1].at == most
    assert [p.at for p in curve.probes] == [floor + (most - floor) * i // 4 for i in range(5)]
    assert [p.figures is not None for p in curve.probes] == [False] * 4 + [True]
    text = budgets_text(curve)
    assert len(planner.asked) == 3 and "without a limit: " in text and text.count("MBC204") == 4 and "0.00 %" in text


def test_a_column_of_host_memory_is_explained():
    """Explain it only if a row has such memory and the table is wide enough for the column."""
    planner = Planner(0, batch=50)
    curve = budget_curve(planner.at_budget, 2)
    fit = largest_batch(Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * 50).at_batch, Batches(8))

    def offloading(probes):
        return tuple(replace(p, figures=p.figures and replace(p.figures, host_bytes=1)) for p in probes)

    assert HOST not in batches_text(fit) + budgets_text(curve)
    fit, curve = replace(fit, probes=offloading(fit.probes)), replace(curve, probes=offloading(curve.probes))
    assert all(f"\n\n{HOST}\n" in text for text in (batches_text(fit), budgets_text(curve)))
    assert HOST not in batches_text(fit, 40) + budgets_text(curve, 40)
    (figures,) = (p.figures for p in curve.probes if p.figures)
    ablations = [[Ablation(frozenset(), replace(figures, host_bytes=n), fits=True)] for n in (0, 1)]
    assert [HOST in ablation_text(one) for one in ablations] == [False, True]


def test_no_refusal_of_a_budget_names_more_than_the_smallest_plan_above_it():
    def plan_at(budget_bytes):
        if budget_bytes < 2 * least_bytes:  # as if the search missed its smallest plan
            raise BudgetError("MBC204", "too much", "", needed_bytes=3 * least_bytes, floor_bytes=1)
        return planner.plan(50, budget_bytes)

    planner, least_bytes = Planner(0, batch=50), OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * 50
    budgets = 2 * least_bytes, least_bytes, least_bytes - 1
    for order, of_budgets in product(permutations(budgets), (True, False)):
        search = Search(plan_at, {}, of_budgets=of_budgets)
        for budget_bytes in order:
            search.probe(budget_bytes)
        below, own, above = search.all_probes()
        assert above.figures is not None and above.figures.needed_bytes == least_bytes
        named_bytes = least_bytes if of_budgets else 3 * least_bytes
        assert isinstance(below.refusal, BudgetError) and below.refusal.needed_bytes == named_bytes
        assert show_size(named_bytes) in reason(below)
        assert isinstance(own.refusal, BudgetError) and own.refusal.needed_bytes == 3 * least_bytes, "its own budget"


@pytest.mark.parametrize("is_certain", [True, False])
def test_the_least_budget_is_that_of_the_smallest_step(is_certain):
    def plan_at(budget_bytes):
        try:
            return planner.at_budget(budget_bytes)
        except BudgetError as error:
            error.is_certain = is_certain
            raise

    smallest_bytes = OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * 10**6
    for budget_bytes in (10**8, 10**9, 10**10):
        planner = Planner(0, batch=10**6, whole=8.0)
        least = least_budget(Search(plan_at, {}, of_budgets=True), budget_bytes, 10**12)
        assert least is not None
        assert smallest_bytes <= least.budget_bytes <= smallest_bytes * (1 if is_certain else LEAST_BUDGET_RATIO)


def test_a_budget_below_one_without_host_memory_is_planned():
    def plan_at(budget_bytes):
        if len(planner.asked) == 2 and not refusals:  # after the plan without a limit and the largest budget
            refusals.append(MbcError("MBC210", "too much in host memory"))
            raise refusals[0]
        return planner.at_budget(budget_bytes)

    planner, refusals = Planner(0, batch=50, whole=8.0), []
    *_, below, refused, _ = budget_curve(plan_at, 9).probes
    assert [refused.refusal] == refusals and below.figures is not None


def test_reasons():
    planner = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * 2)
    fit = largest_batch(planner.at_batch, Batches())
    refused = next(p for p in fit.probes if p.figures is None)
    assert reason(refused).startswith("MBC204: the smallest plan found takes ")
    assert "count as too large" not in batches_text(fit)
    fast = replace(refused, refusal=BudgetError("MBC204", "x", "", needed_bytes=7, floor_bytes=1, slowest_us=2e3))
    assert "count as too large: `mbc compile` may have plans" in batches_text(replace(fit, probes=(*fit.probes, fast)))
    near = BudgetError("MBC204", "x", "", needed_bytes=10**9 + 1, floor_bytes=7, budget_bytes=10**9)
    assert reason(replace(refused, refusal=near)).endswith(" takes 953.7 MiB (1000000001 B)"), "more than the budget"
    bound = replace(refused, refusal=BudgetError("MBC203", "x", "", needed_bytes=7, floor_bytes=7))
    assert reason(bound) == "MBC203: the lower bound of all plans is 7 B"
    assert reason(replace(refused, refusal=MbcError("MBC200", "no kernel"))) == "MBC200: no kernel"


SOURCE = """\
network n(batch = 12, wide = 3) {
  input x[batch, wide] : float
  input t[batch] : class
  y = x |> linear(4)
  output y
  loss (y, t) |> softmax_cross_entropy
}
"""


def test_the_batch_of_a_network():
    assert own_batch(Source("n.mbc", SOURCE), Options()) == 12
    assert own_batch(Source("n.mbc", SOURCE), Options(settings=(("batch", "5"),))) == 5
    with pytest.raises(MbcError) as caught:
        own_batch(Source("n.mbc", SOURCE.replace("batch", "rows")), Options())
    assert caught.value.code == "MBC195" and "`n` has no parameter `batch`" in str(caught.value)
    assert "n.mbc:1:9" in str(caught.value)


def test_settings_replace_each_other():
    asked = with_budget(with_batch(Options(settings=(("batch", "1"), ("wide", "7"))), 9), 10**9)
    assert asked.all_settings == (("wide", "7"), ("memory.device", "1000000000 B"), ("batch", "9"))
    assert own_batch(Source("n.mbc", SOURCE), asked) == 9 and math.isinf(asked.slowest_us)
    assert with_batch(asked, 9, 4500.0).slowest_us == 4000.0  # half of 4500 images/s


def test_values_mean_what_settings_of_the_same_text_mean():
    program = parse(Source("n.mbc", SOURCE))
    for batch, size_bytes in ((1, 1), (9, 10**9), (4096, UNLIMITED_BYTES)):
        values = Overrides(batch, size_bytes)
        of_values, of_text = lower(program, (("batch", "5"),), None, values), lower(program, values.settings)
        assert of_values == of_text and of_values.network.batch == batch and of_values.device_bytes == size_bytes
    options = Options(gpu="h200", settings=(("wide", "7"), ("memory.device", "2 GB"), ("batch", "6")))
    text = replace(options, settings=(("wide", "7"), ("memory.device", "1000000000 B"), ("batch", "9")))
    plan = compile_plan(Source("n.mbc", SOURCE), with_budget(with_batch(options, 9), 10**9))
    assert dump_plan(plan) == dump_plan(compile_plan(Source("n.mbc", SOURCE), text))


@pytest.mark.parametrize("values", [Overrides(batch=0), Overrides(batch=-1), Overrides(device_bytes=0)])
def test_values_that_no_network_takes_are_refused_as_settings_are(values):
    errors: list[str] = []
    for settings, overrides in ((values.settings, Overrides()), ((), values)):
        with pytest.raises(MbcError) as caught:
            lower(parse(Source("n.mbc", SOURCE)), settings, None, overrides)
        errors.append(f"{caught.value.code}: {caught.value.message}")
    assert errors[0] == errors[1]
    with pytest.raises(MbcError, match="--set batch: network `n` has no such setting"):
        lower(parse(Source("n.mbc", SOURCE.replace("batch", "rows"))), (), None, Overrides(batch=3))


def test_each_probe_is_reported_at_once():
    planner = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * 5)
    reports = []
    fit = largest_batch(planner.at_batch, Batches(2), reports.append)
    assert [p.at for p in reports] == planner.asked and {p.at for p in reports} == {p.at for p in fit.probes}
    lines = [batch_line(p) for p in reports]
    assert lines[0].startswith("batch 2: ") and " images/s, takes " in lines[0]
    assert any(line.startswith("batch 6: MBC204: the smallest plan found takes ") for line in lines)
    reports.clear()
    curve = budget_curve(planner.at_budget, 3, reports.append)
    assert [p.at for p in reports] == [p.at for p in reversed(curve.probes)], "the largest budget first"
    assert budget_line(reports[0]).startswith("within ")
    assert within(10**9) == "within 1 GB (953.7 MiB)"


def interrupted(plan_at, after):
    """Return a function like `plan_at` that raises KeyboardInterrupt after `after` plans."""
    calls = []

    def stopped(at):
        calls.append(at)
        if len(calls) > after:
            raise KeyboardInterrupt
        return plan_at(at)

    return stopped


def test_ctrl_c_keeps_the_results_so_far():
    planner = Planner(OVERHEAD_BYTES + FIXED_BYTES + ROW_BYTES * 50)
    fit = largest_batch(interrupted(planner.at_batch, 3), Batches(8))
    assert not fit.finished and [p.at for p in fit.probes] == [8, 16, 32] and fit.largest.batch == 32
    assert " so far: 32, " in batches_text(fit)
    assert " so far" not in batches_text(largest_batch(planner.at_batch, Batches(8)))
    curve = budget_curve(interrupted(planner.at_budget, 2), 5)
    assert not curve.finished and len(curve.probes) == 1
    for after in (0, 1):  # no plan fits
        with pytest.raises(KeyboardInterrupt):
            largest_batch(interrupted(planner.at_batch, after), Batches(1000))
    with pytest.raises(KeyboardInterrupt):
        budget_curve(interrupted(planner.at_budget, 0), 5)
