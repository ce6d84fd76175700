"""The page of a plan: `mbc report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mbc.optimize.bounds.measured_floor import Floor
from mbc.plan.model import Plan
from mbc.report.html.answers import answers
from mbc.report.html.facts import facts_of
from mbc.report.html.plan_data import plan_data
from mbc.report.html.render import render_page
from mbc.report.measured import MeasuredStep
from mbc.report.tables import time_cell
from mbc.units import show_range, show_size

SCRIPTS = (
    "curve.js",
    "plan.js",
    "memory.js",
    "lanes.js",
    "roofline.js",
    "table.js",
    "graph.js",
    "recorded.js",
    "page.js",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the head of a page, as text."""

    name: str
    value: str
    note: str = ""


def plan_page(
    plan: Plan,
    *,
    floor: Floor | None = None,
    recorded: Sequence[Mapping[str, Any]] = (),
    measured: MeasuredStep | None = None,
    others: Sequence[Plan] = (),
) -> str:
    """The text of the page. `floor` and `measured`: of the training step; `recorded`: what `read_recorded` gave;
    `others`: plans of ranks that do not run `plan`, whose launches are shown by stream, too."""
    train = facts_of(plan, plan.train)
    return render_page(
        "plan.html.j2",
        SCRIPTS,
        {
            **plan_data(train, facts_of(plan, plan.infer), floor, [facts_of(other, other.train) for other in others]),
            "measured": None if measured is None else asdict(measured),
            "recorded": list(recorded),
        },
        title=plan_title(plan),
        version=plan.version,
        figures=figures(plan),
        answers=answers(train, measured),
        recorded=recorded,
    )


def plan_title(plan: Plan) -> str:
    """`resnet: batch 128, fp32, h200`."""
    return f"{plan.graph.name}: batch {plan.graph.global_batch}, {plan.graph.precision}, {plan.target.gpu}"


def figures(plan: Plan) -> tuple[Figure, ...]:
    """What a plan comes to."""
    p, graph = plan.predictions, plan.graph
    guess = p.measured_share < 1
    between = show_range(p.train_low_us, p.train_high_us)
    measured = f"{100 * p.measured_share:.0f} % of it from measured times"
    images = f"{graph.global_batch * 1e6 / p.train_us:,.0f} images/s" if p.train_us else ""
    return (
        Figure("training step, predicted", time_cell(p.train_us, guess), f"{between}; {measured}"),
        Figure("throughput", images, f"batch {graph.global_batch}"),
        Figure("inference, predicted", time_cell(p.infer_us, guess)),
        Figure(
            "device memory",
            show_size(p.arena_bytes + p.overhead_bytes),
            f"{show_size(p.arena_bytes)} arena + {show_size(p.overhead_bytes)} overhead; budget"
            f" {show_size(plan.budget_bytes)}",
        ),
        Figure("host memory", show_size(p.host_bytes), "pinned, for offloaded values"),
        Figure("best serial schedule, whatever memory", time_cell(plan.bounds.fastest_us, guess)),
        Figure("lower bound of all plans", show_size(plan.bounds.floor_bytes), f"by {plan.bounds.floor_operation}"),
        Figure("GPU", plan.target.gpu, plan.target.profile or "no profile: times are estimates"),
    )
