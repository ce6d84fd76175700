"""In sentences, what one asks of a plan first. Every figure is one of the plan, or a sum of such, as is said there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mbc.analysis.roofline import Limit
from mbc.plan.live import Kind
from mbc.plan.memory import LiveValue, live_values_at
from mbc.plan.model import COPY_STREAMS, Plan
from mbc.plan.techniques import Offloaded, Recomputed
from mbc.report.html.answer import Answer, Line, cut
from mbc.report.html.facts import Facts
from mbc.report.html.head import taken_bytes
from mbc.report.measured import MeasuredStep
from mbc.report.tables import launch_title, measured_percent, time_cell
from mbc.report.techniques import stalls
from mbc.units import show_size, show_time

MORE_BYTES = 10**9  # what a larger budget is asked about
UNUSED_SHARE = 0.1  # of the budget, or MORE_BYTES: a plan that leaves as much is not held back by memory
_LISTED = 5
CONCURRENT = " With memory for a concurrent stream a step may be faster still."


def answers(facts: Facts, measured: MeasuredStep | None = None) -> tuple[Answer, ...]:
    """What sets the peak, why values are recomputed or offloaded, what a larger budget would buy, what is furthest from
    its roofline, and where the prediction was off; `facts` of the training step."""
    off = () if measured is None else (_off(facts, measured),)
    return (_peak(facts), _why_not_kept(facts), _more(facts), *_furthest(facts), *off)


def _peak(facts: Facts) -> Answer:
    plan, curve, peak = facts.plan, facts.curve, facts.peak
    kinds = sorted(curve.at(peak).items(), key=lambda item: -item[1])
    left = plan.arena_budget_bytes
    holds = [live for live in live_values_at(plan, facts.program, peak, facts.held) if live.size_bytes]
    return Answer(
        "What sets the peak?",
        f"{show_size(curve.peak_bytes)} are live in {launch_title(facts.program, peak)}: {_named(kinds)}. The budget of"
        f" {show_size(plan.budget_bytes)} leaves {show_size(left)} for the arena,"
        f" after {show_size(plan.predictions.overhead_bytes)} of overhead.",
        cut(holds, _LISTED, "with most bytes", lambda live: _held(live, launch_title(facts.program, peak))),
        "memory",
        "kind",
    )


def _held(live: LiveValue, launch: str) -> Line:
    size = f"{show_size(live.size_bytes)}: "
    if live.value is None:
        return Line(f"{size}workspace of {launch}")
    return Line(size, (live.value,), f" ({live.kind}), live in launches {live.start} to {live.stop - 1}")


def _named(kinds: list[tuple[Kind, int]]) -> str:
    shown = [f"{show_size(size)} of {kind}" for kind, size in kinds[:3]]
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
            f" {show_time(one.time_us)} beside the kernels.",
        )

    recompute_us = sum(r.time_us for r in found.recomputed)
    return Answer(
        question,
        f"Kept, they would not fit: at the peak {show_size(recomputed)} of recomputed and {show_size(offloaded)} of"
        f" offloaded values are absent, beside {show_size(max(total))} that are live, and the budget leaves"
        f" {show_size(left)}. {len(found.recomputed)} are recomputed, in {show_time(recompute_us)} of kernels, and"
        f" {len(found.offloaded)} offloaded: those that free most bytes for their time. Choose a value in the map of"
        " the arena for its own reason.",
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
    plan, found, peak = facts.plan, facts.techniques, facts.peak
    question = f"What would {MORE_BYTES // 10**9} GB more buy?"
    least_us = plan.bounds.least_us if plan.bounds.critical_path_us else plan.bounds.fastest_us
    at_most_us = max(0.0, plan.predictions.train_us - least_us)
    # What is absent at the peak and costs most time a byte would be kept first.
    waits: dict[int, float] = {}
    for stall in stalls(facts.program, facts.times):
        waits[stall.cause] = waits.get(stall.cause, 0.0) + stall.time_us
    costs = [
        (one.time_us, one.saved_bytes, one.outputs) for one in found.recomputed if one.absent[0] <= peak < one.absent[1]
    ]
    costs += [
        (sum(waits.get(launch, 0.0) for launch in one.launches), one.saved_bytes, (one.value,))
        for one in found.offloaded
        if one.absent[0] <= peak < one.absent[1]
    ]
    costs.sort(key=lambda cost: -cost[0] / max(1, cost[1]))
    kept: list[tuple[float, int, tuple[str, ...]]] = []
    room = MORE_BYTES
    for cost in costs:
        if cost[0] > 0 and cost[1] <= room:
            kept.append(cost)
            room -= cost[1]
    schedule = "plan" if plan.bounds.critical_path_us else "serial schedule"
    bound = (
        f"No {schedule}, however large the budget, is faster than {show_time(least_us)} with these kernels: "
        f"{show_time(at_most_us)} less than now, {100 * at_most_us / plan.predictions.train_us:.2f} % of the"
        f" {_part(plan)}.{'' if plan.bounds.critical_path_us else CONCURRENT}"
        if plan.predictions.train_us
        else ""
    )
    unused_bytes = plan.budget_bytes - taken_bytes(plan)
    if unused_bytes >= min(MORE_BYTES, UNUSED_SHARE * plan.budget_bytes):
        nothing = f"Nothing: {show_size(unused_bytes)} of the budget are unused, memory is not what holds it back."
        return Answer(question, f"{nothing} {bound}".strip(), (), "memory", "decision")
    if not kept:
        nothing = "Nothing that costs time is absent at the peak."
        return Answer(question, f"{nothing} {bound}".strip(), (), "memory", "decision")
    saved_us, saved_bytes = sum(c[0] for c in kept), sum(c[1] for c in kept)
    return Answer(
        question,
        f"About {show_time(min(saved_us, at_most_us))} a step: so much less of recomputing and stalls if the"
        f" {len(kept)} values that cost most time a byte, {show_size(saved_bytes)} at the peak, were kept (an estimate"
        f" from this plan alone; `mbc fit --curve` plans each budget). {bound}",
        cut(
            kept,
            _LISTED,
            "that cost most time a byte",
            lambda cost: Line("", cost[2], f": {show_size(cost[1])} for {show_time(cost[0])}"),
        ),
        "memory",
        "decision",
    )


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
    also = (
        " It is the furthest by ratio, too."
        if ratio is most
        else f" By ratio it is {ratio.summary.name}: {_taken(ratio)}, {_ratio(ratio):.1f} times its limit."
    )
    return (
        Answer(
            question,
            f"{most.summary.name} loses most: {_taken(most)} where {most.bound} allows {show_time(most.limit_us)},"
            f" {_ratio(most):.2f} times its limit.{also}{known}",
            cut(timed, _LISTED, "that lose most time", _lost),
            "roofline",
        ),
    )


def _lost(one: Limit) -> Line:
    return Line(
        f"{one.summary.name}: {time_cell(one.lost_us, one.summary.estimated)} lost ({_ratio(one):.2f} times its"
        f" limit, bound by {one.bound}), {' | '.join(one.summary.kernels)}"
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
