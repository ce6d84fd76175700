"""Collectives in profiles: written, read, merged, shipped, and missing in older files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mbc.hardware.collective_times import CollectiveKind, CollectiveSlowdown, CollectiveTime, ConcurrentKernel, Link
from mbc.profile.edit import merged, shippable, write_profile
from mbc.profile.model import Overhead, Profile, collective_subject
from mbc.profile.read_profile import read_profile
from mbc.profile.writer import ProfileWriter
from tests.profile.profiles import IDENTITY, measurement, profile, request

REDUCE, GATHER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
SLOWDOWN = CollectiveSlowdown(ConcurrentKernel.GEMM, 2, Link.NVLINK, 8, 1.25, 1.5)


def time(kind: CollectiveKind, size_bytes: int, time_us: float) -> CollectiveTime:
    return CollectiveTime(kind, 2, Link.NVLINK, 8, size_bytes, time_us, time_us + 3)


HELD = replace(
    profile({request(): [measurement(3, 9.0)]}),
    collectives=(time(GATHER, 8, 5.0), time(REDUCE, 4, 9.5), time(REDUCE, 1024, 10.5)),
    collective_slowdowns=(SLOWDOWN,),
    overheads=(Overhead("collectives", collective_subject(2, 8), 99), Overhead("step", "net", 7)),
)


def same(a: Profile, b: Profile) -> bool:
    return (a.collectives, a.collective_slowdowns) == (b.collectives, b.collective_slowdowns)


def test_written_parts_are_read(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    write_profile(HELD, path)
    held = read_profile(path)
    assert same(held, HELD) and type(held.collectives[0].kind) is CollectiveKind
    assert held.overhead_bytes == 7  # a communicator's memory is separate
    assert (held.collective_bytes(2), held.collective_bytes(4)) == (99, 99)
    assert profile({}).collective_bytes(2) is None
    cost = held.collective_model(Link.NVLINK).cost(REDUCE, 1024, 2, 8)
    assert cost.measured and cost.time_us == 10.5
    assert not replace(held, stale=True).collective_model(Link.NVLINK).cost(REDUCE, 1024, 2, 8).measured


def test_a_second_measurement_replaces_the_first(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    write_profile(HELD, path)
    with ProfileWriter(path, IDENTITY) as writer:
        writer.record_collectives([time(REDUCE, 4, 8.0)], [replace(SLOWDOWN, kernel_ratio=1.1)])
        writer.record_collectives([], [])
    held = read_profile(path)
    assert {t.size_bytes: t.time_us for t in held.collectives if t.kind is REDUCE} == {4: 8.0, 1024: 10.5}
    assert [s.kernel_ratio for s in held.collective_slowdowns] == [1.1]


def test_merging_and_shipping():
    other = replace(HELD, collectives=(time(REDUCE, 4, 1.0), time(REDUCE, 64, 2.0)), collective_slowdowns=())
    both = merged(HELD, other)
    assert [(t.kind, t.size_bytes, t.time_us) for t in both.collectives] == [
        (GATHER, 8, 5.0), (REDUCE, 4, 9.5), (REDUCE, 64, 2.0), (REDUCE, 1024, 10.5)
    ]  # fmt: skip
    assert both.collective_slowdowns == (SLOWDOWN,)
    assert same(shippable(HELD), HELD)
