"""Kernels measured on a GPU that poses: requests, figures, and estimates for other GPUs that are fitted to them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import posed_kernels
import sanitized_step
from calibrate import add_missing, calibrate, device_of, text
from modules import example, small

from mbc.codegen.toolchain import find_toolchain
from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import find_spec
from mbc.hardware.target import find_device
from mbc.ir.types import Precision
from mbc.kernels.base import Request
from mbc.kernels.calibration import Shares, calibration, read_calibration, shares_of
from mbc.kernels.cuda import OWN
from mbc.kernels.statistics import convolution_of
from mbc.profile.model import Identity, Measurement, Profile
from mbc.profile.signature import signature
from tests.benchmarks.test_calibrate import made_up
from tests.kernels.statistics import with_statistics

FAMILY = f"mbc {Instruction.MMA_SYNC}"
TRUE, SLOWER = Shares(0.7, 0.9, 2.0), 1.25  # of the family; times of convolutions with statistics over those alone
TFLOPS = 550.0
H200_AS_SM_80 = find_device("h200@sm_80")
SMALL = example("resnet", ("batch", "32"), posed_kernels.HALF)


def requests() -> list[Request]:
    """Return convolutions that arithmetic limits, others that bytes limit, and both with statistics."""
    sizes = [(c, f, s, k) for c in (16, 64, 256) for f in (64, 128, 512) for s in (14, 28, 56) for k in (1, 3)]
    fused = [with_statistics((64, c, s, s), f, k, Precision.BF16) for c, f, s, k in sizes]
    return [*map(convolution_of, fused), *fused]


def posed(noise: float = 0.0) -> Profile:
    """Return an invented profile of an H200 as sm_80, with times by `TRUE` and `SLOWER`."""
    random, identity = np.random.default_rng(0), Identity("NVIDIA H200@sm_80", "sm_80", 132, "1", 91900, "2026-12-01")
    empty = Profile(identity, {}, constants={"mma_sync_tflops": TFLOPS, "graph_gap_us": 0.7})
    measurements: dict[str, tuple[Measurement, ...]] = {}
    for request in requests():
        measurements[signature(request)] = tuple(
            Measurement(
                c.provider, c.name, c.settings, c.layouts, c.workspace_bytes,
                e.time_us(TRUE) * (SLOWER if "statistics" in c.name else 1.0) * float(np.exp(random.normal(0, noise))),
                0.0, True, False, (), 0.0,
            )
            for c, e in OWN.estimated(request, device_of(empty))
            if e.family
        )  # fmt: skip
    return replace(empty, measurements=measurements)


def test_a_family_is_fitted_in_posing_and_each_kernel_by_one_factor() -> None:
    new, rows = add_missing(calibrate(made_up())[0], posed())
    alone, fused = new.shares["mbc implicit_gemm"], new.shares["mbc implicit_gemm_statistics"]
    for name in ("arithmetic", "memory"):
        assert getattr(alone, name) == pytest.approx(getattr(TRUE, name), rel=0.15)
        assert getattr(alone, name) / getattr(fused, name) == pytest.approx(SLOWER, rel=0.05)
    assert new.spreads["mbc implicit_gemm"].error < 0.1 and {"mbc implicit_gemm"} < {row["name"] for row in rows}
    assert new.posed == "NVIDIA H200@sm_80 (2026-12-01)" and read_calibration(text(new)).posed == new.posed


def test_another_profile_replaces_the_shares_of_a_family() -> None:
    old = calibrate(made_up())[0]
    stale = replace(
        old, shares={**old.shares, FAMILY: Shares(0.1, 0.1, 9.0), "mbc implicit_gemm": Shares(0.1, 0.1, 9.0)}
    )
    assert add_missing(stale, posed())[0].shares == add_missing(old, posed())[0].shares


def test_only_a_gpu_that_poses_fits_what_a_family_has_in_common() -> None:
    """A profile of the GPU as it is adds factors of single kernels to the shares that ship."""
    itself = replace(posed(), identity=replace(posed().identity, gpu=find_spec("a100-80").name))
    new, _ = calibrate(itself)
    ours, alone = calibration().shares[FAMILY], new.shares["mbc implicit_gemm"]
    assert new.shares[FAMILY] == ours and alone.arithmetic / alone.memory == pytest.approx(
        ours.arithmetic / ours.memory, rel=1e-3
    )
    assert add_missing(calibration(), itself)[0] == calibration()


@pytest.mark.parametrize("gpu", ["rtx-3060", "a10", "a100-80", "rtx-4090", "h200@64@sm_80"])
def test_gpus_without_a_profile_get_shares_of_their_own_peak_and_bandwidth(gpu: str) -> None:
    new, device = add_missing(calibration(), posed())[0], find_device(gpu)
    alone = [pair for request in requests()[:18] for pair in OWN.estimated(request, device) if pair[1].family]
    assert alone
    for candidate, effort in alone:
        assert new.estimate_us(effort) == pytest.approx(effort.time_us(TRUE), rel=0.2), candidate.name
    assert shares_of(new.shares, replace(alone[0][1], group="mbc never_measured_mma")) == new.shares[FAMILY]


def test_figures_of_kernels() -> None:
    rows = {row["name"]: row for row in posed_kernels.rows_of(posed())}
    row = rows["implicit_gemm"]
    assert row["requests"] == 27 and row["passed"]
    assert 0.6 < row["peak_share"] < 0.7 and 0.3 < row["memory_share"] < 0.9
    assert not row["refused"] and not rows["implicit_gemm_statistics"]["passed"]
    assert rows["implicit_gemm_statistics"]["peak_share"] == pytest.approx(row["peak_share"] / SLOWER, rel=0.05)


def test_a_kernel_with_wrong_results_does_not_pass() -> None:
    profile = posed()
    key, (measured, *_) = next(
        (key, held) for key, held in profile.measurements.items() if held[0].name == "implicit_gemm"
    )
    wrong = replace(measured, refused="output 0 is 2e-01 off")
    rows = posed_kernels.rows_of(replace(profile, measurements={**profile.measurements, key: (wrong,)}))
    row = next(row for row in rows if row["name"] == "implicit_gemm")
    assert row["requests"] == 26 and row["refused"] == 1 and not row["passed"]
    assert posed_kernels.rows_of(replace(profile, measurements={key: (wrong,)})) == [
        {"name": "implicit_gemm", "requests": 0, "refused": 1, "passed": False}
    ]


def test_steps_are_examined_as_older_gpus() -> None:
    cases = {name: case for name, case in sanitized_step.CASES.items() if case.pose}
    assert {case.pose for case in cases.values()} == {"sm_75", "sm_80", "sm_86", "sm_89"}
    plan = small(sanitized_step.job_of(cases["posed_sm_86"], "bf16", "h200"), 1).plan()
    assert plan.target.device.architecture == "sm_86"
    assert any(name.startswith("implicit_gemm") for name in sanitized_step.own_kernels(plan))


def test_only_requests_of_kernels_by_mma_sync_are_measured() -> None:
    kinds = {need.undivided.kind for need in posed_kernels.needs_of(replace(SMALL, gpu="h200@sm_80"), H200_AS_SM_80)}
    assert {"convolution", "convolution+batch_statistics"} <= kinds and "relu" not in kinds
    on_its_own = posed_kernels.needs_of(replace(SMALL, gpu="h200"), find_spec("h200"))
    assert {need.undivided.inputs[0].shape[1] for need in on_its_own} == {3}  # stems are by mma.sync on any GPU
    assert [job.gpu for job in posed_kernels.jobs("sm_86", "auto")] == ["auto@sm_86"] * 4


def test_the_probe_compiles(tmp_path: Path) -> None:
    nvcc = find_toolchain().nvcc
    if nvcc is None:
        pytest.skip("there is no nvcc")
    command = posed_kernels.peak_command(nvcc, "sm_80", tmp_path / "libpeak.so")
    assert "arch=compute_80,code=compute_80" in command
    subprocess.run(command, check=True)
