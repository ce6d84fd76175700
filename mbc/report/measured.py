"""A measured training step beside the plan.

It is read from the record that `--record` of `mbc train` and `mbc bench` wrote from replays of the captured graph
(`step_record`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mbc.errors import MbcError
from mbc.plan.group import launch_name
from mbc.plan.model import Plan

# Fields by which such a record is recognised.
FIELDS = ("step_us", "predicted_us", "steps", "rows", "sums")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Times of all launches in the plan's order, in microseconds: medians over `steps` replays.

    Attributes:
        step_us: Time of the step.
        steps: Number of replays.
        starts_us: Start of each launch in the step; None if the launch was not recorded.
        times_us: Time of each launch; None if the launch was not recorded.
    """

    step_us: float
    steps: int
    starts_us: tuple[float | None, ...]
    times_us: tuple[float | None, ...]


def measured_step(plan: Plan, record: Mapping[str, Any], file: str) -> MeasuredStep:
    """Return the recorded training step of `plan`.

    Raises:
        MbcError: MBC321, the record is damaged or belongs to another plan.
    """
    recorded_rows: Any = record.get("rows")
    step, steps = _time(record.get("step_us")), record.get("steps")
    if not isinstance(recorded_rows, list) or step is None or type(steps) is not int:
        raise _none(file)
    rows = cast(Sequence[Any], recorded_rows)
    names = [launch_name(i, launch) for i, launch in enumerate(plan.train.launches)]
    for i in range(max(len(names), len(rows))):
        of_plan = names[i] if i < len(names) else "none"
        row: Any = rows[i] if i < len(rows) else {}
        recorded = str(cast(Mapping[str, Any], row).get("name", "none")) if isinstance(row, dict) else "none"
        if recorded != of_plan:
            raise MbcError(
                "MBC321",
                f"'{file}' is a record of another plan: launch {i} is '{of_plan}', but '{recorded}' in the record",
                "record this plan with mbc train --record, or give the plan that was recorded",
            )
    times = tuple(_time(row.get("measured_us")) for row in rows)
    starts = tuple(_time(row.get("start_us")) for row in rows)
    if any((a is None) != (b is None) for a, b in zip(times, starts, strict=True)):
        raise _none(file)
    return MeasuredStep(step, steps, starts, times)


def _none(file: str) -> MbcError:
    return MbcError("MBC321", f"'{file}' holds no measured step", "record one with --record of mbc train or mbc bench")


def _time(value: Any) -> float | None:
    """Return a time in microseconds; None if the value is not a time."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) and value >= 0 else None
