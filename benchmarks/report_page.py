"""Size and time of the page of a large plan: to read the plan file, to write the page, to first paint, to its last
section, and of a hover.

Writes results/report_page.json. Needs Chromium for all from first paint on.

    python benchmarks/report_page.py [--plan FILE ...]

Of ResNet-152 at batch 128 and a ResNet of 2,498 layers at batch 1, which plan in some minutes, both within 12 GB, and
of the plan files that are given: `deepest.py` plans the deepest that offloads, in ten minutes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from record import ROOT, attempt, start, write

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.report.html.plan_page import plan_page
from mbc.source import Source
from tests.report.browser import Browser, find_browser

HOVERS = 200
HOVER = (
    "(() => { const c = document.querySelector('#memory canvas'), r = c.getBoundingClientRect(), took = [];"
    f" for (let i = 0; i < {HOVERS}; i++) {{ const t = performance.now();"
    " c.dispatchEvent(new PointerEvent('pointermove',"
    " {clientX: r.left + 70 + (37 * i) % (r.width - 80), clientY: r.top + 10 + (53 * i) % (r.height - 50)}));"
    " took.push(performance.now() - t); } return Math.max(...took); })()"
)


# Names of examples, with settings.
DEFAULTS = {
    "resnet": (("depth", "152"), ("batch", "128"), ("memory.device", "12GB")),
    "resnet_deep": (("n1", "6"), ("n2", "32"), ("n3", "788"), ("n4", "6"), ("batch", "1"), ("memory.device", "12GB")),
}


def planned(name: str) -> str:
    """The plan file of an example."""
    source = (ROOT / "examples" / f"{name}.mbc").read_text(encoding="utf-8")
    return dump_plan(compile_plan(Source(f"{name}.mbc", source), Options(gpu="h200", settings=DEFAULTS[name])))


def measured(file: Callable[[], str]) -> dict[str, Any]:
    """One row. `file`: the text of a plan file."""
    text = file()
    began = time.process_time()
    plan = load_plan(text, "plan.json")
    loaded = time.process_time()
    text = plan_page(plan)
    row: dict[str, Any] = {
        "network": plan.graph.name,
        "load_s": loaded - began,
        "operations": len(plan.graph.train),
        "launches": len(plan.train.launches),
        "write_s": time.process_time() - loaded,
        "bytes": len(text.encode()),
    }
    if find_browser() is None:
        return row
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / "page.html"
        page.write_text(text, encoding="utf-8")
        browser.open(page)
        row["ready_ms"] = browser.run("performance.now()")
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        browser.wait(paint)
        row |= {"first_paint_ms": browser.run(paint), "hover_ms": browser.run(HOVER)}
        row |= {"errors": browser.errors, "requests": len(browser.requests)}
    return row


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, action="append", default=[], help="a plan file, too; may be given again")
    files: list[Path] = parser.parse_args().plan
    texts = {name: partial(planned, name) for name in DEFAULTS}
    texts |= {file.stem: partial(file.read_text, "utf-8") for file in files}
    write("report_page", [attempt(partial(measured, text), name) for name, text in texts.items()])


if __name__ == "__main__":
    start(main)
