"""The head of a page: the title, and the figures as cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from mbc.optimize.schedule.step_time import accumulate_us, samples_per_s, step_us
from mbc.plan.model import Plan
from mbc.plan.prefetch import prefetch_bytes
from mbc.report.collectives import ranks_text
from mbc.report.figure_names import figure_name
from mbc.report.step_times import range_text
from mbc.report.tables import OVERHEAD, profile_of, time_cell
from mbc.units import show_given, show_rate, show_size


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure in the head of a page, as text."""

    name: str
    value: str
    note: str = ""


def plan_title(plan: Plan, others: Sequence[Plan] = ()) -> str:
    """Format a title such as `resnet: batch 128, fp32, NVIDIA H200`.

    For several GPUs it ends with, for example, `2 GPUs: NVIDIA H200 31 rows + NVIDIA H100 33 rows`.
    """
    ranks = plan.graph.ranks
    gpus = plan.target.gpu if ranks is None else f"{ranks.size} GPUs: {gpus_text(plan, others)}"
    gpus = gpus if plan.is_timed else "CPU"
    return f"{plan.graph.name}: batch {plan.graph.global_batch}, {plan.graph.precision}, {gpus}"


def gpus_text(plan: Plan, others: Sequence[Plan] = ()) -> str:
    """Format the GPU and the rows of each rank, in the order of ranks.

    Args:
        plan: Plan.
        others: Plans of the ranks that do not run `plan`; a rank without a plan here is called `another`.
    """
    if plan.graph.ranks is None:
        return plan.target.gpu
    named = {rank: one.target.gpu for one in (plan, *others) for rank in _members(one)}
    parts = [f"{named.get(rank, 'another')} {rows} rows" for rank, rows in enumerate(plan.graph.ranks.rows)]
    counted = [(part, len(list(same))) for part, same in groupby(parts)]
    return " + ".join(part if count == 1 else f"{count} x {part}" for part, count in counted)


def slowest(plan: Plan, others: Sequence[Plan] = ()) -> Plan:
    """Return the plan with the longest step, for which all ranks wait."""
    return max((plan, *others), key=step_us)


def figures(plan: Plan, others: Sequence[Plan] = ()) -> tuple[Figure, ...]:
    """Return the cards of a plan; for several ranks, the step of the slowest and a card for each plan."""
    bounds, guess = plan.bounds, plan.predictions.measured_share < 1
    whose = f", {ranks_text(_members(plan))}" if others else ""
    infer = time_cell(plan.predictions.infer_us, plan.predictions.infer_low_us < plan.predictions.infer_high_us)
    return (
        *_step_figures(slowest(plan, others), bool(others)),
        Figure(f"inference, predicted{whose}", infer),
        *(_memory_figures(plan) if not others else [_rank_figure(one) for one in (plan, *others)]),
        Figure(
            f"{figure_name('fastest_us')}{whose}",
            time_cell(bounds.fastest_us, guess),
            "lower bound on one stream, for any budget",
        ),
        Figure(
            f"{figure_name('floor_bytes')}{whose}",
            show_size(bounds.floor_bytes),
            f"while {bounds.floor_operation} runs, with any recomputing and offloading",
        ),
        _gpu_figure(plan, others),
        *([Figure("settings that replace the source's", plan.settings_text)] if plan.settings else []),
    )


def _step_figures(plan: Plan, waited_for: bool) -> tuple[Figure, ...]:
    """Return the cards of a step and, if it has several mini-batches, of the last one (the training program)."""
    p, graph, count = plan.predictions, plan.graph, plan.graph.optimizer.accumulate
    guess = p.measured_share < 1
    last = range_text(p.train_low_us, p.train_high_us, p.measured_share) if plan.is_timed else "for the CPU"
    whose = f"of {ranks_text(_members(plan))}, the slowest, for which all wait; " if waited_for else ""
    images = f"{show_rate(samples_per_s(plan))} images/s" if p.train_us else ""
    rows = count * graph.global_batch
    throughput = Figure("throughput", images, f"batch {graph.global_batch}")
    if count == 1:
        return Figure("training step, predicted", time_cell(p.train_us, guess), whose + last), throughput
    each = time_cell(accumulate_us(plan), guess)
    return (
        Figure(
            "training step, predicted",
            time_cell(step_us(plan), guess),
            f"{whose}{rows} rows in {count} mini-batches: {count - 1} of {each}, whose gradients are accumulated,"
            " and the last one",
        ),
        Figure("last mini-batch of a step, predicted", time_cell(p.train_us, guess), last),
        Figure("throughput", images, f"{count} mini-batches of {graph.global_batch} rows a step"),
    )


def _memory_figures(plan: Plan) -> tuple[Figure, ...]:
    return (
        Figure("device memory", show_size(taken_bytes(plan)), _memory_note(plan)),
        Figure("host memory", show_size(plan.predictions.host_bytes), "pinned, for offloaded values"),
    )


def _rank_figure(plan: Plan) -> Figure:
    """Return the card of the ranks that run one plan, where others run another."""
    assert plan.graph.ranks is not None
    p, members = plan.predictions, _members(plan)
    host = f"; host memory {show_size(p.host_bytes)}" if p.host_bytes else ""
    return Figure(
        f"{ranks_text(members)}, {plan.target.gpu}",
        f"{plan.graph.ranks.rows[members[0]]} rows, {time_cell(step_us(plan), p.measured_share < 1)} a step",
        f"device memory {show_size(taken_bytes(plan))}: {_memory_note(plan)}{host}",
    )


def _memory_note(plan: Plan) -> str:
    p, ahead_bytes = plan.predictions, prefetch_bytes(plan)
    ahead = f" + {show_size(ahead_bytes)} prefetch" if ahead_bytes else ""
    return (
        f"{show_size(p.arena_bytes)} arena + {show_size(p.overhead_bytes)} overhead ({OVERHEAD}){ahead}; budget"
        f" {show_given(plan.budget_bytes)}"
    )


def _gpu_figure(plan: Plan, others: Sequence[Plan]) -> Figure:
    ranks = plan.graph.ranks
    if ranks is None:
        return Figure("GPU", plan.target.gpu, profile_of(plan))
    profiles = dict.fromkeys(profile_of(one) for one in (plan, *others))
    return Figure("GPUs", f"{ranks.size}", f"{gpus_text(plan, others)}. Profile: {'; '.join(profiles)}")


def taken_bytes(plan: Plan) -> int:
    """Return the bytes of the budget that a plan uses."""
    return plan.predictions.arena_bytes + plan.predictions.overhead_bytes + prefetch_bytes(plan)


def _members(plan: Plan) -> tuple[int, ...]:
    return (0,) if plan.graph.ranks is None else plan.graph.ranks.members
