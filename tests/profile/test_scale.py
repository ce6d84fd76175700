"""Fewer rows than were measured: how a time falls, what is kept, and what is not offered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.kernels.base import Candidate
from mbc.profile.scale import MOST_TIMES, larger_size, larger_sizes, octave, scaled
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
    (found,) = scaled((16, [own(100.0, accumulates=True, accumulate_us=110.0)]), 8, [own(200.0)], [here])
    assert found.time_us == pytest.approx(time_us)
    assert found.accumulate_us == pytest.approx(1.1 * time_us) and found.accumulates
    assert not found.measured


def test_what_its_provider_offers_is_taken_as_it_is_offered_or_not_at_all():
    larger = (16, [own(100.0, 4096), own(10.0, name="other")])
    there = [own(200.0, 4096), own(20.0, name="other")]
    (found,) = scaled(larger, 8, there, [own(150.0, 8192)])  # the other one takes no 8 rows
    assert (found.name, found.time_us, found.workspace_bytes) == ("convolution", 75.0, 8192)
    assert scaled(larger, 8, [], [own(150.0)]) == ()


def test_engines_go_by_estimates_in_their_layouts_and_keep_their_workspace():
    bare, full, last = engine(-1, 900.0), engine(-1, 400.0, 512), engine(-1, 100.0, 512, LAST)
    here = [replace(c, time_us=t) for c, t in ((bare, 450.0), (full, 300.0), (last, 50.0))]
    legacy = replace(engine(6, 80.0, 1 << 20), provider="cudnn_legacy")
    found = scaled((16, [engine(3, 100.0, 1 << 30), legacy]), 8, [bare, full, last], here)
    assert [(c.settings, c.time_us, c.workspace_bytes) for c in found] == [
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


def test_sizes_are_told_apart_by_octaves():
    assert [octave(times) for times in (1.4, 2, 2.1, 4, 8, 11, 16)] == [2, 2, 4, 4, 8, 16, 16]
