"""Rows under a cap from made-up plans and times, and the batches and depths that planning finds."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ahead
import budget_curves
import cap
import capped
import deepest
import largest_batch
import record
import seek
import stepping
import torch_memory_budget
from cap import GB, Card
from capped import Case, settled
from modules import Job, example
from planner import Planner, Probe, Wanted, processes
from record import ROOT, Results
from shelf import Shelf, unpack

from mbc.errors import BudgetError, MbcError
from mbc.plan.memory import memory_curve

CARD = Card("h200", None)


def small() -> Job:
    return example("alexnet", ("batch", "8"), ("size", "64"), ("width", "8"), ("classes", "10"))


class Here:
    """A pool that works at once, in this process."""

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
    return Planner(CARD, Shelf(tmp_path), Results("probes", {}, {}), pool, 1, set())


def test_what_a_cap_counts_is_the_plan_without_the_bare_context() -> None:
    job = CARD.capped(small(), GB)
    plan = job.plan()
    assert plan.budget_bytes == GB + CARD.context_bytes
    p = plan.predictions
    assert CARD.counted_bytes(plan) == p.arena_bytes + p.overhead_bytes - CARD.context_bytes <= GB
    found, same = cap.planned(CARD, job.plan)
    assert same is not None and same.offsets == plan.offsets
    assert found["counted_gb"] == CARD.counted_bytes(plan) / GB and found["arena_bytes"] == p.arena_bytes
    assert "MBC203" in cap.planned(CARD, CARD.capped(small(), 1).plan)[0]["failed"]
    assert cap.planned(CARD, CARD.capped(small(), 1).plan)[0]["needed_gb"] > 0
    plain = CARD.plain(small()).options
    assert plain.without == {"offload", "recompute", "micro_batches"} and plain.workspace_limit_bytes == 512 << 20


def row(**changes: Any) -> dict[str, Any]:
    made = {"batch": 8, "predicted_ms": 11.0, "over_bound": 0.02, "cap_gb": 6.0, "unlimited_gb": 9.0, "loss": 0.1}
    return made | {"most_loss": 0.12, "free_batch": 8} | changes


def test_rows_of_predictions() -> None:
    assert capped.judged(row())["passed"] and capped.judged(row())["bound_kept"]
    assert not capped.judged(row(most_loss=0.05))["passed"]
    assert not capped.judged(row(over_bound=0.04))["bound_kept"]
    assert "bound_kept" not in capped.judged(row(cap_gb=4.0))


def test_rows_of_measurements() -> None:
    step = {"step_ms": 12.0, "spread_ms": 0.1, "arena_predicted": 7, "arena_taken": 7}
    found = capped.measured(row(), {"capped": step, "free": {"step_ms": 11.5}})
    assert found["loss"] == pytest.approx(12 / 11.5 - 1) and found["loss_predicted"] == 0.1 and found["arena_equal"]
    assert found["predicted_over_measured"] == pytest.approx(11 / 12) and not found["time_near"]
    # Without a cap the card holds four rows only: what counts is a row's time.
    found = capped.measured(row(free_batch=4), {"capped": step, "free": {"step_ms": 5.0}})
    assert found["loss"] == pytest.approx(12 / 8 / (5 / 4) - 1) and not found["passed"]
    assert capped.measured(row(), {"capped": {"failed": "died"}, "free": {}})["failed"] == "died"
    assert "too large" in capped.measured(row(), {"capped": step, "free": {"failed": "too large"}})["failed"]


def test_plans_of_a_case_are_kept(tmp_path: Path, planner: Planner) -> None:
    shelf = planner.shelf
    made = {"name": "x y"} | capped.prepared(planner, Case("x y", small(), 0.5, cap_share=1.0))
    assert made["plans"] == {"capped": made["cap_gb"] * GB, "free": 0} and made["compare"] == ["capped", "free"]
    assert made["passed"] and made["loss"] == pytest.approx(0.0, abs=0.02)
    assert shelf.has(made) and sorted(p.name for p in tmp_path.glob("*.gz")) == [
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
    found = CARD.free_here(job)
    assert CARD.holds(found) and found.graph.batch % 8 == 0 and 8 <= found.graph.batch < 64
    spec.memory_bytes = p.overhead_bytes
    with pytest.raises(RuntimeError, match="holds no plan"):
        CARD.free_here(job)


def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], dict[str, Any]]:
    """What was prepared and timed, and the rows that are there afterwards."""
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
    found = settled(planner, Case("x", small(), 0.1, cap_share=0.5))
    assert found.cap_bytes == CARD.counted_bytes(CARD.unlimited(small()).plan()) // 2
    assert settled(planner, Case("x", small(), 0.1, 3 * GB)).cap_bytes == 3 * GB


def made_up(
    monkeypatch: pytest.MonkeyPatch, figures: Callable[[dict[str, str]], dict[str, Any]]
) -> list[dict[str, str]]:
    """Plans have these figures, by the settings of their jobs; those that were made."""
    made: list[dict[str, str]] = []

    def planned(_: Card, work: Callable[[], Any]) -> tuple[dict[str, Any], None]:
        made.append(work())
        return figures(made[-1]), None

    monkeypatch.setattr(Job, "plan", lambda job: dict(job.settings))
    monkeypatch.setattr("planner.planned", planned)
    return made


def test_the_batch_whose_plain_plan_first_exceeds(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, lambda settings: {"counted_gb": int(settings["batch"]) / 3})
    assert capped.accudnn_batch(planner, small()) == 80  # 72 rows take just 24 GB


def test_cases_are_those_of_the_papers() -> None:
    found = {case.name: case for case in capped.cases()}
    assert len(found) == 14
    assert dict(found["capuchin resnet50"].job.settings)["batch"] == "760"
    assert "batch" not in dict(found["accudnn resnet152"].job.settings)
    assert {c.cap_bytes for c in found.values()} == {0, 8 * GB, 12 * GB, 16 * GB}


@pytest.mark.parametrize(("speed", "most"), [(0.7, 104), (0.8, 80), (1.1, 0), (0.0, 104)])
def test_the_largest_batch_that_is_fast_enough(
    speed: float, most: int, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(settings: dict[str, str]) -> dict[str, Any]:
        batch = int(settings["batch"])
        if settings["memory.device"] == f"{cap.UNLIMITED_BYTES} B":
            return {"predicted_ms": batch}
        # From 60 on a step takes a ms more for every further row; up to 107 rows fit.
        return {"predicted_ms": batch + max(0, batch - 60)} if batch <= 107 else {"failed": "MBC204"}

    made = made_up(monkeypatch, figures)
    case = largest_batch.Case("x", small(), 16)
    # b + (b - 60) <= b / 0.7 up to b = 105; b / 0.8 up to b = 80.
    assert largest_batch.largest(planner, case, GB, 4, speed) == most
    count = len(made)
    assert largest_batch.largest(planner, case, GB, 4, speed) == most and len(made) == count, "each plan is made once"


def test_what_is_asked_of_the_largest_batches() -> None:
    made = row(batch=500, superneurons=240, capuchin=468, cap_gb=12.0, most_loss=1 / 0.7 - 1, loss=0.25, passed=True)
    found = largest_batch.judged(dict(made))
    assert found["passed"] and found["speed"] == pytest.approx(0.8)
    assert not largest_batch.judged({**made, "batch": 479})["passed"]
    assert not largest_batch.judged({**made, "passed": False})["passed"]
    assert largest_batch.judged({**made, "cap_gb": 16.0, "most_loss": None, "batch": 469})["passed"]
    assert not largest_batch.judged({**made, "cap_gb": 16.0, "most_loss": None, "batch": 468})["passed"]
    names = [task.name for task in largest_batch.tasks(12 * GB, 8)]
    assert len(names) == 18 and "at all" in names[12] and len(list(largest_batch.tasks(16 * GB, 8))) == 8


def test_twice_the_batch_of_superneurons_is_not_searched_for(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []

    def prepared(planner: Planner, case: capped.Case) -> dict[str, Any]:
        asked.append(dict(case.job.settings))
        return row(batch=int(asked[-1]["batch"]), cap_gb=12.0, most_loss=case.most_loss, loss=0.25, passed=True)

    monkeypatch.setattr(capped, "prepared", prepared)
    first = next(largest_batch.tasks(12 * GB, 8))
    assert first.name == "alexnet at 2 times SuperNeurons'"
    made = first.prepare(planner)
    assert [settings["batch"] for settings in asked] == ["3584"]
    assert made["passed"] and made["times_superneurons"] == 2


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize(("most", "start", "finest"), [(0, 1, 1), (1, 1, 1), (77, 3, 1), (77, 300, 1), (596, 596, 32)])
def test_several_counts_are_tried_at_once(width: int, most: int, start: int, finest: int) -> None:
    asked: list[int] = []
    waited: list[int] = []

    def answers(counts: Sequence[int]) -> Generator[bool]:
        assert 1 <= len(counts) <= width and list(counts) == sorted(set(counts) - set(asked))
        asked.extend(counts)
        for count in counts:
            waited.append(count)
            yield count <= most

    found = seek.largest(answers, lambda: width, start, finest)
    assert most - finest < found <= most
    assert sum(count > most for count in waited) <= len(asked) / width + 1, "nothing is waited for behind a no"


def test_plans_that_nobody_waits_for_are_not_begun(planner: Planner) -> None:
    begun: list[Future[Any]] = []

    class Busy(Here):
        def submit(self, work: Any, *given: Any) -> Future[Any]:
            begun.append(Future())
            return begun[-1]

    pool: Any = Busy()
    planner.pool = pool
    first, second = Wanted("a", small().plan), Wanted("b", small().plan)
    for wanted in (first, second, second):
        planner._begin(wanted)
    assert len(begun) == 2, "each once"
    planner._withdraw("b")
    assert not begun[1].cancelled()
    planner._withdraw("b")
    assert begun[1].cancelled() and not begun[0].cancelled()
    begun[0].set_result(Probe({"name": "a", "batch": 8}))
    assert planner.ask(first).figures["batch"] == 8 and list(planner.known.rows) == ["a"]
    planner._begin(second)
    assert len(begun) == 3, "what was withdrawn may be wanted again"


def test_figures_of_an_earlier_run_are_taken_and_their_plans_made_when_kept(planner: Planner) -> None:
    wanted = Wanted.of(CARD.unlimited(small()))
    planner.known.rows[wanted.name] = {"name": wanted.name, "batch": 7}
    assert planner.ask(wanted).figures["batch"] == 7
    assert planner.keep("x", "step", wanted) == {"batch": 7}
    assert unpack(planner.shelf.path("x", "step")).graph.batch == 8


def test_processes_end_with_the_block() -> None:
    endless: list[Future[None]] = []
    with pytest.raises(ZeroDivisionError), processes(1) as pool:
        endless.append(pool.submit(time.sleep, 1000))
        while not endless[0].running():
            time.sleep(0.01)
        raise ZeroDivisionError
    assert endless[0].exception() is not None and not multiprocessing.active_children()


def test_processes_end_with_a_benchmark_that_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        """
import multiprocessing, sys, time
from planner import processes
from record import start

def main():
    with processes(1) as pool:
        endless = pool.submit(time.sleep, 1000)
        while not endless.running():
            time.sleep(0.01)
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


@pytest.mark.parametrize("most", [595, 596, 1000, 3000])
def test_the_deepest_network(most: int, planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, lambda settings: {} if int(settings["n3"]) <= most else {"failed": "MBC204"})
    assert most - 8 < deepest.deepest(planner, 16, 12 * GB, 8) <= most


def test_depths_are_counted_as_the_paper_does() -> None:
    assert deepest.layers(596) == 1922 and deepest.layers(788) == 2498
    counts = [op.kind for op in deepest.network(4, 1).with_settings(("n1", "3"), ("n2", "4"), ("n4", "3"))
              .lowered().network.operations]  # fmt: skip
    # Projections, which the paper leaves out, beside three convolutions a bottleneck and the stem.
    assert counts.count("convolution") == 3 * 14 + 1 + 4


def test_the_cap_beside_torch_leaves_its_memory_for_the_arena() -> None:
    job = CARD.capped(small(), torch_memory_budget.cap_of(CARD, 100 << 20))
    plan = job.plan()
    assert plan.budget_bytes - plan.predictions.overhead_bytes == 100 << 20
    assert torch_memory_budget.known(0.5)["median_ms"] == 45.6
    with pytest.raises(RuntimeError, match="no figures of torch"):
        torch_memory_budget.known(0.7)


def test_faster_than_torch_counts_at_no_more_memory_only() -> None:
    made = {"torch_ms": 40.0, "arena_gib": 5.0, "torch_gib": 6.0}
    assert torch_memory_budget.judged(dict(made), 39.0)["passed"]
    assert not torch_memory_budget.judged(dict(made), 41.0)["passed"]
    assert not torch_memory_budget.judged(made | {"torch_gib": 4.9}, 39.0)["passed"]


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


def test_failures_are_told() -> None:
    broken = small().with_settings(("no_such", "1"))
    assert "MBC021" in cap.planned(CARD, broken.plan)[0]["failed"]
    assert isinstance(BudgetError("MBC204", "x"), MbcError)


def test_curves_over_the_budget_and_their_pictures(planner: Planner) -> None:
    rows = [budget_curves.prepared(planner, f"small {share}", "small", small(), share) for share in (1.0, 0.5)]
    assert [row["share"] for row in rows] == [1.0, 0.5]
    assert rows[0]["over_unlimited"] == pytest.approx(0.0) and planner.shelf.has({"name": "small 1.0", **rows[0]})
    assert ("failed" in rows[1]) or rows[1]["passed"] == (rows[1]["over_bound"] <= 0.03)
    picture = budget_curves.time_picture([*rows, {**rows[0], "share": 0.8, "over_unlimited": 0.1}])
    assert picture.startswith("<svg") and "small" in picture and "small, 80: 110.00" in picture


def test_memory_over_the_step_is_drawn_by_kind() -> None:
    plan = CARD.unlimited(small()).plan()
    picture = budget_curves.memory_picture("a step", {"before": plan, "after": plan})
    kinds = [kind for kind, taken in memory_curve(plan, plan.train).bytes_by_kind.items() if max(taken) > 1e5]
    assert picture.count("<polygon") >= 2 * len(kinds) and all(f">{kind}<" in picture for kind in kinds)
    # The scale ends at the peak: some point lies at the top of each panel.
    tops = [float(y) for points in re.findall(r'points="([^"]+)"', picture) for y in re.findall(r",([\d.]+)", points)]
    assert min(tops) == pytest.approx(68.0, abs=4.0)
    ElementTree.fromstring(picture)
