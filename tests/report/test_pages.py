"""Every figure of a page is the plan's, no text is interpreted as HTML, and answers name parts of the plan."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mbc.analysis.roofline import ceilings_of, limits
from mbc.errors import MbcError
from mbc.plan.group import launch_name
from mbc.plan.memory import live_values_at, memory_curve
from mbc.plan.model import Plan
from mbc.plan.summary import summarise
from mbc.plan.techniques import techniques
from mbc.report.html.answer import Answer, Line, cut
from mbc.report.html.answers import CONCURRENT, UNUSED_SHARE, answers
from mbc.report.html.diff_page import diff_page
from mbc.report.html.facts import facts_of
from mbc.report.html.head import taken_bytes
from mbc.report.html.notebook import plan_fragment
from mbc.report.html.packed_rows import Texts, rows_of
from mbc.report.html.plan_page import plan_page
from mbc.report.html.recorded import LINES, read_recorded
from mbc.report.html.render import breakable, packed, write_text
from mbc.report.measured import MeasuredStep, measured_step
from mbc.report.tables import measured_percent
from mbc.report.techniques import techniques_document
from mbc.report.timeline import predicted_timeline
from mbc.report.trace import trace_document
from mbc.resources import folder
from mbc.units import show_size, show_time
from tests.report.pages import data_of
from tests.report.plans import PLANS, plans_of_unlike_gpus


@pytest.fixture(scope="module", params=PLANS, ids=list(PLANS))
def plan(request) -> Plan:
    return PLANS[request.param]()


@pytest.fixture(scope="module")
def data(plan):
    return data_of(plan_page(plan))


def _near(actual, expected) -> None:
    """Assert that the actual value equals the expected value after a round trip through JSON."""
    assert actual == json.loads(json.dumps(expected))


def test_names_break_at_their_joints_and_numbers_do_not():
    assert breakable("memory.device=6GiB,batch=64") == "memory.<wbr>device=<wbr>6GiB,<wbr>batch=<wbr>64"
    assert breakable("12,789.5 images/s") == "12,789.5 images/s"
    assert breakable("<b>a=1</b>") == "&lt;b&gt;a=<wbr>1&lt;/b&gt;"


def test_figures_of_the_plan(plan, data):
    _near(data["predictions"], asdict(plan.predictions))
    _near(data["bounds"], {**asdict(plan.bounds), "least_us": plan.bounds.least_us})
    _near(data["ceilings"], asdict(ceilings_of(plan)))
    assert data["plan"]["budget_bytes"] == plan.budget_bytes
    _near(data["plan"]["target"], asdict(plan.target))


def test_every_operation(plan, data):
    for name, program in (("train", plan.train), ("infer", plan.infer)):
        rows = rows_of(data["programs"][name]["operations"], data["texts"])
        bounds = limits(plan, program, ceilings_of(plan))
        assert len(rows) == len(bounds) > 3
        for row, limit in zip(rows, bounds, strict=True):
            one = limit.summary
            assert (row["name"], row["kind"], row["time_us"]) == (one.name, one.kind, one.time_us)
            assert (row["moved_bytes"], row["flops"], row["limit_us"]) == (
                limit.moved_bytes,
                limit.flops,
                limit.limit_us,
            )
            assert (row["workspace_bytes"], row["output_bytes"]) == (one.workspace_bytes, one.output_bytes)
            assert row["kernels"] == " | ".join(one.kernels) and row["bound"] == str(limit.bound)
            assert row["first_launch"] == one.first_launch and row["estimated"] == one.estimated


def test_every_launch(plan, data):
    for name, program in (("train", plan.train), ("infer", plan.infer)):
        times = predicted_timeline(plan, program)
        rows = rows_of(data["programs"][name]["launches"], data["texts"])
        assert [row["time_us"] for row in rows] == [launch.work.time_us for launch in program.launches]
        assert [row["start_us"] for row in rows] == list(times.starts_us)
        assert [row["end_us"] for row in rows] == list(times.ends_us)
        assert [row["stream"] for row in rows] == [str(launch.stream) for launch in program.launches]
        operations = rows_of(data["programs"][name]["operations"], data["texts"])
        assert sum(row["time_us"] for row in operations) == pytest.approx(sum(row["time_us"] for row in rows))
        _near(data["programs"][name]["waits"], program.waits)


def test_the_map_adds_up_to_the_memory_curve(plan, data):
    for name, program in (("train", plan.train), ("infer", plan.infer)):
        shown = data["programs"][name]
        curve = memory_curve(plan, program)
        live = {str(kind): [0] * len(taken) for kind, taken in curve.bytes_by_kind.items() if any(taken)}
        for piece in rows_of(shown["pieces"], data["texts"]):
            for i in range(piece["start"], piece["stop"]):
                live[piece["kind"]][i] += piece["size_bytes"]
        _near(live, {str(kind): list(taken) for kind, taken in curve.bytes_by_kind.items() if any(taken)})
        assert shown["peak"]["bytes"] == curve.peak_bytes and shown["peak"]["launch"] == curve.peak_launch
        times = predicted_timeline(plan, program)
        document = techniques_document(plan, program, techniques(plan, program), times)
        tables = {name: rows_of(table, data["texts"]) for name, table in shown["techniques"].items()}
        _near(tables, {name: document[name] for name in tables})
        assert len(tables) == 3


def test_pieces_are_where_the_plan_places_them(plan, data):
    rectangles = rows_of(data["programs"]["train"]["pieces"], data["texts"])
    placed = {(plan.buffers[i].value or "", plan.offsets[i]) for i in range(len(plan.buffers))}
    for piece in rectangles:
        assert (piece["value"], piece["offset"]) in placed
        assert piece["offset"] + piece["size_bytes"] <= plan.predictions.arena_bytes
        touched = {*piece["writers"], *piece["readers"]}
        if piece["gap_start"] is not None:
            assert not touched & set(range(piece["gap_start"], piece["gap_stop"])), "it is used in its gap"
            assert piece["recompute_us"] > 0 and piece["offload_us"] > 0
    # No two pieces that are live in one launch share an address.
    for launch in range(len(plan.train.launches)):
        live = sorted((p["offset"], p["size_bytes"]) for p in rectangles if p["start"] <= launch < p["stop"])
        assert all(a + size <= b for (a, size), (b, _) in pairwise(live))


def test_recomputed_values_have_a_reason():
    plan = PLANS["recomputed"]()
    facts = facts_of(plan, plan.train)
    assert facts.techniques.recomputed, "the plan is tight"
    by_question = {one.question: one for one in answers(facts)}
    why = by_question["Why is a value recomputed or offloaded?"]
    assert f"{len(facts.techniques.recomputed)} values are recomputed" in why.answer
    most = max(facts.techniques.recomputed, key=lambda r: r.saved_bytes)
    assert why.details[0].values == most.outputs and why.details[0].text.startswith(", ".join(most.outputs))
    peak = by_question["What sets the peak?"]
    assert f"in launch {facts.peak} (" in peak.answer and f") of {len(facts.program.launches)}: " in peak.answer
    at = show_time(facts.times.starts_us[facts.peak])
    assert facts.loss_launch is not None and facts.peak > facts.loss_launch
    assert f" are live at {at}, in the backward pass, in" in peak.answer
    kinds = {str(kind): size for kind, size in facts.curve.at(facts.peak).items()}
    named = sum(size for kind, size in kinds.items() if f"{show_size(size)} of {kind}" in peak.answer)
    assert named > 0.99 * facts.curve.peak_bytes, "the kinds that are named add up to the peak"
    rows = rows_of(data_of(plan_page(plan))["programs"]["train"]["operations"], data_of(plan_page(plan))["texts"])
    assert any(row["decision"] == "recomputed" for row in rows)
    furthest = by_question["Which kernel is furthest from its roofline?"]
    assert any(furthest.answer.startswith(one.name) for one in summarise(plan, plan.train))


def test_offloaded_values_have_a_reason():
    plan = PLANS["offloaded"]()
    facts = facts_of(plan, plan.train)
    why = _asked(plan, "recomputed or offloaded")
    most = max(facts.techniques.offloaded, key=lambda one: one.saved_bytes)
    (line,) = [one.text for one in why.details if one.values == (most.value,) and "memory of the host" in one.text][:1]
    live = max(facts.curve.total_bytes[most.absent[0] : most.absent[1]])
    assert f"where up to {show_size(live)} are live. If kept, the values would" in line
    cost = f"and cost the kernels about {show_time(facts.costs.of(most))}."
    assert line.endswith(f"The copies take {show_time(most.time_us)} {cost}") and facts.costs.of(most) > 0
    assert facts.costs.text(f"{100 * facts.costs.total_us / facts.times.total_us:.2f} % of the step")[1:] in why.answer


@pytest.mark.parametrize(("critical_path_us", "said"), [(0.0, "serial schedule"), (1.0, "plan")])
def test_a_larger_budget_is_judged_by_the_bound_of_such_schedules(plan, critical_path_us, said):
    plan = replace(plan, bounds=replace(plan.bounds, critical_path_us=critical_path_us))
    (more,) = (one for one in answers(facts_of(plan, plan.train)) if "more memory gain" in one.question)
    assert f"With any budget, no {said} with these kernels is faster than" in more.answer
    assert (CONCURRENT in more.answer) == (not critical_path_us), "a bound of serial schedules binds no others"


def _asked(plan: Plan, words: str) -> Answer:
    (answer,) = (one for one in answers(facts_of(plan, plan.train)) if words in one.question)
    return answer


def test_a_larger_budget_buys_nothing_where_this_one_is_not_used_up():
    plan = PLANS["kept"]()
    more = _asked(plan, "more memory gain")
    unused_bytes = plan.budget_bytes - taken_bytes(plan)
    assert more.answer.startswith(f"Nothing: {show_size(unused_bytes)} of the budget are unused, so memory does not")
    assert "With any budget" in more.answer and not more.details
    tight = PLANS["recomputed"]()
    assert tight.budget_bytes - taken_bytes(tight) < UNUSED_SHARE * tight.budget_bytes
    assert "unused" not in _asked(tight, "more memory gain").answer


def test_the_furthest_kernel_may_be_an_estimate():
    plan = PLANS["kept"]()
    assert plan.predictions.measured_share < 1
    furthest = _asked(plan, "roofline")
    assert (
        f"{measured_percent(plan.predictions.measured_share)} of the step is measured; ~ marks estimates"
        in furthest.answer
    )
    # Limits below a launch: the heading stays, with the reason.
    facts = facts_of(plan, plan.train)
    assert facts.ceilings is not None
    slow = replace(facts, ceilings=replace(facts.ceilings, launch_us=1e9))
    (answer,) = (one for one in answers(slow) if "roofline" in one.question)
    assert answer.answer.startswith("Unknown: the limit of each kernel is below the")


def test_no_kernel_is_named_twice_as_the_furthest():
    plan = PLANS["kept"]()
    facts = facts_of(plan, plan.train)
    one = max(facts.limits, key=lambda limit: limit.limit_us)
    (answer,) = (a for a in answers(replace(facts, limits=(one,))) if "roofline" in a.question)
    assert answer.answer.count(one.summary.name) == 1 and "also the furthest by ratio" in answer.answer


def test_a_list_that_is_cut_says_so():
    lines = [Line(f"line {i}") for i in range(27)]
    assert cut(range(5), 5, "first", lines.__getitem__) == tuple(lines[:5])
    shown = cut(range(27), 5, "first", lines.__getitem__)
    assert [line.text for line in shown[4:]] == ["line 4", "5 of 27: those first"]
    plan = PLANS["offloaded"]()
    peak = _asked(plan, "sets the peak").details
    live = live_values_at(plan, plan.train, memory_curve(plan, plan.train).peak_launch)
    sizes = [one.size_bytes for one in live if one.size_bytes][5:]
    assert peak[-1].text == f"{len(sizes)} more, {show_size(sum(sizes))} in all, are live at the peak"


def test_an_operation_tells_its_line_with_its_file(data, plan):
    sources = {row["source"] for row in rows_of(data["programs"]["train"]["operations"], data["texts"])}
    name = plan.graph.train[0].span.source.name
    assert any(source.startswith(f"{name}:") for source in sources)


class _Elements(HTMLParser):
    """A parser that counts the elements of a page by their tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.attributes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [name for name, _ in attrs]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!--" + "x" * 300


def _hostile(plan: Plan) -> Plan:
    graph = replace(plan.graph, name=HOSTILE)
    return replace(plan, graph=graph, target=replace(plan.target, profile=HOSTILE), version=HOSTILE)


def test_markup_in_names_is_no_markup(plan):
    plain, page = _Elements(plan_page(plan)), _Elements(plan_page(_hostile(plan)))
    joints = {"wbr": 0}  # there are as many as places where names may break
    assert page.tags | joints == plain.tags | joints
    assert not [name for name in page.attributes if name.startswith("on")]
    assert data_of(plan_page(_hostile(plan)))["plan"]["network"] == HOSTILE
    two = _Elements(diff_page(plan, _hostile(plan), HOSTILE, "b"))
    assert "img" not in two.tags and two.tags["script"] == _Elements(diff_page(plan, plan, "a", "b")).tags["script"]
    assert "<img" not in plan_fragment(_hostile(plan)) and "&lt;img" in plan_fragment(_hostile(plan))


def _luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [":root {", ":root.dark {"])
def test_colours_contrast_with_their_background(theme):
    style = (folder("templates") / "report" / "style.css").read_text()
    declarations = re.findall(r"--([\w-]+): (#[0-9a-f]{6});", style.split(theme, 1)[1].split("}", 1)[0])
    colours = dict(declarations)
    grounds = [_luminance(colours.pop(name)) for name in ("ground", "panel")]
    assert len(colours) == len(declarations) - 2 > 15
    colours.pop("line")  # of grids and frames, which say nothing
    for name, colour in colours.items():
        text = name in ("ink", "faint", "accent", "bad")
        # WCAG 2.2 AA: 1.4.3 for text, which also stands on panels, 1.4.11 for what is drawn.
        for ground in grounds if text else grounds[:1]:
            low, high = sorted((_luminance(colour), ground))
            assert (high + 0.05) / (low + 0.05) >= (4.5 if text else 3.0), f"{name}: {colour}"


def test_nothing_is_fetched(plan):
    page = plan_page(plan)
    assert "default-src 'none'" in page
    for word in ("http://", "https://", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert word not in page.replace("http://www.w3.org/2000/svg", ""), word  # a name, not an address


def test_embedded_data_has_no_way_out_of_its_element():
    text = packed({"a": "</script>", "b": float("nan"), "c": [float("inf"), 1.5], "d": "\u2028<!--"})
    assert re.fullmatch("[A-Za-z0-9+/=]+", text)
    read = json.loads(zlib.decompress(b64decode(text)))
    assert read == {"a": "</script>", "b": None, "c": [None, 1.5], "d": "\u2028<!--"}


BYTES_A_LAUNCH = 200  # a network of 3,734 layers has 77,114 launches and a page of at most 10 MB, 130 bytes a launch


def test_a_page_grows_by_few_bytes_a_launch(plan, data):
    size_bytes = len(packed(data))
    assert size_bytes < BYTES_A_LAUNCH * (len(plan.train.launches) + len(plan.infer.launches))
    assert 3 * size_bytes < len(json.dumps(data, separators=(",", ":"))) + 2000


def test_columns_and_back():
    texts = Texts()
    columns = {"a": ["x", "y"], "b": [1, 2.5], "c": [None, "x"], "d": [["y", "z"], []], "e": [[1], []]}
    table = texts.table(columns)
    assert rows_of(table, texts.all) == [{name: column[i] for name, column in columns.items()} for i in range(2)]
    assert texts.all == ["x", "y", "z"] and (table["texts"], table["lists"]) == (["a"], ["d"])


def test_a_diff_names_the_request():
    loose, tight = PLANS["kept"](), PLANS["recomputed"]()
    page = diff_page(loose, tight, "loose", "tight")
    assert "They were planned for different inputs: budget." in page
    assert "What changed between these plans, and why?" in page and "recomputed" in page
    same = diff_page(loose, loose, "a", "b")
    assert "Nothing: no figure and no operation differs." in same
    shown = data_of(page)
    for side, plan in zip(shown["sides"], (loose, tight), strict=True):
        curve = memory_curve(plan, plan.train)
        assert side["peak"] == {"launch": curve.peak_launch, "bytes": curve.peak_bytes}
        assert side["train_us"] == plan.predictions.train_us


def test_a_trace_has_every_launch(plan):
    trace = json.loads(json.dumps(trace_document(plan)))
    events = trace["traceEvents"]
    runs = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    times = predicted_timeline(plan, plan.train)
    assert [event["ts"] for event in runs] == list(times.starts_us)
    assert [event["args"]["launch"] for event in runs] == list(range(len(plan.train.launches)))
    starts = [event["id"] for event in events if event["ph"] == "s" and event["pid"] == 1]
    ends = [event["id"] for event in events if event["ph"] == "f" and event["pid"] == 1]
    assert starts == ends and len(starts) == len(plan.train.waits)
    counters = [sum(event["args"].values()) for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert max(counters) <= memory_curve(plan, plan.train).peak_bytes


def test_a_plan_in_fp64_has_no_roofline():
    from tests.runtime.nets import small_plan

    plan = small_plan("fp64")
    data = data_of(plan_page(plan))
    assert data["ceilings"] is None
    assert all(row["limit_us"] is None for row in rows_of(data["programs"]["train"]["operations"], data["texts"]))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"probes": []}', "[" * 100_000])
def test_results_that_are_none(text):
    with pytest.raises(MbcError, match="holds no result that a page can show") as caught:
        read_recorded(text, "a.json")
    assert caught.value.code == "MBC321"


def _record(plan: Plan) -> dict[str, Any]:
    """Return a record in which each launch takes 1 us longer than predicted and the last launch was not measured."""
    times = predicted_timeline(plan, plan.train)
    rows = [
        {"name": launch_name(i, launch), "start_us": start, "measured_us": end - start + 1.0}
        for i, (launch, start, end) in enumerate(zip(plan.train.launches, times.starts_us, times.ends_us, strict=True))
    ]
    del rows[-1]["start_us"], rows[-1]["measured_us"]
    predicted_us = plan.predictions.train_us
    return {"step_us": 1.25 * predicted_us, "predicted_us": predicted_us, "steps": 5, "rows": rows, "sums": []}


def _measured(plan: Plan, record: dict[str, Any]) -> MeasuredStep:
    return measured_step(plan, read_recorded(json.dumps(record), "step.json"), "step.json")


def test_a_measured_step_beside_the_predicted_one(plan):
    measured = _measured(plan, _record(plan))
    page = plan_page(plan, measured=measured)
    shown, times = data_of(page)["measured"], predicted_timeline(plan, plan.train)
    took = [end - start + 1.0 for start, end in zip(times.starts_us, times.ends_us, strict=True)]
    assert shown["starts_us"] == [*times.starts_us[:-1], None] and shown["step_us"] == measured.step_us
    assert shown["times_us"] == [*took[:-1], None]
    assert "are predicted: +25.0 %. 1 of" in page and "1.00 us more than predicted" in page
    events = trace_document(plan, measured)["traceEvents"]
    runs = [event for event in events if event["ph"] == "X" and event["pid"] == 3]
    assert [event["ts"] for event in runs] == list(times.starts_us[:-1])
    assert [event["dur"] for event in runs] == shown["times_us"][:-1]
    assert data_of(plan_page(plan))["measured"] is None


def test_records_that_are_not_of_the_plan():
    plan = PLANS["small"]()
    with pytest.raises(MbcError, match=r"MBC321: 'step.json' is a record of another plan: launch 0 is '0") as caught:
        _measured(plan, _record(PLANS["kept"]()))
    assert caught.value.remedy.startswith("record this plan")
    short, damaged, bench = _record(plan), _record(plan), _record(plan)
    del short["rows"][-1]
    with pytest.raises(MbcError, match="but 'none' in the record"):
        _measured(plan, short)
    del damaged["rows"][0]["start_us"]
    bench["rows"] = {}
    for record in (damaged, bench, {**_record(plan), "step_us": "1"}):
        with pytest.raises(MbcError, match="holds no measured step"):
            _measured(plan, record)


def _line(kind: str, step: int, loss: float | None = 1.0) -> str:
    return json.dumps({"kind": kind, "step": step, "epoch": 1, "loss": loss, "images_per_s": 10.0}) + "\n"


@pytest.mark.parametrize("rest", ["", '{"kind": "epo'])
def test_the_log_of_a_training(rest):
    text = _line("interval", 2) + _line("interval", 3, None) + _line("epoch", 3)
    shown = read_recorded(text + rest, "log.jsonl")
    assert shown["what"] == "training" and shown["left_out"] == 0
    assert [(line["kind"], line["step"]) for line in shown["lines"]] == [("interval", 2), ("interval", 3), ("epoch", 3)]
    assert read_recorded(_line("epoch", 3), "log.jsonl")["lines"][0]["loss"] == 1.0


def test_a_page_has_some_lines_of_a_long_log_and_the_last():
    count = 2 * LINES + 7
    shown = read_recorded("".join(_line("interval", i + 1) for i in range(count)), "log.jsonl")
    steps = [line["step"] for line in shown["lines"]]
    assert len(steps) <= LINES and len(steps) + shown["left_out"] == count
    assert {b - a for a, b in pairwise(steps)} == {3} and steps[-1] == count


@pytest.mark.parametrize("change", [("3", "true"), ("10.0", "null"), ('"epoch", ', '"epoch"')])
def test_lines_that_are_no_log(change):
    with pytest.raises(MbcError, match="holds no result") as caught:
        read_recorded(_line("interval", 2) + _line("epoch", 3).replace(*change), "a.json")
    assert "mbc train --log" in caught.value.remedy and "of --record" in caught.value.remedy


def test_a_page_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(MbcError, match=r"MBC320: cannot write '.*there.html': .*") as caught:
        write_text(tmp_path / "not" / "there.html", "x")
    assert caught.value.remedy == "name another file with -o"


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "page.html"
    write_text(path, "before")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(MbcError, match=r"MBC320: .*No space left on device"):
            write_text(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    write_text(path, "after")
    assert path.read_text() == "after"
    write_text(Path("/dev/null"), "nowhere")


def test_ranks_that_run_another_plan():
    plan, other = plans_of_unlike_gpus()
    events = trace_document(plan, others=[other])["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named[1].endswith(": training step of rank 0, predicted")
    assert named[4].endswith(": training step of rank 1, predicted")
    times = predicted_timeline(other, other.train)
    assert [event["ts"] for event in events if event["ph"] == "X" and event["pid"] == 4] == list(times.starts_us)
    data = data_of(plan_page(plan, others=[other]))
    (shown,) = data["others"]
    assert (shown["ranks"], shown["gpu"]) == ("rank 1", other.target.gpu)
    rows = rows_of(shown["launches"], data["texts"])
    assert [row["end_us"] for row in rows] == list(times.ends_us)
    assert [row["stream"] for row in rows] == [str(launch.stream) for launch in other.train.launches]
    operations = [row["name"] for row in rows_of(shown["operations"], data["texts"])]
    assert all(row["operation"] < len(operations) for row in rows)
    assert data_of(plan_page(plan))["others"] == []
