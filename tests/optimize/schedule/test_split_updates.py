"""Split updates: each update runs once, each launch is as early as possible, and results are equal."""

from __future__ import annotations

import functools

import pytest

from mbc.ir.graph import Operation
from mbc.kernels.providers import PROVIDERS
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.horizontal import fuses_horizontally
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.schedule.split_updates import split_into, split_within
from mbc.optimize.selection.select import choose
from mbc.plan.group import operation_of
from mbc.plan.model import Kernel, Launch, Mode
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers
from tests.optimize.planned import Favouring, kept_plan, plan_of, table
from tests.optimize.remat.test_apply_decisions import trained

CASES = [("residual", "fp32"), ("residual", "bf16"), ("dense", "bf16")]


def operations(network: str, precision: str) -> dict[str, Operation]:
    return {operation.name: operation for operation in table(network, precision).graph.train}


@functools.cache
def grouped(network: str, precision: str) -> CandidateTable:
    """Return the candidates, in which kernels for groups are selected."""
    alone = table(network, precision)
    providers = tuple(map(Favouring, PROVIDERS))
    return CandidateTable(alone.graph, alone.device, providers, None, Rules())


@functools.cache
def whole(network: str, precision: str) -> Draft:
    tabulated = grouped(network, precision)
    programs = Fusion.of(tabulated).programs()
    groups = (*programs.train, *programs.infer)
    choices = choose(tabulated, {}, programs=programs)
    return alias_in_place(tabulated.graph, emit_launches(tabulated, choices), (*groups, *choices.train, *choices.infer))


def cut(monkeypatch: pytest.MonkeyPatch, network: str, precision: str, count: int) -> Draft:
    monkeypatch.setattr(effort, "UPDATE_PART_MIN_US", 0.0)
    return split_into(whole(network, precision), count, grouped(network, precision))


def many(draft: Draft, by_name: dict[str, Operation]) -> list[Launch]:
    return [
        launch
        for launch in draft.train.launches
        if launch.operations and all(fuses_horizontally(by_name[name]) for name in launch.operations)
    ]


@pytest.mark.parametrize(("network", "precision"), CASES)
def test_every_piece_is_a_group_that_its_kernel_takes(
    network: str, precision: str, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    """Each piece has a kernel of its provider for its operations, which may be a single one."""
    divided, by_name = cut(monkeypatch, network, precision, 64), operations(network, precision)
    pieces = many(divided, by_name)
    assert any(len(launch.operations) == 1 for launch in pieces)
    for launch in pieces:
        offered = grouped(network, precision).offered(operation_of(launch, by_name, divided.buffers))
        assert isinstance(launch.work, Kernel)
        assert launch.work.name in {candidate.name for candidate in offered}


@pytest.mark.parametrize(("network", "precision"), CASES)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_split_updates_give_the_result_of_the_whole(
    network: str, precision: str, count: int, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    divided, kept = cut(monkeypatch, network, precision, count), kept_plan(network, precision)
    before, after = plan_of(kept, whole(network, precision)), plan_of(kept, divided)
    verify_plan(after)
    assert len(after.train.launches) > len(before.train.launches) or count == 8  # of few operations
    assert trained(after, Transfers.IN_ORDER) == trained(before, Transfers.IN_ORDER)


@pytest.mark.parametrize(("network", "precision"), CASES)
def test_every_operation_runs_once_and_takes_its_share(
    network: str, precision: str, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    by_name, launch_us = operations(network, precision), table(network, precision).device.launch_us
    before = many(whole(network, precision), by_name)
    after = many(cut(monkeypatch, network, precision, 3), by_name)
    assert sorted(n for launch in before for n in launch.operations) == sorted(
        n for launch in after for n in launch.operations
    )
    moving_us = [sum(max(0.0, launch.work.time_us - launch_us) for launch in launches) for launches in (before, after)]
    assert moving_us[0] == pytest.approx(moving_us[1])


def test_an_update_comes_when_its_gradient_is_there(monkeypatch: pytest.MonkeyPatch):
    draft, by_name = cut(monkeypatch, "residual", "bf16", 4), operations("residual", "bf16")
    places = [
        i
        for i, launch in enumerate(draft.train.launches)
        if launch.operations and by_name[launch.operations[0]].kind == "sgd_update"
    ]
    backward = max(
        i
        for i, launch in enumerate(draft.train.launches)
        if any("backward_filter" in by_name[name].kind for name in launch.operations)
    )
    assert len(places) > 1 and places[0] < backward < places[-1]


def test_within_a_budget_an_update_waits_for_no_more_than_it_may_hold(monkeypatch: pytest.MonkeyPatch):
    """Without its last operation, a part holds less than a limited share of the budget."""
    monkeypatch.setattr(effort, "UPDATE_PART_MIN_US", 0.0)
    draft, by_name = whole("residual", "bf16"), operations("residual", "bf16")
    tabulated = grouped("residual", "bf16")

    def held(draft: Draft) -> list[int]:
        return [
            sum(draft.buffers[a.buffer].size_bytes for a in launch.accesses if a.mode is Mode.READ)
            - sum(draft.buffers[b].size_bytes for b in {a.buffer for a in launch.accesses} & set(draft.persistent))
            for launch in draft.train.launches
            if launch.operations and by_name[launch.operations[0]].kind == "sgd_update"
        ]

    (all_bytes,) = held(draft)
    plenty = int(all_bytes / effort.UPDATE_HELD_SHARE) + 1
    assert split_within(draft, plenty, tabulated) == draft
    tight = split_within(draft, plenty // 4, tabulated)
    assert len(held(tight)) > 1 and max(held(tight)) < all_bytes
    verify_plan(plan_of(kept_plan("residual", "bf16"), tight))
