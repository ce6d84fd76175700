"""The output of `mbc diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mbc.plan.diff import Change, Figure, OperationChange, PlanDiff
from mbc.plan.model import Plan
from mbc.plan.summary import OperationSummary
from mbc.report.columns import DEFAULT_WIDTH, Column, render
from mbc.report.figure_names import figure_name
from mbc.report.step_times import compared_steps, unlike_estimates
from mbc.report.tables import cudnn_version, layouts, measured_percent, micro_batches, profile_of, time_cell
from mbc.units import show_range, show_size, show_time

_RANGES = {
    "train_low_us": "train_range_us", "train_high_us": "train_range_us",
    "infer_low_us": "infer_range_us", "infer_high_us": "infer_range_us",
}  # fmt: skip


def diff_text(
    diff: PlanDiff,
    before: str,
    after: str,
    *,
    width: int = DEFAULT_WIDTH,
    limit: int | None = None,
    with_times: bool = False,
) -> str:
    """Format totals, then a row for each aspect of an operation that differs.

    Operations that differ only in time are counted, and listed with `with_times`.

    Args:
        diff: Differences.
        before: Title of the first plan.
        after: Title of the second plan.
        width: Columns of the terminal.
        limit: Largest number of operations to list, those with the largest difference of time; None for all.
        with_times: Whether to list operations that differ only in time.
    """
    if diff.same:
        return f"{before} and {after} run the same: no figure and no operation differs"
    parts: list[str] = []
    profiles = ("profile", *map(profile_of, diff.plans))
    rows = [row for row in total_rows(diff) if row[0] != profiles[0]]
    if rows:
        columns = (Column("in all"), Column(before, right=True, shrinks=True), Column(after, right=True, shrinks=True))
        parts.append(render((*columns, Column("change", right=True)), rows, width))
    if unlike_estimates(diff.plans):
        parts.append(compared_steps(diff.plans, (before, after)))
    if profiles[1] != profiles[2]:  # too long for a column
        parts.append(f"profile of {before}: {profiles[1]}\nprofile of {after}: {profiles[2]}")
    listed = [c for c in diff.operations if with_times or not c.only_time]
    if listed:
        parts.append(_operations(listed, before, after, width, limit))
    only_time = len(diff.operations) - len(listed)
    if only_time:
        gains = {
            what: sum(c.after.time_us - c.before.time_us for c in diff.operations if c.only_time and c.program == name)
            for name, what in (("train", "the training step"), ("infer", "inference"))
        }
        gains_text = " and ".join(f"{_signed_time(gain)} in {what}" for what, gain in gains.items() if gain)
        parts.append(f"{only_time} operations differ in time only, by {gains_text or _signed_time(0.0)} together")
    for title, only in ((before, diff.only_before), (after, diff.only_after)):
        if only:
            parts.append(_only(title, only, limit))
    return "\n\n".join(parts)


def _operations(changes: Sequence[OperationChange], before: str, after: str, width: int, limit: int | None) -> str:
    shown = list(changes)
    if limit is not None and len(shown) > limit:
        largest = sorted(range(len(shown)), key=lambda i: (-abs(shown[i].after.time_us - shown[i].before.time_us), i))
        shown = [shown[i] for i in sorted(largest[:limit])]
    rows: list[tuple[str, ...]] = []
    for change in shown:
        name = change.name if change.program == "train" else f"{change.name} ({change.program})"
        for aspect in change.differs:
            old, new = aspect_text(aspect, change.before), aspect_text(aspect, change.after)
            if aspect == "kernel":
                old, new = _apart(old, new)
            rows.append((name, aspect.replace("_", "-"), old, new))
            name = ""  # only in the first row
    columns = (
        Column("operation", shrinks=True, least=12),
        Column("differs"),
        Column(before, shrinks=True, least=10),
        Column(after, shrinks=True, least=10),
    )
    text = render(columns, rows, width)
    if len(shown) < len(changes):
        text += f"\n… and {len(changes) - len(shown)} more operations, whose times differ less (--limit)"
    return text


def aspect_text(aspect: str, summary: OperationSummary) -> str:
    """Format one aspect of `OperationChange.differs` for one of the two plans."""
    return {
        "kind": lambda: summary.kind,
        "kernel": lambda: " | ".join(summary.kernels),
        "micro_batches": lambda: f"{micro_batches(summary.micro_batches)} rows",
        "layout": lambda: layouts(summary.layouts) if len(set(summary.layouts)) == 1 else " ".join(summary.layouts),
        "workspace": lambda: show_size(summary.workspace_bytes),
        "time": lambda: time_cell(summary.time_us, summary.estimated),
    }[aspect]()


def _apart(old: str, new: str) -> tuple[str, str]:
    """Format two kernels without the settings that they share."""
    ours, theirs = Counter(old.split(" ")), Counter(new.split(" "))
    shared = ours & theirs
    head_old, head_new = old.split(" ")[0], new.split(" ")[0]

    def rest(text: str, head: str) -> str:
        return " ".join([head, *(word for word in text.split(" ")[1:] if word not in shared)])

    return rest(old, head_old), rest(new, head_new)


def _only(title: str, only: Sequence[tuple[str, OperationSummary]], limit: int | None) -> str:
    shown = only if limit is None else only[:limit]
    rows = [(s.name, program, " | ".join(s.kernels), time_cell(s.time_us, s.estimated)) for program, s in shown]
    columns = (Column(f"only in {title}"), Column("program"), Column("kernel"), Column("time", right=True))
    text = render(columns, rows)
    return text if len(shown) == len(only) else f"{text}\n… and {len(only) - len(shown)} more"


def total_rows(diff: PlanDiff) -> list[tuple[str, str, str, str]]:
    """Return the figures that differ, with units: name, before, after, and the change in percent.

    Both ends of a range are one row.
    """
    rows: dict[str, tuple[str, str, str, str]] = {}
    for change in diff.totals:
        name = _RANGES.get(change.name, change.name)
        before, after = (figure_of(name, figure, plan) for figure, plan in zip(_both(change), diff.plans, strict=True))
        rows[name] = (figure_name(name), before, after, relative_change(change) if name == change.name else "")
    return list(rows.values())


def figure_of(name: str, figure: Figure, plan: Plan) -> str:
    """Format a figure of one of the plans; `~` marks estimates."""
    p = plan.predictions
    if name == "profile":
        return profile_of(plan)
    if name == "train_range_us":
        return show_range(p.train_low_us, p.train_high_us) if plan.is_timed else "-"
    if name == "infer_range_us":
        return show_range(p.infer_low_us, p.infer_high_us) if plan.is_timed else "-"
    guess = p.infer_low_us < p.infer_high_us if name == "infer_us" else p.measured_share < 1
    return ("~" if guess and name.endswith("_us") and figure else "") + show_figure(name, figure)


def _both(change: Change) -> tuple[Figure, Figure]:
    return change.before, change.after


def show_figure(name: str, figure: Figure) -> str:
    """Format a figure with its unit."""
    if isinstance(figure, str):
        return figure
    if name == "cudnn":
        return cudnn_version(int(figure)) if figure else "any"  # the plan uses no engine of cuDNN
    if name.endswith("_bytes"):
        return show_size(figure)
    if name.endswith("_us"):
        return time_cell(figure, False)
    return measured_percent(figure) if name.endswith("_share") else f"{figure:,}"


def relative_change(change: Change) -> str:
    """Format the change of a size or a time in percent; empty for other figures."""
    before, after = change.before, change.after
    if isinstance(before, str) or isinstance(after, str) or not before or not change.name.endswith(("_us", "_bytes")):
        return ""
    has_no_time = not after and change.name.endswith("_us")
    return "" if has_no_time else f"{100 * (after / before - 1):+.1f} %"


def _signed_time(time_us: float) -> str:
    return ("+" if time_us >= 0 else "-") + show_time(abs(time_us))
