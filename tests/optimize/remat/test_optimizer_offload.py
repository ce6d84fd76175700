"""States of the optimizer that stay in host memory: equal bits, a smaller arena, and checkpoints in both directions."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from mbc.errors import BudgetError, MbcError
from mbc.hardware.spec import find_spec
from mbc.hardware.streams import Space, Stream
from mbc.ir.graph import Role
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.remat.optimizer_offload import (
    _position_after,
    _position_before,
    movable_states,
    offload_states,
)
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.search.search import Limits, search
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers
from mbc.runtime.module import Module
from tests.graphs import training_graph
from tests.optimize.planned import ONE_BY_ONE, draft_of, kept_plan, plan_of, table
from tests.plan.mutate import KINDS_OF_MUTATIONS, OF_FUSED_OR_WORKSPACE, mutate

Case = tuple[str, str, int]
CASES = [("residual", "fp32", 0), ("residual", "bf16", 2), ("dense", "fp16", 0)]
IDS = ["-".join(map(str, case)) for case in CASES]


def test_copies_start_as_close_to_their_launch_as_the_lead_allows() -> None:
    draw = random.Random(0)
    for _ in range(300):
        starts_us = list(accumulate((draw.choice([0.0, 1.0, 2.5]) for _ in range(draw.randrange(1, 12))), initial=0.0))
        launch, lead_us = draw.randrange(len(starts_us)), draw.choice([0.0, 0.5, 1.0, 3.0, 50.0])
        early = [i for i in range(launch + 1) if starts_us[launch] - starts_us[i] >= lead_us]
        late = [i for i in range(launch, len(starts_us)) if starts_us[i] - starts_us[launch] >= lead_us]
        assert _position_before(starts_us, launch, lead_us) == max(early, default=0)
        assert _position_after(starts_us, launch, lead_us) == min(late, default=len(starts_us) - 1)


def moved(case: Case, every: int = 1, lead: float = 2.0) -> Draft:
    """Return a draft with one in `every` states of the optimizer in host memory."""
    draft, tabulated = draft_of(*case), table(*case)
    return offload_states(
        tabulated.graph,
        draft,
        dict.fromkeys(movable_states(tabulated.graph, draft)[::every], Space.HOST),
        tabulated.device.links,
        lead,
    )


def planned(case: Case, every: int = 1, lead: float = 2.0) -> Plan:
    return plan_of(kept_plan(*case), alias_in_place(table(*case).graph, moved(case, every, lead)))


def trained(plan: Plan, transfers: Transfers = Transfers.IN_ORDER) -> Module:
    net = Module(plan, seed=5, device="cpu", transfers=transfers)
    random = np.random.default_rng(0)
    shape = plan.graph.values["image"].type.shape
    for _ in range(3):
        image = random.standard_normal(shape).astype(np.float32)
        net.step(image, random.integers(0, 3, shape[0]), lr=0.05)
    return net


def states(net: Module) -> dict[str, bytes]:
    return {name: net.state(name).tobytes() for name in net.states}


@pytest.mark.parametrize(("every", "lead"), [(1, 2.0), (2, 2.0), (1, 0.0)])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_states_in_host_memory_change_no_bit(case: Case, every: int, lead: float) -> None:
    plan = planned(case, every, lead)
    verify_plan(plan)
    assert load_plan(dump_plan(plan), "p") == plan
    kept = states(trained(kept_plan(*case)))
    for transfers in Transfers:
        assert states(trained(plan, transfers)) == kept


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_they_take_host_memory_instead_of_arena(case: Case) -> None:
    draft, tabulated = draft_of(*case), table(*case)
    away = movable_states(tabulated.graph, draft)
    assert away and all(tabulated.graph.values[draft.buffers[b].value or ""].role is Role.OPTIMIZER for b in away)
    plan = planned(case)
    at_home = [b for b in plan.train.entry if plan.buffers[b].space is Space.HOST]
    assert len(at_home) == len(away)
    sizes = sum(-(-plan.buffers[b].size_bytes // 256) * 256 for b in at_home)
    assert plan.predictions.host_bytes == sizes, "the next version lies where the state lay"
    copies = [launch.stream for launch in plan.train.launches if launch.stream is not Stream.COMPUTE]
    assert copies.count(Stream.TO_HOST) == copies.count(Stream.TO_DEVICE) == len(away)
    assert all(launch.stream is Stream.COMPUTE for launch in plan.infer.launches)


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    case = CASES[0]
    away, kept = trained(planned(case)), Module(kept_plan(*case), seed=9, device="cpu")
    away.save(tmp_path / "a")
    kept.load(tmp_path / "a")
    assert states(kept) == states(away)
    image = np.ones(away._plan.graph.values["image"].type.shape, np.float32)
    target = np.zeros(image.shape[0], np.int64)
    assert float(kept.step(image, target, lr=0.1)) == float(away.step(image, target, lr=0.1))
    kept.save(tmp_path / "b")
    away.load(tmp_path / "b")
    assert states(kept) == states(away)


def test_only_states_of_the_optimizer_may_be_away_before_the_start() -> None:
    case = CASES[0]
    draft, tabulated = draft_of(*case), table(*case)
    roles = {b: tabulated.graph.values[draft.buffers[b].value or ""].role for b in draft.persistent}
    parameter = next(b for b, role in roles.items() if role is Role.PARAMETER)
    plan = kept_plan(*case)
    index = next(i for i in plan.train.entry if plan.buffers[i].value == draft.buffers[parameter].value)
    buffers = list(plan.buffers)
    buffers[index] = replace(buffers[index], space=Space.HOST)
    end = plan.offsets[index] + buffers[index].size_bytes
    bad = replace(plan, buffers=tuple(buffers), predictions=replace(plan.predictions, host_bytes=end))
    with pytest.raises(MbcError) as caught:
        verify_plan(bad)
    assert caught.value.code in ("MBC122", "MBC128")


@pytest.mark.parametrize("kind", [kind for kind in KINDS_OF_MUTATIONS if kind not in OF_FUSED_OR_WORKSPACE])
def test_mutants_are_refused_or_change_no_bit(kind: str) -> None:
    case = CASES[0]
    plan, right = planned(case), states(trained(planned(case)))
    refused = 0
    for seed in range(25):
        mutant = mutate(plan, kind, seed)
        try:
            verify_plan(mutant)
        except MbcError:
            refused += 1
            continue
        for transfers in (Transfers.EARLY, Transfers.LATE):
            assert states(trained(mutant, transfers)) == right, f"{kind}, seed {seed}, {transfers}"
    assert refused


def test_every_wait_of_a_state_is_needed() -> None:
    plan = planned(CASES[0])
    for wait in plan.train.waits:
        waits = tuple(w for w in plan.train.waits if w != wait)
        with pytest.raises(MbcError) as caught:
            verify_plan(replace(plan, train=replace(plan.train, waits=waits)))
        assert caught.value.code == "MBC125"


WIDE = """
network wide(batch = 4, classes = 3) {
  input image[batch, 4, 8, 8] : float
  input target[batch] : class
  x = image |> flatten |> linear(256) |> relu |> linear(256) |> relu |> linear(256) |> relu
  logits = x |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = adamw() }
"""


@pytest.fixture(scope="module")
def wide() -> CandidateTable:
    graph = training_graph(WIDE)
    return CandidateTable(graph, find_spec("h200"), ONE_BY_ONE, None, Rules())


@pytest.mark.parametrize("part", [0.9, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (0.75, 0.65))])
def test_states_are_offloaded_if_needed(wide: CandidateTable, part: float) -> None:
    kept = search(wide, Limits(1 << 40))
    overhead = kept.predictions.overhead_bytes
    available_bytes = int(part * kept.predictions.arena_bytes)
    plan = search(wide, Limits(overhead + available_bytes))
    verify_plan(plan)
    assert plan.predictions.arena_bytes <= available_bytes and plan.bounds.floor_bytes <= available_bytes
    homes = [b for b in plan.train.entry if plan.buffers[b].space is Space.HOST]
    lacking_bytes = kept.predictions.arena_bytes - available_bytes
    away_bytes = sum(plan.buffers[b].size_bytes for b in homes)
    assert homes and away_bytes > 0.5 * lacking_bytes
    assert states(trained(plan)) == states(trained(kept))
    with pytest.raises(BudgetError):
        search(wide, Limits(overhead + available_bytes, without=frozenset({"offload"})))


def test_only_as_many_states_are_offloaded_as_are_needed_and_as_host_memory_holds(wide: CandidateTable) -> None:
    kept = search(wide, Limits(1 << 40))
    budget_bytes = kept.predictions.overhead_bytes + int(0.9 * kept.predictions.arena_bytes)
    plan = search(wide, Limits(budget_bytes))
    all_bytes = sum(
        plan.buffers[b].size_bytes
        for b in plan.train.entry
        if wide.graph.values[plan.buffers[b].value or ""].role is Role.OPTIMIZER
    )
    assert 0 < plan.predictions.host_bytes < all_bytes
    limit_bytes = plan.predictions.host_bytes
    assert search(wide, Limits(budget_bytes, host_bytes=limit_bytes)).predictions.host_bytes <= limit_bytes
    with pytest.raises(BudgetError) as caught:
        search(wide, Limits(budget_bytes, host_bytes=1024))
    assert caught.value.code in ("MBC203", "MBC204")
