"""Tables of the results on several GPUs, for `pictures.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tables import Columns, Row, document, entry, table_of

FILES = ("many_gpus", "many_gpus_4")


def gpus_pages(results: Path) -> tuple[dict[str, str], list[str]]:
    """Return no pictures and this section of the page."""
    page: list[str] = []
    for name in FILES:
        rows = _rows(results, name)
        if rows:
            gpus = rows[0]["gpus"]
            page += [
                f"### {gpus} GPUs, each with its part of the mini-batch", "",
                "Efficiency is the step time of one GPU over that of all GPUs. DDP is `torch.compile` with DDP as "
                "PyTorch documents it; \"whole graph\" captures that step in one CUDA graph. \"Predicted over "
                "measured\" has two values: for one GPU and for all. `sync`: batch normalisation uses the rows of all "
                "GPUs; `sharded`: each GPU holds a part of the optimizer's states.", "",
                *table_of(MANY, rows),
            ]  # fmt: skip
    for title, note, name, columns in OTHERS:
        rows = _rows(results, name)
        if rows:
            page += [f"### {title}", "", note, "", *table_of(columns, rows)]
    return {}, ["## Several GPUs", "", *page] if page else []


def _rows(results: Path, name: str) -> Sequence[Row]:
    """Return the rows of a results file. A row without a GPU gets the GPU of the file."""
    file = document(results, name)
    return [{**row, "card": file["gpu"], **_cards(row)} for row in file["rows"]] if file else ()


def _cards(row: Row) -> dict[str, str]:
    """Return the GPU of a row. Rows name their own GPU, because a file may have rows of several machines."""
    gpu = row.get("gpu") or ""
    return {"card": gpu} if gpu.startswith("NVIDIA") else {}


def _pair(first: str, second: str, form: str = ".2f") -> Callable[[Row], str]:
    return lambda row: f"{row[first]:{form}}, {row[second]:{form}}"


def _card(row: Row) -> str:
    return row["card"].split()[1]


MANY: Columns = {
    "network, images a GPU": entry("name"),
    "GPU": _card,
    "precision": entry("precision"),
    "one GPU, ms": entry("mbc_one_ms", ".2f"),
    "all, ms": entry("mbc_all_ms", ".2f"),
    "efficiency": entry("mbc_efficiency", ".3f"),
    "images/s": entry("mbc_images_s", ",.0f"),
    "of DDP": entry("ddp_efficiency", ".3f"),
    "DDP over mbc": entry("over_ddp", ".2f"),
    "whole graph over mbc": entry("over_whole", ".2f"),
    "predicted over measured": _pair("one_predicted_over_measured", "all_predicted_over_measured"),
    "over whole states": entry("over_whole_states", ".3f"),
    "saved a GPU, GiB": entry("saved_gib", ".2f"),
}
LENDING: Columns = {
    "case": entry("name"),
    "batch": entry("batch", "d"),
    "alone, ms": entry("alone_ms", ".0f"),
    "slowest, ms": entry("slowest_ms", ".0f"),
    "predicted, ms": entry("predicted_ms", ".0f"),
    "of the summed speeds": entry("of_summed_speeds", ".1%"),
}
AS_ONE: Columns = {
    "network": entry("name"),
    "median distance of a state": entry("median", ".1e"),
    "one GPU with divided convolutions": entry("yardstick_median", ".1e"),
    "same bits in two runs": lambda row: "yes" if row["same_bits"] else "no",
}
FAILURES: Columns = {
    "case": entry("name"),
    "trials": entry("trials", "d"),
    "all ended within, s": lambda row: f"{row['slowest_s'] if 'slowest_s' in row else row['seconds']:.1f}",
    "ended with the reason": entry("failures_told", "d"),
    "had a checkpoint": entry("with_checkpoint", "d"),
    "whole": entry("whole", "d"),
    "same bits as undisturbed": lambda row: "yes" if row["same_bits"] else "no",
}
DISTURBED = "The digits: a rank without memory, one stopped for a minute, one killed at random moments."
OTHERS: Sequence[tuple[str, str, str, Columns]] = (
    ("Three H200s that borrow from a fourth", "ResNet-152 in fp32, each in 16 GB.", "lending_4", LENDING),
    (
        "Two ranks beside one GPU with the whole mini-batch", "Twenty steps in fp32, relative distance of the states.",
        "ranks_as_one", AS_ONE,
    ),
    ("A training of two ranks that is disturbed", DISTURBED, "rank_failures", FAILURES),
    ("A training of four ranks that is disturbed", DISTURBED, "rank_failures_4", FAILURES),
)  # fmt: skip
