"""The output of `mbc show --json` and `mbc diff --json`: objects of plain values, sizes in bytes and times in µs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mbc.plan.diff import PlanDiff
from mbc.plan.memory import memory_curve
from mbc.plan.model import Plan, Program
from mbc.plan.prefetch import prefetch_bytes
from mbc.plan.summary import summarise
from mbc.plan.techniques import techniques
from mbc.report.collectives import collectives_document
from mbc.report.memory import curve_rows
from mbc.report.techniques import techniques_document
from mbc.report.timeline import predicted_timeline


def plan_document(plan: Plan, *, memory: bool = False) -> dict[str, Any]:
    """Return a plan for scripts; with `memory` also the bytes by kind at every launch."""
    graph = plan.graph
    return {
        "network": graph.name,
        "settings": dict(plan.settings),
        "batch": graph.global_batch,
        "precision": str(graph.precision),
        "target": asdict(plan.target),
        "budget_bytes": plan.budget_bytes,
        "host_limit_bytes": plan.host_limit_bytes,
        "peer_limit_bytes": plan.peer_limit_bytes,
        "predictions": asdict(plan.predictions),
        "prefetch_bytes": prefetch_bytes(plan),
        "bounds": asdict(plan.bounds),
        "above_bounds": {
            "train_us_over_least": _over(plan.predictions.train_us, plan.bounds.least_us),
            "train_us_over_fastest": _over(plan.predictions.train_us, plan.bounds.fastest_us),
            "arena_over_live": _over(plan.predictions.arena_bytes, plan.bounds.live_bytes),
            "arena_over_floor": _over(plan.predictions.arena_bytes, plan.bounds.floor_bytes),
        },
        "collectives": collectives_document(plan),
        "train": _program(plan, plan.train, memory),
        "infer": _program(plan, plan.infer, memory),
    }


def diff_document(diff: PlanDiff) -> dict[str, Any]:
    """Return the differences of two plans for scripts."""
    return {
        "same": diff.same,
        "totals": {change.name: {"before": change.before, "after": change.after} for change in diff.totals},
        "operations": [
            {
                "program": change.program,
                "name": change.name,
                "kind": change.kind,
                "differs": list(change.differs),
                "before": asdict(change.before),
                "after": asdict(change.after),
            }
            for change in diff.operations
        ],
        "only_before": [{"program": program, **asdict(summary)} for program, summary in diff.only_before],
        "only_after": [{"program": program, **asdict(summary)} for program, summary in diff.only_after],
    }


def _program(plan: Plan, program: Program, memory: bool) -> dict[str, Any]:
    curve = memory_curve(plan, program)
    peak = curve.peak_launch
    document: dict[str, Any] = {
        "launches": len(program.launches),
        "waits": len(program.waits),
        "peak": {
            "launch": peak,
            "operations": list(program.launches[peak].operations) if program.launches else [],
            "bytes": curve.total_bytes[peak],
            "by_kind": {str(kind): taken for kind, taken in curve.at(peak).items()},
        },
        "operations": [asdict(summary) for summary in summarise(plan, program)],
        "techniques": techniques_document(plan, program, techniques(plan, program), predicted_timeline(plan, program)),
    }
    if memory:
        document["memory"] = curve_rows(curve)
    return document


def _over(figure: float, bound: float) -> float | None:
    return figure / bound - 1 if bound > 0 else None
