"""Gradient buckets: every gradient is summed once, as soon as all gradients of its bucket are ready.

No launch moves before its operands.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from mbc.compiler import compile_plans
from mbc.hardware.collective_times import CollectiveCost, CollectiveKind, CollectiveModel
from mbc.hardware.streams import Stream, aligned
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.placement.assign_addresses import assign_addresses
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.schedule.choose_buckets import choose_buckets
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.depth_first_groups import Division
from mbc.optimize.schedule.depth_first_micro_batches import divided_operations
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.gradient_buckets import Collective, bucketings, collectives_of, sum_layouts, with_buckets
from mbc.optimize.schedule.liveness import blocks, blocks_to_place, contiguous
from mbc.optimize.schedule.simulate import Contention, timeline
from mbc.optimize.search.solution import Problem, scheduled_draft
from mbc.optimize.selection.select import choose
from mbc.optimize.selection.selector import Selector
from mbc.options import Options
from mbc.plan.collectives import ctas_of, is_bucket, is_collective
from mbc.plan.model import Launch, Mode, Program
from mbc.plan.verify import verify_plan
from mbc.source import Source
from tests.optimize.planned import plan_of
from tests.optimize.search.test_streams import launch as launch_on
from tests.optimize.shared import EXAMPLES, kept, one_by_one, shared_table, sums_of

NAMES = ("digits", "resnet", pytest.param("vgg", marks=pytest.mark.exhaustive))


def bucketed(name: str, buckets: tuple[Collective, ...], ctas: int = 8) -> Draft:
    table = shared_table(name)
    return with_buckets(one_by_one(name), buckets, ctas, table.graph, table.device)


def ready(draft: Draft, bucket: Collective) -> int:
    """Return the number of launches, without collectives, up to the last that touches the gradients of a bucket."""
    (at,) = (i for i, launch in enumerate(draft.train.launches) if launch.operations == bucket)
    read = {a.buffer for a in draft.train.launches[at].accesses if a.mode is Mode.READ}
    kernels = [launch for launch in draft.train.launches if not is_collective(launch)]
    return 1 + max(i for i, kernel in enumerate(kernels) if any(a.buffer in read for a in kernel.accesses))


def sums(name: str, collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Return the sums of buckets alone, without the gathers that VGG-16 has for its fully connected layers."""
    kinds = {op.name: op.kind for op in shared_table(name).graph.train}
    return tuple(c for c in collectives if kinds[c[0]] == "all_reduce")


def before_guard(draft: Draft, name: str) -> list[Launch]:
    """Return the launches of the forward and backward pass, without collectives."""
    names = [op.name for op in shared_table(name).graph.train]
    end = next(i for i, n in enumerate(names) if n == "guard")
    kernels = [w for w in draft.train.launches if not is_collective(w)]
    return [w for w in kernels if not w.operations or w.operations[0] in names[:end]]


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_is_in_one_bucket(name: str) -> None:
    draft = one_by_one(name)
    summed = [op.name for op in shared_table(name).graph.train if op.kind == "all_reduce"]
    assert sorted(members for (members,) in sums_of(draft)) == sorted(summed)
    ways = list(bucketings(draft))
    assert len(ways) == len(set(ways)) > len(effort.BUCKET_COUNTS)
    bucketed_sums = [sums(name, way) for way in ways]
    assert min(map(len, bucketed_sums)) == 1 and max(map(len, bucketed_sums)) > 6
    for buckets in bucketed_sums:
        assert all(buckets) and sorted(member for bucket in buckets for member in bucket) == sorted(summed)


@pytest.mark.parametrize("name", NAMES)
def test_buckets_are_launched_when_they_are_ready(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "UPDATE_PART_MIN_US", 0.0)
    before = one_by_one(name)
    for order in bucketings(before):
        draft = bucketed(name, order)
        assert collectives_of(draft.train) == order and ctas_of(draft.train) == 8
        assert tuple(sums_of(draft)) == sums(name, order)
        # The forward and backward pass keep their order, and every operation is launched as often as before.
        assert before_guard(draft, name) == before_guard(before, name)
        assert Counter(n for w in draft.train.launches for n in w.operations) == Counter(
            n for w in before.train.launches for n in w.operations
        )
        kernels, behind = 0, 0  # and after how many launches the collective before it is
        for launch in draft.train.launches:
            if not is_collective(launch):
                kernels += 1
                continue
            assert launch.stream is Stream.COLLECTIVE
            if is_bucket(launch):
                assert kernels == max(behind, ready(draft, launch.operations))
            behind = kernels


@pytest.mark.parametrize("name", NAMES)
def test_nothing_moves_before_its_operands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier, which knows no buckets, proves every order that the streams allow."""
    monkeypatch.setattr(effort, "UPDATE_PART_MIN_US", 0.0)
    orders = list(bucketings(one_by_one(name)))
    for buckets in {min(orders, key=len), max(orders, key=len), orders[len(orders) // 2]}:
        verify_plan(plan_of(kept(name), bucketed(name, buckets)))


def test_a_given_order_is_kept() -> None:
    """The order may be another rank's, whose gradients are ready in another order."""
    buckets = max(bucketings(one_by_one("digits")), key=len)[::-1]
    draft = bucketed("digits", buckets)
    assert len(buckets) > 2 and tuple(sums_of(draft)) == buckets
    verify_plan(plan_of(kept("digits"), draft))


@pytest.mark.parametrize("name", ["resnet", "vgg"])
def test_updates_are_split_by_buckets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most updates run while the last bucket is being summed."""
    monkeypatch.setattr(effort, "UPDATE_PART_MIN_US", 0.0)
    kinds = {op.name: op.kind for op in shared_table(name).graph.train}
    order = next(collectives for collectives in bucketings(one_by_one(name)) if len(sums(name, collectives)) == 2)
    draft = bucketed(name, order)
    updates = [i for i, w in enumerate(draft.train.launches) if w.operations and "_update" in kinds[w.operations[0]]]
    whole = [w for w in one_by_one(name).train.launches if w.operations and "_update" in kinds[w.operations[0]]]
    assert len(updates) > len(whole)
    (last,) = (i for i, w in enumerate(draft.train.launches) if w.operations == order[-1])
    read = {a.buffer for a in draft.train.launches[last].accesses if a.mode is not Mode.READ}
    waiting = [i for i in updates if any(a.buffer in read for a in draft.train.launches[i].accesses)]
    assert waiting and set(updates) - set(waiting) and min(waiting) > last


@pytest.mark.parametrize("name", NAMES)
def test_buckets_are_adjacent(name: str) -> None:
    for buckets in bucketings(one_by_one(name)):
        draft = bucketed(name, buckets)
        offsets = assign_addresses(draft, thorough=False).offsets
        together = list(contiguous(draft.train))
        assert len(together) == sum(len(bucket) > 1 for bucket in sums(name, buckets))
        for members in together:
            for one, other in itertools.pairwise(members):
                assert offsets[other] == offsets[one] + aligned(draft.buffers[one].size_bytes)
        for launch in filter(is_bucket, draft.train.launches):
            count = len(launch.operations)
            for source, total in zip(launch.accesses[:count], launch.accesses[count:], strict=True):
                assert offsets[total.buffer] == offsets[source.buffer]


@pytest.mark.parametrize("name", ["digits", "vgg"])
@pytest.mark.parametrize("several", [False, True])
def test_depth_first_groups_leave_sums_between_them(name: str, several: bool) -> None:
    table = shared_table(name)
    buckets = (max if several else min)(bucketings(one_by_one(name)), key=len)
    table = replace_rules(table, buckets)
    problem = Problem(Selector.of(table), {}, 1 << 40, buckets=choose_buckets(table, one_by_one(name)))
    division = Division(max(v.type.size_bytes for v in table.graph.values.values() if v.per_sample) // 2, 8)
    whole = problem.choose({})
    divided = divided_operations(table, emit_launches(table, whole), (*whole.train, *whole.infer), division)
    assert divided
    choices = problem.choose({}, divided)
    draft = scheduled_draft(problem, choices, AllowedTechniques(True, 1.0, 0, True, division=division), None)
    assert any(w.accesses[0].rows.count == 8 for w in draft.train.launches if w.accesses)
    assert collectives_of(draft.train) == buckets
    verify_plan(plan_of(kept(name), draft))


def replace_rules(table, buckets):
    return type(table)(
        table.graph, table.device, table.providers, table.profile, replace(table.rules, collectives=buckets, ctas=8)
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_gradients_of_a_bucket_are_one_block(name: str) -> None:
    """All passes that place buffers or count free bytes see the gradients of a bucket as one block."""
    for buckets in bucketings(one_by_one(name)):
        draft = bucketed(name, buckets)
        asked = draft.train, draft.buffers, frozenset(draft.persistent)
        alone, placed = blocks(*asked), blocks_to_place(*asked)
        assert len(alone) - len(placed) == sum(len(bucket) - 1 for bucket in buckets)
        assert sum(block.size_bytes for block in alone) == sum(block.size_bytes for block in placed)
        lives = {buffer: block for block in placed for buffer in block.buffers}
        for block in alone:
            around = lives[block.buffers[0]]
            assert around.start <= block.start and block.stop <= around.stop
        for members in contiguous(draft.train):
            (whole,) = {lives[buffer] for buffer in members}
            own = [block for block in alone if block.buffers[0] in members]
            assert (whole.start, whole.stop) == (min(b.start for b in own), max(b.stop for b in own))


def test_a_collective_and_a_kernel_slow_down_each_other() -> None:
    """Both take 100 us alone. Beside the other, the kernel takes 1.5 times and the sum 2 times as long."""
    kernel, total = launch_on(Stream.COMPUTE, 100.0), launch_on(Stream.COLLECTIVE, 100.0)
    slower = Contention({}, (0.0,) * 2, 0.0, 0.0, (1.5, 1.0), (2.0, 1.0))
    times = timeline(Program((kernel, total), (), (), ()), contention=slower)
    # The sum has done 75 us of its work when the kernel ends, and does the rest alone.
    assert times.ends_us == pytest.approx((150.0, 175.0))
    # Not where one waits for the other.
    times = timeline(Program((kernel, total), ((0, 1),), (), ()), contention=slower)
    assert times.ends_us == pytest.approx((100.0, 200.0))


def test_each_kernel_has_its_slowdown_by_collectives() -> None:
    draft, table = bucketed("resnet", min(bucketings(one_by_one("resnet")), key=len)), shared_table("resnet")
    slowdown = contention(draft.train, table.graph, draft.buffers, table.device)
    assert slowdown is not None and len(slowdown.beside_collective) == len(slowdown.collective) == len(
        draft.train.launches
    )
    kernels = [i for i, w in enumerate(draft.train.launches) if not is_collective(w)]
    assert all(slowdown.beside_collective[i] > 1 and slowdown.collective[i] > 1 for i in kernels)


@pytest.mark.parametrize(("network", "precision"), [("alexnet", "fp32"), ("resnet", "bf16")])
def test_ranks_with_other_rows_sum_gradients_in_one_layout(network: str, precision: str) -> None:
    """Ranks with different numbers of rows may prefer different layouts, but must sum in one."""
    source = Source(f"{network}.mbc", (EXAMPLES / f"{network}.mbc").read_text(encoding="utf-8"))
    settings = (("batch", "7"), ("train.precision", precision))
    plans = compile_plans(source, Options(gpu="h200", gpus=2, settings=settings))  # which verifies them together
    assert [plan.graph.batch for plan in plans] == [4, 3]
    first, second = (dict(sum_layouts(plan.train, plan.buffers)) for plan in plans)
    assert first == second and len(set(first.values())) == 2


@pytest.mark.parametrize("sums_take_time", [True, False])
def test_gathers_keep_their_place_in_the_graph(sums_take_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets come between or after the gathers. All collectives run on one stream, in the given order.

    If sums take no time, updates follow as soon as all launches that read the parameters have run.
    """
    monkeypatch.setattr(effort, "UPDATE_PART_MIN_US", 0.0)
    if not sums_take_time:
        monkeypatch.setattr(CollectiveModel, "cost", lambda *_: CollectiveCost(0.0, True))
    table, draft = shared_table("synchronised"), one_by_one("synchronised")
    gathers = tuple((op.name,) for op in table.graph.train if op.kind == "all_gather")
    ways = tuple(bucketings(draft))
    assert any(way[: len(gathers)] == gathers for way in ways)
    assert any(way[: len(gathers)] != gathers for way in ways)
    for way in ways:
        assert tuple(c for c in way if c in gathers) == gathers
        bucketed = with_buckets(draft, way, 4, table.graph, table.device)
        assert collectives_of(bucketed.train) == way and ctas_of(bucketed.train) == 4
        for launch in bucketed.train.launches:
            assert (launch.stream is Stream.COLLECTIVE) == is_collective(launch)
        assert [w.operations for w in bucketed.train.launches if w.operations in gathers] == list(gathers)
        verify_plan(plan_of(kept("synchronised"), bucketed))


def test_small_calls_do_not_queue_behind_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a sum takes long, the buckets wait until after the last gather; otherwise the step would wait twice."""
    monkeypatch.setattr(CollectiveModel, "cost", lambda self, kind, *_: CollectiveCost(COSTS_US[kind], True))
    table = shared_table("synchronised")
    fresh = CandidateTable(table.graph, table.device, table.providers, None, table.rules)
    draft = one_by_one("synchronised")
    buckets = choose_buckets(fresh, draft)
    assert buckets is not None
    order = collectives_of(buckets.applied(fresh, draft).train)
    gathers = [op.name for op in table.graph.train if op.kind == "all_gather"]
    assert [c[0] for c in order[: len(gathers)]] == gathers


COSTS_US = {CollectiveKind.ALL_REDUCE: 500.0, CollectiveKind.ALL_GATHER: 5.0}


def test_nothing_comes_between_the_micro_batches_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "UPDATE_PART_MIN_US", 0.0)
    table = shared_table("vgg", rules=Rules(micro_batch=8))
    draft = emit_launches(table, choose(table, {}, programs=Fusion.of(table).programs()))
    divided = [name for name, count in Counter(map(_name, draft.train.launches)).items() if name and count > 1]
    assert divided
    for way in bucketings(draft):
        names = map(_name, with_buckets(draft, way, 8, table.graph, table.device).train.launches)
        runs = Counter(name for name, _ in itertools.groupby(names))
        assert [runs[name] for name in divided] == [1] * len(divided)


def _name(launch: Launch) -> tuple[str, ...]:
    return launch.operations
