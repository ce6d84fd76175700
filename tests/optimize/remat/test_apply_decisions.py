"""Any decisions about gaps leave the step valid, with equal bits."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.hardware.streams import Stream
from mbc.optimize.remat.apply_decisions import Decisions, Offload, Recompute, in_launch_order, rewrite
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.schedule.regions import Region, regions_of
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers
from tests.effort import examples
from tests.optimize.planned import NETWORKS, draft_of, kept_plan, plan_of, table, trained

Case = tuple[str, str, int]
CASES = [("residual", "fp32", 0), ("residual", "bf16", 2), ("dense", "fp32", 2), ("dense", "fp16", 0)]


def regions(case: Case) -> tuple[Region, ...]:
    draft = draft_of(*case)
    return regions_of(table(*case).graph, draft, draft.train)


def last_position(case: Case, run: Region) -> int:
    """Return the last position at which a run may be repeated, before the states that it reads are updated."""
    draft = draft_of(*case)
    updated = {draft.buffers[b].alias: i for i, r in enumerate(regions(case)) for b in r.writes}
    return min((updated.get(b, len(regions(case)) - 1) for b in run.reads), default=len(regions(case)) - 1)


@functools.cache
def movable(case: Case) -> tuple[int, ...]:
    """Return the buffers that may be offloaded."""
    draft = draft_of(*case)
    written = {b for run in regions(case) for b in run.writes if draft.buffers[b].alias is None}
    return tuple(sorted((written | set(draft.train.entry)) - set(draft.persistent)))


@st.composite
def decisions(draw: st.DrawFn, case: Case) -> Decisions:
    regions_ = regions(case)
    repeatable = [
        (b, i, last_position(case, run))
        for i, run in enumerate(regions_)
        for b in run.writes
        if run.recomputable and last_position(case, run) > i
    ]
    recomputes = set()
    for buffer, position, last in draw(st.lists(st.sampled_from(repeatable), max_size=8)):
        recomputes.add((draw(st.integers(position + 1, last)), buffer))
    offloads = set()
    made_by = {b: i for i, run in enumerate(regions_) for b in run.writes}
    for buffer in draw(st.lists(st.sampled_from(movable(case)), max_size=6, unique=True)):
        out = draw(st.integers(made_by.get(buffer, -1) + 1, len(regions_) - 1))
        offloads.add((buffer, out, draw(st.integers(out, len(regions_) - 1))))
    return Decisions(
        tuple(Recompute(b, p) for p, b in sorted(recomputes)), tuple(Offload(*o) for o in sorted(offloads))
    )


def decided(case: Case, chosen: Decisions) -> Plan:
    tabulated = table(*case)
    rewritten = rewrite(draft_of(*case), regions(case), chosen, tabulated.device.links)
    assert len(rewritten.position) == len(rewritten.draft.train.launches)
    return plan_of(kept_plan(*case), in_launch_order(alias_in_place(tabulated.graph, rewritten.draft)))


@functools.cache
def undecided(case: Case) -> dict[str, bytes]:
    return trained(kept_plan(*case), Transfers.IN_ORDER)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@given(data=st.data())
@settings(max_examples=examples(6, 12))
def test_any_decisions_give_a_sound_plan_and_the_same_bits(case: Case, data: st.DataObject) -> None:
    plan = decided(case, data.draw(decisions(case)))
    verify_plan(plan)
    for transfers in (Transfers.EARLY, Transfers.LATE):
        assert trained(plan, transfers) == undecided(case)


@functools.cache
def everything_at_once(network: str) -> Plan:
    """Return decisions that recompute every value before its last reader if possible, and prefetch all others."""
    case = (network, "fp32", 0)
    shared = regions(case)
    recomputes: list[tuple[int, int]] = []
    offloads: list[Offload] = []
    readers = {b: [i for i, run in enumerate(shared) if b in run.reads] for b in movable(case)}
    made_by = {b: i for i, run in enumerate(shared) for b in run.writes}
    for b in movable(case):
        if not readers[b] or b in draft_of(*case).train.exit:
            continue
        last, maker = readers[b][-1], made_by.get(b, -1)
        if maker >= 0 and shared[maker].recomputable and maker < last <= last_position(case, shared[maker]) and b % 2:
            recomputes.append((last, b))
        elif last > maker + 1:
            offloads.append(Offload(b, maker + 1, last))
    assert len(recomputes) > 5
    return decided(case, Decisions(tuple(Recompute(b, p) for p, b in sorted(recomputes)), tuple(offloads)))


@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_everything_at_once(network: str) -> None:
    plan = everything_at_once(network)
    verify_plan(plan)
    assert {launch.stream for launch in plan.train.launches} == {Stream.COMPUTE, Stream.TO_HOST, Stream.TO_DEVICE}
    assert trained(plan, Transfers.LATE) == trained(plan, Transfers.EARLY) == undecided((network, "fp32", 0))
