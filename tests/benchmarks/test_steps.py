"""Rows of the step benchmarks from invented plans and times, and deepbench's rows from an invented profile."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import deterministic
import plans
import predictions
import stepping
from modules import Job, example
from plans import Planned, make_plan, step_digest

from mbc.options import Policy
from tests.benchmarks.test_capped import Here


def small(name: str = "alexnet", **options: Any) -> Job:
    job = example(name, ("batch", "8"), ("size", "64"), ("width", "8"), ("classes", "10"))
    return Job(job.name, job.source, job.settings, job.network, "h200").with_options(**options)


def test_equal_steps_have_one_digest(tmp_path: Path) -> None:
    first = make_plan(small(policy=Policy.UNDIVIDED), tmp_path)
    again = make_plan(small(policy=Policy.UNDIVIDED, workspace_limit_bytes=1 << 40), tmp_path)
    cut = make_plan(small(policy=Policy.UNDIVIDED, micro_batch=4), tmp_path)
    assert not (first.failed or again.failed or cut.failed)
    assert first.step == again.step != cut.step
    assert cut.divided > 0 and first.divided == 0
    assert {p.name for p in tmp_path.iterdir()} == {f"{first.step}.json.gz", f"{cut.step}.json.gz"}
    other = small(policy=Policy.UNDIVIDED).with_settings(("batch", "16"))
    assert step_digest(other.plan()) != first.step


def test_an_impossible_plan_has_a_reason(tmp_path: Path) -> None:
    assert "MBC203" in make_plan(small().with_settings(("memory.device", "1 kB")), tmp_path).failed
    assert not list(tmp_path.iterdir())


def test_a_package_that_ends_the_process_does_not_take_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import json, os, sys\n"
        "folders, steps, *_ = json.loads(sys.stdin.read())\n"
        "for name in folders:\n"
        "    if name == 'bad':\n"
        "        os._exit(7)\n"
        "    print(json.dumps({'name': name, 'step_ms': 1.0, 'steps': steps}), flush=True)\n"
    )
    monkeypatch.setattr(stepping, "__file__", str(script))
    result = stepping.time_packages({name: Path(name) for name in ("a", "bad", "b")}, 3)
    assert result["a"] == result["b"] == {"step_ms": 1.0, "steps": 3}
    assert result["bad"] == {"failed": "the process ended with 7"}


def test_a_package_that_hangs_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, hanging = tmp_path / "child.py", tmp_path / "hanging"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "for name in json.loads(sys.stdin.read())[0]:\n"
        "    if name == 'hangs':\n"
        f"        pathlib.Path({str(hanging)!r}).touch()\n"
        "        time.sleep(3600)\n"
        "    print(json.dumps({'name': name, 'step_ms': 1.0}), flush=True)\n"
    )
    now_s = [100.0]

    class Timer(threading.Timer):
        """A timer that fires when the child hangs, however long it takes until then."""

        def run(self) -> None:
            assert self.interval == 2.0
            while not hanging.exists():
                time.sleep(0.01)
            now_s[0] += self.interval
            self.function()

    monkeypatch.setattr(stepping, "__file__", str(script))
    monkeypatch.setattr(stepping, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(stepping, "threading", SimpleNamespace(Timer=Timer))
    result = stepping.time_packages({name: Path(name) for name in ("a", "hangs", "b")}, 3, timeout_s=2.0)
    assert result["a"] == {"step_ms": 1.0} and result["hangs"] == {"failed": "not done in 2 s"}
    assert result["b"] == {"failed": "not reached in the time allowed"}


def test_steps_are_built_once_and_failures_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "processes", lambda workers: Here())
    monkeypatch.setattr(plans, "build", lambda path, folder: "no compiler" if folder.name == "b" else "")
    asked_for: list[list[str]] = []

    def time_packages(folders: dict[str, Path], steps: int, digest_after: int) -> dict[str, dict[str, Any]]:
        asked_for.append(list(folders))
        return {name: {"step_ms": 1.0} for name in folders}

    monkeypatch.setattr(plans, "time_packages", time_packages)
    first, second = plans.run_steps(["a", "b", "a", ""], tmp_path, 1, 5, runs=2)
    assert asked_for == [["a"], ["a"]] and first == second
    assert first == {"a": {"step_ms": 1.0}, "b": {"failed": "no compiler"}}


def test_predictions_are_held_to_the_length_of_the_step() -> None:
    arena = {"arena_predicted": 10, "arena_taken": 10}
    plan = Planned("s", 9.4, ())
    assert predictions.row_of("n", plan, {"step_ms": 10.0, **arena})["passed"] is False
    assert predictions.row_of("n", plan, {"step_ms": 9.8, **arena})["passed"] is True
    assert predictions.row_of("n", Planned("s", 0.92, ()), {"step_ms": 1.0, **arena})["passed"] is True
    assert predictions.row_of("n", plan, {"step_ms": 9.4, "arena_predicted": 10, "arena_taken": 11})["passed"] is False
    assert predictions.row_of("n", Planned("", 0.0, (), "no memory"), {})["failed"] == "no memory"


def test_determinism_compares_all_runs() -> None:
    runs = [
        {"free": {"step_ms": 1.0, "states": str(k)}, "fixed": {"step_ms": 1.2 + k, "states": "same"}} for k in range(3)
    ]
    row = deterministic.row_of("n", "fp32", Planned("free", 1.0, ()), Planned("fixed", 1.1, ()), runs)
    assert row["deterministic_equal"] is True and row["free_equal"] is False and row["same_plan"] is False
    assert row["price"] == pytest.approx(1.2) and row["price_predicted"] == pytest.approx(1.1)
    broken = deterministic.row_of("n", "fp32", Planned("free", 1.0, ()), Planned("", 0.0, (), "no kernel"), runs)
    assert broken["failed"] == "no kernel" and broken["price"] is None
