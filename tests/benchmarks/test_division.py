"""The best division by trying all, against mbc's menu; the layers; what is compared after a run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from deepbench_layers import BATCH, LAYERS, PASSES, Layer, Operation, operations
from division import brute_force_us, divided, menus, offers, partitions, undivided

from mbc.ir.types import Layout, Precision
from mbc.kernels.base import Candidate
from mbc.kernels.cudnn_legacy import MATHS
from mbc.ops import KINDS
from mbc.profile.model import Identity, Measurement, Profile, signature

FIRST, LAST = ((layout,) * 3 for layout in Layout)


def candidate(
    rows: int, workspace: int, time_us: float, layouts: tuple[Layout, ...] = FIRST, adds: float = 0.0
) -> Candidate:
    return Candidate("mbc", "made_up", (("rows", rows),), layouts, workspace, time_us, True, True, adds > 0, adds)


def test_partitions_are_all_multisets_of_a_sum() -> None:
    assert partitions(4, (4, 2, 1)).tolist() == [[0, 0, 4], [0, 1, 2], [0, 2, 0], [1, 0, 0]]
    assert len(partitions(256, tuple(256 >> k for k in range(9)))) == 692_004  # OEIS A000123
    assert len(partitions(6, (4,))) == 0


@pytest.mark.parametrize("sums", (False, True))
@pytest.mark.parametrize("seed", range(20))
def test_menu_and_brute_force_agree(seed: int, sums: bool) -> None:
    random = np.random.default_rng(seed)
    sizes = [32 >> k for k in range(6) if k == 0 or random.random() < 0.8]
    found = {
        layouts: {
            rows: [
                candidate(
                    rows,
                    int(random.integers(0, 100)),
                    float(rows**0.7 + random.random() * 10),
                    layouts,
                    float(random.random() * 10 + rows**0.7) if random.random() < 0.7 else 0.0,
                )
                for _ in range(int(random.integers(1, 4)))
            ]
            for rows in sizes
        }
        for layouts in (FIRST, LAST)
    }
    for limit in (10, 40, 100):
        best = divided(menus(found, 32, sums), limit)
        tried = brute_force_us(found, 32, sums, limit)
        assert tried == pytest.approx(best.time_us if best else float("inf"), rel=1e-9)
        whole = undivided(found, 32, limit)
        assert whole is None or tried <= whole.time_us


def test_brute_force_overwrites_once_and_then_adds() -> None:
    found = {FIRST: {2: [candidate(2, 9, 100.0)], 1: [candidate(1, 0, 1.0, adds=5.0)]}}
    assert brute_force_us(found, 2, True, 0) == pytest.approx(6.0)
    assert brute_force_us(found, 2, False, 0) == pytest.approx(2.0)
    # What cannot add cannot follow.
    alone = {FIRST: {1: [candidate(1, 0, 1.0)]}}
    assert brute_force_us(alone, 2, True, 0) == float("inf")
    assert brute_force_us(alone, 2, False, 0) == pytest.approx(2.0)


def test_offers_hold_what_was_measured_of_the_providers() -> None:
    operation = Operation(LAYERS[0], "F", Precision.FP32)

    def measured(provider: str, refused: str = "") -> Measurement:
        legacy = (("algorithm", 1), ("layout", 0), ("math", MATHS["FMA"]))
        settings = {"cudnn_legacy": legacy, "cudnn": (("engine", 0),)}.get(provider, ())
        return Measurement(provider, "convolution", settings, FIRST, 0, 1.0, 0.0, True, False, (), 0.0, refused)

    key = signature(operation.request())
    kept = (measured("cudnn_legacy"), measured("cudnn"), measured("mbc", refused="wrong"))
    profile = Profile(Identity("gpu", "sm_90", 1, "1", 91900, "2026-01-01"), {key: kept})
    requests = {rows: operation.request(rows) for rows in (BATCH, 128)}
    assert [c.provider for c in offers(profile, requests)[FIRST][BATCH]] == ["cudnn", "cudnn_legacy"]
    assert {c.provider for c in offers(profile, requests, ("cudnn_legacy",))[FIRST][BATCH]} == {"cudnn_legacy"}
    assert offers(profile, requests, ("mbc",)) == {}


def test_layers_are_distinct_and_their_requests_fit() -> None:
    shapes = [
        (layer.width, layer.height, layer.channels, layer.outputs, layer.kernel, layer.stride) for layer in LAYERS
    ]
    assert len(set(shapes)) == len(LAYERS)
    for operation in operations(Precision.BF16):
        for rows in operation.sizes:
            request = operation.request(rows)
            (made,) = KINDS[request.kind].shape(request.attributes, request.inputs)
            assert made == request.outputs[0]
    assert {o.which for o in operations(Precision.FP32) if o.layer.channels == 1} == {"F", "W"}
    assert all(PASSES[o.which].endswith("filter") == o.sums for o in operations(Precision.FP32))


def test_slices_start_aligned() -> None:
    odd = Layer("deepbench", "odd", 7, 7, 1, 1, 3, 1, 1)  # 49 elements a row
    assert Operation(odd, "F", Precision.FP32).sizes[-1] == 4
    assert Operation(odd, "F", Precision.BF16).sizes[-1] == 8
    even = Layer("deepbench", "even", 8, 8, 4, 4, 3, 1, 1)
    assert Operation(even, "W", Precision.FP32).sizes == tuple(256 >> k for k in range(9))


def test_compared_rows() -> None:
    from divided_run import COMPARED_BYTES, compared_rows, distance

    from mbc.ir.types import DType, TensorType

    small = TensorType((16, 8), DType.FP32)
    assert compared_rows(small) == list(range(16))
    large = TensorType((256, COMPARED_BYTES // 4), DType.FP32)  # one row is all that is allowed
    assert compared_rows(large) == [0, 128, 255]
    assert distance(np.full(4, 1.1), np.ones(4)) == pytest.approx(0.1)
    assert np.isnan(distance(np.array([np.nan]), np.ones(1)))
