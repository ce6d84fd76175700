"""Merging profiles, and the part of one that is shipped."""

from __future__ import annotations

import gzip
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.profile.edit import merged, ship, shippable, write_profile
from mbc.profile.model import WHOLE_EXTENT, Extent, Overhead
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import signature
from mbc.profile.writer import ProfileWriter
from tests.profile.profiles import IDENTITY, LAST, measurement, profile, request

OLD, NEW = "2026-11-01T00:00:00", "2026-11-20T00:00:00"
A, B, C = request(8), request(16), request(32)


def engines(measurements):
    return {dict(m.settings)["engine"]: m.time_us for m in measurements}


def test_merging_takes_the_union_and_the_newer_of_the_same():
    first = profile(
        {A: [measurement(1, 10.0), measurement(2, 20.0)], B: [measurement(1, 5.0)]}, {A: Extent(64, "", OLD)}
    )
    second = profile({A: [measurement(1, 11.0), measurement(3, 30.0)], C: []}, {A: Extent(32, "", NEW), C: Extent(1)})
    both = merged(first, second)
    assert engines(both.measurements[signature(A)]) == {1: 11.0, 2: 20.0, 3: 30.0}
    assert engines(both.measurements[signature(B)]) == {1: 5.0}
    assert both.extents[signature(C)] == Extent(1)
    assert both.extents[signature(A)] == Extent(64, "", NEW)
    assert both.source == "p.sqlite and p.sqlite"
    assert engines(merged(second, first).measurements[signature(A)]) == {1: 11.0, 2: 20.0, 3: 30.0}


def test_the_first_can_be_made_to_win():
    first = profile({A: [measurement(1, 10.0)]}, {A: Extent(64, "", OLD)})
    second = profile({A: [measurement(1, 11.0)]}, {A: Extent(64, "", NEW)})
    assert engines(merged(first, second, newer_wins=False).measurements[signature(A)]) == {1: 10.0}
    # and does so where both are equally old
    assert engines(merged(first, replace(second, extents=first.extents)).measurements[signature(A)]) == {1: 10.0}


def test_single_runs_give_way_to_careful_measurements():
    once = replace(measurement(1, 90.0), dominated=True)
    careful = profile({A: [measurement(1, 70.0)]}, {A: Extent(64, "", OLD)})
    both = merged(profile({A: [once]}, {A: Extent(64, "", NEW)}), careful)
    assert engines(both.measurements[signature(A)]) == {1: 70.0}


def test_omissions_are_reported_as_far_as_they_still_hold():
    wide, wider = Extent(64, "engines after the best 8"), Extent(64, "engines compiled at run time")
    narrow = Extent(32, "candidates that need more than 32 B")
    both = merged(profile({A: []}, {A: wide}), profile({A: []}, {A: wider}))
    assert both.extents[signature(A)].left_out == "engines after the best 8; engines compiled at run time"
    assert merged(profile({A: []}, {A: wide}), profile({A: []}, {A: narrow})).extents[signature(A)] == wide
    parts = Extent(64, "candidates in layouts that gain nothing", micro_batches_only=True)
    assert merged(profile({A: []}, {A: wide}), profile({A: []}, {A: parts})).extents[signature(A)] == wide
    assert merged(profile({A: []}, {A: narrow}), profile({A: []}, {A: parts})).extents[signature(A)] == parts


def test_constants_and_overheads_of_both():
    first = replace(profile({}), overheads=(Overhead("step", "a", 1),), constants={"graph_gap_us": 1.0})
    second = replace(
        profile({}),
        overheads=(Overhead("step", "a", 2), Overhead("step", "b", 3)),
        constants={"graph_gap_us": 2.0, "x": 1},
    )
    both = merged(first, second)
    assert set(both.overheads) == {Overhead("step", "a", 1), Overhead("step", "b", 3)}
    assert both.constants == {"graph_gap_us": 1.0, "x": 1}


@pytest.mark.parametrize("change", [{"gpu": "Another GPU"}, {"multiprocessors": 66}, {"cudnn": 92800}])
def test_unlike_profiles_are_not_merged(change):
    with pytest.raises(MbcError, match="never mixed") as caught:
        merged(profile({}), profile({}, identity=replace(IDENTITY, **change), source="other.sqlite"))
    assert caught.value.code == "MBC076"
    assert "other.sqlite" in caught.value.message


def test_patches_of_cudnn_and_drivers_may_differ():
    assert merged(profile({}), profile({}, identity=replace(IDENTITY, cudnn=91902, driver="590")))


def test_shipping_keeps_unbeaten_candidates(tmp_path: Path):
    slow_and_large, other_layout = measurement(4, 30.0, 8192), measurement(5, 40.0, 0, LAST)
    loose = replace(measurement(6, 1.0), deterministic=False)
    once = replace(measurement(7, 0.5), dominated=True)
    refused = replace(measurement(8, 0.0), refused="wrong result")
    measurements = [
        measurement(1, 20.0),
        measurement(2, 10.0, 4096),
        slow_and_large,
        other_layout,
        loose,
        once,
        refused,
    ]
    whole = replace(
        profile({A: measurements, B: [refused]}, {B: Extent(7, "all")}), overheads=(Overhead("step", "x", 300),)
    )
    target = tmp_path / "shipped.sqlite"
    assert ship(whole, target) == 4
    shipped = read_profile(target)
    assert set(engines(shipped.measurements[signature(A)])) == {1, 2, 5, 6}
    assert shipped.overhead_bytes == 300
    # The absence of a usable candidate is recorded, too, so that nobody tries again.
    assert shipped.extents[signature(B)].workspace_limit_bytes == 7 and signature(B) not in shipped.measurements


def test_estimated_requests_are_merged_and_shipped(tmp_path: Path):
    measured = profile({A: [measurement(1, 10.0)]}, {A: Extent(64)})
    left = replace(measured, left_to_estimate=frozenset({signature(B)}))
    ship(merged(measured, left), tmp_path / "left.sqlite.gz")
    assert read_profile(tmp_path / "left.sqlite.gz").left_to_estimate == {signature(B)}
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(gzip.decompress((tmp_path / "left.sqlite.gz").read_bytes()))
        dates = connection.execute("SELECT date FROM request WHERE left_out != ''").fetchall()
    assert dates == [(IDENTITY.date,)]  # not that of today: the same bytes each time
    ship(merged(left, profile({B: [measurement(1, 5.0)]}, {B: Extent(64)})), tmp_path / "measured.sqlite.gz")
    assert not read_profile(tmp_path / "measured.sqlite.gz").left_to_estimate


def test_kernels_that_add_faster_are_shipped_too():
    adds = replace(measurement(1, 10.0), accumulates=True, accumulate_us=15.0)
    adds_faster = replace(measurement(2, 11.0), accumulates=True, accumulate_us=12.0)
    adds_slower = replace(measurement(3, 11.0), accumulates=True, accumulate_us=16.0)
    overwrites = measurement(4, 11.0)
    part = shippable(profile({A: [adds, adds_faster, adds_slower, overwrites]}))
    assert set(engines(part.measurements[signature(A)])) == {1, 2}
    only_overwrites_faster = [measurement(4, 9.0), adds]
    assert set(engines(shippable(profile({A: only_overwrites_faster})).measurements[signature(A)])) == {1, 4}


def test_kernels_without_emulated_fp32_are_shipped_too():
    emulated = replace(measurement(1, 10.0), provider="mbc", name="fp32_emulated_conv")
    strict, slower = measurement(2, 20.0), measurement(3, 30.0)
    assert set(engines(shippable(profile({A: [emulated, strict, slower]})).measurements[signature(A)])) == {1, 2}
    assert set(engines(shippable(profile({A: [measurement(2, 9.0), emulated]})).measurements[signature(A)])) == {2}


def test_a_profile_is_written_in_one_stroke(tmp_path: Path):
    target = tmp_path / "p.sqlite"
    write_profile(profile({A: [measurement(1, 1.0)], B: []}), target)
    write_profile(profile({A: [measurement(2, 2.0)]}), target)
    assert set(engines(read_profile(target).measurements[signature(A)])) == {2}
    assert read_profile(target).extents.keys() == {signature(A)}
    assert read_profile(target).extents[signature(A)].workspace_limit_bytes == WHOLE_EXTENT.workspace_limit_bytes
    with pytest.raises(MbcError) as caught:
        write_profile(profile({A: [measurement(1, 1.0)]}), target / "not" / "a folder")
    assert caught.value.code == "MBC072"
    assert [p.name for p in tmp_path.iterdir()] == ["p.sqlite"]
    with pytest.raises(AttributeError):
        write_profile(replace(profile({A: [None]})), target)  # pyright: ignore[reportArgumentType]
    assert set(engines(read_profile(target).measurements[signature(A)])) == {2}
    assert [p.name for p in tmp_path.iterdir()] == ["p.sqlite"]


def test_a_packed_profile_is_the_same_profile(tmp_path: Path):
    whole = profile({A: [measurement(1, 10.0)], B: []}, {A: Extent(64, "why", OLD), B: Extent(1, "", OLD)})
    packed, plain = tmp_path / "p.sqlite.gz", tmp_path / "p.sqlite"
    write_profile(whole, packed)
    write_profile(whole, plain)
    assert replace(read_profile(packed), source="") == replace(read_profile(plain), source="")
    before = packed.read_bytes()
    write_profile(whole, packed)
    assert packed.read_bytes() == before and len(before) < plain.stat().st_size / 4
    packed.write_bytes(before[:-20])
    with pytest.raises(MbcError, match="is damaged") as caught:
        read_profile(packed)
    assert caught.value.code == "MBC073"


def test_a_packed_profile_that_cannot_be_read_or_written(tmp_path: Path):
    (tmp_path / "folder.gz").mkdir()
    for name in ("missing.sqlite.gz", "folder.gz"):
        with pytest.raises(MbcError) as caught:
            read_profile(tmp_path / name)
        assert caught.value.code == "MBC072"
    packed = tmp_path / "p.sqlite.gz"
    for exists in (False, True):
        with pytest.raises(MbcError, match="nothing can be added to it") as caught:
            ProfileWriter(packed, IDENTITY)
        assert caught.value.code == "MBC072" and "mbc profile ship" in caught.value.remedy
        assert packed.exists() == exists
        write_profile(profile({A: [measurement(1, 10.0)]}), packed)
    assert signature(A) in read_profile(packed).measurements
