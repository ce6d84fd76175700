"""Writes the figures of pages from the committed results, and measures nothing.

Tables and charts go into benchmarks/README.md, single figures into the text of README.md and docs/ (`figures.toml`).

`--check` writes nothing and fails if a picture or a page is out of date.

    python benchmarks/pictures.py [--check]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from accuracy_pages import accuracy_pages
from figures import listed, results_by_name, with_results
from goal_pages import correctness_pages, goal_pages
from gpus_pages import gpus_pages
from memory_pages import memory_pages
from peer_pages import peer_pages
from record import ROOT
from tables import Columns, document, entry, rows_of, table, table_of, where

README = ROOT / "benchmarks" / "README.md"
PRECISIONS = ("fp32", "tf32", "bf16")
BEGIN, END = "<!-- figures: written by pictures.py -->", "<!-- end of figures -->"


def drawn(results: Path) -> tuple[dict[str, str], str]:
    """Return the pictures as SVG texts by file name, and the part of the page with tables and pictures."""
    pictures: dict[str, str] = {}
    page: list[str] = []
    own = (_volumes, _predictions, _posed, _deterministic, _planning)
    for make in (peer_pages, goal_pages, correctness_pages, accuracy_pages, memory_pages, gpus_pages, *own):
        charts, text = make(results)
        pictures |= charts
        page += text
    return pictures, "\n".join(page).strip() + "\n"


VOLUMES: Columns = {
    "network, contender": entry("name"),
    "step, ms": entry("ms", ".1f"),
    "predicted, ms": entry("predicted_ms", ".1f"),
    "process, GB": lambda row: f"{row['taken_bytes'] / 1e9:.2f}",
    "error of gradients over PyTorch's": entry("ratio", ".2f"),
}
PREDICTED: Columns = {
    "network": entry("name"),
    "predicted, ms": entry("predicted_ms", ".3f"),
    "measured, ms": entry("step_ms", ".3f"),
    "predicted over measured": entry("predicted_over_measured", ".3f"),
    "arena as planned": lambda row: "yes" if row["arena_equal"] else "no",
}
DETERMINISTIC: Columns = {
    "network": entry("name"),
    "free, ms": entry("free_ms", ".3f"),
    "deterministic, ms": entry("deterministic_ms", ".3f"),
    "price": entry("price", ".2f"),
    "predicted": entry("price_predicted", ".2f"),
    "same bits in each run": lambda row: "yes" if row["deterministic_equal"] else "no",
}
PLANNING: Columns = {
    "plan or command": entry("name"),
    "CPU seconds": lambda row: f"{next(row[key] for key in PLANNING_TIMES if key in row):.3g}",
    "at most": entry("limit_s", "g"),
}
POSED: Columns = {
    "network, pose, kernels": entry("name"),
    "mbc, ms": entry("mbc_ms", ".2f"),
    "predicted, ms": entry("predicted_ms", ".2f"),
    "torch.compile, ms": entry("torch_ms", ".2f"),
    "its variant": entry("torch_variant"),
    "speedup": entry("speedup", ".2f"),
    "launches of libraries": entry("library_launches", "d"),
}
PLANNING_TIMES = ("plan_s", "command_s")


def _predictions(results: Path) -> tuple[dict[str, str], list[str]]:
    names = [name for precision in PRECISIONS if document(results, name := f"predictions_{precision}")]
    if not names:
        return {}, []
    machines = [where(file) for name in names if (file := document(results, name))]
    rows = [row for name in names for row in rows_of(results, name)]
    page = ["## Predicted and measured", "", *machines, "", *table_of(PREDICTED, rows)]
    page += ["Predicted over measured steps in the other results, whatever part of a plan was estimated:", ""]
    return {}, [*page, *table(["results", "steps", "least", "median", "most"], _all_predictions(results))]


def _all_predictions(results: Path) -> list[list[str]]:
    """Return a row for each results file with measured steps of plans, and one row for all files of `mbc bench`."""
    ratios: dict[str, list[float]] = {}
    for path in sorted(results.glob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        if path.stem.startswith("bench_"):
            ratios.setdefault("bench_*", []).append(file["predicted_ms"] / file["mbc"]["step_ms"])
        elif not path.stem.startswith("predictions_"):
            for row in file.get("rows", ()):
                figures = [value for key, value in row.items() if key.endswith("predicted_over_measured") and value]
                ratios.setdefault(path.stem, []).extend(figures)
    return [
        [f"`{name}`", str(len(values)), *(f"{value:.2f}" for value in (min(values), median(values), max(values)))]
        for name, values in ratios.items()
        if values
    ]


def _volumes(results: Path) -> tuple[dict[str, str], list[str]]:
    return {}, _section("Volumes: steps of nnU-Net in fp16", results, "volume_step_cuda", VOLUMES)


def _posed(results: Path) -> tuple[dict[str, str], list[str]]:
    return {}, _section("Posing as an older GPU, beside torch.compile, which does not pose", results, "posed", POSED)


def _deterministic(results: Path) -> tuple[dict[str, str], list[str]]:
    return {}, _section("deterministic = true", results, "deterministic", DETERMINISTIC)


def _planning(results: Path) -> tuple[dict[str, str], list[str]]:
    return {}, _section("Planning", results, "planning_time", PLANNING)


def _section(title: str, results: Path, name: str, columns: Columns) -> list[str]:
    file = document(results, name)
    return [f"## {title}", "", where(file), "", *table_of(columns, file["rows"])] if file else []


def with_figures(page: str, figures: str) -> str:
    """Return the page with new text between the two marks."""
    before, begun, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not begun or not closed:
        raise SystemExit(f"the page has no '{BEGIN}' ... '{END}' to write figures between")
    return f"{before}{BEGIN}\n\n{figures}\n{END}{after}"


def wanted_pages(results: Path) -> dict[Path, str]:
    """Return the text that every picture, and every page with figures, should have."""
    pictures, figures = drawn(results)
    wanted = {results / name: text for name, text in pictures.items()}
    wanted[README] = with_figures(README.read_text(encoding="utf-8"), figures)
    named = results_by_name(results)
    for name, page in listed().items():
        path = ROOT / name
        wanted[path] = with_results(wanted.get(path) or path.read_text(encoding="utf-8"), page.templates, named)
    return wanted


def out_of_date(wanted: Mapping[Path, str]) -> list[Path]:
    """Return the files whose text is out of date."""
    return [p for p, text in wanted.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]


def main() -> None:
    """Write pictures and figures, or fail if `--check` finds that some are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = wanted_pages(ROOT / "benchmarks" / "results")
    stale = out_of_date(wanted)
    if arguments.check and stale:
        raise SystemExit(f"out of date, run benchmarks/pictures.py: {', '.join(p.name for p in stale)}")
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
