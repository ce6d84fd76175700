"""A race: which contenders run, how they run, and the conclusions from their results. No other framework is needed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.bench import contender as process
from mbc.bench import race as racing
from mbc.bench.contender_messages import MBC, Contender, Job, Result, contenders
from mbc.bench.race import Entry, Race, compared, race, run_apart
from mbc.errors import MbcError
from mbc.ir.types import Precision
from tests.bench.jobs import job

OURS = Result(losses=(2.0, 1.0, 0.5), step_ms=10.0, spread_ms=0.1, steps=20, versions="mbc")


def test_settings_of_each_peer():
    names = {
        (peer, precision): [c.name for c in contenders(peer, precision, True)]
        for peer in ("torch", "torch.compile", "jax")
        for precision in Precision
    }
    assert names["torch", Precision.BF16] == ["torch (eager, channels_last)", "torch (CUDA graph, channels_last)"]
    assert len(names["torch", Precision.TF32]) == 4  # both layouts
    legacy = [c for c in contenders("torch", Precision.FP32, True) if c.environment]
    assert [c.graph for c in legacy] == [False, True]
    assert legacy[0].environment == (("TORCH_CUDNN_V8_API_DISABLED", "1"),)
    assert [(c.mode, c.graph) for c in contenders("torch.compile", Precision.FP16, True)] == [
        ("default", False), ("default", True), ("max-autotune", False),
    ]  # fmt: skip
    assert [c.mode for c in contenders("torch.compile", Precision.BF16, True, ["max-autotune"])] == ["max-autotune"]
    assert names["jax", Precision.FP32] == ["jax (jit)"]
    on_cpu = contenders("torch", Precision.BF16, False)
    assert [(c.channels_last, c.graph) for c in on_cpu] == [(False, False)]


@pytest.mark.parametrize(
    ("losses", "same"),
    [
        ((2.0, 1.0, 0.5), True),
        ((2.0, 1.0009, 0.5), True),
        ((2.0, 1.002, 0.5), False),
        ((2.0, float("nan"), 0.5), False),
        ((2.0, 1.0), False),
    ],
)
def test_losses_are_compared(losses: tuple[float, ...], same: bool):
    assert compared(Contender("torch"), replace(OURS, losses=losses), OURS, 1e-3).same == same


def test_losses_that_nobody_has_are_equal():
    nothing = replace(OURS, losses=(2.0, float("nan"), float("inf")))
    assert compared(Contender("torch"), nothing, nothing, 1e-3).apart == 0.0


def test_a_race(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    turns: list[str] = []
    ours_ms = iter((10.0, 11.0))

    def run(job: Job, contender: Contender, timeout_s: float) -> Result:
        turns.append(contender.name)
        if contender.peer == MBC:
            return replace(OURS, step_ms=next(ours_ms))
        if contender.peer == "jax":
            return Result(problem="jax is not installed")
        wrong = contender.graph
        return replace(OURS, step_ms=1.0 if wrong else 21.0, losses=(2.0, 1.5, 0.5) if wrong else OURS.losses)

    monkeypatch.setattr(racing, "run_apart", run)
    result = race(replace(job(tmp_path), device="cuda"), ("torch", "jax"), Precision.BF16, 60)
    assert turns == [
        "mbc", "torch (eager, channels_last)", "torch (CUDA graph, channels_last)", "jax (jit)", "mbc",
    ]  # fmt: skip
    assert result.ours.step_ms == 10.5 and result.ours.steps == 40 and result.drift == pytest.approx(0.1)
    assert not result.fair
    best = result.best("torch")
    assert best is not None and best.result.step_ms == 21.0, "what computes something else does not count"
    assert result.best("jax") is None


def test_a_peer_that_is_not_installed_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(
        racing,
        "run_apart",
        lambda job, contender, timeout_s: OURS if contender.peer == MBC else Result(problem="x is not installed"),
    )
    assert len(race(replace(job(tmp_path), device="cuda"), ("torch.compile",), Precision.TF32, 60).entries) == 1


def test_a_second_turn_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    answers = iter((OURS, replace(OURS, step_ms=20.0), Result(problem="took longer than 60 s")))
    monkeypatch.setattr(racing, "run_apart", lambda *_: next(answers))
    result = race(job(tmp_path), ("jax",), Precision.FP32, 60)
    assert result.ours.step_ms == OURS.step_ms and result.drift is None
    assert result.best("jax") is not None


def test_an_interrupted_race_keeps_its_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[str] = []

    def run(job: Job, contender: Contender, timeout_s: float) -> Result:
        asked.append(contender.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return OURS

    monkeypatch.setattr(racing, "run_apart", run)
    result = race(job(tmp_path), ("torch.compile", "jax"), Precision.BF16, 1.0)
    assert len(asked) == len(result.entries) + 1 == 3
    assert result.ours == OURS and result.entries[0].same and result.drift is None
    assert [entry.result.problem for entry in result.entries] == ["", "interrupted while it ran"]


def test_mbc_must_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(racing, "run_apart", lambda *_: Result(problem="died with 1: no such device"))
    with pytest.raises(MbcError) as caught:
        race(job(tmp_path), ("torch",), Precision.FP32, 60)
    assert caught.value.code == "MBC220" and "no such device" in caught.value.message


def test_in_a_process_of_its_own(tmp_path: Path):
    bench_job = job(tmp_path)
    result = run_apart(bench_job, Contender(MBC), 600)
    assert result.problem == "" and len(result.losses) == bench_job.losses and result.steps == 2
    assert result.losses == process.run(bench_job, Contender(MBC)).losses
    missing = run_apart(replace(bench_job, package=str(tmp_path / "nowhere.json")), Contender(MBC), 600)
    assert missing.problem.startswith("died with 1: ") and "MBC166" in missing.problem
    assert run_apart(bench_job, Contender(MBC), 0.01).problem == "took longer than 0 s"


def test_missing_frameworks_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "mbc.bench.jax_functions", raising=False)
    monkeypatch.delitem(sys.modules, "mbc.bench.jax_contender", raising=False)
    assert process.run(job(tmp_path), Contender("jax")).problem.startswith("jax is not installed")


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp64"])
def test_our_own_losses_do_not_depend_on_timing(tmp_path: Path, precision: str):
    bench_job = job(tmp_path, precision=precision)
    few, many = (process.run(replace(bench_job, blocks=blocks), Contender(MBC)) for blocks in (2, 3))
    assert few.losses == many.losses and few.losses[0] > few.losses[-1]


def test_the_fastest_of_a_peer():
    entries = tuple(
        Entry(Contender("torch", str(ms)), replace(OURS, step_ms=ms), 0.0, same)
        for ms, same in ((3.0, True), (2.0, True), (1.0, False))
    )
    best = Race(OURS, 0.0, 1e-3, entries).best("torch")
    assert best is not None and best.contender.variant == "2.0"
