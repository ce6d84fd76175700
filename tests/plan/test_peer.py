"""Plans that offload to another GPU's memory are proved, executed, written, shown and compared as any other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mbc.errors import MbcError
from mbc.fit import figures
from mbc.hardware.streams import Space, Stream
from mbc.plan.diff import diff_plans
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Copy, Launch, Plan, Program
from mbc.plan.techniques import techniques
from mbc.plan.traffic import traffic
from mbc.plan.verify import verify_plan
from mbc.report.memory import curve_text
from mbc.report.tables import outside_cell
from mbc.report.techniques import techniques_document, techniques_text
from mbc.report.timeline import predicted_timeline
from mbc.runtime.launch_order import Transfers
from mbc.units import show_size
from tests.optimize.remat.test_apply_decisions import everything_at_once, trained, undecided
from tests.plan.offload import offloaded_plan
from tests.plan.peer import lent

NETWORKS = ("dense", "residual")


def refused(plan: Plan, code: str, words: str) -> None:
    with pytest.raises(MbcError) as caught:
        verify_plan(plan)
    assert caught.value.code == code and words in caught.value.message


def with_launches(plan: Plan, launches: list[Launch], waits: tuple[tuple[int, int], ...]) -> Plan:
    return replace(plan, train=Program(tuple(launches), waits, plan.train.entry, plan.train.exit))


@pytest.mark.parametrize("network", NETWORKS)
def test_a_peer_s_memory_gives_the_same_bits(network: str) -> None:
    plan = lent(everything_at_once(network))
    verify_plan(plan)
    assert {launch.stream for launch in plan.train.launches} == {Stream.COMPUTE, Stream.TO_PEER, Stream.FROM_PEER}
    assert trained(plan, Transfers.LATE) == trained(plan, Transfers.EARLY) == undecided((network, "fp32", 0))


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_are_proved(seed: int) -> None:
    verify_plan(lent(offloaded_plan(seed)))


def test_more_than_a_peer_lends_is_refused() -> None:
    plan = lent(everything_at_once("residual"))
    size_bytes = plan.predictions.peer_bytes
    refused(replace(plan, peer_limit_bytes=size_bytes - 1), "MBC131", f"it may take {size_bytes - 1}")
    shorter = replace(plan, predictions=replace(plan.predictions, peer_bytes=size_bytes - 256))
    refused(shorter, "MBC121", "are outside the peer")
    longer = replace(plan, predictions=replace(plan.predictions, peer_bytes=size_bytes + 256))
    refused(replace(longer, peer_limit_bytes=size_bytes + 256), "MBC131", f"its buffers end at {size_bytes}")


def test_two_values_in_the_same_bytes_are_refused() -> None:
    plan = lent(everything_at_once("residual"))
    away = [i for i, buffer in enumerate(plan.buffers) if buffer.space is Space.PEER]
    start = plan.offsets[away[0]]
    together = tuple(start if i in away else offset for i, offset in enumerate(plan.offsets))
    with pytest.raises(MbcError) as caught:
        verify_plan(replace(plan, offsets=together))
    assert caught.value.code in ("MBC124", "MBC125")


@pytest.mark.parametrize(("stream", "code"), [(Stream.TO_PEER, "never written"), (Stream.FROM_PEER, "is needed, but")])
def test_a_missing_copy_is_refused(stream: Stream, code: str) -> None:
    plan = lent(everything_at_once("residual"))
    gone = next(i for i, launch in enumerate(plan.train.launches) if launch.stream is stream)
    launches = [launch for i, launch in enumerate(plan.train.launches) if i != gone]
    waits = ((a - (a > gone), b - (b > gone)) for a, b in plan.train.waits if gone not in (a, b))
    refused(with_launches(plan, launches, tuple(waits)), "MBC124", code)


def test_a_missing_wait_is_refused() -> None:
    plan = lent(everything_at_once("residual"))
    copies = {i for i, launch in enumerate(plan.train.launches) if isinstance(launch.work, Copy)}
    needed = [wait for wait in plan.train.waits if copies.intersection(wait)]
    assert needed
    for wait in needed:
        waits = tuple(other for other in plan.train.waits if other != wait)
        refused(with_launches(plan, list(plan.train.launches), waits), "MBC125", "does not wait for")


def test_a_plan_s_file_says_it_only_where_it_is_so() -> None:
    plan = everything_at_once("residual")
    host, peer = json.loads(dump_plan(plan)), json.loads(dump_plan(lent(plan)))
    assert "peer_limit_bytes" not in host and "peer_bytes" not in host["predictions"]
    assert peer["peer_limit_bytes"] == peer["predictions"]["peer_bytes"] > 0
    for one in (plan, lent(plan)):
        assert load_plan(dump_plan(one), "plan.json") == one


def test_shown_and_compared_figures() -> None:
    host = everything_at_once("residual")
    peer = lent(host)
    (link,) = traffic(peer, peer.train)
    (other,) = traffic(host, host.train)
    assert link.space is Space.PEER and other.space is Space.HOST
    assert (link.copies, link.out_bytes, link.back_bytes) == (other.copies, other.out_bytes, other.back_bytes)
    assert link.out_bytes > 0 and not link.measured
    assert {o.space for o in techniques(peer, peer.train).offloaded} == {Space.PEER}
    assert "peer" in techniques_text(peer, peer.train, 120) and "peer" not in techniques_text(host, host.train, 120)
    used, times = techniques(peer, peer.train), predicted_timeline(peer, peer.train)
    assert techniques_document(peer, peer.train, used, times)["links"][0]["out_bytes"] == link.out_bytes
    assert "peer, own scale" in curve_text(peer, peer.train, 100)
    changed = {change.name: (change.before, change.after) for change in diff_plans(host, peer).totals}
    assert changed["copied_to_peer_bytes"] == (0, link.out_bytes)
    assert changed["copied_to_host_bytes"] == (link.out_bytes, 0)
    assert changed["peer_bytes"] == (0, peer.predictions.peer_bytes)


def test_a_fit_is_reported_with_the_overhead() -> None:
    plan = everything_at_once("residual")
    own, other = figures(plan), figures(lent(plan))
    assert (own.peer_bytes, other.peer_bytes) == (0, plan.predictions.host_bytes)
    assert outside_cell(0, 0) == "-" and outside_cell(own.host_bytes, 0) == show_size(own.host_bytes)
    assert outside_cell(other.host_bytes, other.peer_bytes) == f"-, peer {show_size(other.peer_bytes)}"
