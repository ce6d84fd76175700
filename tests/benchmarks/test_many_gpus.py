"""Rows of several GPUs from invented times, and from two processes of PyTorch on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import many_gpus
import record
from cap import Card
from many_gpus import Bench, Case, measure, summed_up
from modules import Job, example
from planner import Planner, processes
from record import Results, results
from shelf import Shelf

from mbc.bench import several_gpus as ranks
from mbc.bench.contender_messages import MBC, Contender, Result
from mbc.bench.contender_messages import Job as Raced
from mbc.source import Source
from tests.bench.jobs import MIXED

CASE = Case("tiny 2", Job("mixed", Source("mixed.mbc", MIXED), (("train.precision", "fp32"),)), 2)
TIMES = {"mbc": (10.0, 10.2), "ddp": (15.0, 20.0), 25: (12.0, 15.3), 100: (12.0, 14.0)}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the list of requests to the processes, whose answers are invented."""
    asked: list[str] = []
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "ROOT", tmp_path)  # without earlier measurements

    def answer(contender: Contender, place: int) -> Result:
        key = "mbc" if contender.peer == MBC else contender.bucket_mb or "ddp"
        return Result((1.0, 0.9), TIMES[key][place], 0.1, 10, peak_bytes=1 << 30, versions="x")

    def alone(job: Raced, contender: Contender, gpus: int, timeout_s: float) -> Result:
        asked.append(f"alone {contender.name}")
        return answer(contender, 0)

    def together(job: Raced, contender: Contender, gpus: int, timeout_s: float) -> Result:
        asked.append(f"{gpus} {contender.name} {Path(job.package).name}")
        return answer(contender, 1)

    monkeypatch.setattr(ranks, "run_alone", alone)
    monkeypatch.setattr(ranks, "run_ranks", together)
    return asked


def bench(**packages: Any) -> Bench:
    return Bench(2, "cuda", 10, (25, 100), 60.0, True, packages and {CASE.name: lambda: packages["found"]})


def test_peers_first_and_mbc_later(here: list[str], tmp_path: Path) -> None:
    measured = results("many_gpus")
    planned = Results("planned", {}, {"tiny 2 h200": {"one_predicted_ms": 9.5, "all_predicted_ms": 10.2}})
    measure(bench(), [CASE], planned, measured, 1e9, False)
    assert [line.split()[0] for line in here] == ["alone", "2", "alone", "2", "2"], "alone, buckets do not matter"
    row = json.loads((tmp_path / "many_gpus.json").read_text())["rows"][0]
    assert row["ddp_efficiency"] == 0.75 and row["whole_bucket"] == "100" and "mbc_all_ms" not in row
    here.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many_gpus, "spec_name", lambda: "h200")
        result = (tmp_path / "one", tmp_path / "all")
        measure(bench(found=result), [CASE], planned, results("many_gpus"), 1e9, False)
    assert here == ["alone mbc", "2 mbc all"], "what is there is not measured again"
    row = results("many_gpus").rows["tiny 2"]
    assert row["mbc_efficiency"] == pytest.approx(10 / 10.2) and row["over_whole"] == pytest.approx(14 / 10.2)
    assert row["over_ddp"] == pytest.approx(20 / 10.2) and row["all_predicted_over_measured"] == pytest.approx(1.0)
    assert row["mbc_images_s"] == pytest.approx(4e3 / 10.2)
    here.clear()
    measure(bench(), [CASE], planned, results("many_gpus"), 1e9, True)
    assert len(here) == 5, "--again"


def test_another_machine_and_other_code_begin_anew(here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Results("planned", {}, {})
    measure(bench(found=(Path("one"), Path("all"))), [CASE], planned, results("many_gpus"), 1e9, False)
    here.clear()
    held = results("many_gpus")
    held.rows["tiny 2"]["code"] = {"kernels": "older"}
    measure(bench(found=(Path("one"), Path("all"))), [CASE], planned, held, 1e9, False)
    assert here == ["alone mbc", "2 mbc all"], "DDP is none of mbc's code"
    here.clear()
    held.rows["tiny 2"]["machine"] = ["another"]
    measure(bench(), [CASE], planned, held, 1e9, False)
    assert len(here) == 5


def test_failures_are_reported_and_tried_last(here: list[str], capsys: Any) -> None:
    planned = Results("planned", {}, {})
    measure(bench(found="not built: nvcc"), [CASE], planned, results("many_gpus"), 1e9, False)
    row = results("many_gpus").rows["tiny 2"]
    assert row["failed"] == "mbc: not built: nvcc" and row["ddp_all_ms"] == 20.0 and not any("mbc" in a for a in here)
    measure(bench(), [CASE], planned, results("many_gpus"), -1.0, True)
    assert "parts are left: run this again" in capsys.readouterr().out


def test_requests_of_a_task() -> None:
    part = {"one_ms": 9.9, "all_ms": 10.0, "efficiency": 0.99, "images_s": 1.0, "all_gib": 1.0}
    part |= {"one_losses": (1.0,), "all_losses": (1.0,), "stage": ""}
    row = {"name": "resnet50 256", "each": 256, "gpus": 2, "machine": [], "precision": "bf16"}
    parts = {"mbc": part, "ddp": {**part, "all_ms": 16.1}, "whole 25": {**part, "all_ms": 14.6}}
    assert summed_up({**row, "parts": parts}, {})["passed"]
    assert not summed_up({**row, "parts": {**parts, "ddp": {**part, "all_ms": 15.9}}}, {})["passed"]
    assert not summed_up({**row, "parts": {"mbc": part}}, {})["passed"]
    apart = summed_up({**row, "parts": {**parts, "ddp": {**part, "all_losses": (1.1,)}}}, {})
    assert apart["losses_apart"] == pytest.approx(0.1) and not apart["same_mathematics"]


def test_sharded_states_are_compared_with_whole_ones() -> None:
    part = {"one_ms": 9.9, "all_ms": 10.2, "efficiency": 0.97, "images_s": 1.0, "all_gib": 2.0}
    part |= {"one_losses": (1.0,), "all_losses": (1.0,), "stage": ""}
    row = {"name": "vgg16 64 adamw sharded", "each": 64, "gpus": 2, "machine": [], "precision": "bf16"}
    row |= {"parts": {"mbc": part}}
    whole = {"mbc_all_ms": 10.0, "mbc_all_gib": 3.0}
    result = summed_up(row, {}, whole)
    assert result["passed"] and result["over_whole_states"] == pytest.approx(1.02) and result["saved_gib"] == 1.0
    assert not summed_up(row, {}, whole | {"mbc_all_ms": 9.8})["passed"]
    assert summed_up(row, {}, None)["passed"] is None
    cases = {case.name: case for case in many_gpus.cases()}
    assert set(many_gpus.ASKED) == set(cases) and not cases[row["name"]].has_peers
    settings = [dict(cases[name].job.settings) for name in (row["name"], "resnet152 32 fp32 adamw")]
    assert [s["train.shard_optimizer"] for s in settings] == ["true", "false"]
    assert [s["train.precision"] for s in settings] == ["bf16", "fp32"] and settings[1]["depth"] == "152"


def test_plans_for_one_gpu_and_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    small = example("alexnet", ("size", "64"), ("width", "8"), ("classes", "10"))
    case = Case("small 4", small, 4)
    with processes(1) as pool:
        planner = Planner(Card("h100", None), Shelf(tmp_path), pool)
        row: dict[str, Any] = {"name": many_gpus.shelved(case, "h100")} | many_gpus.prepared(planner, case, 2)
    assert row["plans"] == {"one": 0, "all": 0} and planner.shelf.has(row)
    assert row["one_predicted_ms"] > 0 and row["all_predicted_ms"] > 0
    batches = {what: case.sized(count).lowered().network.batch for what, count in (("one", 1), ("all", 2))}
    assert batches == {"one": 4, "all": 8}


@pytest.mark.exhaustive
def test_two_processes_of_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    created = Bench(2, "cpu", 10, (), 200.0, True, {})
    result = created.timed(CASE, Contender("torch", bucket_mb=1), 200.0)
    assert "failed" not in result and result["efficiency"] > 0 and len(result["all_losses"]) == 4
    assert result["images_s"] == pytest.approx(4e3 / result["all_ms"])
