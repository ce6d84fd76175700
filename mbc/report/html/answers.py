"""In sentences, what one asks of a plan first. Every figure is one of the plan, or a sum of such, as is said there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mbc.analysis.roofline import Limit
from mbc.hardware.streams import COPY_STREAMS
from mbc.plan.live import Kind
from mbc.plan.memory import LiveValue, live_values_at
from mbc.plan.model import Plan
from mbc.plan.techniques import Offloaded, Recomputed
from mbc.report.html.answer import Answer, Line, cut
from mbc.report.html.facts import Facts
from mbc.report.html.head import taken_bytes
from mbc.report.html.larger_budget import absent_values, kept_with, time_saved
from mbc.report.html.time_words import what_takes_the_time
from mbc.report.measured import MeasuredStep
from mbc.report.tables import OVERHEAD, launch_title, measured_percent, time_cell
from mbc.units import show_size, show_time

MORE_BYTES = 10**9  # what a larger budget is asked about
UNUSED_SHARE = 0.1  # of the budget, or MORE_BYTES: a plan that leaves as much is not held back by memory
_LISTED = 5
CONCURRENT = " With memory for a concurrent stream a step may be faster still."


def answers(facts: Facts, measured: MeasuredStep | None = None) -> tuple[Answer, ...]:
    """What takes the time, what sets the peak, why values are recomputed or offloaded, what a larger budget would buy,
    what is furthest from its roofline, and where the prediction was off; `facts` of the training step."""
    off = () if measured is None else (_off(facts, measured),)
    return (*what_takes_the_time(facts), _peak(facts), _why_not_kept(facts), _more(facts), *_furthest(facts), *off)


def _peak(facts: Facts) -> Answer:
    plan, curve, peak = facts.plan, facts.curve, facts.peak
    kinds = sorted(curve.at(peak).items(), key=lambda item: -item[1])
    left = plan.arena_budget_bytes
    holds = [live for live in live_values_at(plan, facts.program, peak, facts.held) if live.size_bytes]
    launch = launch_title(facts.program, peak)
    rest_bytes = sum(live.size_bytes for live in holds[_LISTED:])
    return Answer(
        "What sets the peak?",
        f"{show_size(curve.peak_bytes)} are live{facts.peak_moment}, in {launch} of"
        f" {len(facts.program.launches)}: {_named(kinds)}. The budget of {show_size(plan.budget_bytes)} leaves"
        f" {show_size(left)} for the arena, after {show_size(plan.predictions.overhead_bytes)} of overhead"
        f" ({OVERHEAD}).",
        cut(
            holds,
            _LISTED,
            "with most bytes",
            lambda live: _held(live, launch),
            f"{len(holds) - _LISTED:,} more, {show_size(rest_bytes)} in all, are live at the peak",
        ),
        "memory",
        "kind",
    )


def _held(live: LiveValue, launch: str) -> Line:
    size = f"{show_size(live.size_bytes)}: "
    if live.value is None:
        return Line(f"{size}workspace of {launch}")
    return Line(size, (live.value,), f" ({live.kind}), live in launches {live.start} to {live.stop - 1}")


def _named(kinds: list[tuple[Kind, int]]) -> str:
    """All but what is less than a thousandth of them."""
    total = sum(size for _, size in kinds)
    shown = [f"{show_size(size)} of {kind}" for kind, size in kinds if 1000 * size >= total > 0]
    return ", ".join(shown) or "nothing"


def _why_not_kept(facts: Facts) -> Answer:
    plan, found = facts.plan, facts.techniques
    question = "Why is a value recomputed or offloaded?"
    if not (found.recomputed or found.offloaded):
        return Answer(question, "None is: all values fit the budget between their uses.", (), "memory", "decision")
    left = plan.arena_budget_bytes
    total = facts.curve.total_bytes
    recomputed, offloaded = found.absent_bytes(facts.peak)

    def reason(one: Recomputed | Offloaded) -> str:
        most = max(total[one.absent[0] : one.absent[1]], default=0)
        over = most + one.saved_bytes - left
        then = (
            f"they would exceed what the budget leaves by {show_size(over)}"
            if over > 0
            else "they would fit with all others as they are"
        )
        return (
            f"in launches {one.absent[0]} to {one.absent[1] - 1}, where up to {show_size(most)} are live; kept, {then}."
        )

    def recomputed_line(one: Recomputed) -> Line:
        told = f": {show_size(one.saved_bytes)} are absent {reason(one)} Recomputing takes {show_time(one.time_us)}."
        return Line("", one.outputs, told)

    def offloaded_line(one: Offloaded) -> Line:
        return Line(
            "",
            (one.value,),
            f": {show_size(one.saved_bytes)} are in memory of the {one.space} {reason(one)} The copies take"
            f" {show_time(one.time_us)} and cost the kernels about {show_time(facts.costs.of(one))}.",
        )

    recompute_us = sum(r.time_us for r in found.recomputed)
    prices = [f"recomputing costs {show_time(recompute_us)} ({_of_step(recompute_us, plan)})"] if recompute_us else []
    prices += [facts.costs.text(_of_step(facts.costs.total_us, plan))] if found.offloaded else []
    told = "; ".join(prices)
    return Answer(
        question,
        f"Kept, they would not fit: at the peak {show_size(recomputed)} of recomputed and {show_size(offloaded)} of"
        f" offloaded values are absent, beside {show_size(max(total))} that are live, and the budget leaves"
        f" {show_size(left)}. {len(found.recomputed)} are recomputed and {len(found.offloaded)} offloaded: those that"
        f" free most bytes for their time. {told[:1].upper()}{told[1:]}. Choose a value in the map of the arena for its"
        " own reason.",
        (
            *cut(_largest(found.recomputed), _LISTED, "recomputed values with most bytes", recomputed_line),
            *cut(_largest(found.offloaded), _LISTED, "offloaded values with most bytes", offloaded_line),
        ),
        "memory",
        "decision",
    )


Saving = TypeVar("Saving", Recomputed, Offloaded)


def _largest(found: Sequence[Saving]) -> Sequence[Saving]:
    """Those that save most first."""
    return sorted(found, key=lambda one: -one.saved_bytes)


def _more(facts: Facts) -> Answer:
    plan = facts.plan
    question = f"What would {MORE_BYTES // 10**9} GB more buy?"
    least_us = plan.bounds.least_us if plan.bounds.critical_path_us else plan.bounds.fastest_us
    at_most_us = max(0.0, plan.predictions.train_us - least_us)
    schedule = "plan" if plan.bounds.critical_path_us else "serial schedule"
    bound = (
        f"No {schedule}, however large the budget, is faster than {show_time(least_us)} with these kernels: "
        f"{show_time(at_most_us)} less than now, {_of_step(at_most_us, plan)}."
        f"{'' if plan.bounds.critical_path_us else CONCURRENT}"
        if plan.predictions.train_us
        else ""
    )
    unused_bytes = plan.budget_bytes - taken_bytes(plan)
    if unused_bytes >= min(MORE_BYTES, UNUSED_SHARE * plan.budget_bytes):
        nothing = f"Nothing: {show_size(unused_bytes)} of the budget are unused, memory is not what holds it back."
        return Answer(question, f"{nothing} {bound}".strip(), (), "memory", "decision")
    absent = absent_values(facts)
    kept = kept_with(facts, absent, MORE_BYTES)
    gain_us = min(time_saved(facts, kept), at_most_us)
    if gain_us <= 0:
        nothing = "Nothing that costs time is absent."
        return Answer(question, f"{nothing} {bound}".strip(), (), "memory", "decision")
    saved_bytes = sum(one.saved_bytes for one in kept)
    recompute_us = sum(one.cost_us for one in kept if isinstance(one.of, Recomputed))
    fit = f"all {len(kept)}" if len(kept) == len(absent) else f"{len(kept)} of {len(absent)}"
    return Answer(
        question,
        f"About {show_time(gain_us)}, {_of_step(gain_us, plan)}: {fit} absent values, {show_size(saved_bytes)}, would"
        f" fit, without {show_time(recompute_us)} of recomputing and {show_time(max(0.0, gain_us - recompute_us))} that"
        " copies cost. That is an estimate from this plan alone: `mbc fit --curve` plans each budget, and `mbc fit` the"
        f" largest batch. {bound}",
        cut(
            [one for one in kept if one.cost_us],
            _LISTED,
            "that cost most time a byte",
            lambda one: Line("", one.values, f": {show_size(one.saved_bytes)} for {show_time(one.cost_us)}"),
        ),
        "memory",
        "decision",
    )


def _of_step(time_us: float, plan: Plan) -> str:
    """Its share of what the training program takes."""
    return f"{100 * time_us / (plan.predictions.train_us or 1.0):.2f} % of the {_part(plan)}"


def _part(plan: Plan) -> str:
    """What the training program runs."""
    return "step" if plan.graph.optimizer.accumulate == 1 else "last mini-batch of a step"


def _furthest(facts: Facts) -> tuple[Answer, ...]:
    if facts.ceilings is None:
        return ()
    question = "Which kernel is furthest from its roofline?"
    share = facts.plan.predictions.measured_share
    known = (
        "" if share >= 1 else f" Of the step {measured_percent(share)} is measured, ~ is not: `mbc profile` measures."
    )
    kernels = [one for one in facts.limits if one.summary.stream not in COPY_STREAMS]
    # Whatever its limit, a kernel takes a launch: below that a ratio says nothing.
    timed = sorted((one for one in kernels if one.limit_us > facts.ceilings.launch_us), key=lambda one: -one.lost_us)
    if not timed:
        launch = show_time(facts.ceilings.launch_us)
        told = f"None can be told: each has a limit below the {launch} that a launch takes.{known}"
        return (Answer(question, told, (), "roofline"),)
    most, ratio = timed[0], max(timed, key=_ratio)
    recomputing = facts.recomputing
    also = (
        " It is the furthest by ratio, too."
        if ratio is most
        else f" By ratio it is {ratio.summary.name}: {_taken(ratio)}, {_ratio(ratio):.1f} times its limit."
    )
    return (
        Answer(
            question,
            f"{most.summary.name} loses most: {_one_run(most, recomputing.get(most.summary.name, 0))}.{also}{known}",
            cut(timed, _LISTED, "that lose most time", lambda one: _lost(one, recomputing.get(one.summary.name, 0))),
            "roofline",
        ),
    )


def _one_run(one: Limit, recomputing: int) -> str:
    """Of an operation that is run again to recompute, what each run takes, and what it loses in all."""
    runs, guess = len(one.summary.micro_batches) if recomputing else 1, one.summary.estimated
    taken, limit = time_cell(one.summary.time_us / runs, guess), show_time(one.limit_us / runs)
    told = f"{taken}{' a run' if runs > 1 else ''} where {one.bound} allows {limit}, {_ratio(one):.2f} times its limit"
    lost = f"; run {runs} times, {recomputing} of them to recompute, it loses {time_cell(one.lost_us, guess)} in all"
    return f"{told}{lost}" if recomputing else told


def _lost(one: Limit, recomputing: int) -> Line:
    runs = f" in {len(one.summary.micro_batches)} runs, {recomputing} of them to recompute" if recomputing else ""
    return Line(
        f"{one.summary.name}: {time_cell(one.lost_us, one.summary.estimated)} lost{runs} ({_ratio(one):.2f} times its"
        f" limit, the nearest is {one.bound}), {' | '.join(one.summary.kernels)}"
    )


def _ratio(one: Limit) -> float:
    return one.summary.time_us / one.limit_us


def _taken(one: Limit) -> str:
    return time_cell(one.summary.time_us, one.summary.estimated)


def _off(facts: Facts, measured: MeasuredStep) -> Answer:
    predicted_us = facts.plan.predictions.train_us
    spans = zip(facts.times.starts_us, facts.times.ends_us, measured.times_us, strict=True)
    found = [(us - (end - start), us, i) for i, (start, end, us) in enumerate(spans) if us is not None]
    missing = len(measured.times_us) - len(found)
    return Answer(
        "How far is the prediction from what was measured?",
        f"The {_part(facts.plan)} took {show_time(measured.step_us)}, the median of {measured.steps} replays of its"
        f" graph, where {show_time(predicted_us)} are predicted: {100 * (measured.step_us / predicted_us - 1):+.1f} %."
        + (f" {missing} of {len(measured.times_us)} launches were not found in the record." if missing else ""),
        cut(
            sorted(found, key=lambda one: -abs(one[0])),
            _LISTED,
            "that are furthest off",
            lambda one: Line(
                f"{launch_title(facts.program, one[2])}: {show_time(one[1])}, {show_time(abs(one[0]))}"
                f" {'more' if one[0] > 0 else 'less'} than predicted"
            ),
        ),
        "lanes",
    )
