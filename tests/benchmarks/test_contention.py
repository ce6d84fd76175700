"""Rows of GPUs that copy with one host, from made-up plans and times."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import contention
import record
from contention import Case, judged, measure
from modules import Job
from record import Results, results
from shelf import Shelf

from mbc.bench import ranks
from mbc.bench.job import Result
from mbc.source import Source
from tests.bench.jobs import MIXED

CASE = Case("tiny in half", Job("mixed", Source("mixed.mbc", MIXED)), 2, 1 / 2)
TIMES = {"one": 10.0, "aware": 10.5, "oblivious": 12.6}
PLANNED = {f"{what}_predicted_ms": time for what, time in TIMES.items()} | {
    "name": CASE.name, "gpus": 2, "gpu": "h100", "batch": 4, "plans": dict.fromkeys(TIMES, 0),
}  # fmt: skip


def test_losses_and_what_awareness_gains() -> None:
    row = judged(dict(PLANNED), "predicted_ms")
    assert row["loss"] == pytest.approx(0.05) and row["oblivious_loss"] == pytest.approx(0.26)
    assert row["gain"] == pytest.approx(1.2) and row["passed"]
    assert not judged(PLANNED | {"aware_predicted_ms": 11.5}, "predicted_ms")["passed"]
    assert not judged(PLANNED | {"oblivious_predicted_ms": 10.0}, "predicted_ms")["passed"]


def test_twice_the_batch_has_to_be_as_fast() -> None:
    row = {"plain_batch": 8, "twice_batch": 16, "plain_ms": 10.0, "twice_ms": 19.0}
    assert judged(dict(row), "ms")["speed"] == pytest.approx(20 / 19) and judged(dict(row), "ms")["passed"]
    assert not judged(row | {"twice_ms": 21.0}, "ms")["passed"]


def test_one_runs_alone_and_the_others_on_all_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, int, dict[str, str]]] = []

    @contextmanager
    def processes(count: int) -> Any:
        def submit(work: Any, plan: Path, place: Path) -> Future[str]:
            future: Future[str] = Future()
            future.set_result("")
            return future

        yield SimpleNamespace(submit=submit)

    def ran(job: Any, contender: Any, gpus: int, limit_s: float) -> Result:
        what = Path(job.package).name.rpartition("_")[2]
        asked.append((what, gpus, dict(job.settings)))
        return Result((1.0, 0.9), TIMES[what], 0.1, 10, peak_bytes=1 << 30, versions="x")

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(contention, "processes", processes)
    monkeypatch.setattr(contention, "local_gpus", lambda: 2 * (SimpleNamespace(name="H", uuid="GPU-1"),))
    monkeypatch.setattr(ranks, "run_alone", ran)
    monkeypatch.setattr(ranks, "run_ranks", ran)
    arguments = argparse.Namespace(gpus=2, workers=1, for_s=1e9, again=False, steps=10)
    planned = Results("contention_planned", {}, {CASE.name: dict(PLANNED)})
    measure([CASE], planned, results("contention"), Shelf(tmp_path), arguments)
    assert [(what, gpus, settings["batch"]) for what, gpus, settings in asked] == [
        ("one", 1, "2"), ("aware", 2, "4"), ("oblivious", 2, "4"),
    ]  # fmt: skip
    row = results("contention").rows[CASE.name]
    assert row["passed"] and row["gain"] == pytest.approx(1.2) and row["aware_predicted_over_measured"] == 1.0
    measure([CASE], planned, results("contention"), Shelf(tmp_path), arguments)
    assert len(asked) == 3, "what is there is not measured again"
