"""A step by PyTorch and by JAX gives mbc's results on the CPU; skipped if they are not installed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from mbc.bench import contender as process
from mbc.bench.contender_messages import MBC, Contender, Job, Result
from mbc.bench.race import TOLERANCES, compared
from mbc.ir.types import Precision
from mbc.runtime.machine import Memory
from mbc.runtime.module import Module
from tests.bench.jobs import job

# What rounding alone makes of four steps of these networks, at a hundred times the rate that is used for timing.
ROUNDING = {"fp64": 1e-6, "fp32": 2e-5, "tf32": 3e-3, "bf16": 2e-2, "fp16": 3e-3}


def assert_as_by(peer: str, bench_job: Job, precision: str) -> Result:
    """Assert that a peer computes the steps of a job as mbc does, and return mbc's result."""
    ours, theirs = (process.run(bench_job, Contender(who, "eager")) for who in (MBC, peer))
    assert theirs.problem == "" and theirs.steps == 2 and theirs.step_ms > 0
    comparison = compared(Contender(peer), theirs, ours, ROUNDING[precision])
    assert comparison.same, (ours.losses, theirs.losses)
    return ours


@pytest.mark.parametrize("peer", ["torch", "jax"])
@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, precision) for name in ("small", "mixed", "dense") for precision in ROUNDING), ("mobile", "fp32")],
)
def test_the_same_mathematics(tmp_path: Path, peer: str, name: str, precision: str):
    pytest.importorskip(peer)
    bench_job = job(tmp_path, name, precision)
    ours = assert_as_by(peer, bench_job, precision)
    assert ROUNDING[precision] <= TOLERANCES[Precision(precision)]
    assert len({round(loss, 4) for loss in ours.losses}) == bench_job.losses, "steps change something"


@pytest.mark.parametrize("peer", ["torch", "jax"])
@pytest.mark.parametrize("optimizer", ["adamw(weight_decay=0.5)", "sgd(momentum=0.9, weight_decay=0.5)"])
def test_groups_of_parameters(tmp_path: Path, peer: str, optimizer: str):
    pytest.importorskip(peer)
    bench_job = job(tmp_path, "grouped", "fp64", (("train.optimizer", optimizer),))
    ours = assert_as_by(peer, bench_job, "fp64")
    plain = job(tmp_path, "mixed", "fp64", (("train.optimizer", optimizer),))
    assert process.run(plain, Contender(MBC, "eager")).losses[1] != pytest.approx(ours.losses[1], rel=1e-4)


@pytest.mark.parametrize("peer", ["torch", "jax"])
def test_frozen_parameters(tmp_path: Path, peer: str):
    pytest.importorskip(peer)
    bench_job = job(tmp_path, "small", "fp64", (("train.frozen", '("*.bias", "first.*")'), ("train.clip_norm", "0.3")))
    ours = assert_as_by(peer, bench_job, "fp64")
    assert len({round(loss, 4) for loss in ours.losses}) == bench_job.losses, "steps change something"


@pytest.mark.parametrize("peer", ["torch", "jax"])
@pytest.mark.parametrize("precision", ["fp64", "fp16"])
def test_clipped_gradients(tmp_path: Path, peer: str, precision: str):
    pytest.importorskip(peer)
    limits = (("train.clip_norm", "0.3"), ("train.clip_value", "0.02"), ("train.optimizer", "sgd(weight_decay=0.1)"))
    bench_job = job(tmp_path, "small", precision, limits)
    ours = assert_as_by(peer, bench_job, precision)
    for alone in limits[:2]:
        other = process.run(job(tmp_path, "small", precision, (alone, limits[2])), Contender(MBC, "eager"))
        assert other.losses[1] != pytest.approx(ours.losses[1], rel=1e-5), "both limits matter"


@pytest.mark.parametrize("overhead", [None, 7])
def test_memory_of_mbc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overhead: int | None):
    monkeypatch.setattr(Module, "memory", Memory(1, 100, 2, overhead, 3, 4, prefetch_taken=20))
    result = process.run(job(tmp_path), Contender(MBC, "eager"))
    assert (result.peak_bytes, result.device_bytes) == (120, 120 + (overhead or 0))


def test_a_wrong_update_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    network = importlib.import_module("mbc.bench.torch_network").TorchNetwork
    right = network.optimizer
    monkeypatch.setattr(network, "optimizer", lambda self, rule, rate, **more: right(self, rule, 1.5 * rate, **more))
    bench_job = job(tmp_path)
    ours, theirs = (process.run(bench_job, Contender(who, "eager")) for who in (MBC, "torch"))
    assert theirs.losses[0] == pytest.approx(ours.losses[0], rel=1e-5)
    assert not compared(Contender("torch"), theirs, ours, TOLERANCES[Precision.FP32]).same


def test_channels_last_changes_nothing(tmp_path: Path):
    pytest.importorskip("torch")
    bench_job = job(tmp_path, "mixed")
    first, last = (process.run(bench_job, Contender("torch", "", channels_last=last)) for last in (False, True))
    assert first.losses == pytest.approx(last.losses, rel=1e-5)
