"""Answers on the differences between two plans and their causes."""

from __future__ import annotations

from collections.abc import Mapping

from mbc.hardware.streams import COPY_STREAMS, Stream
from mbc.optimize.schedule.step_time import step_us
from mbc.plan.diff import Figure, PlanDiff
from mbc.report.differences import figure_of
from mbc.report.figure_names import figure_name
from mbc.report.html.answer import Answer, Line, cut
from mbc.report.html.facts import Facts
from mbc.report.step_times import compared_steps
from mbc.units import show_size, show_time

# Settings and facts of the machine that a plan depends on; other differences follow from these.
CAUSES = (
    "network", "settings", "batch", "precision", "optimizer", "gpu", "architecture", "multiprocessors", "memory_bytes",
    "cudnn", "profile", "budget_bytes", "host_limit_bytes", "peer_limit_bytes", "gpus", "rows", "mbc",
)  # fmt: skip
_LISTED = 8


def diff_answers(diff: PlanDiff, before: Facts, after: Facts) -> tuple[Answer, ...]:
    """Say what changed and why, where time and memory went, and which values are treated differently."""
    if diff.same:
        return (Answer("What changed between these plans?", "Nothing: no figure and no operation differs."),)
    return (_causes(diff, before, after), _time(diff, before, after), _memory(before, after), _decisions(before, after))


def _causes(diff: PlanDiff, before: Facts, after: Facts) -> Answer:
    changed = {change.name: change for change in diff.totals}
    causes = [changed[name] for name in CAUSES if name in changed]
    lines = tuple(
        Line(f"{figure_name(c.name)}: {_shown(c.name, c.before, before)}, then {_shown(c.name, c.after, after)}")
        for c in causes
    )
    # The settings are listed in full below; they are named here only if no other figure shows them.
    named = [c for c in causes if c.name != "settings"] or causes
    why = (
        f"They were planned for different inputs: {', '.join(figure_name(c.name) for c in named)}."
        if causes
        else "Network, GPU, budget and profile are equal: the options of planning or the search differ."
    )
    graphs = [len(facts.plan.graph.train) for facts in (before, after)]
    if graphs[0] != graphs[1]:
        lines = (*lines, Line(f"operations of the graph: {graphs[0]:,}, then {graphs[1]:,}"))
    kernels = sum("kernel" in change.differs for change in diff.operations)
    return Answer(
        "What changed between these plans, and why?",
        f"{why} {len(diff.operations)} operations run differently, {kernels} of them with another kernel;"
        f" {len(diff.only_before)} are in the first plan only, {len(diff.only_after)} in the second only.",
        lines,
        "operations",
    )


def _shown(name: str, figure: Figure, facts: Facts) -> str:
    return figure_of(name, figure, facts.plan) or "none"


def _time(diff: PlanDiff, before: Facts, after: Facts) -> Answer:
    question, steps = "Where did the time go?", compared_steps(diff.plans, ("the first plan", "the second"))
    if not all(plan.is_timed for plan in diff.plans):
        return Answer(question, steps, (), "operations")
    last = [facts.plan.predictions.train_us for facts in (before, after)]
    whole = [step_us(plan) for plan in diff.plans]
    of_last = "" if last == whole else f" Its last mini-batch takes {show_time(last[0])}, then {show_time(last[1])}."
    groups: dict[str, float] = {}
    changes = [(c.program, c.before, c.after.time_us - c.before.time_us) for c in diff.operations]
    changes += [(program, summary, -summary.time_us) for program, summary in diff.only_before]
    changes += [(program, summary, summary.time_us) for program, summary in diff.only_after]
    for program, summary, time_us in changes:
        if program == "train" and summary.stream not in COPY_STREAMS:  # copies overlap kernels
            groups[summary.kind] = groups.get(summary.kind, 0.0) + time_us
    most = [(kind, time) for kind, time in sorted(groups.items(), key=lambda item: -abs(item[1])) if time]
    families = [_families(facts) for facts in (before, after)]
    sums = [
        f"{name} {_signed(families[1][name] - families[0][name])}"
        for name in families[0]
        if families[0][name] or families[1][name]
    ]
    return Answer(
        question,
        f"{steps}{of_last}"
        f" Change of the time of kernels alone (streams may run some concurrently) and of the cost of copies:"
        f" {', '.join(sums)}. By kind of operation:",
        cut(most, _LISTED, "that changed the most", lambda one: Line(f"{one[0]}: {_signed(one[1])}")),
        "operations",
    )


def _families(facts: Facts) -> Mapping[str, float]:
    """Return the time of each family of launches of the training program, in microseconds; for copies, their cost."""
    times = {"recomputing": _recompute_us(facts), "other kernels": 0.0, "collectives": 0.0}
    for launch in facts.program.launches:
        if launch.stream not in COPY_STREAMS:
            times["collectives" if launch.stream is Stream.COLLECTIVE else "other kernels"] += launch.work.time_us
    times["other kernels"] -= times["recomputing"]
    return {**times, "copies": facts.costs.total_us}


def _memory(before: Facts, after: Facts) -> Answer:
    kinds = {kind: (before.curve.at(before.peak).get(kind, 0), after.curve.at(after.peak).get(kind, 0))
             for kind in before.curve.bytes_by_kind}  # fmt: skip
    most = sorted(kinds.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    return Answer(
        "Where did the memory go?",
        f"At its peak the first plan has {show_size(before.curve.peak_bytes)} of live bytes{before.peak_moment}, in"
        f" launch {before.peak}; the second {show_size(after.curve.peak_bytes)}{after.peak_moment}, in launch"
        f" {after.peak}. By kind:",
        tuple(Line(f"{kind}: {show_size(a)}, then {show_size(b)}") for kind, (a, b) in most if a != b),
        "memory",
    )


def _decisions(before: Facts, after: Facts) -> Answer:
    old, new = _decided(before), _decided(after)
    moved = [value for value in dict.fromkeys((*old, *new)) if old.get(value) != new.get(value)]
    counts = [
        f"{len(facts.techniques.recomputed)} recomputations ({show_time(_recompute_us(facts))}) and"
        f" {len(facts.techniques.offloaded)} offloaded values"
        for facts in (before, after)
    ]
    return Answer(
        "Which values are kept, recomputed or offloaded differently?",
        f"The first plan has {counts[0]}, the second {counts[1]}.",
        cut(
            moved,
            _LISTED,
            "that come first",
            lambda value: Line("", (value,), f": {old.get(value, 'kept')}, then {new.get(value, 'kept')}"),
        ),
        "memory",
    )


def _decided(facts: Facts) -> Mapping[str, str]:
    decisions = dict.fromkeys((one.value for one in facts.techniques.offloaded), "offloaded")
    return decisions | {value: "recomputed" for one in facts.techniques.recomputed for value in one.outputs}


def _recompute_us(facts: Facts) -> float:
    return sum(one.time_us for one in facts.techniques.recomputed)


def _signed(time_us: float) -> str:
    return f"{'+' if time_us >= 0 else '-'}{show_time(abs(time_us))}"
