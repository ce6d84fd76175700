"""Sizes between measured sizes: linear times, safe workspaces, and no extrapolation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.kernels.base import Candidate
from mbc.profile.interpolate import between, candidates_at
from mbc.profile.model import Extent
from tests.profile.profiles import LAST, measurement, profile, request


def candidate(engine: int, time_us: float, workspace_bytes: int = 0, **changes) -> Candidate:
    return replace(measurement(engine, time_us, workspace_bytes).candidate(), **changes)


def test_a_time_is_interpolated_between_its_neighbours():
    (candidate_between,) = between((8, [candidate(1, 10.0)]), (16, [candidate(1, 30.0)]), 10)
    assert candidate_between.time_us == 15.0
    assert not candidate_between.measured


def test_workspace_is_the_larger_and_a_property_must_be_of_both():
    low = candidate(1, 10.0, 4096, deterministic=False, accumulates=True)
    high = candidate(1, 20.0, 1024, deterministic=True, accumulates=False)
    (candidate_between,) = between((8, [low]), (16, [high]), 12)
    assert candidate_between.workspace_bytes == 4096
    assert not candidate_between.deterministic and not candidate_between.accumulates
    (candidate_between,) = between((8, [high]), (16, [low]), 12)
    assert candidate_between.workspace_bytes == 4096


def test_time_when_adding():
    adding = candidate(1, 10.0, accumulates=True, accumulate_us=12.0)
    unknown = candidate(1, 20.0, accumulates=True)
    assert between((8, [adding]), (16, [replace(adding, accumulate_us=16.0)]), 12)[0].accumulate_us == 14.0
    assert between((8, [adding]), (16, [unknown]), 12)[0].accumulate_us == 16.0  # as its time, 20
    assert between((8, [unknown]), (16, [unknown]), 12)[0].accumulate_us == 0.0


def test_only_candidates_of_both_neighbours_fastest_first():
    other_layout = replace(measurement(1, 1.0, 0, LAST).candidate())
    low = [candidate(1, 30.0), candidate(2, 10.0), candidate(3, 1.0)]
    high = [candidate(2, 20.0), candidate(1, 40.0), candidate(4, 1.0), other_layout]
    candidates = between((8, low), (16, high), 9)
    assert [dict(c.settings)["engine"] for c in candidates] == [2, 1]


@pytest.mark.parametrize("rows", [4, 8, 16, 20])
def test_nothing_is_extrapolated(rows):
    with pytest.raises(ValueError):
        between((8, [candidate(1, 10.0)]), (16, [candidate(1, 30.0)]), rows)


def test_a_family_knows_its_neighbours():
    family = {size: (candidate(1, float(size)),) for size in (2, 4, 16)}
    assert candidates_at(family, 1) == () == candidates_at(family, 17)
    assert candidates_at(family, 4) is family[4]
    assert [c.time_us for c in candidates_at(family, 3)] == [3.0]
    assert [c.time_us for c in candidates_at(family, 15)] == [15.0]
    assert candidates_at({}, 3) == ()


def test_a_profile_answers_for_sizes_between():
    refused = replace(measurement(3, 0.0), refused="wrong result")
    once = replace(measurement(2, 100.0), dominated=True)
    measured = profile(
        {
            request(16): [measurement(1, 32.0), replace(once, time_us=200.0), refused],
            request(4): [measurement(1, 8.0), once, measurement(3, 1.0)],
            request(8, channels=8): [measurement(1, 1.0)],
            request(8, "convolution_backward_filter"): [measurement(1, 1.0)],
        }
    )
    family = measured.family(request(5))
    assert list(family) == [4, 16]
    assert [c.time_us for c in family[16]] == [32.0, 200.0]
    candidates = measured.candidates(request(10))
    assert [(c.time_us, c.measured) for c in candidates] == [(20.0, False), (150.0, False)]
    assert [c.measured for c in measured.candidates(request(16))] == [True, True]
    assert measured.candidates(request(17)) == measured.candidates(request(3)) == ()


def test_a_size_where_everything_was_refused_offers_nothing_and_nothing_crosses_it():
    measured = profile(
        {request(4): [measurement(1, 8.0)], request(16): [measurement(1, 32.0)]},
        {request(8): Extent(1 << 30, "refused")},
    )
    assert measured.candidates(request(8)) == ()
    assert measured.candidates(request(6)) == measured.candidates(request(12)) == ()


def test_times_of_a_stale_profile_are_estimates():
    stale = replace(profile({request(8): [measurement(1, 8.0)]}), stale=True)
    assert [c.measured for c in stale.candidates(request(8))] == [False]
