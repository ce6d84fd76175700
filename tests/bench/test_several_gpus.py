"""A contender on several GPUs, or on as many processes on the CPU; with PyTorch if it is installed."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mbc.bench import race as racing
from mbc.bench import several_gpus as ranks
from mbc.bench.contender_messages import MBC, Contender, Job, Result, Share, ddp_contenders
from mbc.bench.race import race, run_apart
from mbc.bench.several_gpus import combined, rank_environment, run_alone, run_ranks, stages
from mbc.ir.types import Precision
from tests.bench.jobs import job
from tests.ranks.test_mpi import AS_ROOT, with_mpi

OURS = Result(losses=(2.0, 1.0, 0.5), step_ms=10.0, spread_ms=0.1, steps=20, versions="mbc")
WHOLE = Contender("torch.compile", "whole", True, "default", True, bucket_mb=25)


def test_parts_of_a_mini_batch(tmp_path: Path):
    bench_job = job(tmp_path)
    whole = bench_job.inputs(1)
    parts = [replace(bench_job, share=Share(rank, 3, False)).inputs(1) for rank in range(3)]
    assert all(len(part["image"]) == 2 for part in parts)
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


def test_parts_of_unlike_gpus():
    shares = [Share(rank, 3, sizes=(5, 2, 1)) for rank in range(3)]
    assert [share.rows(8) for share in shares] == [slice(0, 5), slice(5, 7), slice(7, 8)]


def test_settings_of_ddp():
    contenders = ddp_contenders("torch.compile", Precision.BF16, True, ("default", "max-autotune"), (25, 1))
    assert [(c.mode, c.graph, c.bucket_mb, c.channels_last) for c in contenders] == [
        ("default", False, 0, True), ("max-autotune", False, 0, True),
        ("default", True, 25, True), ("default", True, 1, True),
    ]  # fmt: skip
    assert len({c.name for c in contenders}) == 4
    on_cpu = ddp_contenders("torch", Precision.FP32, False)
    assert not any(c.graph or c.mode or c.channels_last for c in on_cpu) and on_cpu[0].bucket_mb == 0


def test_less_and_less_is_captured():
    settings = [(c.mode, c.inner, c.graph) for _, c in stages(WHOLE)]
    assert settings == [("default", False, True), ("default", True, True), ("", False, True), ("default", False, False)]
    assert [c.mode for _, c in stages(replace(WHOLE, mode=""))] == [""]
    plain = replace(WHOLE, bucket_mb=0)
    assert list(stages(plain)) == [("", plain)]


def test_the_slowest_rank_and_the_fullest_gpu_count():
    slow = replace(OURS, step_ms=12.0, peak_bytes=5, first_step_s=1.0)
    full = replace(OURS, peak_bytes=7, device_bytes=9, first_step_s=2.0)
    result = combined([slow, full])
    assert (result.step_ms, result.peak_bytes, result.device_bytes, result.first_step_s) == (12.0, 7, 9, 2.0)
    assert combined([OURS, Result(problem="out of memory")]).problem == "rank 1: out of memory"
    assert "rank 1: has the losses" in combined([OURS, replace(OURS, losses=(2.0, 1.0, 0.4))]).problem
    nothing = replace(OURS, losses=(float("nan"),))
    assert combined([nothing, replace(nothing, losses=(float("nan"),))]).problem == ""
    assert result.each_ms == (12.0, 10.0)


def test_a_stage_that_fails_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[tuple[Contender, float]] = []

    def run(jobs: list[Job], contender: Contender, timeout_s: float) -> list[Result]:
        asked.append((contender, timeout_s))
        assert [bench_job.share.rank for bench_job in jobs] == [0, 1] and not any(
            bench_job.share.alone for bench_job in jobs
        )
        return [OURS, Result(problem="cannot capture") if len(asked) < 3 else OURS]

    monkeypatch.setattr(ranks, "_run", run)
    result = run_ranks(job(tmp_path), WHOLE, 2, 100.0)
    assert result.step_ms == OURS.step_ms and asked[2][0].mode == "" and asked[0][1] <= 60.0
    assert result.stage.startswith("captured, not compiled; captured, compiled around DDP failed: rank 1: cannot")
    monkeypatch.setattr(ranks, "_run", lambda *_: [OURS, Result(problem="cannot capture")])
    assert "compiled around DDP, not captured failed: rank 1" in run_ranks(job(tmp_path), WHOLE, 2, 100.0).problem


def test_the_environment_of_a_rank(monkeypatch: pytest.MonkeyPatch):
    for name in ("OMPI_COMM_WORLD_RANK", "RANK", "MBC_RANKS", "SLURM_PROCID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MBC_RESULTS", "kept")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = rank_environment(Share(1, 2, False, "/tmp/somewhere/meeting"), WHOLE)
    expected = {
        "MBC_RANK": "1",
        "MBC_RANKS": "2",
        "MBC_LOCAL_RANK": "1",
        "MBC_LOCAL_RANKS": "2",
        "MBC_JOB": "somewhere",
    }
    assert {k: v for k, v in environment.items() if k in expected} == expected
    assert (
        environment["MBC_RESULTS"] == "kept"
        and not {"OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID"} & environment.keys()
    )
    assert environment["NCCL_NVLS_ENABLE"] == "0" and environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    alone = rank_environment(Share(0, 2), replace(WHOLE, graph=False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    second = rank_environment(Share(1, 2), WHOLE)
    assert (alone["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("0", "5")
    assert "MBC_RANK" not in alone and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in alone


def test_mbc_alone_takes_its_own_package_and_ranks_that_of_all(tmp_path: Path):
    bench_job = job(tmp_path)
    half = tmp_path / "half"
    half.mkdir()
    settings = (*bench_job.settings, ("batch", "3"))
    alone = job(half, settings=settings)
    result = run_alone(replace(bench_job, alone_package=alone.package, package="nowhere.json"), Contender(MBC), 2, 300)
    assert result.problem == "" and result.steps == bench_job.timed_steps and result.step_ms > 0
    assert len(result.each_ms) == 2 and max(result.each_ms) == result.step_ms, (
        "each GPU by itself, and the slowest counts"
    )


def _running() -> list[str]:
    """The command lines of all processes."""
    command_lines: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command_lines.append(path.read_bytes().decode(errors="replace"))
    return command_lines


class TestMbc:
    """Two ranks of mbc on the CPU, started by mpiexec."""

    pytestmark = with_mpi

    def test_they_compute_the_step_of_all_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        for name, value in AS_ROOT.items():
            monkeypatch.setenv(name, value)
        folders = [tmp_path / name for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
        one, two = (job(folder, "mixed", gpus=gpus) for gpus, folder in enumerate(folders, 1))
        whole = run_apart(one, Contender(MBC), 300)
        result = run_ranks(two, Contender(MBC), 2, 300)
        assert result.problem == "" and whole.problem == ""
        assert result.losses == pytest.approx(whole.losses, rel=1e-5) and len(set(result.losses)) == len(result.losses)
        assert result.steps == two.timed_steps and len(result.each_ms) == 2 and max(result.each_ms) == result.step_ms
        assert "MBC147" in run_ranks(one, Contender(MBC), 2, 300).problem, "of all rows on each"

    def test_they_compute_the_result_of_ddp(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """Batch norm uses the rows of one rank, and each rank has its own dropout masks."""
        pytest.importorskip("torch")
        for name, value in AS_ROOT.items():
            monkeypatch.setenv(name, value)
        bench_job = job(tmp_path, gpus=2)
        assert {"batch_norm", "dropout"} <= {op.kind for op in bench_job.lowered().network.operations}
        result, ddp = (run_ranks(bench_job, Contender(peer), 2, 300) for peer in (MBC, "torch"))
        assert result.problem == "" and ddp.problem == "" and ddp.losses == pytest.approx(result.losses, rel=1e-5)

    def test_nothing_runs_on_when_the_time_is_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        for name, value in AS_ROOT.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TMPDIR", str(tmp_path))  # which their command lines tell of
        monkeypatch.setattr(ranks.tempfile, "tempdir", None)
        endless = replace(job(tmp_path, gpus=2), blocks=1_000_000)
        assert run_ranks(endless, Contender(MBC), 2, 5.0).problem == "rank 0: took longer than 5 s"
        assert not [line for line in _running() if str(tmp_path) in line]

    def test_faults_are_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        for name, value in AS_ROOT.items():
            monkeypatch.setenv(name, value)
        result = run_ranks(replace(job(tmp_path), package=str(tmp_path / "nowhere.json")), Contender(MBC), 2, 300)
        assert "MBC166" in result.problem and result.problem.startswith("rank ")


def test_a_rank_that_dies_ends_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ranks, "_GRACE_S", 0.0)
    script = "import os, sys, time; time.sleep(0 if os.environ['MBC_RANK'] == '1' else 500); sys.exit('no memory')"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {ranks.sys.executable} -c "{script}"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(ranks.sys, "executable", str(fake))
    result = run_ranks(job(tmp_path), Contender("torch"), 2, 300.0)
    assert "died with 1: no memory" in result.problem


def test_ranks_that_take_too_long(tmp_path: Path):
    assert run_ranks(job(tmp_path), Contender("torch"), 2, 0.01).problem == "rank 0: took longer than 0 s"


def test_a_race_on_two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    alone: list[str] = []

    def by_itself(job: Job, contender: Contender, gpus: int, timeout_s: float) -> Result:
        alone.append(contender.peer)
        return replace(OURS, step_ms=8.0)

    def together(job: Job, contender: Contender, gpus: int, timeout_s: float) -> Result:
        broken = contender.bucket_mb == 10
        return Result(problem="out of memory") if broken else replace(OURS, step_ms=16.0 if contender.mode else 10.0)

    monkeypatch.setattr(racing, "run_alone", by_itself)
    monkeypatch.setattr(racing, "run_ranks", together)
    result = race(
        replace(job(tmp_path), device="cuda"), ("torch.compile",), Precision.BF16, 60, modes=("default",), gpus=2
    )
    assert alone == [MBC, "torch.compile", "torch.compile"], "buckets are none of a setting on one GPU"
    assert result.efficiency() == 0.8 and [result.efficiency(e) for e in result.entries] == [0.5, 0.5, 0.5, None]
    assert result.batch == 6 and result.gpus == 2 and result.fair


@pytest.mark.parametrize("bucket_mb", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_two_ranks_of_ddp_compute_the_step_of_all_rows(tmp_path: Path, bucket_mb: int):
    pytest.importorskip("torch")
    bench_job = job(tmp_path, "mixed")  # without batch norm, whose statistics would be each rank's own
    whole = importlib.import_module("mbc.bench.torch_contender").run(bench_job, Contender("torch"))
    result = run_ranks(bench_job, Contender("torch", bucket_mb=bucket_mb), 2, 300)
    assert result.problem == "" and result.losses == pytest.approx(whole.losses, rel=1e-5)
    assert result.steps == bench_job.timed_steps and result.step_ms > 0
    half = run_alone(bench_job, Contender("torch"), 2, 300)
    assert half.problem == "" and abs(half.losses[1] / whole.losses[1] - 1) > 1e-4, "half of the rows has another loss"


def test_ranks_that_do_not_sum_their_gradients_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text(
        "import mbc.bench.torch_ranks as r\n"
        "class Unsummed(r.torch.nn.parallel.DistributedDataParallel):\n"
        "    def forward(self, *given):\n"
        "        with self.no_sync():\n"
        "            return super().forward(*given)\n"
        "r.torch.nn.parallel.DistributedDataParallel = Unsummed\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run_ranks(job(tmp_path, "mixed"), Contender("torch"), 2, 300)
    assert "gradients were not summed" in result.problem


@pytest.mark.exhaustive
@pytest.mark.parametrize("contender", [Contender("torch.compile", mode="default", bucket_mb=size) for size in (0, 1)])
def test_compiled_ddp(tmp_path: Path, contender: Contender):
    pytest.importorskip("torch")
    bench_job = job(tmp_path, "mixed")
    eager, compiled = (run_ranks(bench_job, c, 2, 300) for c in (Contender("torch"), contender))
    assert compiled.problem == "" and compiled.losses == pytest.approx(eager.losses, rel=1e-4)
