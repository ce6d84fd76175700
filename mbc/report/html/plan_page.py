"""The page of a plan: `mbc report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mbc.collection import uncollected
from mbc.optimize.bounds.measured_floor import Floor
from mbc.plan.model import Plan
from mbc.report.html.answers import answers
from mbc.report.html.facts import facts_of
from mbc.report.html.head import figures, plan_title
from mbc.report.html.plan_data import plan_data
from mbc.report.html.render import render_page
from mbc.report.measured import MeasuredStep

SCRIPTS = (
    "curve.js", "plan.js", "memory.js", "lanes.js", "roofline.js", "table.js", "graph.js", "recorded.js", "page.js",
)  # fmt: skip


@uncollected()
def plan_page(
    plan: Plan,
    *,
    floor: Floor | None = None,
    recorded: Sequence[Mapping[str, Any]] = (),
    measured: MeasuredStep | None = None,
    others: Sequence[Plan] = (),
) -> str:
    """Return the text of the page of a plan.

    Args:
        plan: Plan.
        floor: Floor of the training step; None if it was not computed.
        recorded: Results of `read_recorded`.
        measured: Measured training step; None without a record.
        others: Plans of the ranks that do not run `plan`; the page also has their cards and launches by stream.
    """
    train = facts_of(plan, plan.train)
    return render_page(
        "plan.html.j2",
        SCRIPTS,
        {
            **plan_data(
                train, facts_of(plan, plan.infer, train), floor, [facts_of(other, other.train) for other in others]
            ),
            "measured": None if measured is None else asdict(measured),
            "recorded": list(recorded),
        },
        title=plan_title(plan, others),
        version=plan.version,
        figures=figures(plan, others),
        answers=answers(train, measured),
        recorded=recorded,
    )
