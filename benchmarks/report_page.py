"""Size and time of the page of a large plan: to write it, to first paint, to its last section, and of a hover.

Writes results/report_page.json. Needs Chromium for all but the first two.

    python benchmarks/report_page.py [--plan FILE ...]     default: ResNet-152 at batch 128 within 12 GB
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from record import ROOT, attempt, start, write

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.plan.file import load_plan
from mbc.plan.model import Plan
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


def resnet152() -> Plan:
    """The default."""
    settings = (("depth", "152"), ("batch", "128"), ("memory.device", "12GB"))
    source = (ROOT / "examples" / "resnet.mbc").read_text(encoding="utf-8")
    return compile_plan(Source("resnet.mbc", source), Options(gpu="h200", settings=settings))


def measured(plan: Plan) -> dict[str, Any]:
    """One row."""
    began = time.process_time()
    text = plan_page(plan)
    row: dict[str, Any] = {
        "operations": len(plan.graph.train),
        "launches": len(plan.train.launches),
        "write_s": time.process_time() - began,
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
    parser.add_argument("--plan", type=Path, action="append", default=[], help="a plan file; may be given again")
    files: list[Path] = parser.parse_args().plan
    plans = [load_plan(file.read_text(encoding="utf-8"), str(file)) for file in files] or [resnet152()]
    write("report_page", [attempt(partial(measured, plan), plan.graph.name) for plan in plans])


if __name__ == "__main__":
    start(main)
