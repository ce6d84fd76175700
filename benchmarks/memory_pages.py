"""Tables and pictures of the results under a memory budget, for `pictures.py`.

A measured row takes the place of a row that was only predicted. Every table says which of both its rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chart import Line, chart
from peer_pages import best_of_peers
from tables import Columns, Row, document, entry, rows_of, table_of

BUDGETS = "step_over_budget_resnet50.svg"
BUDGETS_TITLE = "ResNet-50, batch 256, bf16, NVIDIA H200: step over its memory"
YES = {True: "yes", False: "no", None: "-"}


def memory_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """Return SVG texts by file name, and the part of the page."""
    pictures: dict[str, str] = {}
    page: list[str] = []
    page += _titled("Losses under a cap", results, "capped", CAPPED)
    page += _titled(
        "Beside torch.compile with an activation budget, ResNet-50, batch 256, bf16", results,
        "torch_memory_budget", TORCH,
    )  # fmt: skip
    budgets = budget_picture(results)
    if budgets:
        pictures[BUDGETS] = budgets
        page += [f"![{BUDGETS_TITLE}](results/{BUDGETS})", ""]
    return pictures, ["## Under a memory budget", "", *page] if page else []


def budget_picture(results: Path) -> str:
    """Return a chart of measured steps over their memory, or nothing if too little was measured.

    Both steps without a limit come from one run of `mbc bench`. Rows of torch.compile within a budget come from the
    last run, or, if it did not repeat them, from the run before it, from whose memory the budgets of the plans were
    taken.
    """
    free = document(results, "bench_resnet50_256_bf16")
    rows = {row["name"]: row for row in (*rows_of(results, "torch_memory_budget_planned"),
                                         *rows_of(results, "torch_memory_budget"))}  # fmt: skip
    timed = [row for row in rows.values() if "step_ms" in row]
    if free is None or not timed:
        return ""
    mbc = [(row["arena_gib"], row["step_ms"]) for row in timed]
    mbc.append((free["mbc"]["peak_bytes"] / 2**30, free["mbc"]["step_ms"]))
    torch = [(row["torch_gib"], row["torch_ms"]) for row in rows.values() if row["budget"] < 1]
    peer = best_of_peers(free)
    if peer is not None:
        torch.append((peer["peak_bytes"] / 2**30, peer["step_ms"]))
    lines = [Line("torch.compile", _by_gib(torch), dashed=True), Line("mbc", _by_gib(mbc))]
    return chart(BUDGETS_TITLE, "memory of a step, GiB", "step, ms", lines, y_zero=True)


def _by_gib(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((round(gib, 1), ms) for gib, ms in points))


def _titled(title: str, results: Path, name: str, columns: Columns) -> list[str]:
    measured, planned = document(results, name), document(results, f"{name}_planned")
    file = measured or planned
    if file is None:
        return []
    gpu = f"{file['gpu']}, driver {file['driver']}" if measured else "predicted by the plans, not run"
    measured_names = {row["name"] for row in file["rows"]}
    more = [row for row in planned["rows"] if row["name"] not in measured_names] if planned else []
    left = [f"Not run, predicted only: {', '.join(row['name'] for row in more)}.", ""] if more else []
    return [f"### {title}", "", f"{gpu}, {file['date'][:10]}: `{file['command']}`", "",
            *table_of(columns, [*file["rows"], *more]), *left]  # fmt: skip


def _passed(row: Row) -> str:
    return YES[row.get("passed")]


CAPPED: Columns = {
    "case": entry("name"),
    "batch": entry("batch", "d"),
    "cap, GB": entry("cap_gb", ".2f"),
    "no limit, GB": entry("unlimited_gb", ",.1f"),
    "host, GB": entry("host_gb", ",.1f"),
    "predicted, ms": entry("predicted_ms", ",.1f"),
    "measured, ms": entry("step_ms", ",.1f"),
    "without a cap, ms": entry("free_ms", ",.1f"),
    "at batch": lambda row: str(row["free_batch"]) if "free_ms" in row else "-",
    "loss": entry("loss", "+.1%"),
    "at most": entry("most_loss", ".1%"),
    "over its bound": entry("over_bound", ".1%"),
    "predicted over measured": entry("predicted_over_measured", ".3f"),
    "gradients, median": entry("gradient_median", ".1e"),
    "as asked": _passed,
}
TORCH: Columns = {
    "": entry("name"),
    "torch, GiB": entry("torch_gib", ".2f"),
    "mbc's arena, GiB": entry("arena_gib", ".2f"),
    "torch, ms": entry("torch_ms", ",.1f"),
    "mbc predicted, ms": entry("predicted_ms", ",.1f"),
    "mbc measured, ms": entry("step_ms", ",.1f"),
    "times faster": entry("times_faster", ".2f"),
    "as asked": _passed,
}
