"""Rows under a cap, from invented plans and times."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ahead
import cap
import capped
import record
import stepping
import torch_memory_budget
from cap import GB, Card
from capped import Case, settled
from modules import Job, example
from planner import Planner, processes
from record import ROOT
from shelf import Shelf, unpack

from mbc.errors import BudgetError, MbcError

CARD = Card("h200", None)


def small() -> Job:
    return example("alexnet", ("batch", "8"), ("size", "64"), ("width", "8"), ("classes", "10"))


class Here:
    """A pool that runs its work at once, in this process."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Any, *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given))
        return done


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    pool: Any = Here()
    return Planner(CARD, Shelf(tmp_path), pool)


def test_a_cap_counts_the_plan_without_the_bare_context() -> None:
    job = CARD.capped(small(), GB)
    plan = job.plan()
    assert plan.budget_bytes == GB + CARD.context_bytes
    p = plan.predictions
    assert CARD.counted_bytes(plan) == p.arena_bytes + p.overhead_bytes - CARD.context_bytes <= GB
    result, same = cap.planned(CARD, job.plan)
    assert same is not None and same.offsets == plan.offsets
    assert result["counted_gb"] == CARD.counted_bytes(plan) / GB and result["arena_bytes"] == p.arena_bytes
    assert "MBC203" in cap.planned(CARD, CARD.capped(small(), 1).plan)[0]["failed"]
    assert cap.planned(CARD, CARD.capped(small(), 1).plan)[0]["needed_gb"] > 0


def row(**changes: Any) -> dict[str, Any]:
    created = {"batch": 8, "predicted_ms": 11.0, "over_bound": 0.02, "cap_gb": 6.0, "unlimited_gb": 9.0, "loss": 0.1}
    return created | {"most_loss": 0.12, "free_batch": 8} | changes


def test_rows_of_predictions() -> None:
    assert capped.judged(row())["passed"] and capped.judged(row())["bound_kept"]
    assert not capped.judged(row(most_loss=0.05))["passed"]
    assert not capped.judged(row(over_bound=0.04))["bound_kept"]
    assert "bound_kept" not in capped.judged(row(cap_gb=4.0))


def test_rows_of_measurements() -> None:
    step = {"step_ms": 12.0, "spread_ms": 0.1, "arena_predicted": 7, "arena_taken": 7}
    result = capped.measured(row(), {"capped": step, "free": {"step_ms": 11.5}})
    assert result["loss"] == pytest.approx(12 / 11.5 - 1) and result["loss_predicted"] == 0.1 and result["arena_equal"]
    assert result["predicted_over_measured"] == pytest.approx(11 / 12) and not result["time_near"]
    # Without a cap the card holds four rows only: what counts is a row's time.
    result = capped.measured(row(free_batch=4), {"capped": step, "free": {"step_ms": 5.0}})
    assert result["loss"] == pytest.approx(12 / 8 / (5 / 4) - 1) and not result["passed"]
    assert capped.measured(row(), {"capped": {"failed": "died"}, "free": {}})["failed"] == "died"
    assert "too large" in capped.measured(row(), {"capped": step, "free": {"failed": "too large"}})["failed"]


def test_plans_of_a_case_are_kept(tmp_path: Path, planner: Planner) -> None:
    shelf = planner.shelf
    created = {"name": "x y"} | capped.prepared(planner, Case("x y", small(), 0.5, cap_share=1.0))
    assert created["plans"] == {"capped": created["cap_gb"] * GB, "free": 0} and created["compare"] == [
        "capped",
        "free",
    ]
    assert created["passed"] and created["loss"] == pytest.approx(0.0, abs=0.02)
    assert shelf.has(created) and sorted(p.name for p in tmp_path.glob("*.gz")) == [
        "x_y.capped.json.gz", "x_y.free.json.gz"]  # fmt: skip
    assert unpack(shelf.path("x y", "free")).offsets == CARD.unlimited(small()).plan().offsets
    assert "plans" not in capped.prepared(planner, Case("z", small(), 0.5, 1))
    assert not shelf.has({"name": "z", "plans": {"capped": 1}})


def test_the_largest_batch_that_the_card_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small().with_settings(("batch", "64"))
    free = CARD.unlimited(job).plan()
    assert CARD.free_here(job).offsets == free.offsets
    p = free.predictions
    spec = SimpleNamespace(memory_bytes=p.overhead_bytes + p.arena_bytes * 3 // 4)
    monkeypatch.setattr(cap, "find_device", lambda gpu: spec)
    result = CARD.free_here(job)
    assert CARD.holds(result) and result.graph.batch % 8 == 0 and 8 <= result.graph.batch < 64
    spec.memory_bytes = p.overhead_bytes
    with pytest.raises(RuntimeError, match="holds no plan"):
        CARD.free_here(job)


def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], dict[str, Any]]:
    """Return the plans and measurements that were made, and the rows afterwards."""
    log: list[str] = []

    def prepare(planner: Planner, name: str) -> dict[str, Any]:
        log.append(f"plan {name}")
        if name == "c":
            raise RuntimeError("no plan")
        planner.shelf.keep(name, "step", b"")
        return {"plans": {"step": 5}, "predicted_ms": 2.0}

    def time_packages(folders: dict[str, Path], steps: int, cap_bytes: int) -> dict[str, Any]:
        log.append(f"time {steps} {cap_bytes}")
        return {what: {"step_ms": 1.0} for what in folders}

    monkeypatch.setattr(ahead, "need_gpu", lambda instead: None)
    monkeypatch.setattr(ahead, "time_packages", time_packages)
    monkeypatch.setattr(ahead, "processes", lambda workers: Here())
    monkeypatch.setattr(ahead, "build", lambda plan, folder: "no compiler" if plan.name.startswith("b") else "")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    parser = argparse.ArgumentParser()
    ahead.add_arguments(parser)
    arguments = parser.parse_args([*words, "--plans", str(tmp_path / "plans")])
    tasks = [
        ahead.Task(name, lambda planner, n=name: prepare(planner, n), lambda row, timed: {**row, **timed["step"]})
        for name in ("a", "b", "c")
    ]
    ahead.drive("made_up", tasks, ["name"], arguments)
    path = tmp_path / f"made_up{'_planned' if '--plan-only' in words else ''}.json"
    return log, {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def test_plans_first_and_steps_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    log, rows = driven(tmp_path, monkeypatch, "--plan-only")
    assert (
        sorted(log) == ["plan a", "plan b", "plan c"]
        and rows["a"]["predicted_ms"] == 2.0
        and "no plan" in rows["c"]["failed"]
    )
    log, rows = driven(tmp_path, monkeypatch, "--plan-only")
    assert log == ["plan c"], "what is there is not planned again"
    log, rows = driven(tmp_path, monkeypatch, "--steps", "7")
    assert log == ["time 7 5"], "nor what could not be planned while a GPU waits"
    assert rows["a"]["step_ms"] == 1.0 and rows["b"]["failed"] == "no compiler" and "c" not in rows
    assert "--again" not in capsys.readouterr().out
    log, rows = driven(tmp_path, monkeypatch, "--only", "a")
    assert log == [], "what is measured is not measured again"
    assert "--again" in capsys.readouterr().out
    log, rows = driven(tmp_path, monkeypatch, "--only", "a", "--again")
    assert log == ["time 20 5"]
    (tmp_path / "plans" / "a.step.json.gz").unlink()
    log, rows = driven(tmp_path, monkeypatch, "--only", "a", "--again")
    assert log == ["plan a", "time 20 5"]
    log, rows = driven(tmp_path, monkeypatch, "--again", "--plan-only", "--only", "b")
    assert log == ["plan b"]
    assert "--again" not in capsys.readouterr().out
    log, rows = driven(tmp_path, monkeypatch, "--plan-only", "--only", "b")
    assert log == [] and "--again" in capsys.readouterr().out


def test_no_row_is_begun_when_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    driven(tmp_path, monkeypatch, "--plan-only")
    log, _ = driven(tmp_path, monkeypatch, "--for", "-1", "--only", "a", "b")
    assert log == [] and "2 rows are left: run this again" in capsys.readouterr().out


def test_caps_that_are_shares(planner: Planner) -> None:
    result = settled(planner, Case("x", small(), 0.1, cap_share=0.5))
    assert result.cap_bytes == CARD.counted_bytes(CARD.unlimited(small()).plan()) // 2
    assert settled(planner, Case("x", small(), 0.1, 3 * GB)).cap_bytes == 3 * GB


def test_cases_are_those_of_the_papers() -> None:
    result = {case.name: case for case in capped.cases()}
    assert len(result) == 14
    assert dict(result["capuchin resnet50"].job.settings)["batch"] == "760"
    assert {c.cap_bytes for c in result.values()} == {0, 8 * GB, 12 * GB, 16 * GB}


def test_processes_end_with_the_block() -> None:
    endless: list[Future[None]] = []
    with pytest.raises(ZeroDivisionError), processes(1) as pool:
        endless.append(pool.submit(time.sleep, 1000))
        while not endless[0].running():
            time.sleep(0.01)
        raise ZeroDivisionError
    assert endless[0].exception() is not None and not multiprocessing.active_children()


@pytest.mark.parametrize("locked", ["", "endless._condition.acquire()"])  # as an interrupt may leave it
def test_processes_end_with_a_benchmark_that_is_ended(tmp_path: Path, locked: str) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        f"""
import multiprocessing, sys, time
from planner import processes
from record import start

def main():
    with processes(1) as pool:
        endless = pool.submit(time.sleep, 1000)
        while not endless.running():
            time.sleep(0.01)
        {locked}
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        endless.result()

if __name__ == "__main__":
    start(main)
"""
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "benchmarks"), str(ROOT)))}
    running = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    assert running.stdout is not None
    child = int(running.stdout.readline())
    os.kill(child, 0)
    running.terminate()
    running.communicate(timeout=600)
    assert running.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_the_cap_beside_torch_leaves_its_memory_for_the_arena() -> None:
    job = CARD.capped(small(), torch_memory_budget.cap_of(CARD, 100 << 20))
    plan = job.plan()
    assert plan.budget_bytes - plan.predictions.overhead_bytes == 100 << 20
    assert torch_memory_budget.earlier_step(0.5)["median_ms"] == 45.6
    with pytest.raises(RuntimeError, match="no figures of torch"):
        torch_memory_budget.earlier_step(0.7)


def test_faster_than_torch_counts_at_no_more_memory_only() -> None:
    created = {"torch_ms": 40.0, "arena_gib": 5.0, "torch_gib": 6.0}
    assert torch_memory_budget.judged(dict(created), 39.0)["passed"]
    assert not torch_memory_budget.judged(dict(created), 41.0)["passed"]
    assert not torch_memory_budget.judged(created | {"torch_gib": 4.9}, 39.0)["passed"]


def test_the_rest_of_the_card_is_occupied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mbc.plan.file import PLAN_FILE, dump_plan

    (tmp_path / PLAN_FILE).write_text(dump_plan(CARD.unlimited(small()).plan()))
    free = [50 * GB]
    taken: list[int] = []
    driver = SimpleNamespace(mem_get_info=lambda: (free[0], 80 * GB), mem_alloc=taken.append)
    monkeypatch.setattr("mbc.measure.gpu.open_context", lambda: None)
    package = SimpleNamespace(driver=driver, gpuarray=SimpleNamespace(to_gpu=lambda array: array))
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
    monkeypatch.setitem(sys.modules, "pycuda.gpuarray", package.gpuarray)
    held = stepping.occupy(tmp_path, 12 * GB)
    assert taken == [38 * GB] and [a.shape[0] for a in held.arrays] == [8, 8]
    free[0] = 11 * GB
    with pytest.raises(RuntimeError, match="fewer than the cap"):
        stepping.occupy(tmp_path, 12 * GB)


def test_failures_are_reported() -> None:
    broken = small().with_settings(("no_such", "1"))
    assert "MBC021" in cap.planned(CARD, broken.plan)[0]["failed"]
    assert isinstance(BudgetError("MBC204", "x"), MbcError)
