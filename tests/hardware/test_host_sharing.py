"""The share of the host link that each of several GPUs gets, measured or assumed, and the memory that all may pin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.hardware.host_sharing import (
    HOST_GB_S,
    SharedRates,
    check_pinned,
    measured_sharing,
    shared_link,
    sharing_constants,
)
from mbc.hardware.spec import find_spec
from mbc.hardware.streams import Stream
from mbc.hardware.transfers import estimated_link, link_constants
from mbc.profile.edit import write_profile
from mbc.profile.model import Profile, calibrated, for_ranks
from mbc.profile.read_profile import read_profile
from tests.hardware.test_transfers import IDENTITY, LINK

MEASURED = (SharedRates(2, 20.0, 24.0, 10.0, 12.0), SharedRates(4, 12.0, 15.0, 6.0, 6.5))


def rates(gpus: int, measured: tuple[SharedRates, ...] = MEASURED) -> tuple[float, ...]:
    link = shared_link(LINK, measured, gpus)
    return link.to_host_gb_s, link.to_device_gb_s, link.to_host_both_gb_s, link.to_device_both_gb_s


def test_one_gpu_keeps_its_link() -> None:
    assert shared_link(LINK, MEASURED, 1) is LINK and shared_link(LINK, (), 0) is LINK


def test_measured_numbers_of_gpus_and_those_between() -> None:
    assert rates(2) == (20.0, 24.0, 10.0, 12.0)
    assert rates(4) == (12.0, 15.0, 6.0, 6.5)
    # 40 and 48 GB/s together by two and four: 44 by three.
    assert rates(3)[0] == pytest.approx(44 / 3)
    assert rates(8)[0] == pytest.approx(48 / 8), "more move no more together"
    assert shared_link(LINK, MEASURED, 4).measured and not shared_link(LINK, MEASURED, 5).measured
    assert shared_link(LINK, MEASURED, 4).latency_us == LINK.latency_us


def test_rates_are_those_of_the_same_way_of_measuring() -> None:
    # By the way in which several GPUs are measured one reaches 16 GB/s to the host, of the 20 of its link.
    one = SharedRates(1, 16.0, 25.0, 16.0, 18.0)
    assert rates(2, (one, SharedRates(2, 12.0, 25.0, 16.0, 18.0)))[0] == pytest.approx(20 * 12 / 16)


def test_nothing_is_faster_than_alone() -> None:
    assert rates(2, (SharedRates(2, 99.0, 99.0, 99.0, 99.0),)) == (20.0, 25.0, 16.0, 18.0)
    assert rates(2, (SharedRates(2, 5.0, 99.0, 9.0, 9.0),))[2] == 5.0, "both ways are no faster than one"


def test_unmeasured_rates_are_assumed() -> None:
    fifth = estimated_link(5, 16)
    for gpus in (2, 4, 8):
        link = shared_link(fifth, (), gpus)
        assert gpus * link.gb_s(Stream.TO_HOST) <= HOST_GB_S
        assert gpus * (link.to_host_both_gb_s + link.to_device_both_gb_s) <= HOST_GB_S * (1 + 1e-9)
        assert not link.measured
    slow = estimated_link(3, 16)
    assert replace(shared_link(slow, (), 2), measured=slow.measured) == slow, "two slow links are not too much"


def test_rates_are_kept_in_profiles(tmp_path: Path) -> None:
    constants = {**link_constants(LINK), **sharing_constants(MEASURED)}
    path = tmp_path / "p.sqlite"
    write_profile(Profile(IDENTITY, {}, constants=constants), path)
    profile = read_profile(path)
    assert measured_sharing(profile.constants) == MEASURED
    spec = calibrated(find_spec("h200"), profile)
    assert for_ranks(spec, profile, 4, 4).host_link == shared_link(LINK, MEASURED, 4)
    assert for_ranks(spec, profile, 4).host_link == LINK, "ranks on machines of their own"
    partly = {k: v for k, v in constants.items() if k != "to_host_gb_s_of_2_gpus"}
    assert measured_sharing(partly) == MEASURED[1:]


def test_ranks_that_pin_more_than_their_machine_has() -> None:
    check_pinned([13 * 10**9] * 8, 8, 104 * 10**9)
    check_pinned([13 * 10**9] * 8, 4, 52 * 10**9)
    with pytest.raises(MbcError) as caught:
        check_pinned([13 * 10**9] * 8, 8, 100 * 10**9)
    assert caught.value.code == "MBC360" and "the plans of 8 ranks on one machine pin " in caught.value.message
    assert "memory.host to 6250MB" in caught.value.remedy
    with pytest.raises(MbcError, match=r"MBC360.* of 3 ranks"):
        check_pinned([1, 1, 1, 9, 9, 9], 3, 20)
