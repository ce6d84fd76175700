"""Operations, launches and the bytes of the arena of one program, as tables of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from mbc.ir.graph import Operation
from mbc.plan.live import Kind, kinds_of_values, live_ranges
from mbc.plan.memory import outside_curve
from mbc.plan.model import STREAM_TO
from mbc.plan.summary import grouped, summarise
from mbc.plan.techniques import Techniques
from mbc.report.html.columns import Texts
from mbc.report.html.facts import Facts
from mbc.report.html.letting_go import Gaps
from mbc.report.tables import layouts, micro_batches
from mbc.report.techniques import techniques_document

KEPT, RECOMPUTED, OFFLOADED, DEPTH_FIRST, DIVIDED = "kept", "recomputed", "offloaded", "depth-first", "divided"

OPERATIONS = (
    "name", "kind", "kernels", "micro_batches", "layouts", "time_us", "estimated", "workspace_bytes", "output_bytes",
    "first_launch", "stream", "moved_bytes", "flops", "limit_us", "bound", "decision", "source",
)  # fmt: skip
LAUNCHES = ("operation", "stream", "start_us", "end_us", "stall_us", "time_us", "measured")
# Bytes of the arena that one buffer holds, from launch `start` to before launch `stop`.
PIECES = (
    "value", "kind", "offset", "size_bytes", "start", "stop", "decision", "writers", "readers", "gap_start",
    "gap_stop", "recompute_us", "lacks", "offload_us",
)  # fmt: skip


def program_data(facts: Facts, texts: Texts) -> dict[str, Any]:
    """Of one program. Where the plan is for no GPU operations have no limits."""
    plan, program, curve, peak = facts.plan, facts.program, facts.curve, facts.peak
    of_loss = (launches for buffer, launches in facts.writers.items() if plan.buffers[buffer].value == plan.graph.loss)
    outside = {str(space): outside_curve(plan, program, space) for space in STREAM_TO}
    return {
        "operations": texts.table(_operations(facts), OPERATIONS),
        "launches": texts.table(_launches(facts), LAUNCHES),
        "waits": program.waits,
        "pieces": texts.table(_pieces(facts), PIECES),
        "memory": {str(kind): taken for kind, taken in curve.bytes_by_kind.items() if any(taken)},
        "outside": {space: taken for space, taken in outside.items() if any(taken)},
        "peak": {
            "launch": peak,
            "bytes": curve.peak_bytes,
            "by_kind": {str(kind): taken for kind, taken in curve.at(peak).items()},
        },
        "techniques": techniques_document(plan, program, facts.techniques, facts.times),
        "loss_launch": next((launches[0] for launches in of_loss), None),
    }


def lanes_data(facts: Facts, texts: Texts) -> dict[str, Any]:
    """Of one program as much as its launches by stream need."""
    return {
        "operations": texts.table(_operations(facts), ("name", "decision")),
        "launches": texts.table(_launches(facts), LAUNCHES),
    }


def _operations(facts: Facts) -> list[dict[str, Any]]:
    plan, program = facts.plan, facts.program
    groups = grouped(plan, program)
    lines = _lines((*plan.graph.train, *plan.graph.infer))
    decisions = _decisions_of_operations(facts, groups)
    bounded = {one.summary.name: one for one in facts.limits}
    rows: list[dict[str, Any]] = []
    for summary in [one.summary for one in facts.limits] or summarise(plan, program):
        limit = bounded.get(summary.name)
        members = program.launches[groups[summary.name][0]].operations
        rows.append(
            {
                **asdict(summary),
                "kernels": " | ".join(summary.kernels),
                "micro_batches": f"{micro_batches(summary.micro_batches)} rows",
                "layouts": layouts(summary.layouts),
                "stream": str(summary.stream),
                "moved_bytes": limit.moved_bytes if limit else None,
                "flops": limit.flops if limit else None,
                "limit_us": limit.limit_us if limit else None,
                "bound": str(limit.bound) if limit else "",
                "decision": decisions[summary.name],
                "source": next((lines[name] for name in members if name in lines), ""),
            }
        )
    return rows


def _lines(operations: Iterable[Operation]) -> Mapping[str, str]:
    """The line that each operation stems from, where that is known, as `net.mbc:14`."""
    return {op.name: f"{op.span.source.name}:{op.span.line}" for op in operations if op.span is not None}


def _decisions_of_operations(facts: Facts, groups: Mapping[str, list[int]]) -> Mapping[str, str]:
    plan, program, found = facts.plan, facts.program, facts.techniques
    recomputed = {one.operation for one in found.recomputed}
    divided = {one.operation for one in found.divided}
    of_values = _decisions_of_values(found)
    writes: dict[int, list[str]] = {}
    for buffer, launches in facts.writers.items():
        for i in launches:
            writes.setdefault(i, []).append(plan.buffers[buffer].value or "")
    made: dict[str, str] = {}
    for name, launches in groups.items():
        of_outputs = {of_values.get(value, KEPT) for i in launches for value in writes.get(i, ())}
        decision = next((d for d in (RECOMPUTED, OFFLOADED, DEPTH_FIRST) if d in of_outputs), KEPT)
        if name in recomputed:
            decision = RECOMPUTED
        if decision == KEPT and "+".join(program.launches[launches[0]].operations) in divided:
            decision = DIVIDED
        made[name] = decision
    return made


def _decisions_of_values(found: Techniques) -> Mapping[str, str]:
    decisions = dict.fromkeys((one.value for one in found.depth_first), DEPTH_FIRST)
    decisions |= dict.fromkeys((one.value for one in found.offloaded), OFFLOADED)
    return decisions | {name: RECOMPUTED for one in found.recomputed for name in one.outputs}


def _launches(facts: Facts) -> list[dict[str, Any]]:
    plan, program, times = facts.plan, facts.program, facts.times
    operation = {launch: i for i, group in enumerate(grouped(plan, program).values()) for launch in group}
    return [
        {
            "operation": operation[i],
            "stream": str(launch.stream),
            "start_us": times.starts_us[i],
            "end_us": times.ends_us[i],
            "stall_us": times.stalls_us[i],
            "time_us": launch.work.time_us,
            "measured": launch.work.measured,
        }
        for i, launch in enumerate(program.launches)
    ]


def _pieces(facts: Facts) -> list[dict[str, Any]]:
    plan, program = facts.plan, facts.program
    kinds, decisions = kinds_of_values(plan.graph), _decisions_of_values(facts.techniques)
    gaps = Gaps(facts)
    rows: list[dict[str, Any]] = []
    for live_range in live_ranges(plan, program):
        # As the memory curve counts: the bytes are those of one member until the next one is written.
        starts = (live_range.start, *live_range.since[1:])
        ends = (*live_range.since[1:], live_range.stop)
        for member, start, stop in zip(live_range.members, starts, ends, strict=True):
            if stop <= start:
                continue
            value = plan.buffers[member].value
            go = gaps.letting_go(member)
            rows.append(
                {
                    "value": value or "",
                    "kind": str(Kind.WORKSPACE if value is None else kinds[value]),
                    "offset": plan.offsets[live_range.members[0]],
                    "size_bytes": live_range.size_bytes,
                    "start": start,
                    "stop": stop,
                    "decision": decisions.get(value or "", KEPT),
                    "writers": facts.writers.get(member, ()),
                    "readers": facts.readers.get(member, ()),
                    "gap_start": go.start if go else None,
                    "gap_stop": go.stop if go else None,
                    "recompute_us": go.recompute_us if go else None,
                    "lacks": list(go.lacks) if go else [],
                    "offload_us": go.offload_us if go else None,
                }
            )
    return rows
