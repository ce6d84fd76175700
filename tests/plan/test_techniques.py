"""Recomputed, offloaded and divided operations of a program, counted from its launches and again by a slow method."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mbc.hardware.streams import Space, Stream
from mbc.optimize.schedule.simulate import timeline
from mbc.plan.live import rounded
from mbc.plan.memory import live_values_at, memory_curve, outside_curve
from mbc.plan.model import Copy, Mode
from mbc.plan.techniques import techniques
from mbc.report.documents import plan_document
from mbc.report.memory import curve_text
from mbc.report.show import plan_text
from mbc.report.techniques import techniques_text
from mbc.report.timeline import stalls
from tests.optimize.schedule.test_depth_first_micro_batches import drafts_of
from tests.optimize.schedule.test_depth_first_micro_batches import plan as plan_of_draft
from tests.plan.chains import random_plan
from tests.plan.offload import offloaded_plan

SEEDS = range(25)


def plain(seed):
    return random_plan(seed, (Stream.COMPUTE,))


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_found_in_plans_that_only_divide(seed):
    plan = plain(seed)
    used = techniques(plan, plan.train)
    assert not used.recomputed and not used.offloaded
    divided = {d.operation for d in used.divided}
    launches = [launch.operations for launch in plan.train.launches if launch.operations]
    assert divided == {names[0] for names in launches if launches.count(names) > 1}
    assert all(sum(d.micro_batches) == plan.graph.batch for d in used.divided)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_host_buffer_is_one_stay(seed):
    plan = offloaded_plan(seed)
    used = techniques(plan, plan.train)
    hosts = {
        a.buffer
        for launch in plan.train.launches
        for a in launch.accesses
        if plan.buffers[a.buffer].space is Space.HOST
    }
    assert len(used.offloaded) == len(hosts)
    copies = {
        i
        for i, launch in enumerate(plan.train.launches)
        if isinstance(launch.work, Copy) and any(a.buffer in hosts for a in launch.accesses)
    }
    assert {i for o in used.offloaded for i in o.launches} == copies
    for stay in used.offloaded:
        out, back = stay.absent
        assert out in stay.launches and back in stay.launches and out < back
        assert stay.time_us == sum(plan.train.launches[i].work.time_us for i in stay.launches)


@pytest.mark.parametrize("seed", SEEDS)
def test_recomputation_writes_other_buffers_of_the_same_rows(seed):
    plan = offloaded_plan(seed)
    launches = plan.train.launches
    recomputing = {i for r in techniques(plan, plan.train).recomputed for i in r.launches}
    expected = set()
    for i, launch in enumerate(launches):
        for before in launches[:i]:
            if launch.operations and set(launch.operations) & set(before.operations) and again(plan, before, launch):
                expected.add(i)
    assert recomputing == expected


def again(plan, before, after):
    return any(
        a.mode is not Mode.READ and b.mode is not Mode.READ and a.buffer != b.buffer
        and plan.buffers[a.buffer].value == plan.buffers[b.buffer].value is not None
        and a.rows.start < b.rows.stop and b.rows.start < a.rows.stop
        for a in before.accesses for b in after.accesses
    )  # fmt: skip


def test_some_plans_recompute_and_some_offload():
    used = [techniques(plan, plan.train) for plan in map(offloaded_plan, SEEDS)]
    assert sum(bool(f.recomputed) for f in used) > 5 and sum(bool(f.offloaded) for f in used) > 5


def test_saved_bytes_are_not_in_the_arena_meanwhile():
    checked = 0
    for seed in SEEDS:
        plan = offloaded_plan(seed)
        for recomputed in techniques(plan, plan.train).recomputed:
            if shared(plan, recomputed.outputs):
                continue  # other values have the bytes meanwhile
            for launch in range(*recomputed.absent):
                there = {t.value for t in live_values_at(plan, plan.train, launch)}
                assert not there & set(recomputed.outputs)
                checked += 1
    assert checked > 10


def shared(plan, values):
    return any(b.alias is not None and plan.buffers[b.alias].value in values for b in plan.buffers) or any(
        b.alias is not None and b.value in values for b in plan.buffers
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_taken_bytes_add_up(seed):
    plan = offloaded_plan(seed)
    curve = memory_curve(plan, plan.train)
    for launch in (0, curve.peak_launch, len(plan.train.launches) - 1):
        taken = live_values_at(plan, plan.train, launch)
        by_kind = {kind: sum(t.size_bytes for t in taken if t.kind is kind) for kind in {t.kind for t in taken}}
        assert {kind: size for kind, size in by_kind.items() if size} == curve.at(launch)
        assert [t.size_bytes for t in taken] == sorted((t.size_bytes for t in taken), reverse=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_host_memory_over_the_step(seed):
    plan = offloaded_plan(seed)
    curve = outside_curve(plan, plan.train, Space.HOST)
    for launch in range(len(plan.train.launches)):
        there = 0
        for b, buffer in enumerate(plan.buffers):
            touched = [i for i, x in enumerate(plan.train.launches) if any(a.buffer == b for a in x.accesses)]
            if buffer.space is Space.HOST and touched and min(touched) <= launch <= max(touched):
                there += rounded(buffer.size_bytes)
        assert curve[launch] == there
    assert max(curve) <= plan.predictions.host_bytes


def test_stalls_are_attributed_to_the_last_end():
    seen = 0
    for seed in SEEDS:
        plan = offloaded_plan(seed, (Stream.COMPUTE, Stream.TO_DEVICE))
        times = timeline(plan.train)
        for stall in stalls(plan.train, times):
            assert (stall.cause, stall.launch) in plan.train.waits
            assert times.ends_us[stall.cause] == times.starts_us[stall.launch]
            assert stall.time_us > 0
            seen += 1
    assert seen


def test_waiting_for_a_concurrent_kernel_is_no_stall():
    others = 0
    for seed in SEEDS:
        plan = offloaded_plan(seed, (Stream.COMPUTE, Stream.CONCURRENT))
        launches, times = plan.train.launches, timeline(plan.train)
        stalled = {stall.launch for stall in stalls(plan.train, times)}
        for i, launch in enumerate(launches):
            if launch.stream is not Stream.COMPUTE or not times.stalls_us[i]:
                continue
            last = max((j for j, later in plan.train.waits if later == i), key=lambda j: times.ends_us[j])
            assert (i in stalled) == isinstance(launches[last].work, Copy)
            others += i not in stalled
    assert others, "nobody waits for kernels: the test shows nothing"


def test_pages_say_it():
    plan = next(
        p for p in map(offloaded_plan, SEEDS)
        if techniques(p, p.train).recomputed and techniques(p, p.train).offloaded and techniques(p, p.train).divided
    )  # fmt: skip
    text = plan_text(plan, width=140)
    for word in ("technique", "saved at the peak", "recomputed", "offloaded", "divided", "host, own scale"):
        assert word in text, word
    assert techniques_text(plan, plan.train, 140, limit=1).count("\n") < techniques_text(plan, plan.train, 140).count(
        "\n"
    )
    document = plan_document(plan)["train"]["techniques"]
    assert document["recomputed"] and document["offloaded"] and document["divided"]


def test_the_scale_is_the_budget_where_that_is_near():
    plan = plain(3)
    peak = memory_curve(plan, plan.train).peak_bytes
    overhead = plan.predictions.overhead_bytes
    near = curve_text(replace(plan, budget_bytes=2 * peak + overhead), plan.train, 80)
    far = curve_text(replace(plan, budget_bytes=100 * peak + overhead), plan.train, 80)
    assert ", the budget of the arena" in near and "█" not in near.splitlines()[1]
    assert ", the peak; the budget of the arena is " in far and "█" in far.splitlines()[1]


@pytest.mark.parametrize("large_bytes", [400, 1500])
def test_values_between_micro_batches_never_exist_as_a_whole(large_bytes):
    plan = plan_of_draft("residual", "fp32", drafts_of("residual", "fp32", 2, large_bytes)[1])
    used = techniques(plan, plan.train)
    assert used.depth_first and all(h.rows == 2 for h in used.depth_first)
    for handed in used.depth_first:
        held = {access.buffer for launch in plan.train.launches for access in launch.accesses}
        buffers = [plan.buffers[b] for b in held if plan.buffers[b].value == handed.value]
        size_bytes = plan.graph.values[handed.value].type.size_bytes
        assert {b.rows.count for b in buffers} == {2} and plan.graph.batch == 6
        assert abs(handed.saved_bytes - size_bytes * 4 // 6) <= 512
    text = techniques_text(plan, plan.train, 120)
    assert re.search(r"^depth-first +\d+ values +\S+ \S+ never live as a whole", text, re.MULTILINE)
    assert re.search(rf"^{re.escape(used.depth_first[0].value)} +2 ", text, re.MULTILINE)
    document = plan_document(plan)["train"]["techniques"]
    assert len(document["depth_first"]) == len(used.depth_first)
