"""Times of a GPU scaled to another GPU of its architecture, by bandwidth and peaks; they never count as measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mbc.hardware.spec import device_specs, find_spec
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Request
from mbc.ops.base import NoAttributes
from mbc.profile import locate, paths
from mbc.profile.edit import write_profile
from mbc.profile.locate import find_profile
from mbc.profile.other_gpu import Scaling, distance
from mbc.profile.paths import user_path
from tests.profile.profiles import GPU, measurement, profile, request

PCIE = find_spec("h100-pcie")
FROM_H200 = Scaling(GPU, PCIE)
IMAGE = TensorType((64, 256, 56, 56), DType.FP32)
RELU = Request("relu", NoAttributes(), (IMAGE,), (IMAGE,), Precision.FP32)


def time_us(scaling: Scaling, asked: Request, measured_us: float = 100.0) -> float:
    candidate = replace(measurement(1, measured_us).candidate(), accumulate_us=measured_us + 10)
    scaled = scaling.scaled(candidate, asked)
    assert not scaled.measured and scaled.accumulate_us > scaled.time_us
    assert replace(scaled, measured=True, time_us=measured_us, accumulate_us=measured_us + 10) == candidate
    return scaled.time_us


def test_memory_bound_kernels_scale_by_bandwidth() -> None:
    gap_us = GPU.launch_us
    assert time_us(FROM_H200, RELU) == pytest.approx(gap_us + (100 - gap_us) * GPU.copy_gb_s / PCIE.copy_gb_s)


def test_kernels_scale_by_peaks_the_more_they_multiply() -> None:
    few, many = (time_us(FROM_H200, request(64, channels=channels)) for channels in (4, 4096))
    ratios = [time_us(FROM_H200, RELU), GPU.launch_us + (100 - GPU.launch_us) * FROM_H200.arithmetic(Precision.FP32)]
    assert min(ratios) < many < few < max(ratios)
    assert many == pytest.approx(ratios[1], rel=0.02)


def test_a_launch_takes_no_less_than_its_gap() -> None:
    assert time_us(FROM_H200, RELU, GPU.launch_us / 2) == GPU.launch_us / 2


def test_the_range_is_that_of_either_limit_alone() -> None:
    spread = FROM_H200.spread(Precision.BF16)
    assert spread.low == pytest.approx(1 / spread.high)
    assert spread.high == pytest.approx((4300 / 1790) / (790 / 605))
    assert Scaling(GPU, GPU).spread(Precision.BF16).high == 1.0


def test_a_gpu_of_other_memory_is_planned_from_the_one_most_like_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(paths, "BUNDLED", tmp_path / "bundled")
    monkeypatch.setattr(locate, "local_gpus", lambda: ())
    asked = request(8)
    for name in ("h200", "h100"):
        spec = find_spec(name)
        identity = replace(profile({}).identity, gpu=spec.name)
        user_path(spec.name).parent.mkdir(parents=True, exist_ok=True)
        write_profile(profile({asked: [measurement(1, 100.0)]}, identity=identity), user_path(spec.name))
    located = find_profile(PCIE)
    assert located is not None and located.scaling is not None and located.scaling.source.name == find_spec("h100").name
    assert "scaled to NVIDIA H100 PCIe: estimates" in located.origin
    (candidate,) = located.candidates(asked)
    assert not candidate.measured
    assert candidate.time_us == pytest.approx(time_us(located.scaling, asked))
    assert find_profile(find_spec("a100-40")) is None, "an H100 tells nothing of an A100"
    own = replace(profile({}).identity, gpu=PCIE.name, multiprocessors=PCIE.multiprocessors)
    write_profile(profile({asked: [measurement(1, 130.0)]}, identity=own), user_path(PCIE.name))
    measured = find_profile(PCIE)
    assert measured is not None and measured.scaling is None
    assert [c.measured for c in measured.candidates(asked)] == [True]
    assert measured.similar is not None and measured.similar.candidates(asked) == located.candidates(asked)


def test_a_gpu_of_another_cudnn_completes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(paths, "BUNDLED", tmp_path / "bundled")
    monkeypatch.setattr(locate, "local_gpus", lambda: ())
    user_path(GPU.name).parent.mkdir(parents=True)
    for cudnn in (91900, 92000):
        for name, version in (("h200", 91900), ("h100", cudnn)):
            spec = find_spec(name)
            identity = replace(profile({}).identity, gpu=spec.name, cudnn=version)
            write_profile(profile({request(8): [measurement(1, 100.0)]}, identity=identity), user_path(spec.name))
        located = find_profile(GPU)
        assert located is not None and (located.similar is None) == (cudnn == 92000)


def test_gpus_are_most_like_themselves() -> None:
    for one in device_specs().values():
        assert min(device_specs().values(), key=lambda other: distance(one, other)).copy_gb_s == one.copy_gb_s
