"""Charts and pages from made-up figures, and that the committed ones are those of the committed results."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chart import Line, chart
from figures import PageFigures, listed, results_by_name, unexplained, with_results
from pictures import BEGIN, END, drawn, out_of_date, wanted_pages, with_figures

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
]
SVG = "{http://www.w3.org/2000/svg}"
ABOUT = {"gpu": "A GPU", "driver": "1.2", "date": "2026-01-02T03:04", "command": "python x.py"}


def write(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps({**ABOUT, **more, "rows": rows}), encoding="utf-8")


def step(limit_mib: int, over: float | None) -> dict[str, Any]:
    return {
        "name": f"net fp32 {limit_mib} MiB", "network": "net", "batch": 8, "precision": "fp32", "limit_mib": limit_mib,
        "legacy_ms": 20.0, "undivided_ms": 15.0, "divided_ms": 10.0, "over_legacy": over, "over_undivided": 1.5,
        "divided_operations": 3,
    }  # fmt: skip


def test_chart_places_points_on_a_logarithmic_axis() -> None:
    text = chart("a < b", "x", "y", [Line("first", ((8, 1.0), (16, 2.0), (32, 3.0)))])
    root = ET.fromstring(text)
    line = root.find(f"{SVG}polyline")
    assert line is not None
    points = [p.split(",") for p in line.attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = ((float(x), float(y)) for x, y in points)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and y0 > y2
    labels = [t.text for t in root.iter(f"{SVG}text")]
    assert {"8", "16", "32", "a < b", "first"} <= set(labels)
    assert "prefers-color-scheme: dark" in text
    assert text == chart("a < b", "x", "y", [Line("first", ((8, 1.0), (16, 2.0), (32, 3.0)))])


def test_chart_of_one_value_and_of_none() -> None:
    ET.fromstring(chart("one", "x", "y", [Line("flat", ((64, 1.0), (128, 1.0)))]))
    ET.fromstring(chart("one", "x", "y", [Line("flat", ((64, 1.0),), dots=((60, 0.5), (66, 4.0)))], y_log=True))
    with pytest.raises(ValueError, match="nothing to draw"):
        chart("none", "x", "y", [])


def test_micro_batches_page(tmp_path: Path) -> None:
    bound = {
        "before_ms": 20.0, "divided_ms": 10.0, "convolutions_ms": 7.0, "the_rest_ms": 3.0, "unlimited_ms": 9.0,
        "most_possible": 2.2, "operations": [
            {"operation": "conv1", "before_us": 900.0, "divided_us": 400.0, "unlimited_us": None,
             "micro_batches": [64, 64, 32]},
        ],
    }  # fmt: skip
    short = {**step(64, 1.2), "over_legacy_asked": 1.7, "over_legacy_bounded_by": bound}
    torch = [
        {"network": "net", "precision": "fp32", "path": path, "cap_mib": cap, "through_ms": ms}
        for path, cap, ms in (("graph", None, 22.0), ("legacy", None, 16.0), ("graph", 64, 23.0), ("legacy", 64, 30.0))
    ]
    write(tmp_path, "micro_batches", [short, step(128, 2.0), step(256, None)], torch=torch)
    pictures, page = drawn(tmp_path)
    assert list(pictures) == ["micro_batches_net.svg"]
    root = ET.fromstring(pictures["micro_batches_net.svg"])
    lines = [len(line.get("points", "").split()) for line in root.iter(f"{SVG}polyline")]
    assert lines == [2, 3]  # what was not measured is left out
    assert "| net | fp32 | 64 MiB | 20.00 | 15.00 | 10.00 | 1.20x | 1.50x | 3 |" in page
    assert "| net | fp32 | 22.00 | 16.00 | 23.00 | 30.00 |" in page
    assert "1.20x, asked 1.7x" in page and "| conv1 | 900 | 400 | - | 2 x 64 + 32 |" in page


def test_deepbench_page(tmp_path: Path) -> None:
    rows = [
        {
            "name": "layer F",
            "candidates": c,
            "limit_mib": 64,
            "speed_up": up,
            "undivided_us": 10.0 * up,
            "divided_us": 10.0,
        }
        for c, up in (("legacy", 3.0), ("all", 1.5))
    ]
    summary = [
        {"suite": suite, "candidates": c, "limit_mib": 64, "operations": 1, "undivided_ms": 3.0, "divided_ms": 1.0,
         "total_speed_up": up, "mean_speed_up": up, "most": up, "within": 1, "ran": 1}
        for suite in ("deepbench", "together") for c, up in (("legacy", 3.0), ("all", 1.5))
    ]  # fmt: skip
    write(tmp_path, "deepbench_fp32", rows, summary=summary)
    pictures, page = drawn(tmp_path)
    assert list(pictures) == ["deepbench_fp32.svg"]
    assert page.count("| fp32 | legacy algorithms | 64 MiB | 1 | 3.00 | 1.00 | 3.00x | 3.00x | 3.00x | 1 of 1 |") == 1
    assert "| layer | 3.00x | 1.50x |" in page


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    assert drawn(tmp_path) == ({}, "\n")


def test_figures_go_between_the_marks() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    made = with_figures(page, "new\n")
    assert made == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n" and with_figures(made, "new\n") == made
    with pytest.raises(SystemExit, match="to write figures between"):
        with_figures("no marks", "new")


def test_committed_pictures_are_those_of_the_committed_results() -> None:
    results = ROOT / "benchmarks" / "results"
    stale = [path.name for path in out_of_date(wanted_pages(results))]
    assert not stale, f"run benchmarks/pictures.py and commit what it writes: {stale}"


def test_figures_of_a_page_are_written_whatever_its_lines(tmp_path: Path) -> None:
    write(tmp_path, "timed", [{"name": "first row", "step_ms": 12.345, "error": 3.3e-6}])
    results = results_by_name(tmp_path)
    template = 'It takes {timed["first row"].step_ms:.1f} ms, {timed["first row"].error:.1e} off.'
    page = "It takes\n9 ms, 1e-3 off. At most 20 GB, `30 ms`, and 1.5 times."
    made = with_results(page, [template], results)
    assert made == "It takes\n12.3 ms, 3.3e-6 off. At most 20 GB, `30 ms`, and 1.5 times."
    assert with_results(made, [template], results) == made
    with pytest.raises(SystemExit, match="0 times"):
        with_results("Nothing.", [template], results)
    known = PageFigures([template], ["At most 20 GB"], [])
    assert [text.split(" in: ")[0] for text in unexplained(made, known)] == ["'1.5 times'"]


@pytest.mark.parametrize("name", PAGES)
def test_figures_of_pages_come_from_results(name: str) -> None:
    assert set(listed()) <= set(PAGES)
    left = unexplained((ROOT / name).read_text(encoding="utf-8"), listed().get(name, PageFigures((), (), ())))
    assert not left, "neither from a result nor explained in benchmarks/figures.toml:\n" + "\n".join(left)
