"""Charts and pages from invented figures; and the committed pages agree with the committed results."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chart import Line, chart
from figures import PageFigures, listed, results_by_name, span_of, unexplained, with_results
from pictures import BEGIN, END, drawn, out_of_date, wanted_pages, with_figures

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page.relative_to(ROOT).as_posix() for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))]
PAGES += [page.relative_to(ROOT).as_posix() for page in (ROOT / "examples").rglob("*.md")]
PAGES = sorted([*PAGES, "benchmarks/README.md", "grammar/LANGUAGE.md", "tests/README.md"])
SVG = "{http://www.w3.org/2000/svg}"
ABOUT = {"gpu": "A GPU", "driver": "1.2", "date": "2026-01-02T03:04", "command": "python x.py"}


def write(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps({**ABOUT, **more, "rows": rows}), encoding="utf-8")


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


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    assert drawn(tmp_path) == ({}, "\n")


def test_figures_go_between_the_marks() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    created = with_figures(page, "new\n")
    assert created == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n" and with_figures(created, "new\n") == created
    with pytest.raises(SystemExit, match="to write figures between"):
        with_figures("no marks", "new")


def test_committed_pictures_are_those_of_the_committed_results() -> None:
    results = ROOT / "benchmarks" / "results"
    stale = [path.name for path in out_of_date(wanted_pages(results))]
    assert not stale, f"run benchmarks/pictures.py and commit what it writes: {stale}"


def test_scripts_that_made_the_results_exist() -> None:
    """The command of a published result can be repeated: it names an existing script, or `mbc bench`."""
    benchmarks = ROOT / "benchmarks"
    for path in (benchmarks / "results").glob("*.json"):
        if not path.name.startswith("bench_"):
            command = json.loads(path.read_text(encoding="utf-8"))["command"]
            script = next(word for word in command.split() if word.endswith(".py"))
            assert (benchmarks / Path(script).name).is_file(), f"{path.name}: {command}"


def test_figures_of_a_page_are_written_whatever_its_lines(tmp_path: Path) -> None:
    write(tmp_path, "timed", [{"name": "first row", "step_ms": 12.345, "error": 3.3e-6}])
    results = results_by_name(tmp_path)
    template = 'It takes {timed["first row"].step_ms:.1f} ms, {timed["first row"].error:.1e} off.'
    page = "It takes\n9 ms, 1e-3 off. At most 20 GB, `30 ms`, and 1.5 times."
    created = with_results(page, [template], results)
    assert created == "It takes\n12.3 ms, 3.3e-6 off. At most 20 GB, `30 ms`, and 1.5 times."
    assert with_results(created, [template], results) == created
    with pytest.raises(SystemExit, match="0 times"):
        with_results("Nothing.", [template], results)
    earlier = PageFigures([template], ["At most 20 GB"], [])
    assert [text.split(" in: ")[0] for text in unexplained(created, earlier)] == ["'1.5 times'"]


@pytest.mark.parametrize("name", listed())
def test_figures_of_decisions_stand_beside_a_link_to_the_decision(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for words in listed()[name].decisions:
        start, end = span_of(text, words)
        begin, after = text.rfind("\n\n", 0, start), text.find("\n\n", end)
        assert "decisions/" in text[begin:after], words


@pytest.mark.parametrize("name", PAGES)
def test_figures_of_pages_come_from_results(name: str) -> None:
    assert set(listed()) <= set(PAGES)
    left = unexplained((ROOT / name).read_text(encoding="utf-8"), listed().get(name, PageFigures((), (), ())))
    assert not left, "neither from a result nor explained in benchmarks/figures.toml:\n" + "\n".join(left)
