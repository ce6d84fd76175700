"""The file of a recorded step, with predicted and measured times of each launch; `measured` reads it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mbc.ops.fused import joined_kind
from mbc.plan.group import launch_name
from mbc.plan.model import Copy, Launch, Plan
from mbc.record.step import RecordedStep
from mbc.report.columns import Column, render
from mbc.report.timeline import predicted_timeline
from mbc.units import show_time

SCHEMA = 1  # of the file; older files have none
NAME_CHARACTERS = 60  # of the name of a kernel
KINDS = 8  # rows of the table, the longest first
_SUMMED = ("predicted_us", "measured_us", "predicted_gap_us", "gap_us")
_COLUMNS = (
    Column("kind", shrinks=True),
    Column("launches", right=True, optional=1),
    Column("predicted", right=True),
    Column("measured", right=True),
    Column("ratio", right=True),
)


def record_document(plan: Plan, recorded: RecordedStep) -> dict[str, Any]:
    """Return the record that `--record` writes, with times in microseconds.

    Its `rows` are launches in the plan's order (`RecordedLaunch`), without measured times where nothing was recorded.
    Its `sums` are by kind of launch, the longest first.
    """
    rows = _rows(plan, recorded)
    return {
        "schema": SCHEMA,
        "network": plan.graph.name,
        "planned_for": plan.target.gpu,
        "steps": recorded.steps,
        "step_us": recorded.step_us,
        "predicted_us": plan.predictions.train_us,
        "left": dict(recorded.left),
        "sums": _sums(rows),
        "rows": rows,
    }


def dump_record(document: Mapping[str, Any]) -> str:
    """Return the text of a record."""
    return json.dumps(document, indent=1) + "\n"


def record_text(document: Mapping[str, Any], width: int | None = None) -> str:
    """Format the kinds of launches that take longest, and the step."""
    cells = [
        (
            total["name"],
            str(total["launches"]),
            show_time(total["predicted_us"]),
            show_time(total["measured_us"]),
            f"{total['measured_us'] / total['predicted_us']:.2f}" if total["predicted_us"] else "",
        )
        for total in document["sums"][:KINDS]
    ]
    rows, recorded = document["rows"], sum("measured_us" in row for row in document["rows"])
    step, predicted = show_time(document["step_us"]), show_time(document["predicted_us"])
    step_text = f"step: {step} measured over {document['steps']} steps, {predicted} predicted"
    return f"{render(_COLUMNS, cells, width)}\n\n{step_text}; {recorded} of {len(rows)} launches recorded"


def _rows(plan: Plan, recorded: RecordedStep) -> list[dict[str, Any]]:
    predicted = predicted_timeline(plan, plan.train)
    kinds = {op.name: op.kind for op in plan.graph.train}
    rows: list[dict[str, Any]] = []
    for i, (launch, ran) in enumerate(zip(plan.train.launches, recorded.launches, strict=True)):
        row: dict[str, Any] = {
            "name": launch_name(i, launch),
            "kind": _kind(launch, kinds),
            "stream": str(launch.stream),
            "kernels": [] if ran is None else [name[:NAME_CHARACTERS] for name in ran.kernels],
            "alone_us": launch.work.time_us,
            "predicted_us": predicted.ends_us[i] - predicted.starts_us[i],
            "predicted_start_us": predicted.starts_us[i],
            "predicted_gap_us": predicted.stalls_us[i],
        }
        if ran is not None:
            row |= {"measured_us": ran.time_us, "start_us": ran.start_us, "gap_us": ran.gap_us}
            row["gpu_streams"] = list(ran.streams)
        rows.append(row)
    return rows


def _kind(launch: Launch, kinds: Mapping[str, str]) -> str:
    if isinstance(launch.work, Copy):
        return f"copy {launch.stream}"
    return joined_kind([kinds[name] for name in launch.operations]) or "conversion"


def _sums(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sum recorded launches by kind, the longest first."""
    totals: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "measured_us" in row:
            total = totals.setdefault(row["kind"], {"name": row["kind"], "launches": 0, **dict.fromkeys(_SUMMED, 0.0)})
            total["launches"] += 1
            for name in _SUMMED:
                total[name] += row[name]
    return sorted(totals.values(), key=lambda total: -total["measured_us"])
