"""Pages in a real browser: no error, no request, and working controls."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest

from mbc.analysis.roofline import Bound
from mbc.hardware.streams import COPY_STREAMS
from mbc.plan.diff import diff_plans
from mbc.plan.memory import memory_curve
from mbc.plan.summary import summarise
from mbc.plan.techniques import techniques
from mbc.report.html.diff_page import diff_page
from mbc.report.html.facts import facts_of
from mbc.report.html.plan_page import plan_page
from mbc.report.html.recorded import training
from mbc.report.measured import MeasuredStep
from mbc.resources import folder
from mbc.units import show_rate, show_size, show_time
from tests.report.browser import Browser, find_browser
from tests.report.plans import PLANS, plans_of_unlike_gpus

pytestmark = pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on this machine")

LARGEST = "[...document.querySelectorAll('button')].find(b => b.textContent.startsWith('largest')).click()"
DETAIL = "document.querySelector('#memory .detail').textContent"
HOVER_MS = 50
KEYS = {
    name: {"windowsVirtualKeyCode": code}
    for name, code in (("Tab", 9), ("Enter", 13), ("ArrowRight", 39), ("ArrowDown", 40))
}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    path.write_text(plan_page(PLANS["offloaded"]()))
    return path


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


def _shown(browser: Browser, path: Path) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.open(path)


def test_a_plan(browser, page):
    plan = PLANS["offloaded"]()
    _shown(browser, page)
    # The page names the largest value at the peak with its bytes and the reason why it is there.
    browser.run(LARGEST)
    detail = browser.run(DETAIL)
    curve = memory_curve(plan, plan.train)
    assert "the peak among them" in detail and "letting it go" in detail and "why" in detail
    assert f"launch {curve.peak_launch}" in browser.run("document.querySelector('#memory svg').textContent")
    # The table is searched and sorted.
    rows = "document.querySelectorAll('#operations tbody tr').length"
    count = len(summarise(plan, plan.train))
    assert browser.run(rows) == count
    search = (
        "const s = document.querySelector('#operations input'); s.value = {}; s.dispatchEvent(new Event('input')); 0"
    )
    browser.run(f"{{ {search.format(json.dumps('recomputed'))} }}")
    shown = browser.run(rows)
    assert 0 < shown < count
    assert f"{shown} of {count}" in browser.run("document.querySelector('#operations [role=status]').textContent")
    browser.run(f"{{ {search.format(json.dumps(''))} }}")
    browser.run(f"{{ {search.format(json.dumps('arithmetic'))} }}")
    by_arithmetic = sum(one.bound is Bound.ARITHMETIC for one in facts_of(plan, plan.train).limits)
    assert 0 < browser.run(rows) == by_arithmetic < count
    browser.run(f"{{ {search.format(json.dumps(''))} }}")
    # Copies have a sum of their own, below all kernels, although they take longer.
    copies = [one for one in summarise(plan, plan.train) if one.stream in COPY_STREAMS]
    kernels_us = sum(one.time_us for one in summarise(plan, plan.train) if one.stream not in COPY_STREAMS)
    apart = f"{count} of {count}: {count - len(copies)} kernels, {show_time(kernels_us)}; {len(copies)} copies, "
    assert browser.run("document.querySelector('#operations [role=status]').textContent").startswith(apart)
    column = "[...document.querySelectorAll('#operations tbody td:first-child')].map(e => e.textContent)"
    assert set(browser.run(column)[-len(copies) :]) == {one.name for one in copies}
    costs = facts_of(plan, plan.train).costs
    lanes = browser.run("document.querySelector('#lanes-view > .note').textContent")
    assert lanes.startswith(f"compute: {show_time(kernels_us)} alone + {show_time(costs.synchronise_us)} of synchron")
    first = "document.querySelector('#operations tbody td').textContent"
    browser.run("document.querySelector('#operations thead button').click()")
    assert browser.run(first) == min(s.name for s in summarise(plan, plan.train))
    browser.run("document.querySelector('#operations thead button').click()")
    assert browser.run(first) == max(s.name for s in summarise(plan, plan.train))
    # Other colours, of map and curve alike, then the other program, and dark.
    change = "const s = document.querySelector({}); s.value = {}; s.dispatchEvent(new Event('change')); 0"
    browser.run(f"{{ {change.format(json.dumps('#memory select'), json.dumps('decision'))} }}")
    assert "recomputed" in browser.run("document.querySelector('#memory .legend').textContent")
    fills = browser.run("[...document.querySelectorAll('#memory svg path')].map(e => e.getAttribute('fill'))")
    assert {"var(--kept)", "var(--recomputed)", "var(--offloaded)"} <= set(fills) and not [
        f for f in fills if "--c" in f
    ]
    assert browser.run("document.querySelector('#memory h3').textContent") == "Live bytes by decision"
    browser.run(f"{{ {change.format(json.dumps('#memory select'), json.dumps('kind'))} }}")
    assert "var(--c2)" in browser.run("document.querySelector('#memory svg').innerHTML")
    browser.run(f"{{ {change.format(json.dumps('#program select'), json.dumps('infer'))} }}")
    assert browser.run(rows) == len(summarise(plan, plan.infer))
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.run("document.getElementById('theme').click()")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != light
    assert browser.errors == [] and browser.requests == [page.as_uri()]


def test_sentences_lead_to_the_map(browser, page):
    plan = PLANS["offloaded"]()
    _shown(browser, page)
    colours = "document.querySelector('#memory select').value"
    assert browser.run(colours) == "kind"
    titles = "[...document.querySelectorAll('#answers summary')]"
    browser.run(f"{titles}.find(e => e.textContent.startsWith('Why is')).parentElement.querySelector('a').click()")
    assert browser.run(colours) == "decision"
    # It shows the first value of the answer, which is recomputed, beside the map and in sight.
    assert "Recomputed by launch" in browser.run(DETAIL) and "already let go in launches" in browser.run(DETAIL)
    assert browser.run("document.querySelector('#memory .detail').getBoundingClientRect().top") < 700
    most = max(techniques(plan, plan.train).recomputed, key=lambda one: one.saved_bytes).outputs[0]
    link = f"[...document.querySelectorAll('#answers [data-value]')].find(e => e.dataset.value === {json.dumps(most)})"
    browser.run("document.querySelector('#program select').value = 'infer'")
    browser.run("document.querySelector('#program select').dispatchEvent(new Event('change'))")
    browser.run(f"{link}.click()")
    assert browser.run("document.querySelector('#program select').value") == "train"
    assert browser.run(f"{DETAIL}") and browser.run("document.querySelector('#memory .detail dd').textContent") == most
    assert browser.errors == []


@pytest.mark.parametrize("width", [390, 1280])
def test_labels_stand_above_the_curve_and_apart(browser, tmp_path, width):
    path = tmp_path / "tight.html"
    path.write_text(plan_page(PLANS["recomputed"]()))
    browser.resize(width, 800)
    try:
        _shown(browser, path)
        boxes = browser.run("[...document.querySelectorAll('#memory svg .label')].map(e => { const b = e.getBBox();"
                            " return [b.x, b.y, b.x + b.width, b.y + b.height]; })")  # fmt: skip
        top = browser.run("Math.min(...[...document.querySelectorAll('#memory svg path')].map(e => e.getBBox().y))")
        left, _, wide, _ = browser.run("document.querySelector('#memory svg').getAttribute('viewBox')").split()
    finally:
        browser.resize(1280, 900)
    (_, _, _, end), (_, begin, _, last) = boxes
    assert len(boxes) == 2 and end <= begin + 1 and last <= top, "below each other, above all areas"
    assert all(float(left) <= x0 and x1 <= float(wide) for x0, _, x1, _ in boxes)


def test_hovering_and_clicking_the_map(browser, page):
    _shown(browser, page)
    box = "document.querySelector('#memory canvas').getBoundingClientRect()"
    browser.run("document.querySelector('#memory canvas').scrollIntoView({block: 'center'})")
    left, top, width, height = (browser.run(f"{box}.{side}") for side in ("left", "top", "width", "height"))
    x, y = left + width / 2, top + height - 60
    browser.mouse(x, y)
    tip = "document.querySelector('#memory .tip')"
    assert not browser.run(f"{tip}.hidden") and "launches" in browser.run(f"{tip}.textContent")
    browser.click(x, y)
    value = browser.run(f"{tip}.textContent").splitlines()[0]
    assert browser.run("document.querySelector('#memory .detail dd').textContent") == value
    # What one hover takes of the page's own time.
    took = browser.run(
        "(() => { const c = document.querySelector('#memory canvas'), r = c.getBoundingClientRect();"
        " const t = performance.now();"
        " for (let i = 0; i < 20; i++) c.dispatchEvent(new PointerEvent('pointermove',"
        " {clientX: r.left + 80 + 30 * i, clientY: r.top + 20 + 15 * i})); return (performance.now() - t) / 20; })()"
    )
    assert took < HOVER_MS
    assert browser.errors == []


def test_it_fits_a_phone(browser, page):
    browser.resize(390, 800, mobile=True)
    try:
        _shown(browser, page)
        assert browser.run("document.documentElement.scrollWidth") <= 390
        assert len(browser.picture()) > 10_000
        # Operation and time are in sight, and of a long name the end.
        edges = "[...document.querySelectorAll('#operations th')].map(e => e.getBoundingClientRect().right)"
        assert max(browser.run(edges)[:2]) <= 390
        heads = browser.run("[...document.querySelectorAll('#operations th')].map(e => e.textContent)")
        assert heads[0] == "operation" and heads[1].startswith("time")
        long = "[...document.querySelectorAll('#operations td:first-child')].find(e => e.scrollWidth > e.clientWidth)"
        ends = f"[{long}.firstChild.getBoundingClientRect().right, {long}.getBoundingClientRect().right]"
        name, cell = browser.run(ends)
        assert name <= cell, "the end of the name is within its cell"
    finally:
        browser.resize(1280, 900)
    assert browser.errors == []


def test_pictures_are_drawn_in_light_and_dark(browser, page):
    _shown(browser, page)
    drawn = (
        "[...document.querySelectorAll('canvas[role=img]')].map(c => {"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();"
        " for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return seen.size; })"
    )
    assert all(colours > 3 for colours in browser.run(drawn))
    browser.run("document.getElementById('theme').click()")
    assert all(colours > 3 for colours in browser.run(drawn))


def test_texts_for_a_screen_reader(browser, page):
    _shown(browser, page)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    exposed = [(n["role"]["value"], n.get("name", {}).get("value", ""), n) for n in nodes if not n.get("ignored")]
    # Whatever takes the focus or is a picture has a name, and pictures that are drawn the name of what they show.
    focusable = [
        (role, name) for role, name, n in exposed
        if any(p["name"] == "focusable" and p["value"]["value"] for p in n.get("properties", ()))
    ]  # fmt: skip
    assert len(focusable) > 20 and [role for role, name in focusable if not name and role != "RootWebArea"] == []
    assert {role for role, _ in focusable} >= {"button", "combobox", "searchbox", "link", "image"}
    assert [role for role, name, _ in exposed if role == "image" and not name] == []
    # Landmarks and headings, one of the first rank and none that skips a rank.
    assert {"banner", "navigation", "main", "contentinfo"} <= {role for role, _, _ in exposed}
    ranks = browser.run("[...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))")
    assert ranks[0] == 1 and ranks.count(1) == 1 and all(b <= a + 1 for a, b in pairwise(ranks))
    assert browser.run("document.documentElement.lang") == "en"


def test_without_a_mouse(browser, page):
    """Keys do everything that clicks do."""
    _shown(browser, page)

    def press(key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **KEYS[key], **text)

    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    reached: list[str] = []
    while "map of the arena: address over time" not in reached:
        press("Tab")
        reached.append(browser.run(focused))
        assert len(reached) < 60, reached
    assert {"light or dark", "program", "colour by", "zoom in"} <= set(reached)
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    press("ArrowRight")
    first = browser.run(DETAIL)
    press("ArrowRight")
    assert "written by" in first and browser.run(DETAIL) != first
    # Tab reaches one row of the table, arrows reach the others, and the row that Enter chooses keeps the focus.
    assert browser.run("document.querySelectorAll('#operations tbody [tabindex=\"0\"]').length") == 1
    browser.run("document.querySelector('#operations tbody tr').focus()")
    press("ArrowDown")
    press("Enter")
    chosen = "document.querySelector('#operations tr.chosen')"
    assert browser.run(f"{chosen}.rowIndex") == 2 and browser.run(f"document.activeElement === {chosen}")
    assert browser.run(f"{chosen}.cells[0].textContent") in browser.run(
        "document.querySelector('#operations-view .detail').textContent"
    )
    assert browser.errors == []


def test_two_plans(browser, tmp_path):
    path = tmp_path / "diff.html"
    path.write_text(diff_page(PLANS["kept"](), PLANS["recomputed"](), "<b>loose</b>", "tight"))
    _shown(browser, path)
    assert browser.run("document.querySelectorAll('b').length") == 2, "titles are texts"
    assert browser.run("document.querySelectorAll('#curves svg').length") == 2
    rows = "[...document.querySelectorAll('#changes tbody tr')].map(e => e.cells[2].textContent)"
    programs = browser.run(rows)
    count = programs.count("train")
    assert count > 0 and "infer" not in programs[:count], "the training step first"
    diff = diff_plans(PLANS["kept"](), PLANS["recomputed"]())
    changes = [one.after.time_us - one.before.time_us for one in diff.operations if one.program == "train"]
    changes += [-one.time_us for program, one in diff.only_before if program == "train"]
    changes += [one.time_us for program, one in diff.only_after if program == "train"]
    change = f"training step +{show_time(sum(changes))}"
    assert sum(changes) > 0 and change in browser.run("document.querySelector('#changes [role=status]').textContent")
    browser.run("{ const s = document.querySelector('#changes input'); s.value = 'train';"
                " s.dispatchEvent(new Event('input')); 0 }")  # fmt: skip
    assert len(browser.run(rows)) == count == len(changes)
    assert browser.errors == [] and browser.requests == [path.as_uri()]


def test_sizes_times_and_rates_are_rounded_as_in_the_terminal(browser, page):
    _shown(browser, page)
    code = (folder("templates") / "report" / "base.js").read_text()
    used = code[code.index("function rounded") : code.index("function showCount")]
    quarters = [size << 18 for size in range(2, 400)]  # of MiB: 12.25 MiB lies between two
    sizes = [*quarters, *(size << 17 for size in range(9, 90)), 1023, 1024, 12 << 30, *range(10**6, 10**9, 49_999_999)]
    shown = browser.run(f"(() => {{ {used} return {json.dumps(sizes)}.map((n) => showSize(n)); }})()")
    assert shown == [show_size(size) for size in sizes]
    times = [0.0, 0.125, 6.125, 12.25, 12.75, 8.345, 1250.0, 4125.0, *(eighths / 8 for eighths in range(1, 900, 7))]
    shown = browser.run(f"(() => {{ {used} return {json.dumps(times)}.map((n) => showTime(n)); }})()")
    assert shown == [show_time(time_us) for time_us in times]
    rates = [0.0, 0.0427, 0.4, 4.0, 9.996, 42.34, 99.97, 100.5, 1234567.0]
    shown = browser.run(f"(() => {{ {used} return {json.dumps(rates)}.map((n) => showRate(n)); }})()")
    assert shown == [show_rate(rate) for rate in rates]


def test_measured_beside_predicted(browser, tmp_path):
    plan = PLANS["small"]()
    count = len(plan.train.launches)
    measured = MeasuredStep(100.0, 3, tuple(map(float, range(count))), (None, *[0.5] * (count - 1)))
    path = tmp_path / "measured.html"
    path.write_text(plan_page(plan, measured=measured))
    _shown(browser, path)
    heads = browser.run("[...document.querySelectorAll('#operations th')].map(e => e.textContent)")
    column = heads.index("measured")
    cells = f"[...document.querySelectorAll('#operations tbody tr')].map(e => e.cells[{column}].textContent)"
    shown = browser.run(cells)
    assert shown.count("-") == 1 and "0.50 us" in shown, "one operation has the launch that was not found"
    # The last item of the chart is the last launch as it was measured.
    key = "document.querySelector('#lanes canvas').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    browser.run(key)
    detail = browser.run("document.querySelector('#lanes .detail').textContent")
    assert f"0.50 us from {show_time(count - 1)}" in detail and "less than predicted" in detail
    browser.run("document.querySelector('#program select').value = 'infer'")
    browser.run("document.querySelector('#program select').dispatchEvent(new Event('change'))")
    assert set(browser.run(cells)) == {"-"}
    assert browser.errors == []


def test_streams_of_ranks_that_run_another_plan(browser, tmp_path):
    plan, other = plans_of_unlike_gpus()
    path = tmp_path / "ranks.html"
    path.write_text(plan_page(plan, others=[other]))
    _shown(browser, path)
    # Labels of streams are not cut, and the GPU of a rank is above them.
    browser.run(
        "{ window.cut = []; const pen = CanvasRenderingContext2D.prototype, write = pen.fillText;"
        " pen.fillText = function (text, x, y) { if (this.textAlign === 'right')"
        " window.cut.push([text, x - this.measureText(text).width]); return write.call(this, text, x, y); };"
        " dispatchEvent(new Event('resize')); pen.fillText = write; 0 }"
    )
    starts = {text: x for text, x in browser.run("window.cut") if text.endswith("rank 1")}
    assert {"compute, rank 1"} <= set(starts) and min(starts.values()) >= 0
    assert f"rank 1, {other.target.gpu}" in browser.run("document.querySelector('#lanes-view').textContent")
    # The last item of the chart is the last launch of the last rank.
    browser.run(
        "document.querySelector('#lanes canvas').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    )
    detail = browser.run("document.querySelector('#lanes .detail').textContent")
    last = other.train.launches[-1]
    assert f"rank 1, {other.target.gpu}" in detail and f"{len(other.train.launches) - 1}, on {last.stream}" in detail
    browser.run("document.querySelector('#program select').value = 'infer'")
    browser.run("document.querySelector('#program select').dispatchEvent(new Event('change'))")
    browser.run(
        "document.querySelector('#lanes canvas').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    )
    assert "rank 1" not in browser.run("document.querySelector('#lanes .detail').textContent")
    assert browser.errors == []


def test_batches_without_times_have_no_chart(browser, tmp_path):
    probe = {"batch": 8, "images_per_s": 0.0, "budget_bytes": 1 << 30, "fits": True}
    path = tmp_path / "fit.html"
    fit = {"what": "batches", "largest": probe, "fastest": probe, "probes": [probe]}
    path.write_text(plan_page(PLANS["small"](), recorded=[fit]))
    _shown(browser, path)
    said = browser.run("document.getElementById('recorded').textContent")
    assert "Largest batch within 1.00 GiB: 8. A plan in fp64 has no predicted times." in said and "/s" not in said
    assert browser.run("document.querySelectorAll('#recorded svg').length") == 0 and browser.errors == []


def test_results_of_other_commands(browser, tmp_path):
    curve = {"what": "budgets", "unlimited": {"train_us": 100.0, "needed_bytes": 3 << 30}, "probes": [
        {"budget_bytes": size << 30, "train_us": 200.0 / size, "fits": True} for size in (1, 2, 3)
    ]}  # fmt: skip
    bench = {"what": "bench", "predicted_ms": 1.0, "mbc": {"step_ms": 1.1}, "contenders": []}
    lines = [
        {"kind": "interval", "step": step, "epoch": 1, "loss": loss, "images_per_s": 50.0, "<b>f1</b>": -1.0}
        for step, loss in ((5, 2.0), (10, None), (15, 1.0))
    ]
    lines += [{"kind": "epoch", "step": 15, "epoch": 1, "loss": 1.5, "images_per_s": 50.0, "test_accuracy": 0.25}]
    path = tmp_path / "recorded.html"
    path.write_text(plan_page(PLANS["small"](), recorded=[curve, bench, training(lines)]))
    started = time.monotonic()
    _shown(browser, path)
    assert time.monotonic() - started < 30
    titles = browser.run("[...document.querySelectorAll('#recorded h3')].map(e => e.textContent)")
    assert titles[2:] == [
        "loss, of each interval", "images/s, of each interval", "<b>f1</b>, of each interval",
        "test accuracy, of each epoch",
    ]  # fmt: skip
    assert browser.run("document.querySelectorAll('#recorded svg').length") == len(titles) == 6
    drawn = browser.run("[...document.querySelectorAll('#recorded path')].map(e => e.getAttribute('d'))")
    assert not [d for d in drawn if "NaN" in d] and [d.count("L") for d in drawn] == [2, 1, 2, 2, 0]
    assert "10.0 % off" in browser.run("document.getElementById('recorded').textContent")
    assert browser.errors == []
