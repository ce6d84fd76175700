"""What a page says of one program more than once, found once."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.analysis.roofline import Ceilings, Limit, ceilings_of, limits
from mbc.ir.types import Precision
from mbc.optimize.schedule.simulate import Timeline
from mbc.plan.memory import MemoryCurve, memory_curve
from mbc.plan.model import Plan, Program
from mbc.plan.techniques import Techniques, techniques
from mbc.report.techniques import predicted_timeline


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one program of a plan. `ceilings` is None for a plan that is for no GPU, and `limits` then empty; else these
    are in the order of `summarise`."""

    plan: Plan
    program: Program
    ceilings: Ceilings | None
    curve: MemoryCurve
    techniques: Techniques
    times: Timeline
    limits: tuple[Limit, ...]

    @property
    def peak(self) -> int:
        """The launch at the peak of live bytes."""
        return self.curve.peak_launch if self.program.launches else 0


def facts_of(plan: Plan, program: Program) -> Facts:
    """Of the training or the inference program of a plan."""
    ceilings = None if plan.graph.precision is Precision.FP64 else ceilings_of(plan)
    return Facts(
        plan,
        program,
        ceilings,
        memory_curve(plan, program),
        techniques(plan, program),
        predicted_timeline(plan, program),
        () if ceilings is None else limits(plan, program, ceilings),
    )
