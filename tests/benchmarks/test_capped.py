"""Rows under a cap from made-up plans and times, and the batches and depths that planning finds."""

from __future__ import annotations

import argparse
import json
import re
import sys
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
import stepping
import torch_memory_budget
from ahead import Shelf
from cap import GB, Card
from capped import Case, settled
from modules import Job, example

from mbc.errors import BudgetError, MbcError
from mbc.fit import Figures, Search
from mbc.plan.memory import memory_curve

CARD = Card("h200", None)


def small() -> Job:
    return example("alexnet", ("batch", "8"), ("size", "64"), ("width", "8"), ("classes", "10"))


def test_what_a_cap_counts_is_the_plan_without_the_bare_context() -> None:
    job = CARD.capped(small(), GB)
    plan = job.plan()
    assert plan.budget_bytes == GB + CARD.context_bytes
    p = plan.predictions
    assert CARD.counted_bytes(plan) == p.arena_bytes + p.overhead_bytes - CARD.context_bytes <= GB
    found, same = cap.planned(CARD, job)
    assert same is not None and same.offsets == plan.offsets
    assert found["counted_gb"] == CARD.counted_bytes(plan) / GB and found["arena_bytes"] == p.arena_bytes
    assert "MBC203" in cap.planned(CARD, CARD.capped(small(), 1))[0]["failed"]
    assert cap.planned(CARD, CARD.capped(small(), 1))[0]["needed_gb"] > 0
    plain = CARD.plain(small()).options
    assert plain.without == {"offload", "recompute", "split"} and plain.workspace_limit_bytes == 512 << 20


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


def test_plans_of_a_case_are_kept(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    made = {"name": "x y"} | capped.prepared(CARD, Case("x y", small(), 0.5, cap_share=1.0), shelf)
    assert made["plans"] == {"capped": made["cap_gb"] * GB, "free": 0} and made["compare"] == ["capped", "free"]
    assert made["passed"] and made["loss"] == pytest.approx(0.0, abs=0.02)
    assert shelf.has(made) and sorted(p.name for p in tmp_path.iterdir()) == [
        "x_y.capped.json.gz", "x_y.free.json.gz"]  # fmt: skip
    assert "plans" not in capped.prepared(CARD, Case("z", small(), 0.5, 1), shelf)
    assert not shelf.has({"name": "z", "plans": {"capped": 1}})


def test_the_largest_batch_that_the_card_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small().with_settings(("batch", "64"))
    free = CARD.unlimited(job).plan()
    assert CARD.free_here(job, free) is free
    p = free.predictions
    spec = SimpleNamespace(memory_bytes=p.overhead_bytes + p.arena_bytes * 3 // 4)
    monkeypatch.setattr(cap, "find_device", lambda gpu: spec)
    found = CARD.free_here(job, free)
    assert CARD.holds(found) and found.graph.batch % 8 == 0 and 8 <= found.graph.batch < 64
    spec.memory_bytes = p.overhead_bytes
    with pytest.raises(RuntimeError, match="holds no plan"):
        CARD.free_here(job, free)


def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], dict[str, Any]]:
    """What was prepared and timed, and the rows that are there afterwards."""
    log: list[str] = []

    def prepare(shelf: Shelf, name: str) -> dict[str, Any]:
        log.append(f"plan {name}")
        if name == "c":
            raise RuntimeError("no plan")
        shelf.path(name, "step").parent.mkdir(exist_ok=True)
        shelf.path(name, "step").touch()
        return {"plans": {"step": 5}, "predicted_ms": 2.0}

    def time_packages(folders: dict[str, Path], steps: int, cap_bytes: int) -> dict[str, Any]:
        log.append(f"time {steps} {cap_bytes}")
        return {what: {"step_ms": 1.0} for what in folders}

    monkeypatch.setattr(ahead, "need_gpu", lambda instead: None)
    monkeypatch.setattr(ahead, "time_packages", time_packages)
    monkeypatch.setattr(ahead, "_pool", lambda workers: Here())
    monkeypatch.setattr(ahead, "build", lambda plan, folder: "no compiler" if plan.name.startswith("b") else "")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    parser = argparse.ArgumentParser()
    ahead.add_arguments(parser)
    arguments = parser.parse_args([*words, "--plans", str(tmp_path / "plans")])
    tasks = [
        ahead.Task(name, lambda shelf, n=name: prepare(shelf, n), lambda row, timed: {**row, **timed["step"]})
        for name in ("a", "b", "c")
    ]
    ahead.drive("made_up", tasks, ["name"], arguments)
    path = tmp_path / f"made_up{'_planned' if '--plan-only' in words else ''}.json"
    return log, {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


class Here:
    """A pool that works at once, in this process."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Any, *given: Any) -> Any:
        return SimpleNamespace(result=lambda: work(*given), cancel=lambda: None)


def test_plans_first_and_steps_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    log, rows = driven(tmp_path, monkeypatch, "--plan-only")
    assert (
        log == ["plan a", "plan b", "plan c"] and rows["a"]["predicted_ms"] == 2.0 and "no plan" in rows["c"]["failed"]
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


def test_caps_that_are_shares() -> None:
    found = settled(CARD, Case("x", small(), 0.1, cap_share=0.5))
    assert found.cap_bytes == CARD.counted_bytes(CARD.unlimited(small()).plan()) // 2
    assert settled(CARD, Case("x", small(), 0.1, 3 * GB)).cap_bytes == 3 * GB


def test_the_batch_whose_plain_plan_first_exceeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capped, "_plain_bytes", lambda card, job, batch: GB * batch // 3)
    assert capped.accudnn_batch(CARD, small()) == 80  # 72 rows take just 24 GB


def test_cases_are_those_of_the_papers() -> None:
    found = {case.name: case for case in capped.cases()}
    assert len(found) == 14
    assert dict(found["capuchin resnet50"].job.settings)["batch"] == "760"
    assert "batch" not in dict(found["accudnn resnet152"].job.settings)
    assert {c.cap_bytes for c in found.values()} == {0, 8 * GB, 12 * GB, 16 * GB}


def probe_at(batch: int) -> Any:
    if batch > 100:
        raise BudgetError("MBC204", "too much", needed_bytes=1)
    return SimpleNamespace(batch=batch)


def test_the_largest_batch_that_is_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(plan: Any) -> Figures:
        # A step takes its batch in µs, and from 60 on a µs more for every further row.
        return Figures(plan.batch, 0, 0, 0, 0, 0, plan.batch + max(0.0, plan.batch - 60.0), 1.0, 1.0)

    monkeypatch.setattr("mbc.fit.figures", figures)
    found = largest_batch.fastest_enough(Search(probe_at, {}), float, 4, 100)
    # b + (b - 60) <= b / 0.7 up to b = 105: all of them; half the speed is too slow from 86 on.
    assert found is not None and found.at == 100
    monkeypatch.setattr(largest_batch, "LEAST_SPEED", 0.8)
    found = largest_batch.fastest_enough(Search(probe_at, {}), float, 4, 100)
    assert found is not None and found.at == 80
    monkeypatch.setattr(largest_batch, "LEAST_SPEED", 1.1)
    assert largest_batch.fastest_enough(Search(probe_at, {}), float, 4, 100) is None


@pytest.mark.parametrize("most", [595, 596, 1000, 3000])
def test_the_deepest_network(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Planned:
        def __init__(self, n3: int) -> None:
            self.n3 = n3

        def plan(self) -> None:
            if self.n3 > most:
                raise BudgetError("MBC204", "too much", needed_bytes=1)

    monkeypatch.setattr(deepest, "network", lambda n3, batch: n3)
    monkeypatch.setattr(Card, "capped", lambda self, n3, cap_bytes: Planned(n3))
    found = deepest.deepest(CARD, 16, 12 * GB, 8)
    assert found == 0 if most < 596 else most - 8 <= found <= most


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
    monkeypatch.setattr("mbc.device.gpu.open_context", lambda: None)
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
    assert "MBC021" in cap.planned(CARD, broken)[0]["failed"]
    assert isinstance(BudgetError("MBC204", "x"), MbcError)


def test_curves_over_the_budget_and_their_pictures() -> None:
    rows = budget_curves.curve(CARD, "small", small(), (1.0, 0.5))
    assert [row["share"] for row in rows] == [1.0, 0.5]
    assert rows[0]["over_unlimited"] == pytest.approx(0.0)
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
