"""Local search: its result still fits, takes less time, and is deterministic."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from mbc.hardware.spec import find_spec
from mbc.hardware.streams import Stream
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.remat import local_search
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.draft_state import RematState, RematTask, Residency
from mbc.optimize.remat.greedy import choose_residency
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.regions import regions_of
from mbc.optimize.selection.select import choose
from mbc.profile.model import calibrated
from tests.graphs import training_graph
from tests.optimize.planned import ONE_BY_ONE
from tests.optimize.remat.test_greedy import BOTH, OFFLOAD, RECOMPUTE, cost

SEEDS = range(4)
WORK = 20_000
PART = 0.55  # of the arena without a limit


@functools.cache
def network(seed: int) -> tuple[CandidateTable, Draft]:
    """Return residual blocks of random widths and their step, with too many gaps for an exhaustive search."""
    rng = random.Random(seed)
    blocks = ""
    for i in range(6):
        width = rng.choice((8, 16, 32))
        blocks += f"  y = x |> conv({width}, 3, pad=1) |> bn |> relu |> conv(16, 3, pad=1) @last{i} |> bn\n"
        blocks += "  x = x + y |> relu\n"
    text = f"""
network residual(batch = 32) {{
  input image[batch, 4, 32, 32] : float
  input target[batch] : class
  x = image |> conv(16, 3, pad=1) |> bn |> relu
{blocks}
  logits = x |> global_avgpool |> linear(4)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}}
train {{ optimizer = sgd() }}
"""
    graph = training_graph(text)
    defined_at = CandidateTable(graph, calibrated(find_spec("h200"), None), ONE_BY_ONE, None, Rules())
    return defined_at, emit_launches(defined_at, choose(defined_at, {}))


def residency(seed: int, techniques: AllowedTechniques, work: int, part: float = PART) -> tuple[Residency, int]:
    defined_at, draft = network(seed)
    link = defined_at.device.links
    kept_bytes = choose_residency(RematTask(defined_at.graph, draft, link, techniques, 1 << 60)).live_bytes
    available_bytes = int(part * kept_bytes)
    return choose_residency(
        RematTask(defined_at.graph, draft, link, techniques, available_bytes), work=work
    ), available_bytes


def time_us(seed: int, result: Residency) -> float:
    defined_at, draft = network(seed)
    return cost(defined_at, draft, regions_of(defined_at.graph, draft, draft.train), result.decisions)[1]


def test_less_is_recomputed() -> None:
    gained = 0
    for seed in SEEDS:
        (chosen, available_bytes), (improved, _) = residency(seed, RECOMPUTE, 0), residency(seed, RECOMPUTE, WORK)
        assert chosen.live_bytes <= available_bytes
        assert improved.live_bytes <= available_bytes
        before_us, after_us = time_us(seed, chosen), time_us(seed, improved)
        assert after_us <= before_us
        gained += after_us < before_us
    assert gained, "every first choice was the best: the test shows nothing"


def test_a_result_counts_if_nothing_is_left_to_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    take_back, rounds = local_search._destroy, 0

    def soon_nothing(chooser: RematState, draw: random.Random) -> bool:
        nonlocal rounds
        rounds += 1
        return rounds <= effort.MEASURE_AFTER and take_back(chooser, draw)  # too few to have been measured

    monkeypatch.setattr(local_search, "_destroy", soon_nothing)
    gained = 0
    for seed in SEEDS:
        rounds = 0
        (chosen, _), (improved, available_bytes) = residency(seed, RECOMPUTE, 0), residency(seed, RECOMPUTE, WORK)
        assert improved.live_bytes <= available_bytes
        gained += time_us(seed, improved) < time_us(seed, chosen)
    assert gained


def offloaded_bytes(seed: int, result: Residency) -> list[int]:
    return [network(seed)[1].buffers[decision.buffer].size_bytes for decision in result.decisions.offloads]


def test_local_search_keeps_to_the_budget_and_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "MIN_COPY_US", 0.0)  # these networks are small
    techniques = AllowedTechniques(recompute=True, offload=1.0, host_bytes=8 << 20)
    offloaded_share = 0
    for seed in SEEDS:
        result, available_bytes = residency(seed, techniques, WORK)
        assert result.live_bytes <= available_bytes
        assert sum(offloaded_bytes(seed, result)) <= techniques.host_bytes
        offloaded_share += len(result.decisions.offloads)
    assert offloaded_share, "nothing was sent: the test shows nothing"


def test_no_kernel_waits_for_a_copy_where_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "MIN_COPY_US", 0.0)
    for seed in SEEDS:
        waiting, available_bytes = residency(seed, OFFLOAD, WORK)
        assert waiting.stalling and waiting.live_bytes <= available_bytes
        alone = residency(seed, replace(OFFLOAD, stall=False), WORK)[0]
        assert alone.decisions.offloads and not alone.stalling
        both = residency(seed, replace(BOTH, stall=False), WORK)[0]
        assert both.live_bytes <= available_bytes and not both.stalling


def test_short_copies_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are too short are never chosen. All offloaded values could be recomputed instead."""
    shortest_us = 40.0
    monkeypatch.setattr(effort, "MIN_COPY_US", shortest_us)
    link = network(0)[0].device.links
    for seed in SEEDS:
        offloaded_share = offloaded_bytes(seed, residency(seed, BOTH, WORK, 0.5)[0])
        assert offloaded_share and all(
            link.copy_us(size_bytes, Stream.TO_HOST) >= shortest_us for size_bytes in offloaded_share
        )


def test_improving_is_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "MIN_COPY_US", 0.0)
    assert residency(1, BOTH, WORK)[0].decisions.offloads
    assert residency(1, BOTH, WORK)[0].decisions == residency(1, BOTH, WORK)[0].decisions
