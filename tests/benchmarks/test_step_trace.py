"""Rows of a traced step, from made-up traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import record
import step_trace
from cap import Card
from modules import example
from shelf import pack
from step_trace import Trace, by_launch, names_by_launch, replays, rows_of, sums_of

from mbc.plan.model import Plan

NAMES = [["a"], ["b", "c"], ["a"]]


def event(category: str, name: str, start_us: float, time_us: float, correlation: int) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": time_us,
            "args": {"correlation": correlation}}  # fmt: skip


def one_by_one(names: list[list[str]]) -> dict[str, Any]:
    """Each launch is waited for; before the first one PyCUDA copies something, and behind the last one, too."""
    events = [{"ph": "M", "name": "process_name"}, event("gpu_memcpy", "Memcpy HtoD", 1.0, 1.0, 1)]
    now, correlation = 10.0, 10
    for kernels in names:
        for name in kernels:
            events += [event("cuda_runtime", "cudaLaunchKernel", now, 1.0, correlation),
                       event("kernel", name, now + 3.0, 2.0, correlation)]  # fmt: skip
            now, correlation = now + 1.0, correlation + 1
        events.append(event("cuda_runtime", "cudaStreamSynchronize_v3020", now, 9.0, correlation))
        now, correlation = now + 9.0, correlation + 1
    events.append(event("cuda_runtime", "cudaStreamSynchronize_v3020", now, 1.0, correlation))
    events.append(event("gpu_memcpy", "Memcpy DtoH", now + 2.0, 1.0, correlation + 1))
    return {"traceEvents": events[::-1]}


def replayed(steps: list[list[tuple[str, float, float]]]) -> dict[str, Any]:
    """Each step has a graph's events, by name, start and time, and a copy of PyCUDA's."""
    events: list[dict[str, Any]] = []
    for number, step in enumerate(steps):
        begun = 1000.0 * number
        events += [event("gpu_memcpy", "Memcpy HtoD", begun, 2.0, 500 + number),
                   event("cuda_runtime", "cudaGraphLaunch_v10000", begun, 5.0, number)]  # fmt: skip
        events += [event("kernel", name, begun + start_us, time_us, number) for name, start_us, time_us in step]
    return {"traceEvents": events}


def test_what_a_launch_runs_is_told_by_the_waits() -> None:
    trace = Trace.of(one_by_one(NAMES))
    assert names_by_launch(trace, 3) == NAMES
    with pytest.raises(RuntimeError, match=r"4 waits for 5 launches.*cudaLaunchKernel': 4"):
        names_by_launch(trace, 5)


def test_events_of_a_replay_are_those_of_its_graph() -> None:
    trace = Trace.of(replayed([[("b", 20.0, 1.0), ("a", 10.0, 2.0)], [("a", 10.0, 3.0)]]))
    assert [[(e.name, e.end_us - e.start_us) for e in step] for step in replays(trace)] == [
        [("a", 2.0), ("b", 1.0)], [("a", 3.0)]]  # fmt: skip
    with pytest.raises(RuntimeError, match="no replay with 4 events"):
        replays(Trace.of(one_by_one([["a"], ["b"]])))


def test_the_nth_run_of_a_kernel_is_that_of_the_nth_launch() -> None:
    (step,) = replays(Trace.of(replayed([[("a", 10.0, 1.0), ("b", 20.0, 1.0), ("a", 30.0, 5.0), ("d", 40.0, 1.0)]])))
    found, left = by_launch(step, NAMES)
    assert [[(e.name, e.start_us) for e in events] for events in found] == [[("a", 10.0)], [("b", 20.0)], [("a", 30.0)]]
    assert left == {"c": 1, "d": -1}


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = example("alexnet", ("batch", "8"), ("size", "64"), ("width", "8"), ("classes", "10"))
    return Card("h200", None).unlimited(job.with_options(without=frozenset({"concurrent_stream"}))).plan()


def twice_as_long(plan: Plan, gap_us: float) -> tuple[list[list[str]], list[tuple[str, float, float]]]:
    """What the plan's launches run, each in two kernels together twice as long as predicted, with gaps."""
    names, step, now = list[list[str]](), list[tuple[str, float, float]](), 10.0
    for launch in plan.train.launches:
        names.append([f"first of {launch.operations}", "second"])
        for name in names[-1]:
            step.append((name, now, launch.work.time_us))
            now += launch.work.time_us
        now += gap_us
    return names, step


def test_rows_and_sums_are_medians_over_the_steps(plan: Plan) -> None:
    names, step = twice_as_long(plan, 3.0)
    late = [(name, start_us + 100.0, 2 * time_us) for name, start_us, time_us in step]
    rows = rows_of(plan, names, replays(Trace.of(replayed([step, late, step]))))
    assert len(rows) == len(plan.train.launches)
    for row, launch in zip(rows, plan.train.launches, strict=True):
        assert row["measured_us"] == pytest.approx(2 * launch.work.time_us)
        assert row["predicted_us"] == pytest.approx(launch.work.time_us) == row["alone_us"]
        assert row["gap_us"] == pytest.approx(3.0 if launch is not plan.train.launches[0] else 0.0)
    assert [row["start_us"] for row in rows] == sorted(row["start_us"] for row in rows)
    sums = sums_of(rows)
    assert sum(total["launches"] for total in sums) == len(rows)
    assert sum(total["measured_us"] for total in sums) == pytest.approx(2 * plan.predictions.train_us)
    assert all(total["predicted_over_measured"] == pytest.approx(0.5) for total in sums)


def test_what_did_not_run_has_no_figures(plan: Plan) -> None:
    names, step = twice_as_long(plan, 0.0)
    rows = rows_of(plan, names, replays(Trace.of(replayed([step[:-2]]))))
    assert ["measured_us" in row for row in rows] == [True] * (len(rows) - 1) + [False]
    assert sum(total["launches"] for total in sums_of(rows)) == len(rows) - 1


def test_kept_traces_are_read_again(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    names, step = twice_as_long(plan, 3.0)
    (tmp_path / "x.capped.json.gz").write_bytes(pack(plan))
    (tmp_path / "x_capped_launches.json").write_text(json.dumps(one_by_one(names)))
    (tmp_path / "x_capped_replays.json").write_text(json.dumps(replayed([step])))
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["step_trace.py", str(tmp_path / "x.capped.json.gz"), "--keep", str(tmp_path), "--read"]
    )
    step_trace.main()
    found = json.loads((tmp_path / "step_trace_x_capped.json").read_text())
    expected_us = 2 * plan.predictions.train_us + 3.0 * (len(plan.train.launches) - 1)
    assert found["step_us"] == pytest.approx(expected_us) and found["left"] == {}
    assert len(found["rows"]) == len(plan.train.launches)
    assert "names that do not match: none" in capsys.readouterr().out
