"""Recorded replays become times of a plan's launches, and the file that holds them beside predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.plan.group import launch_name
from mbc.plan.model import Plan
from mbc.record.recorder import Event
from mbc.record.step import recorded_step
from mbc.report.html.recorded import read_recorded
from mbc.report.measured import measured_step
from mbc.report.step_record import dump_record, record_document, record_text
from mbc.report.trace import trace_document
from tests.runtime.nets import small_plan

GRAPH, GAP_NS = 4, 3000


@pytest.fixture(scope="module")
def plan() -> Plan:
    return small_plan(serial=True)


def replay(plan: Plan, call: int, slowness: float = 1.0, began_ns: int = 1_000_000) -> Iterator[Event]:
    """Return a replay of launches in series with gaps.

    Each launch has two nodes, which take twice the predicted time.
    """
    now = began_ns + call * 1_000_000_000
    for i, launch in enumerate(plan.train.launches):
        for half in range(2):
            end = now + round(launch.work.time_us * slowness * 1000)
            yield Event(f"kernel {half} of {i}", now, end, call, 2 * i + half + 1, GRAPH, 7 + half, "train", i)
            now = end
        now += GAP_NS


def test_rows_are_medians_over_the_replays(plan: Plan):
    events = [event for call, slowness in enumerate((9, 1, 2, 1), start=1) for event in replay(plan, call, slowness)]
    medians = recorded_step(plan, events, warm=1)
    launches = plan.train.launches
    assert medians.steps == 3 and len(medians.launches) == len(launches) and not medians.left
    total_us = sum(2 * launch.work.time_us for launch in launches) + GAP_NS / 1e3 * (len(launches) - 1)
    assert medians.step_us == pytest.approx(total_us, rel=1e-3)
    for i, (ran, launch) in enumerate(zip(medians.launches, launches, strict=True)):
        assert ran is not None and ran.kernels == (f"kernel 0 of {i}", f"kernel 1 of {i}") and ran.streams == (7, 8)
        assert ran.time_us == pytest.approx(2 * launch.work.time_us, abs=2e-3)
        assert ran.gap_us == pytest.approx(GAP_NS / 1e3 if i else 0.0)
    starts = [ran.start_us for ran in medians.launches if ran is not None]
    assert starts == sorted(starts) and starts[0] == 0.0


def test_the_last_replay_counts_where_all_are_warm_ones(plan: Plan):
    events = [event for call in (1, 2) for event in replay(plan, call, call)]
    medians = recorded_step(plan, events, warm=5)
    first = medians.launches[0]
    assert medians.steps == 1 and first is not None
    assert first.time_us == pytest.approx(4 * plan.train.launches[0].work.time_us, rel=1e-2)


def test_a_replay_that_is_not_whole_does_not_count(plan: Plan):
    """Both replays run equal kernels, so names alone do not distinguish them."""
    whole, broken = list(replay(plan, 1)), list(replay(plan, 2, 5.0))[:-1]
    assert recorded_step(plan, whole + broken, warm=0) == recorded_step(plan, whole, warm=0)
    twice = [*whole, whole[0]]
    with pytest.raises(MbcError) as caught:
        recorded_step(plan, twice, warm=0)
    assert caught.value.code == "MBC366" and "nodes of a training step" in caught.value.message


def test_other_graphs_are_none_of_the_step(plan: Plan):
    events = list(replay(plan, 1))
    nobody = Event("of nobody", 5, 6, 1, 900, GRAPH, 7, None, None)
    elsewhere = Event("elsewhere", 5, 6, 8, 901, GRAPH + 1, 7, None, None)
    inference = Event("inference", 5, 6, 9, 902, GRAPH + 2, 7, "infer", 0)
    medians = recorded_step(plan, [nobody, elsewhere, inference, *events], warm=0)
    assert medians.launches == recorded_step(plan, events, warm=0).launches
    assert medians.left == {"of nobody": 1.0}
    with pytest.raises(MbcError) as caught:
        recorded_step(plan, [nobody, inference], warm=0)
    assert caught.value.code == "MBC366" and "CUPTI recorded no node of a training step's graph" in caught.value.message


def test_the_file_is_read_back_as_it_was_recorded(plan: Plan, tmp_path: Path):
    last = len(plan.train.launches) - 1
    events = [event for event in replay(plan, 1) if event.launch != last]
    recorded = recorded_step(plan, events, warm=0)
    document: dict[str, Any] = read_recorded(dump_record(record_document(plan, recorded)), "step.json")
    assert document["what"] == "step" and document["schema"] == 1
    measured = measured_step(plan, document, "step.json")
    assert measured.step_us == recorded.step_us and measured.steps == 1
    assert measured.starts_us == tuple(None if ran is None else ran.start_us for ran in recorded.launches)
    assert measured.times_us == tuple(None if ran is None else ran.time_us for ran in recorded.launches)
    assert measured.times_us[-1] is None and None not in measured.times_us[:-1]
    rows = document["rows"]
    assert [row["name"] for row in rows] == [launch_name(i, launch) for i, launch in enumerate(plan.train.launches)]
    assert [row["alone_us"] for row in rows] == [launch.work.time_us for launch in plan.train.launches]
    sums = document["sums"]
    assert sum(total["launches"] for total in sums) == last
    assert sum(total["measured_us"] for total in sums) == pytest.approx(sum(t for t in measured.times_us if t))
    assert [total["measured_us"] for total in sums] == sorted((t["measured_us"] for t in sums), reverse=True)
    text = record_text(document, 80)
    assert "measured over 1 steps" in text and f"{last} of {last + 1} launches recorded" in text
    trace = trace_document(plan, measured)
    shown = [event for event in trace["traceEvents"] if event["pid"] == 3 and event["ph"] == "X"]
    assert [event["dur"] for event in shown] == list(measured.times_us[:-1])
    del document["schema"]  # as records of before are
    assert measured_step(plan, json.loads(json.dumps(document)), "old.json") == measured
