"""Greedy decisions: they fit, give equal results, cost no less than the bound, and are optimal on small chains."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.errors import MbcError
from mbc.hardware.spec import find_spec
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.apply_decisions import Decisions, rewrite
from mbc.optimize.remat.draft_state import RematTask
from mbc.optimize.remat.greedy import choose_residency
from mbc.optimize.remat.live_bytes_ledger import Ledger
from mbc.optimize.remat.optimizer_offload import persistent_bytes
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.schedule.liveness import blocks, live_bytes
from mbc.optimize.schedule.regions import Region, regions_of
from mbc.optimize.search.search import Limits, search
from mbc.optimize.selection.select import choose
from mbc.plan.model import Copy
from mbc.plan.verify import verify_plan
from mbc.profile.model import calibrated
from mbc.runtime.launch_order import Transfers
from tests.effort import examples
from tests.graphs import training_graph
from tests.optimize.planned import ONE_BY_ONE, draft_of, kept_plan, table, trained

RECOMPUTE = AllowedTechniques(recompute=True, offload=0.0, host_bytes=0)
OFFLOAD = AllowedTechniques(recompute=False, offload=1.0, host_bytes=1 << 40)
BOTH = AllowedTechniques(recompute=True, offload=1.0, host_bytes=1 << 40)
OVERHEAD = find_spec("h200").overhead_bytes


@functools.cache
def kept_bytes(network: str) -> int:
    defined_at = table(network)
    return choose_residency(
        RematTask(defined_at.graph, draft_of(network), defined_at.device.links, BOTH, 1 << 60)
    ).live_bytes


@pytest.mark.parametrize("network", ["residual", "dense"])
@pytest.mark.parametrize("techniques", [RECOMPUTE, OFFLOAD, BOTH], ids=["recompute", "offload", "both"])
def test_smaller_budgets_are_kept_to(network: str, techniques: AllowedTechniques) -> None:
    defined_at = table(network)
    available_bytes = int(0.9 * kept_bytes(network))
    residency = choose_residency(
        RematTask(defined_at.graph, draft_of(network), defined_at.device.links, techniques, available_bytes)
    )
    assert residency.live_bytes <= available_bytes
    assert bool(residency.decisions.recomputes) <= techniques.recompute
    assert bool(residency.decisions.offloads) <= (techniques.offload > 0)


@pytest.mark.parametrize(
    ("network", "without"),
    [
        ("residual", frozenset[str]()),
        ("dense", frozenset({"offload"})),
        ("residual", frozenset({"recompute"})),
        pytest.param("dense", frozenset[str](), marks=pytest.mark.exhaustive),
        pytest.param("residual", frozenset({"offload"}), marks=pytest.mark.exhaustive),
        pytest.param("dense", frozenset({"recompute"}), marks=pytest.mark.exhaustive),
    ],
)
@given(part=st.floats(0.45, 1.0))
@settings(max_examples=examples(2, 8))
def test_plans_under_any_budget_are_sound_and_give_the_same_bits(
    network: str, without: frozenset[str], part: float
) -> None:
    budget_bytes = int(part * kept_plan(network).predictions.arena_bytes) + OVERHEAD
    try:
        plan = search(table(network), Limits(budget_bytes, without=without))
    except MbcError as error:
        assert error.code in ("MBC203", "MBC204")
        return
    verify_plan(plan)
    assert plan.predictions.arena_bytes + plan.predictions.overhead_bytes <= budget_bytes
    assert plan.bounds.fastest_us <= plan.bounds.within_budget_us <= plan.predictions.train_us * (1 + 1e-9)
    names = [launch.operations for launch in plan.train.launches if launch.operations]
    if "recompute" in without:
        assert len(list(itertools.groupby(names))) == len({*names}), "an operation's launches are together"
    if "offload" in without:
        assert not any(isinstance(launch.work, Copy) for launch in plan.train.launches)
    assert trained(plan, Transfers.LATE) == trained(kept_plan(network), Transfers.IN_ORDER)


@pytest.mark.parametrize(
    ("network", "precision"),
    [
        ("residual", "bf16"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive)
          for case in (("residual", "fp32"), ("dense", "fp32"), ("dense", "bf16"))),
    ],
)  # fmt: skip
@given(
    part=st.floats(0.3, 1.0),
    host_part=st.sampled_from([0.0, 0.02, 0.1, 0.3]) | st.floats(0.0, 0.6),
    without=st.sampled_from(
        [frozenset[str](), *(frozenset({name}) for name in ("recompute", "micro_batches", "workspace"))]
    ),
)
@settings(max_examples=examples(3, 12))
def test_any_limits_of_device_and_host_give_a_sound_plan_or_say_why_not(
    network: str, precision: str, part: float, host_part: float, without: frozenset[str]
) -> None:
    arena_bytes = kept_plan(network, precision).predictions.arena_bytes
    host_bytes = int(host_part * arena_bytes)
    budget_bytes = int(part * arena_bytes) + OVERHEAD
    try:
        plan = search(table(network, precision), Limits(budget_bytes, without=without, host_bytes=host_bytes))
    except MbcError as error:
        assert error.code.startswith("MBC2")
        return
    verify_plan(plan)
    assert plan.predictions.host_bytes <= host_bytes
    assert plan.predictions.arena_bytes + plan.predictions.overhead_bytes <= budget_bytes


def chain(seed: int) -> CandidateTable:
    """Return the candidates of a network of a few layers with random widths."""
    rng = random.Random(seed)
    layers = " |> ".join(
        f"conv({rng.choice((4, 8, 16, 32))}, 3, pad=1) |> {rng.choice(('relu', 'gelu'))}" for _ in range(3)
    )
    text = f"""
network chain(batch = 32) {{
  input image[batch, 4, 32, 32] : float
  input target[batch] : class
  logits = image |> {layers} |> global_avgpool |> linear(4)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}}
train {{ optimizer = sgd() }}
"""
    graph = training_graph(text)
    return CandidateTable(graph, calibrated(find_spec("h200"), None), ONE_BY_ONE, None, Rules())


def cost(
    defined_at: CandidateTable, draft: Draft, regions: tuple[Region, ...], decisions: Decisions
) -> tuple[int, float]:
    """Return the peak of live bytes, and the time of all kernels."""
    aliased = alias_in_place(defined_at.graph, rewrite(draft, regions, decisions, defined_at.device.links).draft)
    program_blocks = blocks(aliased.train, aliased.buffers, frozenset(aliased.persistent))
    live = max(live_bytes(program_blocks, len(aliased.train.launches))) + persistent_bytes(aliased)
    return live, sum(launch.work.time_us for launch in aliased.train.launches)


@pytest.mark.parametrize("seed", range(6))
def test_recomputing_takes_no_longer_than_any_choice_on_a_chain(seed: int) -> None:
    defined_at = chain(seed)
    draft = emit_launches(defined_at, choose(defined_at, {}))
    regions = regions_of(defined_at.graph, draft, draft.train)
    fresh = Ledger(draft, regions, 4096)
    named = [draft.train.launches[region.start].operations for region in regions]
    middle = next(i for i, names in enumerate(named) if any("backward" in name for name in names))
    gaps = [gap for b in fresh.movable if (gap := fresh.gap(b, middle)) is not None and fresh.can_recompute(b)]
    assert len(gaps) >= 3
    ways: list[tuple[int, float]] = []
    for count in range(len(gaps) + 1):
        for subset in itertools.combinations(gaps, count):
            ledger = Ledger(draft, regions, 4096)
            for gap in sorted(subset, key=lambda gap: -gap.after):
                ledger.recompute_chain(gap.buffer, gap.before)
            ways.append(cost(defined_at, draft, regions, ledger.decisions()))
    most, least = max(live for live, _ in ways), min(live for live, _ in ways)
    for part in (0.0, 0.25, 0.5, 0.75):
        available_bytes = int(least + part * (most - least))
        residency = choose_residency(
            RematTask(defined_at.graph, draft, defined_at.device.links, RECOMPUTE, available_bytes)
        )
        live, time_us = cost(defined_at, draft, regions, residency.decisions)
        best_us = min(time_us for live, time_us in ways if live <= available_bytes)
        assert live <= available_bytes
        assert time_us <= best_us * (1 + 1e-9)
