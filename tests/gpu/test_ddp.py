"""PyTorch's DDP on two GPUs computes the step of all rows, in every variant that `mbc bench --gpus` may run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mbc.bench import several_gpus as ranks
from mbc.bench.contender_messages import Contender
from mbc.measure.fleet import visible_gpus
from tests.bench.jobs import job

WHOLE = Contender("torch.compile", mode="default", graph=True, bucket_mb=1)
VARIANTS = {"as documented": replace(WHOLE, graph=False, bucket_mb=0)} | dict(ranks.stages(WHOLE))


@pytest.mark.parametrize("name", VARIANTS)
def test_two_gpus_compute_the_step_of_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    if len(visible_gpus()) < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setattr(ranks, "stages", lambda contender: [(name, contender)])  # this one, or none
    bench_job = replace(job(tmp_path, "mixed"), device="cuda")  # without batch norm
    whole = ranks.run_alone(bench_job, Contender("torch"), 1, 120)
    result = ranks.run_ranks(bench_job, VARIANTS[name], 2, 200)
    with capsys.disabled():
        print(f"\n{name}: {result.problem or f'{result.step_ms:.3f} ms'}", flush=True)
    assert result.problem == "" and result.losses == pytest.approx(whole.losses, rel=1e-3)
