"""The output of `mbc show`."""

from __future__ import annotations

from mbc.plan.model import Plan
from mbc.plan.summary import grouped, summarise
from mbc.plan.techniques import techniques
from mbc.report.collectives import collectives_text
from mbc.report.columns import DEFAULT_WIDTH
from mbc.report.memory import curve_text
from mbc.report.tables import heading, kinds_table, operations_table, peak_table, totals_text
from mbc.report.techniques import LONGEST, techniques_text


def plan_text(
    plan: Plan, *, width: int = DEFAULT_WIDTH, limit: int | None = None, by_kind: bool = False, infer: bool = False
) -> str:
    """Format a plan: heading, operations, peak, memory over the step, techniques that save memory, totals and bounds.

    Args:
        plan: Plan.
        width: Columns of the terminal.
        limit: Largest number of operations to list, the slowest ones, in program order; None for all.
        by_kind: Whether to list kinds of operations instead.
        infer: Whether to show the inference program instead of the training step.
    """
    program = plan.infer if infer else plan.train
    groups = grouped(plan, program)
    summaries = summarise(plan, program, groups)
    recomputing = techniques(plan, program).recomputing(groups)
    parts = [
        heading(plan, infer),
        kinds_table(summaries, width) if by_kind else operations_table(summaries, width, limit, recomputing),
        peak_table(plan, program, width),
        curve_text(plan, program, width),
        "" if infer else collectives_text(plan, width),
        techniques_text(plan, program, width, limit or LONGEST),
        totals_text(plan),
    ]
    return "\n\n".join(part for part in parts if part)
