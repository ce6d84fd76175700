"""A fragment of HTML with a few figures and the live bytes, by which notebooks show plans, modules and fit results."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mbc.fit import BatchFit, BudgetCurve
from mbc.plan.memory import memory_curve
from mbc.plan.model import Plan
from mbc.report.fit import batches_text, budgets_text
from mbc.report.html.head import figures, plan_title
from mbc.units import show_size

_WIDTH, _HEIGHT = 480, 90


def plan_fragment(plan: Plan) -> str:
    """Return the title, the figures and the live bytes of the training step of a plan."""
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td><b>{escape(one.value)}</b></td><td>{escape(one.note)}</td></tr>"
        for one in figures(plan)
    )
    left = plan.arena_budget_bytes
    curve = memory_curve(plan, plan.train)
    caption = f"live bytes of the training step, {show_size(curve.peak_bytes)} at the peak"
    return (
        f"<div><b>{escape(plan_title(plan))}</b><table>{rows}</table>"
        f"{_area(curve.total_bytes, min(left, 2 * curve.peak_bytes), caption)}<small>{escape(caption)}</small></div>"
    )


def fit_fragment(fit: BatchFit | BudgetCurve) -> str:
    """Return the table of `mbc fit` as text in columns."""
    text = batches_text(fit) if isinstance(fit, BatchFit) else budgets_text(fit)
    return f"<pre>{escape(text)}</pre>"


def _area(values: Sequence[int], top: int, title: str) -> str:
    """Draw the largest value in each pixel, with a line at `top`."""
    count = min(_WIDTH, len(values))
    most = max((*values, top, 1))
    highest = [max(values[len(values) * i // count : len(values) * (i + 1) // count]) for i in range(count)]
    step = _WIDTH / max(1, count)
    path = "".join(f"V{_HEIGHT * (1 - value / most):.1f}H{(i + 1) * step:.1f}" for i, value in enumerate(highest))
    line = _HEIGHT * (1 - top / most)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" style="display:block">'
        f"<title>{escape(title)}</title>"
        f'<path d="M0 {_HEIGHT}{path}V{_HEIGHT}Z" fill="#d98c2b"/>'
        f'<path d="M0 {line:.1f}H{_WIDTH}" stroke="#b3261e" stroke-dasharray="4 3"/></svg>'
    )
