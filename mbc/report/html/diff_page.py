"""The page of two plans: `mbc diff -o`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mbc.collection import uncollected
from mbc.hardware.streams import COPY_STREAMS
from mbc.plan.diff import PlanDiff, diff_plans
from mbc.plan.live import Kind
from mbc.plan.model import Plan
from mbc.plan.summary import OperationSummary
from mbc.report.collectives import ranks_text
from mbc.report.differences import aspect_text, total_rows
from mbc.report.html.diff_words import diff_answers
from mbc.report.html.facts import Facts, facts_of
from mbc.report.html.head import plan_title
from mbc.report.html.packed_rows import Texts
from mbc.report.html.render import render_page
from mbc.report.step_times import step_text

SCRIPTS = ("curve.js", "compare.js")
CHANGES = (
    "program", "name", "kind", "what", "before", "after", "before_us", "after_us", "before_estimated",
    "after_estimated", "copy",
)  # fmt: skip


@uncollected()
def diff_page(
    before: Plan,
    after: Plan,
    before_title: str,
    after_title: str,
    before_others: Sequence[Plan] = (),
    after_others: Sequence[Plan] = (),
) -> str:
    """Return the text of the page of two plans.

    Args:
        before: First plan.
        after: Second plan.
        before_title: Name of the first plan.
        after_title: Name of the second plan.
        before_others: Plans of the ranks that do not run the first plan.
        after_others: Plans of the ranks that do not run the second plan.
    """
    diff = diff_plans(before, after)
    facts = facts_of(before, before.train), facts_of(after, after.train)
    return render_page(
        "diff.html.j2",
        SCRIPTS,
        diff_data(diff, facts, (before_title, after_title)),
        title=f"{before_title} and {after_title}",
        version=after.version,
        answers=diff_answers(diff, *facts),
        titles=(before_title, after_title),
        plans=(_described(before, before_others), _described(after, after_others)),
        steps=(step_text(before), step_text(after)),
        totals=total_rows(diff),
    )


def _described(plan: Plan, others: Sequence[Plan]) -> str:
    title = plan_title(plan, others)
    return title if plan.graph.ranks is None else f"{title}; compared: {ranks_text(plan.graph.ranks.members)}"


def diff_data(diff: PlanDiff, facts: tuple[Facts, Facts], titles: tuple[str, str]) -> dict[str, Any]:
    """Return the data that the scripts draw: live bytes of both plans, and a row for each operation that differs."""
    texts = Texts()
    rows = [
        {
            "program": c.program,
            "name": c.name,
            "kind": c.kind,
            "what": ", ".join(aspect.replace("_", "-") for aspect in c.differs),
            "before": "; ".join(aspect_text(aspect, c.before) for aspect in c.differs),
            "after": "; ".join(aspect_text(aspect, c.after) for aspect in c.differs),
            "before_us": c.before.time_us,
            "after_us": c.after.time_us,
            "before_estimated": c.before.estimated,
            "after_estimated": c.after.estimated,
            "copy": c.after.stream in COPY_STREAMS,
        }
        for c in diff.operations
    ]
    rows += [_only(program, one, "only in the first") for program, one in diff.only_before]
    rows += [_only(program, one, "only in the second") for program, one in diff.only_after]
    return {
        "kinds": [str(kind) for kind in Kind],
        "sides": [_side(one, title) for one, title in zip(facts, titles, strict=True)],
        "changes": texts.table({name: [row[name] for row in rows] for name in CHANGES}),
        "texts": texts.all,
    }


def _only(program: str, one: OperationSummary, what: str) -> dict[str, Any]:
    kernels, first = " | ".join(one.kernels), what == "only in the first"
    return {
        "program": program,
        "name": one.name,
        "kind": one.kind,
        "what": what,
        "before": kernels if first else "",
        "after": "" if first else kernels,
        "before_us": one.time_us if first else 0.0,
        "after_us": 0.0 if first else one.time_us,
        "before_estimated": first and one.estimated,
        "after_estimated": not first and one.estimated,
        "copy": one.stream in COPY_STREAMS,
    }


def _side(facts: Facts, title: str) -> dict[str, Any]:
    plan = facts.plan
    return {
        "title": title,
        "memory": {str(kind): taken for kind, taken in facts.curve.bytes_by_kind.items() if any(taken)},
        "peak": {"launch": facts.peak, "bytes": facts.curve.peak_bytes},
        "left_bytes": plan.arena_budget_bytes,
        "arena_bytes": plan.predictions.arena_bytes,
        "train_us": plan.predictions.train_us,
    }
