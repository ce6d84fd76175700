"""Operations, launches and the bytes of the arena of one program, as tables of a page."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mbc.ir.graph import Operation
from mbc.plan.live import Kind
from mbc.plan.techniques import DepthFirst, Offloaded, Recomputed, TechniquesUsed
from mbc.report.html.eviction_estimates import Gaps
from mbc.report.html.facts import Facts
from mbc.report.html.packed_rows import Texts
from mbc.report.tables import layouts, micro_batches

KEPT, RECOMPUTED, OFFLOADED, DEPTH_FIRST, DIVIDED = "kept", "recomputed", "offloaded", "depth-first", "divided"

Columns = dict[str, list[Any]]


def program_data(facts: Facts, texts: Texts) -> dict[str, Any]:
    """Return the data of a program.

    Operations have no limits if no GPU runs the plan. The rectangles (`pieces`) add up to the memory curve.
    """
    program, peak = facts.program, facts.peak
    return {
        "operations": texts.table(_operations(facts)),
        "launches": texts.table(_launches(facts)),
        "waits": program.waits,
        "pieces": texts.table(_pieces(facts)),
        "peak": {
            "launch": peak,
            "bytes": facts.curve.peak_bytes,
            "by_kind": {str(kind): taken for kind, taken in facts.curve.at(peak).items()},
        },
        "techniques": {
            "recomputed": texts.records(Recomputed, facts.techniques.recomputed),
            "offloaded": texts.records(
                Offloaded, facts.techniques.offloaded, cost_us=[facts.costs.of(o) for o in facts.techniques.offloaded]
            ),
            "depth_first": texts.records(DepthFirst, facts.techniques.depth_first),
        },
        "loss_launch": facts.loss_launch,
    }


def lanes_data(facts: Facts, texts: Texts) -> dict[str, Any]:
    """Return the data of a program that the drawing of its launches by stream needs."""
    names = {"name": list(facts.groups), "decision": _decisions_of_operations(facts)}
    return {"operations": texts.table(names), "launches": texts.table(_launches(facts))}


def _operations(facts: Facts) -> Columns:
    plan, program, summaries, limits = facts.plan, facts.program, facts.summaries, facts.limits
    lines = _lines((*plan.graph.train, *plan.graph.infer))
    members = [program.launches[one.first_launch].operations for one in summaries]
    unknown: list[None] = [None] * len(summaries)
    recomputing = facts.recomputing
    runs = [(one.micro_batches, recomputing.get(one.name, 0)) for one in summaries]
    return {
        "name": [one.name for one in summaries],
        "kind": [one.kind for one in summaries],
        "kernels": _each_once(" | ".join, [one.kernels for one in summaries]),
        "runs": _each_once(lambda run: micro_batches(*run), runs),
        "layouts": _each_once(layouts, [one.layouts for one in summaries]),
        "time_us": [one.time_us if plan.is_timed else None for one in summaries],
        "estimated": [one.estimated for one in summaries],
        "workspace_bytes": [one.workspace_bytes for one in summaries],
        "output_bytes": [one.output_bytes for one in summaries],
        "first_launch": [one.first_launch for one in summaries],
        "stream": [one.stream for one in summaries],
        "moved_bytes": [limit.moved_bytes for limit in limits] or unknown,
        "flops": [limit.flops for limit in limits] or unknown,
        "limit_us": [limit.limit_us for limit in limits] or unknown,
        "bound": [limit.bound for limit in limits] or [""] * len(summaries),
        "decision": _decisions_of_operations(facts),
        "source": [next((lines[name] for name in names if name in lines), "") for names in members],
    }


Cell = TypeVar("Cell", bound=Hashable)


def _each_once(text: Callable[[Cell], str], cells: Sequence[Cell]) -> list[str]:
    """Return the text of each cell; equal cells are formatted once."""
    texts = {cell: text(cell) for cell in dict.fromkeys(cells)}
    return [texts[cell] for cell in cells]


def _lines(operations: Iterable[Operation]) -> Mapping[str, str]:
    """Return the source line of each operation such as `net.mbc:14`, if known."""
    return {op.name: f"{op.span.source.name}:{op.span.line}" for op in operations if op.span is not None}


def _decisions_of_operations(facts: Facts) -> list[str]:
    """Return the decision for each operation, in the order of `summaries`."""
    plan, program, techniques = facts.plan, facts.program, facts.techniques
    recomputed = {one.operation for one in techniques.recomputed}
    divided = {one.operation for one in techniques.divided}
    of_values = _decisions_of_values(techniques)
    of_outputs: dict[int, set[str]] = {}
    for buffer, launches in facts.writers.items():
        decision = of_values.get(plan.buffers[buffer].value or "")
        if decision is not None:
            for i in launches:
                of_outputs.setdefault(i, set()).add(decision)
    decisions: list[str] = []
    for name, launches in facts.groups.items():
        if name in recomputed:
            decision = RECOMPUTED
        else:
            outputs = {decision for i in launches for decision in of_outputs.get(i, ())}
            decision = next((d for d in (RECOMPUTED, OFFLOADED, DEPTH_FIRST) if d in outputs), KEPT)
        if decision == KEPT and "+".join(program.launches[launches[0]].operations) in divided:
            decision = DIVIDED
        decisions.append(decision)
    return decisions


def _decisions_of_values(techniques: TechniquesUsed) -> Mapping[str, str]:
    decisions = dict.fromkeys((one.value for one in techniques.depth_first), DEPTH_FIRST)
    decisions |= dict.fromkeys((one.value for one in techniques.offloaded), OFFLOADED)
    return decisions | {name: RECOMPUTED for one in techniques.recomputed for name in one.outputs}


def _launches(facts: Facts) -> Columns:
    program, times = facts.program, facts.times
    operation = {launch: i for i, group in enumerate(facts.groups.values()) for launch in group}
    return {
        "operation": [operation[i] for i in range(len(program.launches))],
        "stream": [launch.stream for launch in program.launches],
        "start_us": list(times.starts_us),
        "end_us": list(times.ends_us),
        "stall_us": list(times.stalls_us),
        "synchronise_us": list(times.synchronise_us),
        "time_us": [launch.work.time_us for launch in program.launches],
        "measured": [launch.work.measured for launch in program.launches],
    }


def _pieces(facts: Facts) -> Columns:
    """Return the bytes of the arena that each buffer holds, from launch `start` to before launch `stop`."""
    plan, held = facts.plan, facts.held
    decisions = _decisions_of_values(facts.techniques)
    stays = [(one, *stay) for one in held.ranges for stay in one.stays]
    members = [member for _, member, _, _ in stays]
    values = [plan.buffers[member].value for member in members]
    gaps = Gaps(facts)
    gone = [gaps.letting_go(member) for member in members]
    return {
        "value": [value or "" for value in values],
        "kind": [Kind.WORKSPACE if value is None else held.kinds[value] for value in values],
        "offset": [plan.offsets[one.members[0]] for one, _, _, _ in stays],
        "size_bytes": [one.size_bytes for one, _, _, _ in stays],
        "start": [start for _, _, start, _ in stays],
        "stop": [stop for _, _, _, stop in stays],
        "decision": [decisions.get(value or "", KEPT) for value in values],
        "writers": [facts.writers.get(member, ()) for member in members],
        "readers": [facts.readers.get(member, ()) for member in members],
        "gap_start": [go and go.start for go in gone],
        "gap_stop": [go and go.stop for go in gone],
        "recompute_us": [go and go.recompute_us for go in gone],
        "lacks": [go.lacks if go else () for go in gone],
        "offload_us": [go and go.offload_us for go in gone],
    }
