"""What a page says of one program more than once, found once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbc.analysis.roofline import Ceilings, Limit, ceilings_of, limits
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Precision
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
    """Of one program of a plan. `device` is None of an unknown GPU. `groups`: launches by the names of `summaries`.
    `ceilings` is None for a plan that is for no GPU, and `limits` then empty; else these are in the order of
    `summaries`. `writers` and `readers`: the launches that write each buffer, and those that read it, in order; one
    that adds to it does both."""

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
        """The launch at the peak of live bytes."""
        return self.curve.peak_launch if self.program.launches else 0

    @property
    def recomputing(self) -> Mapping[str, int]:
        """How many launches of each of the groups recompute its values."""
        return self.techniques.recomputing(self.groups)

    @property
    def loss_launch(self) -> int | None:
        """The launch that computes the loss: the forward pass ends with it."""
        plan = self.plan
        found = (launches for buffer, launches in self.writers.items() if plan.buffers[buffer].value == plan.graph.loss)
        return next((launches[0] for launches in found), None)

    @property
    def peak_moment(self) -> str:
        """` at 3.20 ms, in the backward pass`, as far as that is known."""
        at = f" at {show_time(self.times.starts_us[self.peak])}" if self.times.total_us else ""
        if self.loss_launch is None:
            return at
        return f"{at}, in the {'forward' if self.peak <= self.loss_launch else 'backward'} pass"


def facts_of(plan: Plan, program: Program, other: Facts | None = None) -> Facts:
    """Of the training or the inference program of a plan. `other`: facts of the other one, where these are known."""
    device = device_of(plan)
    ceilings = None if plan.graph.precision is Precision.FP64 else ceilings_of(plan)
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
    """`writers` and `readers` of `Facts`."""
    writers: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    sides = {Mode.READ: (readers,), Mode.WRITE: (writers,), Mode.ACCUMULATE: (writers, readers)}
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            for side in sides[access.mode]:
                found = side.setdefault(access.buffer, [])
                if not found or found[-1] != i:
                    found.append(i)
    return writers, readers
