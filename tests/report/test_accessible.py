"""Pages judged by axe-core (rules of WCAG 2.2 A and AA, axe's best practices) in a real browser, light and dark."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.report.html.diff_page import diff_page
from mbc.report.html.plan_page import plan_page
from mbc.report.measured import MeasuredStep
from tests.report.browser import Browser, find_browser
from tests.report.plans import PLANS, plans_of_unlike_gpus

ROOT = Path(__file__).resolve().parents[2]
AXE = Path(os.environ.get("MBC_AXE", ROOT / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"))
RULES = "['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']"

pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on this machine"),
    pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not here (make axe, or MBC_AXE=axe.min.js)"),
]


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    with Browser(dark=request.param == "dark") as started:
        yield started


def violations(browser: Browser, page: Path) -> list[str]:
    """Return the violations that axe reports: for each, the rule and the elements."""
    browser.open(page)
    browser.run(AXE.read_text(encoding="utf-8") + "; 0")
    describe = "v => `${v.id}: ${v.help}: ${v.nodes.slice(0, 3).map(n => n.html)}`"
    outcome = browser.run(
        f"axe.run(document, {{runOnly: {RULES}, resultTypes: ['violations']}})"
        f".then(found => [found.passes.length, found.violations.map({describe})])"
    )
    passed, wrong = outcome
    assert passed > 15, "axe has judged next to nothing"
    return wrong


def pages(folder: Path) -> Iterator[Path]:
    """Yield pages: of a plan within a budget, of one with all optional parts, and of two plans."""
    plan, other = plans_of_unlike_gpus()
    count = len(plan.train.launches)
    measured = MeasuredStep(100.0, 3, tuple(map(float, range(count))), (None, *[0.5] * (count - 1)))
    measured = replace(measured, starts_us=(None, *measured.starts_us[1:]))
    for name, text in (
        ("budget", plan_page(PLANS["offloaded"]())),
        ("ranks", plan_page(plan, measured=measured, others=[other])),
        ("diff", diff_page(PLANS["kept"](), PLANS["recomputed"](), "loose", "tight")),
    ):
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
        yield folder / f"{name}.html"


def test_pages_are_accessible(browser: Browser, tmp_path: Path):
    faults = {page.stem: violations(browser, page) for page in pages(tmp_path)}
    assert faults == {"budget": [], "ranks": [], "diff": []}


def test_axe_finds_faults(browser: Browser, tmp_path: Path):
    page = tmp_path / "wrong.html"
    text = plan_page(PLANS["small"]()).replace('<html lang="en">', "<html>")
    assert text.count("<html>") == 1
    page.write_text(text.replace("</main>", '<img src="data:,"></main>'), encoding="utf-8")
    assert {rule.partition(":")[0] for rule in violations(browser, page)} >= {"html-has-lang", "image-alt"}


@pytest.mark.exhaustive
def test_the_gallery_is_accessible(browser: Browser, tmp_path_factory: pytest.TempPathFactory):
    sys.path.insert(0, str(ROOT / "docs"))
    from gallery import PAGES, make

    folder = tmp_path_factory.getbasetemp() / "gallery"
    written = [folder / name for name in PAGES] if folder.is_dir() else make(folder)
    assert [violations(browser, page) for page in written] == [[], [], []]
