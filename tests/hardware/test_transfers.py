"""Assumed rates of copies between GPU and host, and the measured rates of a profile that replace them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mbc.hardware.collective_times import Link
from mbc.hardware.spec import device_specs, find_spec
from mbc.hardware.streams import Space, Stream
from mbc.hardware.transfers import (
    IN_STEP,
    HostLink,
    Links,
    PeerLink,
    Slowdown,
    estimated_link,
    link_constants,
    measured_link,
    measured_peer_link,
)
from mbc.plan.model import Copy, copy_work
from mbc.profile.edit import write_profile
from mbc.profile.model import Identity, Profile, calibrated
from mbc.profile.read_profile import read_profile

LINK = HostLink(
    20.0, 25.0, 16.0, 18.0, 5.0, Slowdown(1.01, 1.02, 1.03), Slowdown(1.1, 1.2, 1.3), Slowdown(1.0, 1.0, 1.5), True
)
PEER = PeerLink(
    200.0, 190.0, 120.0, 110.0, 6.0, Slowdown(1.1, 1.2, 1.3), Slowdown(1.3, 1.4, 1.5), Slowdown(1.0, 1.0, 1.01), True,
    beside_host=1.1, host_beside=1.2,
)  # fmt: skip
IDENTITY = Identity("NVIDIA H200", "sm_90", 132, "580.1", 91900, "2026-11-21")


def test_a_copy_takes_its_latency_and_the_time_of_its_bytes_in_a_step() -> None:
    assert LINK.copy_us(0, Stream.TO_HOST) == 5.0
    assert LINK.copy_us(10**6, Stream.TO_HOST) == pytest.approx(5 + 50 / IN_STEP)
    assert LINK.copy_us(10**6, Stream.TO_DEVICE) == pytest.approx(5 + 40 / IN_STEP)
    assert LINK.copy_us(10**6, Stream.TO_HOST, busy_both=True) == pytest.approx(5 + 62.5 / IN_STEP)
    assert LINK.copy_us(9 * 10**6, Stream.TO_DEVICE, busy_both=True) == pytest.approx(5 + 500 / IN_STEP)
    with pytest.raises(ValueError, match="is not a copy stream of the link"):
        LINK.copy_us(1, Stream.COMPUTE)


def test_each_generation_of_the_bus_is_twice_as_fast() -> None:
    third, fourth = estimated_link(3, 16), estimated_link(4, 16)
    assert fourth.to_host_gb_s == pytest.approx(2 * third.to_host_gb_s)
    assert estimated_link(4, 8).to_device_gb_s == pytest.approx(third.to_device_gb_s)
    assert 12 < third.to_host_gb_s < 15.75  # no copy gets more than the bus carries


def test_every_listed_gpu_has_an_estimate() -> None:
    for spec in device_specs().values():
        link = spec.host_link
        assert not link.measured
        for alone, both in (
            (link.to_host_gb_s, link.to_host_both_gb_s),
            (link.to_device_gb_s, link.to_device_both_gb_s),
        ):
            assert alone / 2 < both <= alone
    assert find_spec("h200").host_link.to_host_gb_s == 55.3  # seen, so not what its bus promises


def test_every_listed_gpu_has_an_estimate_of_its_peer_link() -> None:
    for spec in device_specs().values():
        host, peer = spec.host_link, spec.peer_link
        assert not peer.measured and 0 < peer.to_peer_both_gb_s <= peer.to_peer_gb_s
        assert peer.streaming.out >= 1 and peer.beside_host == 1
        if spec.collectives.link is Link.PCIE:
            assert peer.to_peer_gb_s == min(host.to_host_gb_s, host.to_device_gb_s)
    seen = find_spec("h100").peer_link
    assert (seen.to_peer_gb_s, seen.from_peer_gb_s, seen.to_peer_both_gb_s) == (395, 395, 215)
    # As fast as the reached share of the datasheet's rate.
    assert find_spec("b200").peer_link.to_peer_gb_s == pytest.approx(2 * seen.to_peer_gb_s, rel=0.01)


def test_links_by_the_direction_of_a_copy() -> None:
    links = Links(LINK, PEER)
    assert links.fastest((Space.HOST, Space.PEER)) == (Space.PEER, Space.HOST)
    assert links.copy_us(10**6, Stream.TO_DEVICE) == LINK.copy_us(10**6, Stream.TO_DEVICE)
    assert copy_work(links, 10**6, Stream.FROM_PEER) == Copy(PEER.copy_us(10**6, Stream.FROM_PEER), measured=True)
    with pytest.raises(ValueError, match="is not a copy stream of the link"):
        PEER.copy_us(1, Stream.TO_HOST)


def test_constants_of_a_profile_hold_the_link_to_another_gpu_beside_that_to_the_host() -> None:
    constants = {**link_constants(LINK), **link_constants(PEER)}
    assert len(constants) == len(link_constants(LINK)) + len(link_constants(PEER))
    assert measured_link(constants) == LINK and measured_peer_link(constants) == PEER
    assert measured_peer_link(link_constants(LINK)) is None and measured_link(link_constants(PEER)) is None
    spec = find_spec("h200")
    assert calibrated(spec, Profile(IDENTITY, {}, constants=constants)).links == Links(LINK, PEER)
    assert calibrated(spec, Profile(IDENTITY, {}, constants=link_constants(LINK))).peer_link == spec.peer_link


def test_constants_of_a_profile_hold_the_whole_link(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    write_profile(Profile(IDENTITY, {}, constants=link_constants(LINK)), path)
    assert measured_link(read_profile(path).constants) == LINK
    assert calibrated(find_spec("h200"), read_profile(path)).host_link == LINK


def test_a_profile_without_a_link_changes_nothing() -> None:
    spec = find_spec("t4")
    assert calibrated(spec, Profile(IDENTITY, {}, constants={"graph_gap_us": 1.0})).host_link == spec.host_link
    partly = dict(link_constants(LINK))
    del partly["copy_latency_us"]
    assert measured_link(partly) is None


def test_slowdowns_may_be_missing_and_a_stale_profile_only_estimates() -> None:
    rates = {name: value for name, value in link_constants(LINK).items() if "slowdown" not in name}
    link = measured_link(rates)
    assert link is not None and link.streaming == Slowdown() and link.measured
    stale = Profile(IDENTITY, {}, constants=link_constants(LINK), stale=True)
    assert calibrated(find_spec("h200"), stale).host_link == replace(LINK, measured=False)
