"""Writes the figures of pages from the committed results, and measures nothing.

Tables and charts go into benchmarks/README.md, single figures into the text of README.md and docs/ (`figures.toml`).

`--check` writes nothing and fails if a picture or a page is out of date.

    python benchmarks/pictures.py [--check]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from accuracy_pages import accuracy_pages
from chart import Line, chart
from figures import listed, results_by_name, with_results
from goal_pages import correctness_pages, goal_pages, headline_pages
from gpus_pages import gpus_pages
from memory_pages import memory_pages
from peer_pages import peer_pages
from record import ROOT

README = ROOT / "benchmarks" / "README.md"
PRECISIONS = ("fp32", "tf32", "bf16")
BEGIN, END = "<!-- figures: written by pictures.py -->", "<!-- end of figures -->"
BEFORE = {"legacy": "undivided, legacy algorithms", "undivided": "undivided, all kernels"}
BESIDE = (0.94, 1.06)  # where the dots of the two sets of kernels stand, so that both are seen
SETS = {"legacy": "legacy algorithms", "all": "all kernels"}
OLDER_STEPS = (
    "With cuDNN's and cuBLASLt's kernels only, before mbc had its own for fp32 and tf32 "
    "([results](results/earlier/micro_batches.json)), steps in fp32 took, undivided and divided: {}. In tf32 the "
    "profile that comes with mbc has few legacy algorithms, and nothing of ResNet-18 at this batch: legacy algorithms "
    "there are chosen by estimates, so their times say little."
)
Rows = Sequence[Mapping[str, Any]]


def drawn(results: Path) -> tuple[dict[str, str], str]:
    """Return SVG texts by file name, and the part of the page with tables and pictures."""
    pictures: dict[str, str] = {}
    page: list[str] = []
    for make in (
        headline_pages,
        goal_pages,
        correctness_pages,
        peer_pages,
        accuracy_pages,
        memory_pages,
        gpus_pages,
        _micro_batches,
        _deepbench,
        _predictions,
        _deterministic,
        _planning,
    ):
        charts, text = make(results)
        pictures |= charts
        page += text
    return pictures, "\n".join(page).strip() + "\n"


def _read(results: Path, name: str) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty line after them."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def _where(document: Mapping[str, Any]) -> str:
    machine = f"{document['gpu'] or 'no GPU'}, driver {document['driver'] or '-'}"
    return f"{machine}, {document['date'][:10]}: `{document['command']}`"


def _micro_batches(results: Path) -> tuple[dict[str, str], list[str]]:
    document = _read(results, "micro_batches")
    if document is None:
        return {}, []
    rows: Rows = document["rows"]
    pictures: dict[str, str] = {}
    page = [
        "## Whole training steps under a workspace limit",
        "",
        _where(document),
        "",
        _older_steps(results),
        "",
    ]
    for network in dict.fromkeys(row["network"] for row in rows):
        lines = [
            Line(f"{precision}: {label}", points, dashed=before == "legacy")
            for precision in PRECISIONS
            for before, label in (("legacy", "over legacy"), ("undivided", "over all"))
            if (points := _points(rows, network, precision, f"over_{before}"))
        ]
        if not any(len(line.points) > 1 for line in lines):
            continue
        batch = next(row["batch"] for row in rows if row["network"] == network)
        name = f"micro_batches_{network}.svg"
        title = f"{network}, batch {batch}: step divided over undivided"
        pictures[name] = chart(title, "workspace limit an operation, MiB", "times faster", lines)
        page += [f"![{title}](results/{name})", ""]
    page += table(
        ["network", "precision", "limit", *(f"{text}, ms" for text in BEFORE.values()), "divided, ms",
         "over legacy", "over all", "operations divided"],
        (
            [row["network"], row["precision"], f"{row['limit_mib']} MiB", _number(row["legacy_ms"]),
             _number(row["undivided_ms"]), _number(row["divided_ms"]), _gain(row["over_legacy"]),
             _gain(row["over_undivided"]), str(row["divided_operations"])]
            for row in rows
        ),
    )  # fmt: skip
    # PyTorch takes its time: its part may have been a run of its own, with mbc's steps at the same limit beside it.
    beside = document if document.get("torch") else _read(results, "micro_batches_torch") or document
    return pictures, [*page, *_torch(beside), *_bounds(rows)]


def _older_steps(results: Path) -> str:
    older = _read(results / "earlier", "micro_batches")
    cells = (("alexnet", 64), ("resnet18", 64), ("vgg16", 512))
    steps = ", ".join(
        f"{row['network']} at {row['limit_mib']} MiB {row['undivided_ms']:.1f} and {row['divided_ms']:.1f} ms"
        for row in (older["rows"] if older else ())
        if row["precision"] == "fp32" and (row["network"], row["limit_mib"]) in cells
    )
    return OLDER_STEPS.format(steps)


def _points(rows: Rows, network: str, precision: str, key: str) -> tuple[tuple[float, float], ...]:
    these = (r for r in rows if r["network"] == network and r["precision"] == precision and r[key] is not None)
    return tuple(sorted((float(r["limit_mib"]), float(r[key])) for r in these))


def _torch(document: Mapping[str, Any]) -> list[str]:
    timed = [row for row in document.get("torch", []) if row.get("through_ms")]
    if not timed:
        return []
    by_key = {(r["network"], r["precision"], r["path"], bool(r["cap_mib"])): r["through_ms"] for r in timed}
    cap = next((row["cap_mib"] for row in timed if row["cap_mib"]), 0)
    divided = {(r["network"], r["precision"]): r["divided_ms"] for r in document["rows"] if r["limit_mib"] == cap}
    head = ["PyTorch, cudnn.benchmark", "precision", "cuDNN's graph API, ms", "legacy API, ms", "graph, capped, ms",
            "legacy, capped, ms", f"mbc divided, {cap} MiB, ms"]  # fmt: skip
    lines = (
        [network, precision, *(_number(by_key.get((network, precision, path, capped)))
                               for capped in (False, True) for path in ("graph", "legacy")),
         _number(divided.get((network, precision)))]
        for network, precision in dict.fromkeys(key[:2] for key in by_key)
    )  # fmt: skip
    note = f"Capped: `CUDNN_CONV_WSCAP_DBG={cap}`, in MiB. {_where(document)}"
    return [*table(head, lines), note, ""]


def _bounds(rows: Rows) -> list[str]:
    """Return the part of the page on gains below what was asked: what bounds each of them."""
    page: list[str] = []
    for row in rows:
        for before, text in BEFORE.items():
            bound = row.get(f"over_{before}_bounded_by")
            if bound is None:
                continue
            gained = row[f"over_{before}"] or row[f"over_{before}_predicted"]
            page += [
                f"{row['name']}, over {text}: {gained:.2f}x, asked {row[f'over_{before}_asked']:g}x. As predicted, the "
                f"step goes from {bound['before_ms']:.2f} to {bound['divided_ms']:.2f} ms, of which convolutions take "
                f"{bound['convolutions_ms']:.2f} and the rest {bound['the_rest_ms']:.2f} ms; unlimited workspace gives "
                f"{_number(bound['unlimited_ms'])} ms ({_gain(bound['most_possible'])}).",
                "",
                *table(
                    ["operation", "before, us", "divided, us", "unlimited, us", "micro-batches"],
                    (
                        [o["operation"], *(_number(o[key], 0) for key in ("before_us", "divided_us", "unlimited_us")),
                         _parts(o["micro_batches"])]
                        for o in bound["operations"]
                    ),
                ),
            ]  # fmt: skip
    return page


def _parts(rows: Sequence[int]) -> str:
    counts = {size: rows.count(size) for size in dict.fromkeys(rows)}
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in counts.items())


def _deepbench(results: Path) -> tuple[dict[str, str], list[str]]:
    files = {p: document for p in PRECISIONS if (document := _read(results, f"deepbench_{p}")) is not None}
    if not files:
        return {}, []
    pictures: dict[str, str] = {}
    page = ["## DeepBench's 3 x 3 and 5 x 5 convolutions, N = 256", ""]
    for precision, document in files.items():
        lines = [
            Line(
                f"{text}, mean",
                tuple((float(m["limit_mib"]), m["mean_speed_up"]) for m in _means(document, candidates)),
                dots=tuple(
                    (float(r["limit_mib"]) * BESIDE[place], r["speed_up"])
                    for r in document["rows"]
                    if r["candidates"] == candidates and r["speed_up"] is not None
                ),
            )
            for place, (candidates, text) in enumerate(SETS.items())
        ]
        lines = [line for line in lines if line.points]
        if lines:
            name = f"deepbench_{precision}.svg"
            title = f"DeepBench, AlexNet, {precision}: operation divided over undivided"
            pictures[name] = chart(title, "workspace limit an operation, MiB", "times faster", lines, y_log=True)
            page += [f"![{title}](results/{name})", ""]
    page += table(
        ["precision", "kernels", "limit", "operations", "undivided, ms", "divided, ms", "total", "geometric mean",
         "most", "run within 2 %"],
        (
            [precision, SETS[m["candidates"]], f"{m['limit_mib']} MiB", str(m["operations"]),
             _number(m["undivided_ms"]), _number(m["divided_ms"]), _gain(m["total_speed_up"]),
             _gain(m["mean_speed_up"]), _gain(m["most"]),
             f"{m['within']} of {m['ran']}"]
            for precision, document in files.items() for candidates in SETS for m in _means(document, candidates)
        ),
    )  # fmt: skip
    page += [f"{precision}: {_where(document)}" for precision, document in files.items()]
    return pictures, [*page, "", *_layers(files)]


def _means(document: Mapping[str, Any], candidates: str) -> list[Mapping[str, Any]]:
    return [m for m in document["summary"] if m["suite"] == "together" and m["candidates"] == candidates]


def _layers(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of DeepBench's layers in fp32, with the three passes of each added up."""
    document = files.get("fp32")
    if document is None:
        return []
    limits = sorted({r["limit_mib"] for r in document["rows"]})
    head = ["fp32, passes together, divided over undivided"]
    head += [f"{text.split()[0]} {limit} MiB" for text in SETS.values() for limit in limits]
    sums: dict[str, dict[tuple[str, int], list[float]]] = {}
    for r in document["rows"]:
        if r["speed_up"] is not None:
            cell = sums.setdefault(r["name"].rsplit(" ", 1)[0], {}).setdefault(
                (r["candidates"], r["limit_mib"]), [0, 0]
            )
            cell[0] += r["undivided_us"]
            cell[1] += r["divided_us"]
    keys = [(candidates, limit) for candidates in SETS for limit in limits]
    return table(
        head,
        (
            [layer, *(_gain(cells[key][0] / cells[key][1]) if key in cells else "-" for key in keys)]
            for layer, cells in sorted(sums.items())
        ),
    )


def _predictions(results: Path) -> tuple[dict[str, str], list[str]]:
    files = [document for p in PRECISIONS if (document := _read(results, f"predictions_{p}")) is not None]
    if not files:
        return {}, []
    rows = (
        [r["name"], _number(r["predicted_ms"], 3), _number(r["step_ms"], 3), _number(r["predicted_over_measured"], 3),
         "yes" if r["arena_equal"] else "no"]
        for document in files for r in document["rows"] if r.get("predicted_over_measured")
    )  # fmt: skip
    head = ["network", "predicted, ms", "measured, ms", "predicted over measured", "arena as planned"]
    page = ["## Predicted and measured", "", *map(_where, files), "", *table(head, rows)]
    page += ["Predicted over measured steps in the other results, whatever part of a plan was estimated:", ""]
    return {}, [*page, *table(["results", "steps", "least", "median", "most"], _all_predictions(results))]


def _all_predictions(results: Path) -> list[list[str]]:
    """Return a row for each results file that has measured steps of plans, and one for all of `mbc bench`."""
    ratios: dict[str, list[float]] = {}
    for path in sorted(results.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if path.stem.startswith("bench_"):
            ratios.setdefault("bench_*", []).append(document["predicted_ms"] / document["mbc"]["step_ms"])
        elif not path.stem.startswith("predictions_"):
            for row in document.get("rows", ()):
                figures = [value for key, value in row.items() if key.endswith("predicted_over_measured") and value]
                ratios.setdefault(path.stem, []).extend(figures)
    return [
        [f"`{name}`", str(len(values)), *(f"{value:.2f}" for value in (min(values), median(values), max(values)))]
        for name, values in ratios.items()
        if values
    ]


def _deterministic(results: Path) -> tuple[dict[str, str], list[str]]:
    document = _read(results, "deterministic")
    if document is None:
        return {}, []
    rows = (
        [r["name"], _number(r["free_ms"], 3), _number(r["deterministic_ms"], 3), _gain(r["price"]),
         _gain(r["price_predicted"]), "yes" if r.get("deterministic_equal") else "no"]
        for r in document["rows"] if "failed" not in r
    )  # fmt: skip
    head = ["network", "free, ms", "deterministic, ms", "price", "predicted", f"same bits in {document['runs']} runs"]
    return {}, ["## deterministic = true", "", _where(document), "", *table(head, rows)]


_PLANNING_TIMES = ("plan_s", "command_s", "most_menu_of_sums_s")


def _planning(results: Path) -> tuple[dict[str, str], list[str]]:
    document = _read(results, "planning_time")
    if document is None:
        return {}, []
    rows = (
        [r["name"], _number(next(r[k] for k in _PLANNING_TIMES if k in r), 3), f"{r['limit_s']:g}"]
        for r in document["rows"] if "failed" not in r
    )  # fmt: skip
    head = [f"on {document['cores']} cores", "seconds", "at most"]
    return {}, ["## Planning", "", *table(head, rows)]


def with_figures(page: str, figures: str) -> str:
    """Return the page with everything between the two marks replaced."""
    before, document, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not document or not closed:
        raise SystemExit(f"the page has no '{BEGIN}' ... '{END}' to write figures between")
    return f"{before}{BEGIN}\n\n{figures}\n{END}{after}"


def wanted_pages(results: Path) -> dict[Path, str]:
    """Return the text that every picture, and every page with figures, has to have."""
    pictures, figures = drawn(results)
    wanted = {results / name: text for name, text in pictures.items()}
    wanted[README] = with_figures(README.read_text(encoding="utf-8"), figures)
    named = results_by_name(results)
    for name, page in listed().items():
        path = ROOT / name
        wanted[path] = with_results(wanted.get(path) or path.read_text(encoding="utf-8"), page.templates, named)
    return wanted


def out_of_date(wanted: Mapping[Path, str]) -> list[Path]:
    """Return the files whose text is another one."""
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
