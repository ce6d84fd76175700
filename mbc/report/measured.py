"""A measured training step beside the plan: what `--record` of `mbc train` and `mbc bench` wrote of the captured
graph's replays (`step_record`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mbc.errors import MbcError
from mbc.plan.group import launch_name
from mbc.plan.model import Plan

# What tells such a record from other results.
FIELDS = ("step_us", "predicted_us", "steps", "rows", "sums")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Launch by launch, in the plan's order, medians over `steps` replays. `starts_us`: since the step began; None, as
    in `times_us`, where the launch was not found among what ran."""

    step_us: float
    steps: int
    starts_us: tuple[float | None, ...]
    times_us: tuple[float | None, ...]


def measured_step(plan: Plan, record: Mapping[str, Any], file: str) -> MeasuredStep:
    """What a record says of the training step of `plan`. Raises MBC321 where it is damaged or of another plan."""
    found: Any = record.get("rows")
    step, steps = _time(record.get("step_us")), record.get("steps")
    if not isinstance(found, list) or step is None or type(steps) is not int:
        raise _none(file)
    rows = cast(Sequence[Any], found)
    names = [launch_name(i, launch) for i, launch in enumerate(plan.train.launches)]
    for i in range(max(len(names), len(rows))):
        of_plan = names[i] if i < len(names) else "none"
        row: Any = rows[i] if i < len(rows) else {}
        recorded = str(cast(Mapping[str, Any], row).get("name", "none")) if isinstance(row, dict) else "none"
        if recorded != of_plan:
            raise MbcError(
                "MBC321",
                f"'{file}' was recorded of another plan: launch {i} is '{of_plan}', recorded is '{recorded}'",
                "record this plan with mbc train --record, or show the plan that was recorded",
            )
    times = tuple(_time(row.get("measured_us")) for row in rows)
    starts = tuple(_time(row.get("start_us")) for row in rows)
    if any((a is None) != (b is None) for a, b in zip(times, starts, strict=True)):
        raise _none(file)
    return MeasuredStep(step, steps, starts, times)


def _none(file: str) -> MbcError:
    return MbcError("MBC321", f"'{file}' holds no measured step", "record one with --record of mbc train or mbc bench")


def _time(value: Any) -> float | None:
    """In microseconds; None where it is none."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) and value >= 0 else None
