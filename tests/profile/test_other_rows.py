"""Times for numbers of rows that were not measured. Tested are the properties kept and the kernels not offered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.kernels.base import Candidate
from mbc.profile.other_rows import MOST_TIMES, larger_size, larger_sizes, nearest_sizes, octave, resized, scaled
from tests.profile.profiles import FIRST, LAST, measurement


def engine(number: int, time_us: float, workspace_bytes: int = 0, layout=FIRST, **changes) -> Candidate:
    return replace(measurement(number, time_us, workspace_bytes, layout).candidate(), **changes)


def own(time_us: float, workspace_bytes: int = 0, name: str = "convolution", **changes) -> Candidate:
    return Candidate("mbc", name, (), (FIRST,) * 3, workspace_bytes, time_us, True, **changes)


@pytest.mark.parametrize(
    ("estimate_us", "time_us"),
    [(60.0, 60.0), (50.0, 50.0), (30.0, 50.0), (120.0, 100.0)],
    ids=["as the estimate falls", "like the rows", "not below the rows' share", "not above the larger size's"],
)
def test_a_time_falls_as_its_estimate_does(estimate_us: float, time_us: float):
    here = own(2 * estimate_us)
    (estimate,) = scaled((16, [own(100.0, accumulates=True, accumulate_us=110.0)]), 8, [own(200.0)], [here])
    assert estimate.time_us == pytest.approx(time_us)
    assert estimate.accumulate_us == pytest.approx(1.1 * time_us) and estimate.accumulates
    assert not estimate.measured


def test_offers_are_taken_unchanged_or_not_at_all():
    larger = (16, [own(100.0, 4096), own(10.0, name="other")])
    there = [own(200.0, 4096), own(20.0, name="other")]
    (estimate,) = scaled(larger, 8, there, [own(150.0, 8192)])  # the other kernel does not take 8 rows
    assert (estimate.name, estimate.time_us, estimate.workspace_bytes) == ("convolution", 75.0, 8192)
    assert scaled(larger, 8, [], [own(150.0)]) == ()


def test_engines_go_by_estimates_in_their_layouts_and_keep_their_workspace():
    bare, full, last = engine(-1, 900.0), engine(-1, 400.0, 512), engine(-1, 100.0, 512, LAST)
    here = [replace(c, time_us=t) for c, t in ((bare, 450.0), (full, 300.0), (last, 50.0))]
    legacy = replace(engine(6, 80.0, 1 << 20), provider="cudnn_legacy")
    estimates = scaled((16, [engine(3, 100.0, 1 << 30), legacy]), 8, [bare, full, last], here)
    assert [(c.settings, c.time_us, c.workspace_bytes) for c in estimates] == [
        (legacy.settings, pytest.approx(60.0), 1 << 20),
        (engine(3, 0.0).settings, pytest.approx(75.0), 1 << 30),
    ]
    assert scaled((16, [engine(3, 100.0)]), 8, [last], here) == ()  # nothing in these layouts


def test_only_a_size_above_all_that_was_asked_for_and_not_too_far():
    family = {size: (own(float(size)),) for size in (32, 64, 256)}
    assert larger_size(family, 31) == (32, family[32]) == larger_size(family, 32 // MOST_TIMES)
    assert (
        larger_size(family, 1) is larger_size(family, 32) is larger_size(family, 48) is larger_size(family, 512) is None
    )
    assert larger_size({}, 8) is None
    assert [size for size, _ in larger_sizes(family, 8)] == [32, 64]
    with pytest.raises(ValueError):
        scaled((32, family[32]), 32, [], [])


def test_sizes_are_grouped_by_octaves():
    assert [octave(times) for times in (1.4, 2, 2.1, 4, 8, 11, 16)] == [2, 2, 4, 4, 8, 16, 16]


MODEL_US = {16: 100.0, 32: 150.0, 64: 250.0}  # by rows


def modelled(*kernels: Candidate):
    """Return a function that estimates these kernels, with a workspace of one byte for each row."""
    return lambda rows: [replace(c, time_us=MODEL_US[rows], workspace_bytes=rows) for c in kernels]


def test_times_over_estimates_go_evenly_from_one_size_to_the_other():
    low, high = own(200.0, accumulates=True), own(2000.0, accumulates=True, accumulate_us=2200.0)
    (estimate,) = resized((16, [low]), (64, [high]), 32, modelled(low))
    assert estimate.time_us == pytest.approx(150.0 * (200.0 / 100.0 * 2000.0 / 250.0) ** 0.5)  # 32 is half way
    assert estimate.accumulate_us == pytest.approx(1.1 * estimate.time_us) and estimate.accumulates
    assert not estimate.measured and estimate.workspace_bytes == 32
    assert not resized((16, [low]), (64, [replace(high, accumulates=False)]), 32, modelled(low))[0].accumulates


def test_no_time_is_outside_of_those_of_both_sizes_nor_changes_by_more_than_the_rows():
    for low_us, high_us in ((100.0, 101.0), (101.0, 100.0)):
        (estimate,) = resized((16, [own(low_us)]), (64, [own(high_us)]), 32, modelled(own(0.0)))
        assert 100.0 <= estimate.time_us <= 101.0
    (more,) = resized((16, [own(100.0)]), None, 64, modelled(own(0.0)))
    assert more.time_us == pytest.approx(250.0)
    (fewer,) = resized(None, (64, [own(100.0)]), 16, modelled(own(0.0)))
    assert fewer.time_us == pytest.approx(40.0)
    steep = [replace(own(0.0), time_us=t) for t in (1.0, 1000.0)]
    (most,) = resized((16, [own(100.0)]), None, 64, lambda rows: steep[rows > 16 :][:1])
    (least,) = resized(None, (64, [own(100.0)]), 16, lambda rows: steep[rows > 16 :][:1])
    assert (most.time_us, least.time_us) == (pytest.approx(400.0), pytest.approx(25.0))


def test_each_kernel_goes_by_the_sizes_that_have_it():
    only_low, only_high = own(100.0, name="low"), own(300.0, name="high")
    estimates = resized((16, [only_low]), (64, [only_high]), 32, modelled(only_low, only_high))
    assert {c.name: c.time_us for c in estimates} == {"low": pytest.approx(150.0), "high": pytest.approx(180.0)}
    assert estimates[0].name == "low"
    assert resized((16, [only_low]), (64, [only_high]), 32, modelled(only_high))[0].name == "high"


def test_kernels_listed_only_by_cudnn_need_a_larger_size():
    estimate = engine(-1, 0.0)
    low, high = engine(3, 100.0, 1 << 10), engine(3, 200.0, 1 << 20)
    (result,) = resized((16, [low]), (64, [high]), 32, modelled(estimate))
    assert result.workspace_bytes == 1 << 20
    (result,) = resized((16, [low, engine(4, 1.0)]), (64, [high]), 32, modelled(estimate))
    assert result.settings == high.settings


def test_others_do_not_stand_in_for_the_fastest_of_a_smaller_size():
    slower = own(120.0)
    assert resized((16, [engine(3, 100.0), slower]), None, 64, modelled(slower, engine(-1, 0.0))) == ()
    (estimate,) = resized((16, [engine(3, 130.0), slower]), None, 64, modelled(slower, engine(-1, 0.0)))
    assert estimate.name == slower.name and estimate.time_us == pytest.approx(300.0)
    assert resized(None, None, 64, modelled(slower)) == ()


def test_the_nearest_sizes_are_those_with_a_kernel():
    family = {4: (own(4.0),), 16: (own(16.0),), 24: (), 64: (own(64.0),)}
    assert nearest_sizes(family, 32) == ((16, family[16]), (64, family[64]))
    assert nearest_sizes(family, 64) == ((16, family[16]), None)
    assert nearest_sizes(family, 2) == (None, (4, family[4]))
    assert nearest_sizes(family, 64 * MOST_TIMES + 1) == (None, None)
    assert nearest_sizes({}, 8) == (None, None)
