"""The spaces to which values are offloaded: the link with the least predicted time, within its memory."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.hardware.streams import Space, Stream
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.draft_state import RematTask
from mbc.optimize.remat.greedy import choose_residency
from mbc.optimize.remat.optimizer_offload import movable_states, states_to_offload
from mbc.optimize.search.search import Limits, search
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.plan.traffic import traffic
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers
from mbc.source import Source
from tests.optimize.planned import H200, NETWORKS, draft_of, kept_plan, table, trained
from tests.optimize.remat.test_apply_decisions import undecided

CASE = ("residual", "fp32", 0)
ROOM = 1 << 30


@functools.cache
def table_with(host_gb_s: float, peer_gb_s: float) -> CandidateTable:
    """Return the candidates on a machine whose links have these rates."""
    host = dict.fromkeys(("to_host_gb_s", "to_device_gb_s", "to_host_both_gb_s", "to_device_both_gb_s"), host_gb_s)
    peer = dict.fromkeys(("to_peer_gb_s", "from_peer_gb_s", "to_peer_both_gb_s", "from_peer_both_gb_s"), peer_gb_s)
    device = replace(H200, host_link=replace(H200.host_link, **host), peer_link=replace(H200.peer_link, **peer))
    tabulated = table(*CASE)
    return CandidateTable(tabulated.graph, device, tabulated.providers, None, tabulated.rules)


@functools.cache
def planned(host_gb_s: float, peer_gb_s: float, peer_bytes: int, host_bytes: int = ROOM) -> Plan:
    """Return a plan without recomputation within 0.8 of the arena of the plan without a limit."""
    kept = kept_plan(*CASE).predictions
    budget_bytes = int(0.8 * kept.arena_bytes) + H200.overhead_bytes
    without = frozenset({"recompute", "micro_batches"})
    return search(
        table_with(host_gb_s, peer_gb_s),
        Limits(budget_bytes, host_bytes=host_bytes, peer_bytes=peer_bytes, without=without),
    )


def used(plan: Plan) -> dict[Space, int]:
    return {link.space: link.out_bytes for link in traffic(plan, plan.train)}


def proved(plan: Plan) -> Plan:
    verify_plan(plan)
    assert trained(plan, Transfers.EARLY) == trained(plan, Transfers.LATE) == undecided(CASE)
    return plan


def test_the_peer_wins_where_its_link_is_faster() -> None:
    plan = proved(planned(0.05, 0.4, ROOM))
    assert used(plan).keys() == {Space.PEER}
    assert plan.predictions.host_bytes == 0 < plan.predictions.peer_bytes <= plan.peer_limit_bytes == ROOM
    assert plan.predictions.train_us < planned(0.05, 0.4, 0).predictions.train_us


def test_the_host_wins_where_its_link_is_faster() -> None:
    plan = proved(planned(0.05, 0.005, ROOM))
    assert used(plan).keys() == {Space.HOST} and plan.predictions.peer_bytes == 0
    assert plan.train == planned(0.05, 0.005, 0).train


def test_both_are_used_where_the_peer_has_too_little() -> None:
    everything = used(planned(0.05, 0.4, ROOM))[Space.PEER]
    plan = proved(planned(0.05, 0.4, everything // 2))
    assert used(plan).keys() == {Space.HOST, Space.PEER}
    assert 0 < plan.predictions.peer_bytes <= everything // 2
    streams = {launch.stream for launch in plan.train.launches}
    assert streams == {Stream.COMPUTE, Stream.TO_HOST, Stream.TO_DEVICE, Stream.TO_PEER, Stream.FROM_PEER}


def test_without_host_memory_the_peer_is_enough() -> None:
    plan = proved(planned(0.05, 0.4, ROOM, host_bytes=0))
    assert used(plan).keys() == {Space.PEER}


def test_without_room_anywhere_nothing_is_found() -> None:
    with pytest.raises(MbcError) as caught:
        planned(0.05, 0.4, 0, host_bytes=0)
    assert caught.value.code in ("MBC203", "MBC204")


@pytest.mark.parametrize(("slow_first", "first"), [(False, Space.PEER), (True, Space.HOST)])
def test_hidden_copies_take_the_link_that_is_preferred(
    slow_first: bool, first: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both links are so fast that every copy is hidden."""
    monkeypatch.setattr("mbc.optimize.effort.MIN_COPY_US", 0.0)
    tabulated, draft = table_with(50, 400), draft_of(*CASE)
    links = tabulated.device.links
    fast = replace(
        links, host=replace(links.host, latency_us=1e-3, to_host_gb_s=1e4, to_device_gb_s=1e4),
        peer=replace(links.peer, latency_us=1e-3, to_peer_gb_s=1e5, from_peer_gb_s=1e5),
    )  # fmt: skip
    techniques = AllowedTechniques(False, 1.0, ROOM, peer_bytes=ROOM, slow_first=slow_first)
    kept = choose_residency(RematTask(tabulated.graph, draft, fast, techniques, 1 << 60)).live_bytes
    result = choose_residency(RematTask(tabulated.graph, draft, fast, techniques, int(0.85 * kept)))
    assert result.decisions.offloads and not result.stalling
    assert {offload.space for offload in result.decisions.offloads} == {first}


def test_gpus_that_share_a_mini_batch_lend_each_other_nothing() -> None:
    source = Source("residual.mbc", NETWORKS["residual"])
    with pytest.raises(MbcError) as caught:
        compile_plan(source, Options(gpu="h200", gpus=2, settings=(("memory.peers", "1 GB"),)))
    assert caught.value.code == "MBC103"
    assert "memory.peers is for training on one GPU: 2 GPUs that share a mini-batch" in caught.value.message


def test_states_go_where_there_is_room() -> None:
    tabulated, draft = table_with(50, 400), draft_of(*CASE)
    sizes = {b: draft.buffers[b].size_bytes for b in movable_states(tabulated.graph, draft)}
    links = tabulated.device.links
    everything = states_to_offload(tabulated.graph, draft, ROOM, {Space.HOST: ROOM, Space.PEER: ROOM}, links)
    assert everything == dict.fromkeys(sizes, Space.PEER)
    few = states_to_offload(tabulated.graph, draft, ROOM, {Space.HOST: ROOM, Space.PEER: max(sizes.values())}, links)
    assert few.keys() == sizes.keys() and set(few.values()) == {Space.HOST, Space.PEER}
    assert states_to_offload(tabulated.graph, draft, ROOM, {Space.HOST: 0}, links) == {}
