"""Tables of the results on several GPUs, for `pictures.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
FILES = ("many_gpus", "many_gpus_4")


def gpus_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """Return no pictures, and the part of the page."""
    page: list[str] = []
    for name in FILES:
        rows = _rows(results, name)
        if rows:
            gpus = rows[0]["gpus"]
            page += [
                f"### {gpus} GPUs, each with its part of the mini-batch", "",
                "Efficiency: the step of one GPU over that of all. DDP: `torch.compile` with DDP as PyTorch documents "
                "it, and captured whole in one CUDA graph, over mbc's step. Predicted over measured: one GPU, all. "
                "`sync`: batch normalisation over all rows; `sharded`: so are the optimizer's states.", "",
                *_table(MANY, rows),
            ]  # fmt: skip
    for title, note, name, columns in OTHERS:
        rows = _rows(results, name)
        if rows:
            page += [f"### {title}", "", note, "", *_table(columns, rows)]
    return {}, ["## Several GPUs", "", *page] if page else []


def _rows(results: Path, name: str) -> Sequence[Row]:
    """Return the rows of a results file, each with the file's GPU where the row has none."""
    path = results / f"{name}.json"
    if not path.is_file():
        return ()
    document = json.loads(path.read_text(encoding="utf-8"))
    return [{**row, "card": document["gpu"], **_cards(row)} for row in document["rows"]]


def _cards(row: Row) -> dict[str, str]:
    """Return the GPU that a row itself names: a file may have rows of several machines."""
    gpu = row.get("gpu") or ""
    return {"card": gpu} if gpu.startswith("NVIDIA") else {}


def _table(columns: Columns, rows: Sequence[Row]) -> list[str]:
    """Return a table without the columns for which no row has a value."""
    cells = {head: [_cell(text, row) for row in rows] for head, text in columns.items()}
    kept = [head for head, texts in cells.items() if any(text != "-" for text in texts)]
    lines = [kept, ["---"] * len(kept), *([cells[head][i] for head in kept] for i in range(len(rows)))]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def _cell(text: Callable[[Row], str], row: Row) -> str:
    try:
        return text(row)
    except KeyError:
        return "-"


def _of(key: str, form: str = ".2f") -> Callable[[Row], str]:
    return lambda row: format(row[key], form)


def _pair(first: str, second: str, form: str = ".2f") -> Callable[[Row], str]:
    return lambda row: f"{row[first]:{form}}, {row[second]:{form}}"


def _card(row: Row) -> str:
    return row["card"].split()[1]


MANY: Columns = {
    "network, images a GPU": _of("name", ""),
    "GPU": _card,
    "precision": _of("precision", ""),
    "one GPU, ms": _of("mbc_one_ms"),
    "all, ms": _of("mbc_all_ms"),
    "efficiency": _of("mbc_efficiency", ".3f"),
    "images/s": _of("mbc_images_s", ",.0f"),
    "of DDP": _of("ddp_efficiency", ".3f"),
    "DDP over mbc": _of("over_ddp"),
    "whole graph over mbc": _of("over_whole"),
    "predicted over measured": _pair("one_predicted_over_measured", "all_predicted_over_measured"),
    "over whole states": _of("over_whole_states", ".3f"),
    "saved a GPU, GiB": _of("saved_gib"),
}
UNLIKE: Columns = {
    "network": _of("name", ""),
    "rows": lambda row: " + ".join(map(str, row["rows"])),
    "step, ms": _of("ms"),
    "predicted, ms": _of("predicted_ms"),
    "of the summed speeds": _of("of_summed_speeds", ".1%"),
    "an equal split over it": _of("over_equal"),
}
CONTENTION: Columns = {
    "case": _of("name", ""),
    "GPUs": _of("gpus", "d"),
    "one GPU, ms": _of("one_ms", ".1f"),
    "all, by a plan that knows of the others, ms": _of("aware_ms", ".1f"),
    "all, by a plan that does not, ms": _of("oblivious_ms", ".1f"),
    "gain": _of("gain"),
    "loss over one GPU": _of("loss", "+.1%"),
    "largest batch of plain memory, ms": _of("plain_ms", ".1f"),
    "twice that batch, ms": _of("twice_ms", ".1f"),
    "speed of twice the batch": _of("speed"),
}
LENDING: Columns = {
    "case": _of("name", ""),
    "batch": _of("batch", "d"),
    "alone, ms": _of("alone_ms", ".0f"),
    "slowest, ms": _of("slowest_ms", ".0f"),
    "predicted, ms": _of("predicted_ms", ".0f"),
    "of the summed speeds": _of("of_summed_speeds", ".1%"),
}
AS_ONE: Columns = {
    "network": _of("name", ""),
    "median distance of a state": _of("median", ".1e"),
    "one GPU with divided convolutions": _of("yardstick_median", ".1e"),
    "same bits in two runs": lambda row: "yes" if row["same_bits"] else "no",
}
FAILURES: Columns = {
    "case": _of("name", ""),
    "trials": _of("trials", "d"),
    "all ended within, s": lambda row: f"{row['slowest_s'] if 'slowest_s' in row else row['seconds']:.1f}",
    "ended with the reason": _of("failures_told", "d"),
    "had a checkpoint": _of("with_checkpoint", "d"),
    "whole": _of("whole", "d"),
    "same bits as undisturbed": lambda row: "yes" if row["same_bits"] else "no",
}
OFFLOADING = (
    "Steps under a cap on memory, with recomputation switched off, so that they live on copies with the host; and, for "
    "GPUs of 12 GB, twice the largest batch that fits without copies."
)
DISTURBED = "The digits: a rank without memory, one stopped for a minute, one killed at random moments."
OTHERS: Sequence[tuple[str, str, str, Columns]] = (
    (
        "Whole H100s and parts with 64 of their multiprocessors", "bf16, 128 rows a GPU on average.",
        "unlike_gpus", UNLIKE,
    ),
    ("Two H200s that copy with one host", OFFLOADING, "contention", CONTENTION),
    ("Four H100s that copy with one host", f"{OFFLOADING} Planned for H200s.", "contention_4", CONTENTION),
    ("Three H200s that borrow from a fourth", "ResNet-152 in fp32, each in 16 GB.", "lending_4", LENDING),
    (
        "Two ranks beside one GPU with the whole mini-batch", "Twenty steps in fp32, relative distance of the states.",
        "ranks_as_one", AS_ONE,
    ),
    ("A training of two ranks that is disturbed", DISTURBED, "rank_failures", FAILURES),
    ("A training of four ranks that is disturbed", DISTURBED, "rank_failures_4", FAILURES),
)  # fmt: skip
