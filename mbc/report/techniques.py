"""The techniques of a plan, their cost and saving, and the stalls of the GPU for copies.

The techniques are recomputing, offloading, dividing, and depth-first micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mbc.hardware.streams import Stream
from mbc.optimize.schedule.simulate import Timeline
from mbc.plan.memory import memory_curve
from mbc.plan.model import Kernel, Plan, Program
from mbc.plan.techniques import TechniquesUsed, techniques
from mbc.plan.traffic import traffic
from mbc.report.columns import Column, render
from mbc.report.devices import device_of
from mbc.report.tables import launch_title, micro_batches, over, time_cell
from mbc.report.timeline import CopyCosts, Stall, copy_costs, stalls, timeline_on
from mbc.units import show_size, show_time

LONGEST = 8  # rows of a table, the largest first
_DIRECTIONS = {
    Stream.TO_HOST: "to the host", Stream.TO_DEVICE: "from the host",
    Stream.TO_PEER: "to the peer", Stream.FROM_PEER: "from the peer",
}  # fmt: skip
LEAST_SHARE = 1e-4  # of the step: shorter stalls are left out of the table


def techniques_text(plan: Plan, program: Program, width: int | None, limit: int = LONGEST) -> str:
    """Format tables of techniques and stalls; return no text for a plan without techniques."""
    used = techniques(plan, program)
    if not (used.recomputed or used.offloaded or used.divided or used.depth_first):
        return ""
    device = device_of(plan)
    times = timeline_on(device, plan, program)
    waits, costs = stalls(program, times), copy_costs(device, plan, program, times)
    parts = [_overview(plan, program, used, costs)]
    if used.offloaded:
        parts.append(_links_table(plan, program, width))
    if used.recomputed:
        parts.append(_recomputed_table(used, width, limit))
    if used.offloaded:
        parts.append(_offloaded_table(used, costs, width, limit))
    if used.divided:
        parts.append(_divided_table(used, width, limit))
    if used.depth_first:
        parts.append(_depth_first_table(used, width, limit))
    return "\n\n".join(parts + ([_stalls_table(plan, program, waits, width, limit)] if waits else []))


def techniques_document(plan: Plan, program: Program, used: TechniquesUsed, times: Timeline) -> dict[str, Any]:
    """Return the techniques for scripts, from `techniques` and `predicted_timeline`."""
    costs = copy_costs(device_of(plan), plan, program, times)
    return {
        "recomputed": [asdict(r) for r in used.recomputed],
        "offloaded": [{**asdict(o), "cost_us": costs.of(o)} for o in used.offloaded],
        "links": [asdict(link) for link in traffic(plan, program)],
        "divided": [asdict(d) for d in used.divided],
        "depth_first": [asdict(h) for h in used.depth_first],
        "stalls": [asdict(s) for s in stalls(program, times)],
        "copies": {
            "count": costs.copies,
            "cost_us": costs.total_us,
            "stall_us": costs.stall_us,
            "synchronised_kernels": costs.synchronised,
            "synchronise_us": costs.synchronise_us,
        },
    }


def _overview(plan: Plan, program: Program, used: TechniquesUsed, costs: CopyCosts) -> str:
    recomputed_away, offloaded_away = used.absent_bytes(memory_curve(plan, program).peak_launch)
    recompute_us = sum(r.time_us for r in used.recomputed)
    copies_us = sum(o.time_us for o in used.offloaded)
    # Shares of the kernels' time, without recomputing and copies.
    kernels_us = sum(
        launch.work.time_us
        for launch in program.launches
        if isinstance(launch.work, Kernel) and launch.stream is not Stream.COLLECTIVE
    )
    again, copied = (
        share if share.endswith("x") else f"+{share}"
        for share in (over(kernels_us, kernels_us - recompute_us), over(kernels_us + costs.total_us, kernels_us))
    )
    workspace_bytes = max((d.workspace_bytes for d in used.divided), default=0)
    rows = [
        ("recomputed", _count(len(used.recomputed), "operation"),
         f"{show_time(recompute_us)} of kernels, {again}",
         show_size(recomputed_away)),
        ("offloaded", _count(len(used.offloaded), "stay"),
         f"{show_time(copies_us)} of copies, {copied}",
         show_size(offloaded_away)),
        ("divided", _count(len(used.divided), "operation"), f"at most {show_size(workspace_bytes)} of workspace", "-"),
        ("depth-first", _count(len(used.depth_first), "value"),
         f"{show_size(sum(h.saved_bytes for h in used.depth_first))} never live as a whole", "-"),
    ]  # fmt: skip
    if not plan.is_timed:
        rows = [(*row[:2], "-" if row[0] in ("recomputed", "offloaded") else row[2], row[3]) for row in rows]
    shown = [row for row in rows if not row[1].startswith("0 ")]
    columns = (Column("technique"), Column(""), Column("cost"), Column("saved at the peak", right=True))
    return render(columns, shown) + (f"\n{costs.text()}" if costs.copies and plan.is_timed else "")


def _links_table(plan: Plan, program: Program, width: int | None) -> str:
    rows = [
        (str(link.space), str(link.copies), show_size(link.out_bytes), time_cell(link.out_us, not link.measured),
         show_size(link.back_bytes), time_cell(link.back_us, not link.measured))
        for link in traffic(plan, program)
    ]  # fmt: skip
    columns = (
        Column("link to"), Column("copies", right=True), Column("out", right=True), Column("takes", right=True),
        Column("back", right=True), Column("takes", right=True),
    )  # fmt: skip
    return render(columns, rows, width)


def _recomputed_table(used: TechniquesUsed, width: int | None, limit: int) -> str:
    ordered = sorted(used.recomputed, key=lambda r: (-r.saved_bytes, r.launches))
    rows = [
        (r.operation, show_size(r.saved_bytes), f"{r.absent[0]}..{r.absent[1]}", time_cell(r.time_us, False))
        for r in ordered[:limit]
    ]
    columns = (
        Column("recomputed", shrinks=True, least=18), Column("saves", right=True), Column("during", right=True),
        Column("takes", right=True),
    )  # fmt: skip
    return render(columns, rows, width) + _others(len(ordered), limit)


def _offloaded_table(used: TechniquesUsed, costs: CopyCosts, width: int | None, limit: int) -> str:
    ordered = sorted(used.offloaded, key=lambda o: (-o.saved_bytes, o.launches))
    rows: list[tuple[str, ...]] = []
    for o in ordered[:limit]:
        cost_us = costs.of(o)
        rows.append(
            (
                o.value,
                str(o.space),
                show_size(o.saved_bytes),
                f"{o.absent[0]}..{o.absent[1]}",
                time_cell(o.time_us, False),
                time_cell(cost_us, False),
            )
        )
    columns = (
        Column("offloaded", shrinks=True, least=18), Column("to"), Column("saves", right=True),
        Column("during", right=True), Column("copies", right=True), Column("cost", right=True),
    )  # fmt: skip
    return render(columns, rows, width) + _others(len(ordered), limit)


def _divided_table(used: TechniquesUsed, width: int | None, limit: int) -> str:
    ordered = sorted(used.divided, key=lambda d: (-d.time_us, d.operation))
    rows = [
        (d.operation, micro_batches(d.micro_batches), show_size(d.workspace_bytes) if d.workspace_bytes else "-",
         time_cell(d.time_us, False))
        for d in ordered[:limit]
    ]  # fmt: skip
    columns = (
        Column("divided", shrinks=True, least=18), Column("micro-batches", right=True, shrinks=True),
        Column("workspace", right=True), Column("takes", right=True),
    )  # fmt: skip
    return render(columns, rows, width) + _others(len(ordered), limit)


def _depth_first_table(used: TechniquesUsed, width: int | None, limit: int) -> str:
    ordered = sorted(used.depth_first, key=lambda h: (-h.saved_bytes, h.value))
    rows = [(h.value, str(h.rows), show_size(h.saved_bytes)) for h in ordered[:limit]]
    columns = (
        Column("depth-first micro-batches", shrinks=True, least=18), Column("rows", right=True),
        Column("saves", right=True),
    )  # fmt: skip
    return render(columns, rows, width) + _others(len(ordered), limit)


def _stalls_table(plan: Plan, program: Program, waits: Sequence[Stall], width: int | None, limit: int) -> str:
    total_us = sum(s.time_us for s in waits)
    guess = plan.predictions.measured_share < 1
    shown = sorted((s for s in waits if s.time_us >= LEAST_SHARE * plan.predictions.train_us), key=lambda s: -s.time_us)
    rows = [
        (launch_title(program, s.launch), _cause(plan, program, s.cause), time_cell(s.time_us, guess))
        for s in shown[:limit]
    ]
    title = f"the GPU waits for copies: {time_cell(total_us, guess)} in {_count(len(waits), 'stall')}"
    if not rows:
        return title
    columns = (Column("before", shrinks=True, least=18), Column("for", shrinks=True), Column("waits", right=True))
    return f"{title}\n{render(columns, rows, width)}"


def _cause(plan: Plan, program: Program, index: int) -> str:
    launch = program.launches[index]
    value = next((plan.buffers[a.buffer].value for a in launch.accesses), None)
    direction = _DIRECTIONS.get(launch.stream, "within the arena")
    return f"launch {index} ({value} {direction})"


def _others(count: int, limit: int) -> str:
    return f"\n… and {count - limit} smaller ones" if count > limit else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
