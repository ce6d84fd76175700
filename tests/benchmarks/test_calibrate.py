"""Calibration on an invented profile: the fit returns the shares and the error from which the profile was made."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from calibrate import add_missing, calibrate, checked, put_into, text
from calibrate_fit import ESTIMATING, LEAST_LAYERS, MANY_LAYERS, Sample, fit, fitted, samples, unfitted
from calibrate_sizes import interpolated, scaled_times

from mbc.hardware.spec import find_spec
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.calibration import ALL, INTERPOLATED, Shares, Spread, calibration, read_calibration, scaled_group
from mbc.kernels.cuda import OWN
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.profile.model import Identity, Measurement, Profile, calibrated
from mbc.profile.signature import read_signature, signature, with_rows

H200 = find_spec("h200")
TRUE = Shares(0.6, 0.8, 2.5)
BARE = Shares(0.05, 0.2)


def convolution(rows: int, channels: int, filters: int, size: int) -> Request:
    a = Convolution((size, size), (3, 3), (1, 1), (1, 1, 1, 1))
    image = TensorType((rows, channels, size, size), DType.BF16)
    weight = TensorType((filters, channels, 3, 3), DType.BF16)
    return Request(
        "convolution", a, (image, weight), (TensorType((rows, filters, size, size), DType.BF16),), Precision.BF16
    )


def relu(rows: int, channels: int) -> Request:
    y = TensorType((rows, channels, 14, 14), DType.FP32)
    return Request("relu", NoAttributes(), (y,), (y,), Precision.FP32)


def measurement(candidate, time_us: float, engine: int | None = None) -> Measurement:
    c = candidate
    settings = c.settings if engine is None or c.provider == OWN.name else (("engine", engine),)
    return Measurement(c.provider, c.name, settings, c.layouts, c.workspace_bytes, time_us, 0.0, True, False, (), 0.0)


def made_up(noise: float = 0.0, rows: tuple[int, ...] = (8, 16, 32, 64), bare: bool = True) -> Profile:
    random = np.random.default_rng(0)
    measurements: dict[str, tuple[Measurement, ...]] = {}
    sizes = [(c, f, s) for c in (32, 64, 128, 256) for f in (64, 128, 512) for s in (7, 14, 28, 56)]
    requests = [convolution(n, *size) for size in sizes for n in rows]
    requests += [relu(n, c) for n in rows for c in (64, 96, 128, 160, 192, 224, 256, 512)]
    for request in requests:
        result = [
            measurement(
                c, e.time_us(BARE if "no_workspace" in e.variant else TRUE) * float(np.exp(random.normal(0, noise))), 1
            )
            for p in ESTIMATING
            for c, e in p.estimated(request, calibrated(H200, None))
            if bare or "no_workspace" not in e.variant
        ]
        measurements[signature(request)] = tuple(result)
    return Profile(Identity(H200.name, "sm_90", 132, "1", 91900, "2026-01-01"), measurements)


@pytest.fixture(scope="module")
def exact() -> Profile:
    return made_up()


def test_shares_come_back(exact: Profile) -> None:
    result, _ = calibrate(exact)
    for key, shares in result.shares.items():
        wanted = BARE if "no_workspace" in key else TRUE
        if "no_workspace" not in key and "converted" not in key:  # there the rest is lost beside the arithmetic
            assert shares.starts == pytest.approx(wanted.starts, rel=0.15), key
            assert shares.memory == pytest.approx(wanted.memory, rel=0.1), key
        if not key.startswith("mbc"):
            assert shares.arithmetic == pytest.approx(wanted.arithmetic, rel=0.1), key
    assert {"cudnn convolution half straight", "cudnn convolution half no_workspace converted", "mbc relu"} <= set(
        result.shares
    )
    assert result.spreads[ALL].error < 0.03
    assert result.gpu == H200.name and result.requests == len(exact.measurements)


def test_the_error_is_that_of_layers_the_fit_has_not_seen(exact: Profile) -> None:
    sides: dict[str, set[bool]] = {}
    for sample in samples(exact, H200):
        sides.setdefault(signature(with_rows(read_signature(sample.request), 0)), set()).add(sample.tested)
    assert all(len(side) == 1 for side in sides.values())  # all sizes of a layer together
    assert {True} in sides.values() and {False} in sides.values()
    # Layers of the tested half take twice as long as those of the fit, so each has an error of 100 %.
    slower = {s.request for s in samples(exact, H200) if s.tested}
    wrong = {
        key: tuple(replace(m, time_us=2 * m.time_us) for m in result) if key in slower else result
        for key, result in exact.measurements.items()
    }
    spreads = calibrate(replace(exact, measurements=wrong))[0].spreads
    assert spreads["mbc relu"].error == pytest.approx(1.0, rel=0.05)
    assert spreads[ALL].median == pytest.approx(2.0, rel=0.05)


def test_noise_is_reported() -> None:
    spread = calibrate(made_up(noise=0.2))[0].spreads["cudnn convolution half"]
    assert 0.05 < spread.error < 0.2 < spread.error_high < 0.6
    assert spread.low < 0.95 and spread.high > 1.05


def test_six_layers_of_all_passes_fit_three_figures_and_six_of_one_pass_a_factor(exact: Profile) -> None:
    fitting = [s for s in samples(exact, H200) if not (s.tested or s.bare) and s.effort.key.startswith("cudnn ")]
    by_class: dict[str, dict[str, list[Sample]]] = {}
    for sample in fitting:
        by_class.setdefault(sample.effort.key, {}).setdefault(sample.layer, []).append(sample)
    key, layers = max(by_class.items(), key=lambda entry: len(entry[1]))
    few = [sample for layer in list(layers)[: MANY_LAYERS // 2] for sample in layers[layer]]
    shares = fitted(few)
    common = few[0].effort.common
    one, all_passes = shares[key], shares[common]
    prior = unfitted(few[0].effort)
    assert one.arithmetic / one.memory == pytest.approx(prior.arithmetic / prior.memory, rel=1e-3), "one factor"
    assert all_passes.arithmetic / all_passes.memory != pytest.approx(prior.arithmetic / prior.memory, rel=1e-3)


def test_rare_classes_are_not_fitted() -> None:
    result, _ = calibrate(made_up(bare=False))
    assert not [key for key in result.shares if "no_workspace" in key]
    assert "cudnn convolution half straight" in result.shares


def test_times_of_earlier_versions_count_for_kernels_with_unchanged_code() -> None:
    profile = made_up(rows=(8,))
    relus = {key: times for key, times in profile.measurements.items() if read_signature(key).kind == "relu"}
    others = {key: times for key, times in profile.measurements.items() if key not in relus}
    old = replace(profile, measurements=others, earlier=relus)
    assert not [s for s in samples(old, H200) if s.effort.group == "mbc relu"]
    assert set(samples(old, H200, ("relu",))) == set(samples(profile, H200))
    assert "mbc relu" in calibrate(old, ("relu",))[0].shares and "mbc relu" not in calibrate(old)[0].shares


def test_slower_candidates_and_refused_ones_do_not_count(exact: Profile) -> None:
    worse = {
        key: tuple(
            other
            for m in result
            for other in (m, replace(m, time_us=9 * m.time_us), replace(m, time_us=0.0, refused="it is wrong"))
        )
        for key, result in exact.measurements.items()
    }
    assert calibrate(replace(exact, measurements=worse))[0].shares == calibrate(exact)[0].shares


def test_a_fit_without_arithmetic_is_of_memory_alone() -> None:
    result = [s for s in samples(made_up(rows=(8,)), H200) if s.provider == "mbc"]
    assert fit(result).arithmetic == 1.0


def test_interpolation_is_compared_with_sizes_that_were_measured(exact: Profile) -> None:
    ratios = interpolated(exact)
    assert len(ratios) == 2 * 56  # the inner two of four sizes of 48 convolutions and 8 others
    assert calibrate(exact)[0].spreads[INTERPOLATED].count == len(ratios)
    linear = {key: result for key, result in exact.measurements.items() if read_signature(key).kind == "relu"}
    assert interpolated(replace(exact, measurements=linear)) == pytest.approx([1.0] * 16)
    assert not interpolated(made_up(rows=(8, 16)))


def test_larger_sizes_are_compared_with_smaller_ones(exact: Profile) -> None:
    """If all sizes take twice their estimated time, every size is scaled exactly from every other size."""
    slower = {
        key: tuple(measurement(c, 2 * c.time_us) for c in OWN.candidates(read_signature(key), H200))
        for key in exact.measurements
        if read_signature(key).kind == "relu"
    }
    result = list(scaled_times(replace(exact, measurements=slower), H200, 4))
    assert len(result) == 8 * (3 + 2)  # of four sizes: twice, and four times as large
    assert [size.ratio for size in result] == pytest.approx([1.0] * len(result))
    assert {(size.provider, size.times) for size in result} == {("mbc", 2), ("mbc", 4)}
    spreads = calibrate(exact)[0].spreads
    counts = [spreads[scaled_group("cudnn", times)].count for times in (2, 4, 8)]
    assert counts == [48 * 3, 48 * 2, 48]


def test_the_file_reads_back(exact: Profile) -> None:
    result, _ = calibrate(exact)
    again = read_calibration(text(result))
    assert again.shares == result.shares and again.gpu == result.gpu
    assert set(again.spreads) == set(result.spreads)
    assert again.spreads[ALL].low == pytest.approx(result.spreads[ALL].low, abs=1e-4)


def test_the_gap_between_launches_is_that_of_the_profile(exact: Profile) -> None:
    profile = replace(exact, constants={"graph_gap_us": 0.7})
    (_, effort), *_ = CUDNN_CONVOLUTION.estimated(convolution(8, 32, 32, 7), calibrated(H200, profile))
    assert effort.launch_us == 0.7
    assert calibration().estimate_us(effort) > 0.7


def test_nondeterministic_times_do_not_stand_for_deterministic_ones(exact: Profile) -> None:
    faster = {
        key: (*result, *(replace(m, time_us=m.time_us / 9, deterministic=False) for m in result))
        for key, result in exact.measurements.items()
    }
    assert calibrate(replace(exact, measurements=faster))[0].shares == calibrate(exact)[0].shares


def test_one_group_can_be_put_into_an_earlier_fit(exact: Profile) -> None:
    new, old = calibrate(exact)[0], calibration()
    put = put_into(old, new, "cudnn convolution half")
    assert put.shares["cudnn convolution half straight"] == new.shares["cudnn convolution half straight"]
    assert put.shares["mbc relu"] == old.shares["mbc relu"] != new.shares["mbc relu"]
    assert put.spreads["cudnn convolution half"] == new.spreads["cudnn convolution half"]
    assert put.gpu == old.gpu and put.requests == old.requests


def without(table: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the entries whose names begin with none of these names."""
    return {key: value for key, value in table.items() if not key.startswith(names)}


def test_missing_classes_are_added_to_an_earlier_fit(exact: Profile) -> None:
    fitted = calibrate(exact)[0]
    lacking = ("cudnn convolution half", "mbc relu")
    old = replace(fitted, shares=without(fitted.shares, *lacking), spreads=without(fitted.spreads, *lacking))
    old = replace(old, gpu="NVIDIA Z1", shares={key: Shares(0.5, 0.5, 5.0) for key in old.shares})
    new, rows = add_missing(old, exact)
    # Libraries without workspace do not change: a profile has only their decisive measurements.
    added = {"cudnn convolution half straight", "cudnn convolution half converted", "mbc relu", "mbc relu nchw"}
    assert set(new.shares) - set(old.shares) == added | {"mbc relu nhwc"}
    assert {key: new.shares[key] for key in added} == {key: fitted.shares[key] for key in added}
    assert {key: new.shares[key] for key in old.shares} == old.shares and new.gpu == "NVIDIA Z1"
    assert set(new.spreads) - set(old.spreads) == set(lacking) == {row["name"] for row in rows}
    assert {name: new.spreads[name] for name in old.spreads} == old.spreads
    assert add_missing(fitted, exact) == (fitted, [])


def test_a_group_of_mbcs_kernels_is_added_whole_or_not_at_all(exact: Profile) -> None:
    fitted = calibrate(exact)[0]
    layouts = ("mbc relu nchw", "mbc relu nhwc")
    assert set(layouts) <= set(fitted.shares)
    old = replace(fitted, shares=without(fitted.shares, *layouts))
    assert add_missing(old, exact) == (old, [])


def test_an_existing_spread_stays_and_few_requests_give_none(exact: Profile) -> None:
    fitted = calibrate(exact)[0]
    earlier = {**fitted.spreads, "mbc relu": Spread.of([3.0])}
    old = replace(fitted, shares=without(fitted.shares, "mbc relu"), spreads=earlier)
    reference_value, rows = add_missing(old, exact)
    assert reference_value.spreads == earlier and [row["name"] for row in rows] == ["mbc relu"]
    compared = list(dict.fromkeys(s.request for s in samples(exact, H200) if s.tested and s.effort.group == "mbc relu"))
    old = replace(old, spreads=without(old.spreads, "mbc relu"))
    for count in (LEAST_LAYERS - 1, LEAST_LAYERS):
        few = replace(exact, measurements=without(exact.measurements, *compared[count:]))
        new, rows = add_missing(old, few)
        assert "mbc relu" in new.shares
        assert ("mbc relu" in new.spreads) == (count == LEAST_LAYERS) == bool(rows)


def test_shares_that_ship_are_compared_with_all_requests() -> None:
    requests = [relu(n, 64) for n in (8, 16, 32)]
    measurements: dict[str, tuple[Measurement, ...]] = {}
    for request in requests:
        candidates = OWN.candidates(request, calibrated(H200, None))
        measurements[signature(request)] = tuple(measurement(c, 2 * c.time_us) for c in candidates)
    profile = Profile(Identity("NVIDIA H200", "sm_90", 132, "1", 91900, "2026-11-27"), measurements)
    rows = {row["name"]: row for row in checked(profile)}
    assert rows["mbc relu"]["requests"] == rows["mbc"]["requests"] == len(requests)
    assert rows["mbc relu"]["median"] == pytest.approx(2.0)
