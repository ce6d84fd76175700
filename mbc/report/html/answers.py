"""Answers to the most frequent questions about a plan; every figure is one of the plan, or a sum of such figures."""

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
from mbc.units import show_given, show_size, show_time

MORE_BYTES = 10**9  # additional budget in the question
UNUSED_SHARE = 0.1  # of the budget; a plan that leaves this share, or MORE_BYTES, unused is not limited by memory
_LISTED = 5
CONCURRENT = " With memory for a concurrent stream a step may be even faster."


def answers(facts: Facts, measured: MeasuredStep | None = None) -> tuple[Answer, ...]:
    """Return the answers about a plan.

    They say what takes the time, what sets the peak, why values are recomputed or offloaded, what a larger budget would
    gain, which kernel is furthest from its roofline, and how far the prediction is from a measured step.

    Args:
        facts: Facts of the training step.
        measured: Measured step; None without a record.
    """
    off = () if measured is None or not facts.plan.is_timed else (_off(facts, measured),)
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
        f" {len(facts.program.launches)}: {_named(kinds)}. The budget of {show_given(plan.budget_bytes)} leaves"
        f" {show_size(left)} for the arena, after {show_size(plan.predictions.overhead_bytes)} of overhead"
        f" ({OVERHEAD}).",
        cut(
            holds,
            _LISTED,
            "with the most bytes",
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
    """List all kinds of bytes but those below a thousandth."""
    total = sum(size for _, size in kinds)
    shown = [f"{show_size(size)} of {kind}" for kind, size in kinds if 1000 * size >= total > 0]
    return ", ".join(shown) or "nothing"


def _why_not_kept(facts: Facts) -> Answer:
    plan, done = facts.plan, facts.techniques
    question = "Why is a value recomputed or offloaded?"
    if not (done.recomputed or done.offloaded):
        return Answer(
            question, "No value is: all values fit in the budget between their uses.", (), "memory", "decision"
        )
    left = plan.arena_budget_bytes
    total = facts.curve.total_bytes
    recomputed, offloaded = done.absent_bytes(facts.peak)

    def reason(one: Recomputed | Offloaded) -> str:
        most = max(total[one.absent[0] : one.absent[1]], default=0)
        over = most + one.saved_bytes - left
        then = (
            f"the values would exceed the budget of the arena by {show_size(over)}"
            if over > 0
            else "the values would fit, if all others stayed as they are"
        )
        return (
            f"in launches {one.absent[0]} to {one.absent[1] - 1}, where up to {show_size(most)} are live. If kept,"
            f" {then}."
        )

    def recomputed_line(one: Recomputed) -> Line:
        costs = f": {show_size(one.saved_bytes)} are absent {reason(one)} Recomputing takes {show_time(one.time_us)}."
        return Line("", one.outputs, costs)

    def offloaded_line(one: Offloaded) -> Line:
        return Line(
            "",
            (one.value,),
            f": {show_size(one.saved_bytes)} are in memory of the {one.space} {reason(one)} The copies take"
            f" {show_time(one.time_us)} and cost the kernels about {show_time(facts.costs.of(one))}.",
        )

    recompute_us = sum(r.time_us for r in done.recomputed)
    prices = [f"recomputing costs {show_time(recompute_us)} ({_of_step(recompute_us, plan)})"] if recompute_us else []
    prices += [facts.costs.text(_of_step(facts.costs.total_us, plan))] if done.offloaded else []
    costs = "; ".join(prices)
    return Answer(
        question,
        f"Not all values fit. At the peak {show_size(max(total))} are live, and the budget leaves {show_size(left)}"
        f" for the arena; {show_size(recomputed)} of recomputed and {show_size(offloaded)} of offloaded values are"
        " absent."
        f" {len(done.recomputed)} values are recomputed and {len(done.offloaded)} offloaded: those that free the most"
        f" bytes for their time. {costs[:1].upper()}{costs[1:]}. Select a value in the map of the arena to see its own"
        " reason.",
        (
            *cut(_largest(done.recomputed), _LISTED, "recomputed values with the most bytes", recomputed_line),
            *cut(_largest(done.offloaded), _LISTED, "offloaded values with the most bytes", offloaded_line),
        ),
        "memory",
        "decision",
    )


Saving = TypeVar("Saving", Recomputed, Offloaded)


def _largest(techniques: Sequence[Saving]) -> Sequence[Saving]:
    """Sort techniques by the bytes that they save, the largest first."""
    return sorted(techniques, key=lambda one: -one.saved_bytes)


def _more(facts: Facts) -> Answer:
    plan = facts.plan
    question = f"What would {MORE_BYTES // 10**9} GB more memory gain?"
    least_us = plan.bounds.least_us if plan.bounds.critical_path_us else plan.bounds.fastest_us
    at_most_us = max(0.0, plan.predictions.train_us - least_us)
    schedule = "plan" if plan.bounds.critical_path_us else "serial schedule"
    bound = (
        f"With any budget, no {schedule} with these kernels is faster than {show_time(least_us)}: "
        f"{show_time(at_most_us)} less than this plan, {_of_step(at_most_us, plan)}."
        f"{'' if plan.bounds.critical_path_us else CONCURRENT}"
        if plan.predictions.train_us
        else ""
    )
    unused_bytes = plan.budget_bytes - taken_bytes(plan)
    if unused_bytes >= min(MORE_BYTES, UNUSED_SHARE * plan.budget_bytes):
        nothing = f"Nothing: {show_size(unused_bytes)} of the budget are unused, so memory does not limit the plan."
        return Answer(question, f"{nothing} {bound}".strip(), (), "memory", "decision")
    absent = absent_values(facts)
    kept = kept_with(facts, absent, MORE_BYTES)
    gain_us = min(time_saved(facts, kept), at_most_us)
    if gain_us <= 0:
        nothing = "Nothing: no absent value costs time."
        return Answer(question, f"{nothing} {bound}".strip(), (), "memory", "decision")
    saved_bytes = sum(one.saved_bytes for one in kept)
    recompute_us = sum(one.cost_us for one in kept if isinstance(one.of, Recomputed))
    fit = f"all {len(kept)}" if len(kept) == len(absent) else f"{len(kept)} of {len(absent)}"
    return Answer(
        question,
        f"About {show_time(gain_us)}, {_of_step(gain_us, plan)}: {fit} absent values, {show_size(saved_bytes)}, would"
        f" fit. That saves {show_time(recompute_us)} of recomputing and"
        f" {show_time(max(0.0, gain_us - recompute_us))} of costs of copies. This is an estimate from"
        " this plan alone: `mbc fit --curve` plans each budget, and `mbc fit`"
        f" finds the largest batch. {bound}",
        cut(
            [one for one in kept if one.cost_us],
            _LISTED,
            "with the highest cost per byte",
            lambda one: Line("", one.values, f": {show_size(one.saved_bytes)} for {show_time(one.cost_us)}"),
        ),
        "memory",
        "decision",
    )


def _of_step(time_us: float, plan: Plan) -> str:
    """Format a time as a share of the training program."""
    return f"{100 * time_us / (plan.predictions.train_us or 1.0):.2f} % of the {_part(plan)}"


def _part(plan: Plan) -> str:
    """Return the name for the work of the training program."""
    return "step" if plan.graph.optimizer.accumulate == 1 else "last mini-batch of a step"


def _furthest(facts: Facts) -> tuple[Answer, ...]:
    if facts.ceilings is None:
        return ()
    question = "Which kernel is furthest from its roofline?"
    share = facts.plan.predictions.measured_share
    note = (
        ""
        if share >= 1
        else f" {measured_percent(share)} of the step is measured; ~ marks estimates, which `mbc profile` replaces."
    )
    kernels = [one for one in facts.limits if one.summary.stream not in COPY_STREAMS]
    # Each kernel takes at least the time of a launch: for a smaller limit a ratio says nothing.
    timed = sorted((one for one in kernels if one.limit_us > facts.ceilings.launch_us), key=lambda one: -one.lost_us)
    if not timed:
        launch = show_time(facts.ceilings.launch_us)
        text = f"Unknown: the limit of each kernel is below the {launch} that a launch takes.{note}"
        return (Answer(question, text, (), "roofline"),)
    most, ratio = timed[0], max(timed, key=_ratio)
    recomputing = facts.recomputing
    also = (
        " It is also the furthest by ratio."
        if ratio is most
        else f" By ratio, it is {ratio.summary.name}: {_taken(ratio)}, {_ratio(ratio):.1f} times its limit."
    )
    return (
        Answer(
            question,
            f"{most.summary.name} loses the most time: {_one_run(most, recomputing.get(most.summary.name, 0))}."
            f"{also}{note}",
            cut(
                timed, _LISTED, "that lose the most time", lambda one: _lost(one, recomputing.get(one.summary.name, 0))
            ),
            "roofline",
        ),
    )


def _one_run(one: Limit, recomputing: int) -> str:
    """Describe an operation against its limit; if it is recomputed, describe one run and the loss of all runs."""
    runs, guess = len(one.summary.micro_batches) if recomputing else 1, one.summary.estimated
    taken, limit = time_cell(one.summary.time_us / runs, guess), show_time(one.limit_us / runs)
    text = f"{taken}{' a run' if runs > 1 else ''} where {one.bound} allows {limit}, {_ratio(one):.2f} times its limit"
    lost = f"; run {runs} times, {recomputing} of them to recompute, it loses {time_cell(one.lost_us, guess)} in all"
    return f"{text}{lost}" if recomputing else text


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
    errors = [(us - (end - start), us, i) for i, (start, end, us) in enumerate(spans) if us is not None]
    missing = len(measured.times_us) - len(errors)
    return Answer(
        "How far is the prediction from what was measured?",
        f"The {_part(facts.plan)} took {show_time(measured.step_us)}, the median of {measured.steps} replays of its"
        f" graph, where {show_time(predicted_us)} are predicted: {100 * (measured.step_us / predicted_us - 1):+.1f} %."
        + (f" {missing} of {len(measured.times_us)} launches are missing in the record." if missing else ""),
        cut(
            sorted(errors, key=lambda one: -abs(one[0])),
            _LISTED,
            "with the largest errors",
            lambda one: Line(
                f"{launch_title(facts.program, one[2])}: {show_time(one[1])}, {show_time(abs(one[0]))}"
                f" {'more' if one[0] > 0 else 'less'} than predicted"
            ),
        ),
        "lanes",
    )
