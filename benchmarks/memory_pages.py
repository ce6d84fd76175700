"""Tables and pictures of the results under a memory budget, for `pictures.py`.

A measured row is taken before a row that was only predicted, and every table says which it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chart import Line, chart
from peer_pages import best_of_peers

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
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

    Without a limit both are those of one run of `mbc bench`. Rows of torch.compile within a budget that the last run
    did not repeat are of a run before it, by whose memory the plans were made.
    """
    free = _document(results, "bench_resnet50_256_bf16")
    rows = {row["name"]: row for row in (*_rows(results, "torch_memory_budget_planned"),
                                         *_rows(results, "torch_memory_budget"))}  # fmt: skip
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
    measured, planned = _document(results, name), _document(results, f"{name}_planned")
    document = measured or planned
    if document is None:
        return []
    gpu = f"{document['gpu']}, driver {document['driver']}" if measured else "predicted by the plans, not run"
    measured_names = {row["name"] for row in document["rows"]}
    more = [row for row in planned["rows"] if row["name"] not in measured_names] if planned else []
    left = [f"Not run, predicted only: {', '.join(row['name'] for row in more)}.", ""] if more else []
    return [f"### {title}", "", f"{gpu}, {document['date'][:10]}: `{document['command']}`", "",
            *_table(columns, [*document["rows"], *more]), *left]  # fmt: skip


def _table(columns: Columns, rows: Sequence[Row]) -> list[str]:
    """Return a table without the columns for which no row has a value, and why rows failed."""
    cells = {head: [_cell(make, row) for row in rows] for head, make in columns.items()}
    kept = [head for head, texts in cells.items() if any(text != "-" for text in texts)]
    lines = [kept, ["---"] * len(kept), *([cells[head][i] for head in kept] for i in range(len(rows)))]
    failed = [f"{row['name']}: {row['failed']}" for row in rows if "failed" in row]
    return [*("| " + " | ".join(line) + " |" for line in lines), "", *(line for why in failed for line in (why, ""))]


def _cell(make: Callable[[Row], str], row: Row) -> str:
    try:
        return make(row)
    except (KeyError, TypeError):
        return "-"


def _rows(results: Path, name: str) -> Sequence[Row]:
    document = _document(results, name)
    return () if document is None else document["rows"]


def _document(results: Path, name: str) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _name(row: Row) -> str:
    return row["name"]


def _passed(row: Row) -> str:
    return YES[row.get("passed")]


def _of(key: str, text: str = ",.1f") -> Callable[[Row], str]:
    return lambda row: format(row[key], text)


CAPPED: Columns = {
    "case": _name,
    "batch": _of("batch", "d"),
    "cap, GB": _of("cap_gb", ".2f"),
    "no limit, GB": _of("unlimited_gb"),
    "host, GB": _of("host_gb"),
    "predicted, ms": _of("predicted_ms"),
    "measured, ms": _of("step_ms"),
    "without a cap, ms": _of("free_ms"),
    "at batch": lambda row: str(row["free_batch"]) if "free_ms" in row else "-",
    "loss": _of("loss", "+.1%"),
    "at most": _of("most_loss", ".1%"),
    "over its bound": _of("over_bound", ".1%"),
    "predicted over measured": _of("predicted_over_measured", ".3f"),
    "gradients, median": _of("gradient_median", ".1e"),
    "as asked": _passed,
}
TORCH: Columns = {
    "": _name,
    "torch, GiB": _of("torch_gib", ".2f"),
    "mbc's arena, GiB": _of("arena_gib", ".2f"),
    "torch, ms": _of("torch_ms"),
    "mbc predicted, ms": _of("predicted_ms"),
    "mbc measured, ms": _of("step_ms"),
    "times faster": _of("times_faster", ".2f"),
    "as asked": _passed,
}
