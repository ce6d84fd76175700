"""Values about one program that a page needs more than once, computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbc.analysis.roofline import Ceilings, Limit, ceilings_of, limits
from mbc.hardware.spec import DeviceSpec
from mbc.optimize.schedule.simulate import Timeline
from mbc.plan.live import Held, held_in
from mbc.plan.memory import MemoryCurve, memory_curve
from mbc.plan.model import Mode, Plan, Program
from mbc.plan.summary import OperationSummary, grouped, summarise
from mbc.plan.techniques import TechniquesUsed, techniques
from mbc.report.devices import device_of
from mbc.report.timeline import CopyCosts, copy_costs, timeline_on
from mbc.units import show_time


@dataclass(frozen=True, slots=True)
class Facts:
    """Values about one program of a plan.

    Attributes:
        plan: Plan.
        program: Training or inference program.
        device: GPU; None if it is unknown.
        ceilings: Ceilings of the roofline; None for a plan that no GPU runs.
        held: Buffers and their lifetimes.
        curve: Bytes over the launches.
        groups: Launches by the names of `summaries`.
        summaries: Operations.
        techniques: Recomputed, offloaded, divided and depth-first values.
        times: Predicted timeline.
        limits: Roofline limits, in the order of `summaries`; empty without `ceilings`.
        writers: Launches that write each buffer, in order; a launch that accumulates is also in `readers`.
        readers: Launches that read each buffer, in order.
        costs: Cost of copies.
    """

    plan: Plan
    program: Program
    device: DeviceSpec | None
    ceilings: Ceilings | None
    held: Held
    curve: MemoryCurve
    groups: Mapping[str, Sequence[int]]
    summaries: tuple[OperationSummary, ...]
    techniques: TechniquesUsed
    times: Timeline
    limits: tuple[Limit, ...]
    writers: Mapping[int, Sequence[int]]
    readers: Mapping[int, Sequence[int]]
    costs: CopyCosts

    @property
    def peak(self) -> int:
        """Launch at the peak of live bytes."""
        return self.curve.peak_launch if self.program.launches else 0

    @property
    def recomputing(self) -> Mapping[str, int]:
        """Number of launches of each group that recompute values."""
        return self.techniques.recomputing(self.groups)

    @property
    def loss_launch(self) -> int | None:
        """Launch that computes the loss, with which the forward pass ends; None if there is none."""
        plan = self.plan
        loss = plan.graph.loss
        of_loss = (writers for buffer, writers in self.writers.items() if plan.buffers[buffer].value == loss)
        return next((writers[0] for writers in of_loss), None)

    @property
    def peak_moment(self) -> str:
        """Time and pass of the peak as ` at 3.20 ms, in the backward pass`, as far as they are known."""
        at = f" at {show_time(self.times.starts_us[self.peak])}" if self.times.total_us else ""
        if self.loss_launch is None:
            return at
        return f"{at}, in the {'forward' if self.peak <= self.loss_launch else 'backward'} pass"


def facts_of(plan: Plan, program: Program, other: Facts | None = None) -> Facts:
    """Compute the facts of a program.

    Args:
        plan: Plan.
        program: Its training or inference program.
        other: Facts of its other program, some of which are reused; None to compute all.
    """
    device = device_of(plan)
    ceilings = ceilings_of(plan) if plan.is_timed else None
    held = held_in(plan, program, None if other is None else other.held.kinds)
    groups = grouped(plan, program)
    summaries = summarise(plan, program, groups, held.lives)
    times = timeline_on(device, plan, program)
    return Facts(
        plan,
        program,
        device,
        ceilings,
        held,
        memory_curve(plan, program, held),
        groups,
        summaries,
        techniques(plan, program),
        times,
        () if ceilings is None else limits(plan, program, ceilings, groups, summaries),
        *_touches(program),
        copy_costs(device, plan, program, times),
    )


def _touches(program: Program) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]:
    """Return `writers` and `readers` of `Facts`."""
    writers: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    sides = {Mode.READ: (readers,), Mode.WRITE: (writers,), Mode.ACCUMULATE: (writers, readers)}
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            for side in sides[access.mode]:
                launches = side.setdefault(access.buffer, [])
                if not launches or launches[-1] != i:
                    launches.append(i)
    return writers, readers
