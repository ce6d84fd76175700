"""Measuring on a real GPU: results are right, a run can be resumed, and the planner finds what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mbc.device.gpu import Gpu
from mbc.device.measure import identity, measure
from mbc.device.profile import signature
from mbc.device.profile_file import read_profile
from mbc.errors import MbcError
from mbc.ir.types import Precision, TensorType
from mbc.kernels.base import Request
from mbc.ops.convolution import Convolution

PASSES = ("convolution", "convolution_backward_data", "convolution_backward_filter")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    try:
        found = Gpu(memory_share=0.2)
    except MbcError as error:
        pytest.skip(error.message)
    with found:
        yield found


def request(kind: str, precision: Precision, groups: int = 1) -> Request:
    working = precision.working
    image = TensorType((18, 16, 14, 14), working)
    weight = TensorType((32, 16 // groups, 3, 3), working)
    features = TensorType((18, 32, 7, 7), working)
    attributes = Convolution((14, 14), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), groups)
    if kind == "convolution":
        return Request(kind, attributes, (image, weight), (features,), precision)
    if kind == "convolution_backward_data":
        return Request(kind, attributes, (features, weight), (image,), precision)
    return Request(kind, attributes, (image, features), (TensorType(weight.shape, precision.master),), precision)


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16])
def test_every_pass_is_measured(gpu: Gpu, precision: Precision, groups: int, tmp_path: Path) -> None:
    requests = [request(kind, precision, groups) for kind in PASSES]
    path = tmp_path / "p.sqlite"
    summary = measure(gpu, requests, path)
    assert summary.failures == ()
    assert (summary.measured, summary.left) == (3, 0)
    profile = read_profile(path)
    assert profile.identity == identity(gpu)
    for asked in requests:
        found = profile.candidates(asked)
        assert found and all(c.measured and 0 < c.time_us < 1e5 for c in found)
        refused = [m for m in profile.measurements[signature(asked)] if m.refused]
        assert not [m for m in refused if "result is" in m.refused or "unwritten" in m.refused]
    filters = profile.candidates(requests[2])
    assert any(c.accumulates for c in filters)


def test_a_run_is_resumed(gpu: Gpu, tmp_path: Path) -> None:
    requests = [request(kind, Precision.FP32) for kind in PASSES]
    path = tmp_path / "p.sqlite"
    assert measure(gpu, requests[:1], path).measured == 1
    rest = measure(gpu, requests, path)
    assert (rest.known, rest.measured) == (1, 2)
    assert measure(gpu, requests, path).measured == 0


def test_time_is_bounded(gpu: Gpu, tmp_path: Path) -> None:
    requests = [request(kind, Precision.FP32) for kind in PASSES]
    summary = measure(gpu, requests, tmp_path / "p.sqlite", measure_for_s=-1.0)
    assert (summary.measured, summary.left) == (0, 3)


def test_strict_fp32_has_no_tensor_core_engine(gpu: Gpu, tmp_path: Path) -> None:
    asked = request("convolution", Precision.FP32)
    path = tmp_path / "p.sqlite"
    measure(gpu, [asked], path)
    found = read_profile(path).measurements[signature(asked)]
    assert found and all("TENSOR_CORE" not in m.notes for m in found)
    assert all(m.error < 1e-5 for m in found if not m.refused)
