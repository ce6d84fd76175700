"""Times of earlier kernel versions do not count, and are measured again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import KERNELS
from mbc.ops.base import NoAttributes
from mbc.profile.edit import merged, ship
from mbc.profile.kernel_versions import current
from mbc.profile.model import Extent, Measurement, Outdated, Profile
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import signature
from mbc.profile.writer import ProfileWriter
from tests.profile.profiles import FIRST, IDENTITY, LAST, profile

X, VECTOR = TensorType((8, 4, 8, 8), DType.FP32), TensorType((4,), DType.FP32)
REQUEST = Request("batch_statistics", NoAttributes(), (X,), (VECTOR, VECTOR), Precision.FP32)
KEY = signature(REQUEST)
TODAY = Measurement(
    "mbc", "batch_statistics", KERNELS["batch_statistics"].settings, (FIRST,) * 3, 0, 3.0, 0.1, True, False, (), 0.0
)
BEFORE = replace(TODAY, settings=(), time_us=50.0)
EXTENT = {REQUEST: Extent(1 << 30)}


def test_the_kernel_was_rewritten():
    assert TODAY.settings == (("version", KERNELS["batch_statistics"].version),) != BEFORE.settings


def test_an_earlier_edition_is_an_estimate_and_its_request_is_to_be_measured():
    today = current(profile({REQUEST: [BEFORE]}, EXTENT))
    assert KEY not in today.measurements and KEY not in today.extents
    (candidate,) = today.candidates(REQUEST)
    assert (candidate.settings, candidate.time_us, candidate.measured) == (TODAY.settings, 50.0, False)


def test_today_s_kernel_has_its_own_workspace():
    kernel, large = KERNELS["batch_statistics"], TensorType((256, 64, 56, 56), DType.FP32)
    vector = TensorType((64,), DType.FP32)
    request = Request("batch_statistics", NoAttributes(), (large,), (vector, vector), Precision.FP32)
    (candidate,) = current(profile({request: [BEFORE]}, {request: Extent(1 << 30)})).candidates(request)
    assert candidate.workspace_bytes == kernel.workspace(request, FIRST) > BEFORE.workspace_bytes


def test_calls_that_todays_kernel_refuses_are_left_out():
    refused, elsewhere = replace(BEFORE, refused="wrong"), replace(BEFORE, layouts=(FIRST,))
    assert current(profile({REQUEST: [refused, elsewhere]}, EXTENT)).candidates(REQUEST) == ()


def test_a_request_measured_again_counts():
    today = current(profile({REQUEST: [BEFORE, TODAY]}, EXTENT))
    assert today.measurements[KEY] == (TODAY,) and KEY in today.extents
    assert [c.time_us for c in today.candidates(REQUEST)] == [3.0]


def test_a_profile_of_today_is_left_as_it_is():
    of_today = profile({REQUEST: [TODAY]}, EXTENT)
    assert current(of_today) is of_today


def test_files_are_read_so(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    with ProfileWriter(path, IDENTITY) as writer:
        writer.record(REQUEST, (BEFORE,), Extent(1 << 30))
    assert [c.measured for c in read_profile(path).candidates(REQUEST)] == [False]


def test_merging_keeps_open_requests_and_drops_measured_ones():
    cudnn = replace(TODAY, provider="cudnn", name="norm", settings=(), time_us=20.0)
    before, today = (current(profile({REQUEST: [own, cudnn]}, EXTENT)) for own in (BEFORE, TODAY))
    nothing = profile({}, {})
    assert KEY not in merged(before, nothing).extents and KEY in merged(before, today).extents

    def times_us(held: Profile) -> list[float]:
        return sorted(m.time_us for rows in (held.measurements, held.earlier) for m in rows.get(KEY, ()))

    assert times_us(merged(nothing, before)) == [20.0, 50.0]
    assert times_us(merged(before, today)) == [3.0, 20.0]


def test_outdated_measurements_are_written_unchanged(tmp_path: Path):
    extent = Extent(1 << 20, "engines after the best 8", "2026-11-20T10:00:00", micro_batches_only=True)
    slow = replace(BEFORE, layouts=(LAST,) * 3, dominated=True)
    before = current(profile({REQUEST: [BEFORE, slow]}, {REQUEST: extent}))
    paths = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    for path in paths:
        assert ship(merged(before, profile({}, {})), path) == 1
    written = read_profile(paths[0])
    assert KEY not in written.extents and written.measurements == {}
    assert written.outdated == {KEY: Outdated((BEFORE,), extent)}
    with closing(sqlite3.connect(paths[1])) as connection:
        columns = "workspace_limit_bytes, left_out, date, micro_batches_only"
        assert connection.execute(f"SELECT {columns} FROM request").fetchall() == [
            (extent.workspace_limit_bytes, extent.left_out, extent.date, 1)
        ]


def test_each_side_may_have_measured_one_of_two_kernels():
    """One profile has today's statistics, another one a second kernel that was rewritten."""
    other = KERNELS["batch_normalize"]
    of_other = replace(TODAY, name=other.name, settings=other.settings)
    sides = [current(profile({REQUEST: rows}, EXTENT)) for rows in (
        [BEFORE, replace(of_other, settings=())], [TODAY, replace(of_other, settings=())], [BEFORE, of_other],
    )]  # fmt: skip
    for one, two in ((0, 1), (1, 0)):  # neither has measured the other kernel
        both = merged(sides[one], sides[two])
        assert both.measurements[KEY] == (TODAY,) and KEY not in both.extents
        assert [m.name for m in both.outdated[KEY].rows] == [other.name]
    for one, two in ((1, 2), (2, 1)):  # together they have
        both = merged(sides[one], sides[two])
        assert {m.name for m in both.measurements[KEY]} == {TODAY.name, other.name}
        assert KEY in both.extents and not both.outdated and not both.earlier


def test_a_kernel_that_could_not_add_when_it_was_measured_can_today():
    kernel = KERNELS["relu_backward_channel_sum"]
    before = Measurement("mbc", kernel.name, kernel.settings, (FIRST,) * 4, 0, 3.0, 0.1, True, False, (), 0.0)
    refused = replace(before, refused="wrong")
    rows = current(profile({REQUEST: [before, refused, TODAY]}, EXTENT)).measurements[KEY]
    assert [m.accumulates for m in rows] == [True, False, KERNELS[TODAY.name].accumulates]
