"""Segments that are recomputed as a whole, and kernels with smaller workspaces: steps within little memory."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.optimize import effort
from mbc.optimize.remat.draft_state import RematState, RematTask, Residency
from mbc.optimize.remat.greedy import choose_residency
from mbc.optimize.remat.segment_remat import cut_into_segments
from mbc.optimize.schedule.regions import regions_of
from tests.optimize.remat.test_greedy import RECOMPUTE, cost
from tests.optimize.remat.test_local_search import network

SEEDS = range(4)


def chooser(seed: int) -> RematState:
    defined_at, draft = network(seed)
    regions = regions_of(defined_at.graph, draft, draft.train)
    return RematState(RematTask(defined_at.graph, draft, defined_at.device.links, RECOMPUTE, 0, regions=regions))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_segment_is_recomputed_once(seed: int, parts: int) -> None:
    state = chooser(seed)
    kept, excess_bytes = state.measured()
    cut_into_segments(state.ledger, int(np.argmax(excess_bytes)), kept.live_bytes // parts)
    cut, _ = state.measured()
    again = [decision.buffer for decision in cut.decisions.recomputes]
    assert len(again) == len(set(again))
    assert cut.live_bytes < kept.live_bytes
    forward_us = sum(region.time_us for region in state.regions[: int(np.argmax(excess_bytes)) + 1])
    assert 0 < state.ledger.recompute_us < forward_us


def least(seed: int, part: float) -> tuple[Residency, float, int]:
    defined_at, draft = network(seed)
    kept_bytes = choose_residency(
        RematTask(defined_at.graph, draft, defined_at.device.links, RECOMPUTE, 1 << 60)
    ).live_bytes
    available_bytes = int(part * kept_bytes)
    result = choose_residency(RematTask(defined_at.graph, draft, defined_at.device.links, RECOMPUTE, available_bytes))
    return (
        result,
        cost(defined_at, draft, regions_of(defined_at.graph, draft, draft.train), result.decisions)[1],
        available_bytes,
    )


def test_segments_fit_where_choosing_gap_by_gap_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with_segments = {seed: least(seed, 0.3) for seed in SEEDS}
    monkeypatch.setattr(effort, "SEGMENT_SHARES", ())
    without = {seed: least(seed, 0.3) for seed in SEEDS}
    gained = 0
    for seed, (result, time_us, available_bytes) in with_segments.items():
        other, other_us, _ = without[seed]
        assert result.live_bytes <= max(available_bytes, other.live_bytes)
        if other.live_bytes > available_bytes:
            gained += result.live_bytes <= available_bytes
        elif result.live_bytes <= available_bytes:
            assert time_us <= other_us * (1 + 1e-9)
            gained += time_us < other_us
    assert gained, "segments were never better: the test shows nothing"


def test_workspace_is_given_up_where_that_takes_less_time() -> None:
    defined_at, draft = network(0)
    state = chooser(0)
    _, excess_bytes = state.measured()
    # The run that takes most could do with a little workspace less, and be hardly slower.
    regions = regions_of(defined_at.graph, draft, draft.train)
    sized = [i for i in np.argsort(-excess_bytes) if i < len(regions) and state.ledger.scratch_bytes(int(i)) > 0]
    region = int(sized[0])
    available_bytes = int(excess_bytes[region]) - 4096
    names = draft.train.launches[regions[region].start].operations
    workspace_bytes = state.ledger.scratch_bytes(region)
    points = {names: ((workspace_bytes - 4096, regions[region].time_us + 0.5), (0, regions[region].time_us + 1000.0))}
    link = defined_at.device.links
    workspace_cuts = choose_residency(
        RematTask(defined_at.graph, draft, link, RECOMPUTE, available_bytes, points=points)
    )
    without = choose_residency(RematTask(defined_at.graph, draft, link, RECOMPUTE, available_bytes))
    assert workspace_cuts.live_bytes <= available_bytes
    assert len(workspace_cuts.decisions.recomputes) < len(without.decisions.recomputes)
    assert (workspace_cuts.workspace_cuts[0][0], workspace_cuts.workspace_cuts_us) == (region, 0.5)
