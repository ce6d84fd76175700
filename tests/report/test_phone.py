"""Pages on a phone: 390 pixels wide, whatever names stand on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.report.html.diff_page import diff_page
from mbc.report.html.plan_page import plan_page
from mbc.report.html.recorded import training
from mbc.report.measured import MeasuredStep
from mbc.source import Source
from tests.report.browser import Browser, find_browser
from tests.report.plans import CHAIN, PLANS, plans_of_unlike_gpus

pytestmark = pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def phone() -> Iterator[Browser]:
    with Browser() as started:
        started.resize(390, 800, mobile=True)
        yield started


def _fits(browser: Browser) -> bool:
    return browser.run("document.documentElement.scrollWidth") <= 390


def _long_names() -> Plan:
    """Return a plan whose operations have the longest possible names, in which no line can break."""
    text = CHAIN.replace("x = image", f"{'x' * 64} = image", 1).replace("{ x = x |>", f"{{ {'x' * 64} = {'x' * 64} |>")
    return compile_plan(Source("long.mbc", text.replace("logits = x", f"logits = {'x' * 64}")), Options(gpu="h200"))


def _all_pages() -> dict[str, Callable[[], str]]:
    """Return the pages of every command by name, with names and titles that are too long for a line."""
    long = "resnet50-with-a-long-name,batch=256,memory.device=6GiB,train.precision=bf16" + "x" * 80
    probe = {"batch": 8, "images_per_s": 50.0, "budget_bytes": 1 << 30, "train_us": 200.0, "fits": True}
    fits = [
        {"what": "batches", "largest": probe, "fastest": probe, "probes": [probe]},
        {"what": "budgets", "unlimited": {"train_us": 100.0, "needed_bytes": 3 << 30}, "probes": [probe]},
    ]
    log = [{"kind": "interval", "step": 1, "epoch": 1, "loss": 1.0, "images_per_s": 5.0, "m" * 90: 0.5}]
    bench = {
        "what": "bench",
        "predicted_ms": 1.0,
        "mbc": {"step_ms": 1.1},
        "contenders": [{"name": long, "step_ms": 2}],
    }

    def measured() -> str:
        plan = PLANS["small"]()
        times = tuple(map(float, range(len(plan.train.launches))))
        return plan_page(plan, recorded=[training(log), bench], measured=MeasuredStep(100.0, 3, times, times))

    def ranks() -> str:
        plan, other = plans_of_unlike_gpus()
        return plan_page(plan, others=[other])

    return {
        **{name: partial(lambda plan: plan_page(plan()), plan) for name, plan in PLANS.items()},
        "long names": lambda: plan_page(_long_names()),
        "fit": lambda: plan_page(PLANS["small"](), recorded=fits),
        "train and bench": measured,
        "ranks": ranks,
        "diff": lambda: diff_page(PLANS["kept"](), PLANS["recomputed"](), long, f"{long}2"),
        "diff of networks": lambda: diff_page(_long_names(), PLANS["offloaded"](), long, "tight"),
    }


@pytest.mark.parametrize("name", _all_pages())
def test_every_page_fits_a_phone(phone, tmp_path, name):
    path = tmp_path / "page.html"
    path.write_text(_all_pages()[name]())
    phone.open(path)
    assert _fits(phone)
    # So does a page with all details open and the first row of each table chosen.
    phone.run("for (const one of document.querySelectorAll('details')) one.open = true; 0")
    phone.run("for (const one of document.querySelectorAll('tbody')) one.querySelector('tr')?.click(); 0")
    assert _fits(phone)
    assert phone.errors == []


def test_settings_break_at_their_joints(phone, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(plan_page(PLANS["recomputed"]()))
    phone.open(path)
    # The lines of the card by the heights of its letters: each line but the last ends behind a joint.
    letters = phone.run(
        "(() => { const found = [], range = document.createRange();"
        " const card = [...document.querySelectorAll('.card b')].find((e) => e.textContent.includes('memory.device'));"
        " const walk = document.createTreeWalker(card, NodeFilter.SHOW_TEXT);"
        " for (let text = walk.nextNode(); text; text = walk.nextNode())"
        " for (let i = 0; i < text.length; i++) { range.setStart(text, i); range.setEnd(text, i + 1);"
        " found.push([text.data[i], Math.round(range.getBoundingClientRect().top)]); }"
        " return found; })()"
    )
    ends = [letter for (letter, top), (_, below) in pairwise(letters) if below > top]
    assert ends and set(ends) <= set("=,. "), letters
