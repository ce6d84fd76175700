"""The tables of a plan: `~` marks times that are estimated, `*` kernels of emulated fp32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from mbc.hardware.streams import Stream
from mbc.ir.text import optimizer_summary
from mbc.optimize.schedule.step_time import accumulate_us, samples_per_s, step_us
from mbc.plan.group import title
from mbc.plan.live import rounded
from mbc.plan.memory import live_values_at, memory_curve
from mbc.plan.model import Plan, Program
from mbc.plan.prefetch import prefetch_bytes
from mbc.plan.summary import OperationSummary, emulated_share
from mbc.report.columns import Column, render, without_columns
from mbc.report.devices import host_sharing_text, posing_text
from mbc.units import show_given, show_range, show_rate, show_size, show_time

OVERHEAD = "CUDA's context, libraries, modules and graphs"  # contents of the overhead
LARGEST = 6  # values listed at the peak
EMULATED = " *"  # mark of kernels of emulated fp32
PREFETCHED = "inputs of the next step, copied while this one runs"
NOT_PREFETCHED = "none: too few bytes of the budget are free for the inputs of the next step"
NO_PROFILE = "none: nothing was measured on such a GPU, and times are estimated"
NO_GPU = "none: the plan is for the CPU"
HOST = "host: memory of the machine (RAM) that holds offloaded values"
NO_TIMES = "has no times of the step's kernels, which are estimated"

_OPERATIONS = (
    Column("operation", shrinks=True, least=18),
    Column("kind", shrinks=True, least=12, optional=3),
    Column("kernel", shrinks=True, least=16),
    Column("micro-batches", right=True, shrinks=True),
    Column("layout", optional=1),
    Column("time", right=True),
    Column("workspace", right=True),
    Column("output", right=True, optional=2),
    Column("lifetime", right=True),
)
_KINDS = (
    Column("kind", shrinks=True, least=12), Column("operations", right=True), Column("launches", right=True),
    Column("time", right=True), Column("share", right=True), Column("workspace", right=True),
)  # fmt: skip


def heading(plan: Plan, infer: bool = False) -> str:
    """Return three lines on the target and the profile of a plan, and more on its pose and settings, if any."""
    graph, target = plan.graph, plan.target
    what = "inference" if infer else "training step"
    cudnn = f", cuDNN {cudnn_version(target.cudnn)}" if target.cudnn else ""
    posing = f"posing: {posing_text(plan)}\n" if plan.target.device.poses else ""
    asked = f"\nset: {plan.settings_text}" if plan.settings else ""
    first = f"{graph.name}: {what}, {batch_text(plan)}, {graph.precision}, {optimizer_summary(graph.optimizer)}\n"
    if not plan.is_timed:
        return f"{first}for the CPU{asked}"
    return (
        f"{first}for {target.gpu} ({target.architecture}, {target.multiprocessors} multiprocessors, "
        f"{show_size(target.memory_bytes)}){cudnn}, budget {show_given(plan.budget_bytes)}\n"
        f"{posing}profile: {profile_of(plan)}{asked}"
    )


def batch_text(plan: Plan) -> str:
    """Format a batch as `batch 64`, or `batch 64 shared by 3 GPUs (22 + 2 x 21 rows)`."""
    batch, ranks = f"batch {plan.graph.global_batch}", plan.graph.ranks
    return batch if ranks is None else f"{batch} shared by {ranks.size} GPUs ({micro_batches(ranks.rows)} rows)"


def profile_of(plan: Plan) -> str:
    """Format the profile of a plan, such as `NVIDIA H200, driver 580.159.04, cuDNN 9.19.0, 2026-11-21`."""
    profile = plan.target.profile
    if not plan.is_timed:
        return NO_GPU
    unmeasured = profile and plan.predictions.train_us and not plan.predictions.measured_share
    return f"{profile} ({NO_TIMES})" if unmeasured else profile or NO_PROFILE


def cudnn_version(number: int) -> str:
    """Format a version of cuDNN: 9.19.0 for 91900."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def operations_table(
    summaries: Sequence[OperationSummary],
    width: int | None,
    limit: int | None = None,
    recomputing: Mapping[str, int] | None = None,
) -> str:
    """Format a table with a row for each operation, in program order.

    Args:
        summaries: Operations.
        width: Columns of the terminal; None for no limit.
        limit: Largest number of operations, the slowest ones; None for all.
        recomputing: Number of launches of each operation that recompute, by `Techniques`.
    """
    shown = list(summaries)
    if limit is not None and len(shown) > limit:
        slowest = sorted(shown, key=lambda s: (-s.time_us, s.first_launch))[:limit]
        shown = sorted(slowest, key=lambda s: s.first_launch)
    rows = [
        (
            s.name,
            s.kind,
            kernels_cell(s),
            micro_batches(s.micro_batches, (recomputing or {}).get(s.name, 0)),
            layouts(s.layouts),
            time_cell(s.time_us, s.estimated),
            show_size(s.workspace_bytes) if s.workspace_bytes else "-",
            show_size(s.output_bytes),
            f"{s.lifetime[0]}..{s.lifetime[1]}",
        )
        for s in shown
    ]
    columns = _OPERATIONS
    if any(s.stream is Stream.COLLECTIVE for s in shown):  # streams are more useful here than layouts
        columns = (*_OPERATIONS[:4], Column("stream"), *_OPERATIONS[5:])
        rows = [(*row[:4], str(s.stream), *row[5:]) for row, s in zip(rows, shown, strict=True)]
    if not any(s.time_us for s in shown):
        columns, rows = without_columns(columns, rows, "time")
    lines = [render(columns, rows, width)]
    if len(shown) < len(summaries):
        names = {s.name for s in shown}
        others = [s for s in summaries if s.name not in names]
        time_us = sum(s.time_us for s in others)
        time = time_cell(time_us, any(s.estimated for s in others))
        take = f"faster operations that take {time} together" if time_us else "more operations"
        lines.append(f"… and {len(others)} {take}")
    return "\n".join(lines)


def kinds_table(summaries: Sequence[OperationSummary], width: int | None) -> str:
    """Format a table with a row for each kind of operation, the slowest first."""
    total_us = sum(s.time_us for s in summaries) or 1.0
    by_kind: dict[str, list[OperationSummary]] = {}
    for summary in summaries:
        by_kind.setdefault(summary.kind, []).append(summary)
    ordered = sorted(by_kind.items(), key=lambda item: (-sum(s.time_us for s in item[1]), item[0]))
    rows: list[tuple[str, ...]] = []
    for kind, group in ordered:
        time_us = sum(s.time_us for s in group)
        workspace_bytes = max(s.workspace_bytes for s in group)
        rows.append(
            (
                kind,
                str(len(group)),
                str(sum(len(s.micro_batches) for s in group)),
                time_cell(time_us, any(s.estimated for s in group)),
                f"{100 * time_us / total_us:.1f} %",
                show_size(workspace_bytes) if workspace_bytes else "-",
            )
        )
    if not any(s.time_us for s in summaries):
        return render(*without_columns(_KINDS, rows, "time", "share"), width)
    return render(_KINDS, rows, width)


def peak_table(plan: Plan, program: Program, width: int | None = None) -> str:
    """Format the live bytes at the peak: by kind, and the largest values."""
    curve = memory_curve(plan, program)
    peak = curve.peak_launch
    total = curve.total_bytes[peak]
    rows = [(str(kind), show_size(taken), f"{100 * taken / total:.1f} %") for kind, taken in curve.at(peak).items()]
    rows.append(("all", show_size(total), "100.0 %"))
    columns = (Column("at the peak"), Column("memory", right=True), Column("share", right=True))
    where = f"the peak is at {launch_title(program, peak)}"
    return f"{render(columns, rows)}\n{where}\n\n{_largest(plan, program, peak, width)}"


def _largest(plan: Plan, program: Program, launch: int, width: int | None) -> str:
    taken = [t for t in live_values_at(plan, program, launch) if t.size_bytes]
    rows = [(t.value or "-", str(t.kind), show_size(t.size_bytes), f"{t.start}..{t.stop}") for t in taken[:LARGEST]]
    columns = (
        Column("largest then", shrinks=True, least=18), Column("kind"), Column("memory", right=True),
        Column("lifetime", right=True),
    )  # fmt: skip
    others = taken[LARGEST:]
    rest = f"\n… and {len(others)} others, {show_size(sum(t.size_bytes for t in others))} together" if others else ""
    return render(columns, rows, width) + rest


def launch_title(program: Program, index: int) -> str:
    """Format a launch such as `launch 12 (conv1)`."""
    if index >= len(program.launches):
        return f"launch {index}"
    operations = program.launches[index].operations
    return f"launch {index} ({title(operations) or 'conversion'})"


def _accumulated_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the rows on gradient accumulation: the training program runs the last of several mini-batches."""
    count = plan.graph.optimizer.accumulate
    if count == 1:
        return []
    each, guess = accumulate_us(plan), plan.predictions.measured_share < 1
    return [
        ("  mini-batches before", time_cell(each, guess), f"each of {count - 1}, whose gradients are accumulated"),
        ("  all mini-batches", time_cell(step_us(plan), guess), f"{count * plan.graph.global_batch} rows"),
    ]


def totals_text(plan: Plan) -> str:
    """Format the predictions, and how far the plan is above each bound."""
    predictions, bounds = plan.predictions, plan.bounds
    guess = predictions.measured_share < 1
    share = f"{measured_percent(predictions.measured_share)} of the step measured"
    rate = f"{show_rate(samples_per_s(plan))} samples/s"
    overhead = "measured" if predictions.overhead_measured else "reserved, never measured on this GPU"
    ahead_bytes = prefetch_bytes(plan)
    total = predictions.arena_bytes + predictions.overhead_bytes + ahead_bytes
    states = {b for b in plan.train.entry if plan.graph.values[plan.buffers[b].value or ""].role.persistent}
    state_bytes = sum(rounded(plan.buffers[b].size_bytes) for b in states)
    rows = [
        (
            "training step",
            time_cell(predictions.train_us, guess),
            f"{within(predictions.train_low_us, predictions.train_high_us)}{rate}, {share}",
        ),
        (
            "inference",
            time_cell(predictions.infer_us, predictions.infer_low_us < predictions.infer_high_us),
            within(predictions.infer_low_us, predictions.infer_high_us).rstrip("; "),
        ),
        *_accumulated_rows(plan),
        *_emulated_rows(plan),
        ("arena", show_size(predictions.arena_bytes), f"{predictions.arena_bytes:,} bytes, exact"),
        ("  of it states", show_size(state_bytes), "parameters, statistics, optimizer state, control block"),
        ("overhead", show_size(predictions.overhead_bytes), overhead),
        ("prefetch", show_size(ahead_bytes), PREFETCHED if ahead_bytes else NOT_PREFETCHED),
        ("all of it", show_size(total), f"of a budget of {show_given(plan.budget_bytes)}"),
    ]
    if not plan.is_timed:  # the CPU takes other times, and has no GPU's memory
        rows = [row for row in rows if row[0] in ("arena", "  of it states")]
    if predictions.host_bytes:
        limit = plan.host_limit_bytes
        most = "" if limit is None else f", of at most {show_given(limit)}"
        rows.append(("host memory", show_size(predictions.host_bytes), f"pinned{most}"))
    if predictions.host_gpus:
        rows.append(("  by all GPUs", time_cell(predictions.oblivious_us, guess), host_sharing_text(plan)))
    if predictions.peer_bytes:
        most = f"of at most {show_given(plan.peer_limit_bytes)}"
        rows.append(("another GPU's memory", show_size(predictions.peer_bytes), most))
    within_budget_us = bounds.within_budget_us if bounds.within_budget_us > bounds.fastest_us else 0.0
    times_us = {
        "critical-path lower bound": bounds.critical_path_us,
        "best serial schedule": bounds.fastest_us,
        "best serial schedule without deterministic = true": bounds.nondeterministic_us,
        "best serial schedule within the budget (knapsack)": within_budget_us,
    }
    sizes = {
        "peak live bytes": bounds.live_bytes,
        f"lower bound of the arena, set by {bounds.floor_operation}": bounds.floor_bytes,
    }
    limits = [(name, time_cell(us, guess), over(predictions.train_us, us)) for name, us in times_us.items() if us]
    limits += [(name, show_size(size), over(predictions.arena_bytes, size)) for name, size in sizes.items()]
    totals = render((Column("in all"), Column("", right=True), Column("")), rows)
    return (
        totals
        + "\n\n"
        + render((Column("bound"), Column("", right=True), Column("plan over bound", right=True)), limits)
    )


def _emulated_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the row on emulated operations, if there are any."""
    emulated, products = emulated_share(plan, plan.train)
    what = "convolutions and linear layers of the step, marked * above"
    return [("emulated fp32", f"{emulated} of {products}", what)] if emulated else []


def measured_percent(share: float) -> str:
    """Format a share in percent; a share strictly between 0 and 1 is never `0 %` or `100 %`."""
    rounded_percent = round(100 * share)
    if 0 < share < 1 and rounded_percent in (0, 100):
        return "under 1 %" if rounded_percent == 0 else "over 99 %"
    return f"{rounded_percent} %"


def over(figure: float, bound: float) -> str:
    """Return how far a figure is above its bound: `12.50 %`, or `24.5x` where it is twice the bound or more."""
    if bound <= 0:
        return "-"
    if figure >= 2 * bound:
        return f"{figure / bound:,.1f}x"
    percent = 100 * (figure / bound - 1)
    return f"{0.0 if abs(percent) < 0.005 else percent:.2f} %"


def kernels_cell(summary: OperationSummary) -> str:
    """Format the kernels of an operation."""
    return " | ".join(summary.kernels) + (EMULATED if summary.emulated_fp32 else "")


def outside_cell(host_bytes: int, peer_bytes: int) -> str:
    """Format the bytes that a plan keeps in host memory, and in another GPU's memory if it uses any."""
    host = show_size(host_bytes) if host_bytes else "-"
    return f"{host}, peer {show_size(peer_bytes)}" if peer_bytes else host


def host_note(table: str, host_bytes: Iterable[int]) -> list[str]:
    """Return the line below a table that explains its column `host`, if a row of it has such memory."""
    return [HOST] if "host" in table.partition("\n")[0].split() and any(host_bytes) else []


def time_cell(time_us: float, estimated: bool) -> str:
    """Format a time, with `~` for an estimate; `-` for none."""
    return f"{'~' if estimated else ''}{show_time(time_us)}" if time_us else "-"


def within(low_us: float, high_us: float) -> str:
    """Format a range as `18.2 to 31.0 ms; `; return no text for an exact time."""
    return f"{show_range(low_us, high_us)}; " if low_us < high_us else ""


def micro_batches(rows: Sequence[int], recomputing: int = 0) -> str:
    """Format micro-batches as `256`, `4 x 64` or `3 x 64 + 32`; add the launches that recompute, `(1 recomputed)`."""
    parts = [(count, len(list(group))) for count, group in groupby(rows)]
    text = " + ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in parts)
    return f"{text} ({recomputing} recomputed)" if recomputing else text


def layouts(names: Sequence[str]) -> str:
    """Return the layout of the operands; `mixed` if they differ."""
    distinct = tuple(dict.fromkeys(names))
    return distinct[0] if len(distinct) == 1 else "mixed" if distinct else "-"
