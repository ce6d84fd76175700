"""Measuring on a real GPU: results are right, a run can be resumed, and the planner finds what was measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mbc.ir.types import Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import OWN
from mbc.measure.gemm_trial import PRODUCT_KINDS
from mbc.measure.gpu import Gpu
from mbc.measure.measure import identity, measure
from mbc.measure.need import Need
from mbc.measure.offers import Offer
from mbc.measure.protocols import Harness
from mbc.measure.workbench import Bench
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import signature
from tests.kernels.cuda.cases import CASES
from tests.kernels.cuda.groups import groups_in

PASSES = ("convolution", "convolution_backward_data", "convolution_backward_filter")
LINEAR = ("linear", "linear_backward_data", "linear_backward_filter")
PRECISIONS = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)
SIZES = (18, 8, 3)


def request(kind: str, precision: Precision, groups: int = 1, rows: int = 18) -> Request:
    working = precision.working
    image = TensorType((rows, 16, 14, 14), working)
    weight = TensorType((32, 16 // groups, 3, 3), working)
    features = TensorType((rows, 32, 7, 7), working)
    attributes = Convolution((14, 14), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), groups)
    if kind == "convolution":
        return Request(kind, attributes, (image, weight), (features,), precision)
    if kind == "convolution_backward_data":
        return Request(kind, attributes, (features, weight), (image,), precision)
    return Request(kind, attributes, (image, features), (TensorType(weight.shape, precision.master),), precision)


def need(kind: str, precision: Precision, groups: int = 1, sizes: tuple[int, ...] = SIZES) -> Need:
    return Need(tuple(request(kind, precision, groups, rows) for rows in sizes), 1.0)


def linear(kind: str, precision: Precision) -> Need:
    def sized(rows: int) -> Request:
        x, w, y = (TensorType(shape, precision.working) for shape in ((rows, 64, 2, 2), (72, 256), (rows, 72)))
        inputs, result = {LINEAR[0]: ((x, w), y), LINEAR[1]: ((y, w), x)}.get(kind, ((x, y), w))
        if kind == LINEAR[2]:
            result = TensorType(w.shape, precision.master)
        return Request(kind, Linear((64, 2, 2)), inputs, (result,), precision)

    return Need(tuple(sized(rows) for rows in (64, 16)), 1.0)


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_pass_is_measured(gpu: Gpu, precision: Precision, groups: int, tmp_path: Path) -> None:
    needs = [need(kind, precision, groups) for kind in PASSES]
    path = tmp_path / "p.sqlite"
    summary = measure(gpu, needs, path)
    assert summary.failures == ()
    assert summary.measured + summary.ruled_out == len(PASSES) * len(SIZES) and summary.left == 0
    profile = read_profile(path)
    assert profile.identity == identity(gpu)
    assert 0 < profile.constants["graph_gap_us"] < 100
    for asked in needs:
        candidates = profile.candidates(asked.undivided)
        assert candidates and all(c.measured and 0 < c.time_us < 1e5 for c in candidates)
        wrong = [m for m in profile.measurements[signature(asked.undivided)] if m.refused]
        print(asked.undivided.kind, precision, groups, len(candidates), [m.refused for m in wrong])
        assert not [m for m in wrong if "unwritten" in m.refused or "beyond" in m.refused]
    providers = {c.provider for asked in needs for c in profile.candidates(asked.undivided)}
    assert "cudnn" in providers and ("cudnn_legacy" in providers or groups > 1)
    filters = profile.candidates(needs[2].undivided)
    assert any(c.accumulates and c.accumulate_us > 0 for c in filters)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_linear_layers_are_measured(gpu: Gpu, precision: Precision, tmp_path: Path) -> None:
    needs = [linear(kind, precision) for kind in LINEAR]
    path = tmp_path / "p.sqlite"
    assert measure(gpu, needs, path).failures == ()
    profile = read_profile(path)
    for asked in needs:
        candidates = profile.candidates(asked.undivided)
        assert "cublaslt" in {c.provider for c in candidates}
        assert all(0 <= m.error < 1e-2 for m in profile.measurements[signature(asked.undivided)] if not m.refused)
    tried = [m for m in profile.measurements[signature(needs[2].undivided)] if not m.refused and not m.dominated]
    assert tried and all(m.accumulates for m in tried)  # not tried where one run showed that it is dominated


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
def test_every_kernel_of_ours_passes_its_check(gpu: Gpu, precision: Precision) -> None:
    cases = [
        c
        for c in (*CASES, *groups_in(precision))
        if c.kind not in PRODUCT_KINDS and "nan" not in c.name and "wild" not in c.name
    ]
    refused: list[str] = []
    with Bench(gpu) as bench:
        for case in {case.kind: case for case in reversed(cases)}.values():
            asked = case.request(precision)
            offers = [Offer(c) for c in OWN.candidates(asked, bench.spec)]
            with bench.open(Need((asked,), 1.0)) as harness:
                refused += _refused(harness, asked, offers)
    assert refused == []


def _refused(harness: Harness, asked: Request, offers: list[Offer]) -> list[str]:
    refused: list[str] = []
    with harness.at(asked, offers) as place:
        for offer in offers:
            attempt = place.attempt(offer, math.inf)
            if attempt.refused or (offer.candidate.accumulates and not place.adds(attempt)):
                refused.append(f"{asked.kind} {offer.candidate.layouts}: {attempt.refused or 'does not add'}")
            else:
                assert place.time(attempt, 100.0).median_us > 0
    return refused


def test_a_run_is_resumed(gpu: Gpu, tmp_path: Path) -> None:
    needs = [need(kind, Precision.FP32, sizes=(18,)) for kind in PASSES]
    path = tmp_path / "p.sqlite"
    assert measure(gpu, needs[:1], path).measured == 1
    rest = measure(gpu, needs, path)
    assert (rest.already_measured, rest.measured) == (1, 2)
    assert measure(gpu, needs, path).measured == 0


def test_a_raised_limit_completes(gpu: Gpu, tmp_path: Path) -> None:
    asked, path = need(PASSES[0], Precision.FP32, sizes=(18,)), tmp_path / "p.sqlite"
    measure(gpu, [asked], path, workspace_limit_bytes=0)
    lean = read_profile(path).candidates(asked.undivided)
    assert lean and all(c.workspace_bytes == 0 for c in lean)
    measure(gpu, [asked], path)
    full = read_profile(path).candidates(asked.undivided)
    assert set(lean) < set(full) and any(c.workspace_bytes for c in full)


def test_time_is_bounded(gpu: Gpu, tmp_path: Path) -> None:
    needs = [need(kind, Precision.FP32, sizes=(18,)) for kind in PASSES]
    summary = measure(gpu, needs, tmp_path / "p.sqlite", measure_for_s=-1.0)
    assert (summary.measured, summary.left) == (0, 3)


def test_strict_fp32_is_exact(gpu: Gpu, tmp_path: Path) -> None:
    """FFT and Winograd count only if their error is small; tensor cores never count."""
    asked, path = need(PASSES[0], Precision.FP32, sizes=(18,)), tmp_path / "p.sqlite"
    measure(gpu, [asked], path)
    measurements = read_profile(path).measurements[signature(asked.undivided)]
    assert measurements and all("TENSOR_CORE" not in m.notes for m in measurements)
    assert all(m.error <= 5e-6 and math.isfinite(m.time_us) for m in measurements if not m.refused)
