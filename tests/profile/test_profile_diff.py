"""Comparing profiles."""

from __future__ import annotations

from dataclasses import replace

from mbc.profile.model import Extent
from mbc.profile.profile_diff import Ratios, diff_profiles
from mbc.profile.signature import signature
from tests.profile.profiles import measurement, profile, request

A, B, C = request(8), request(16), request(32)


def test_equal_profiles():
    one = profile({A: [measurement(1, 10.0)]}, {B: Extent(1)})
    diff = diff_profiles(one, one)
    assert (diff.only_before, diff.only_after, diff.changes) == ((), (), ())
    assert diff.ratios == Ratios(1, 1.0, 1.0, 1.0)


def test_entries_of_one_profile_only():
    before = profile({A: [measurement(1, 1.0), measurement(2, 1.0)], B: [measurement(1, 1.0)]})
    after = profile({A: [measurement(1, 1.0), measurement(3, 1.0), measurement(4, 1.0)]}, {C: Extent(1)})
    diff = diff_profiles(before, after)
    assert diff.only_before == (signature(B),) and diff.only_after == (signature(C),)
    assert (diff.only_before_candidates, diff.only_after_candidates) == (1, 2)


def test_times_within_the_tolerance_are_no_change_and_the_largest_comes_first():
    before = [measurement(engine, 100.0) for engine in range(4)]
    after = [measurement(engine, time_us) for engine, time_us in enumerate((104.0, 106.0, 40.0, 200.0))]
    diff = diff_profiles(profile({A: before}), profile({A: after}))
    assert [c.ratio for c in diff.changes] == [0.4, 2.0, 1.06]
    assert diff.ratios is not None and diff.ratios.median == 1.05 and diff.ratios.count == 4
    assert diff.ratios.p10 < diff.ratios.median < diff.ratios.p90


def test_what_is_not_compared():
    fine, once = measurement(1, 10.0), replace(measurement(1, 90.0), dominated=True)
    refused = replace(measurement(1, 0.0), refused="wrong result")
    assert diff_profiles(profile({A: [fine]}), profile({A: [once]})).ratios is None
    assert diff_profiles(profile({A: [refused]}), profile({A: [refused]})).ratios is None
    diff = diff_profiles(profile({A: [fine]}), profile({A: [refused]}))
    assert (diff.refused_before, diff.refused_after, diff.changes) == (0, 1, ())
    assert diff_profiles(profile({A: [refused]}), profile({A: [fine]})).refused_before == 1
