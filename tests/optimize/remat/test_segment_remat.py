"""Segments that are recomputed as a whole, and workspace that is given up: steps within little memory."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.optimize import effort
from mbc.optimize.remat.greedy import choose_residency
from mbc.optimize.remat.segment_remat import cut_into_segments
from mbc.optimize.remat.state import RematState, Residency
from mbc.optimize.schedule.regions import runs_of
from tests.optimize.remat.test_greedy import RECOMPUTE, cost
from tests.optimize.remat.test_local_search import network

SEEDS = range(4)


def chooser(seed: int) -> RematState:
    made, draft = network(seed)
    runs = runs_of(made.graph, draft, draft.train)
    return RematState(made.graph, draft, made.device.host_link, RECOMPUTE, 0, float("inf"), (), {}, {}, runs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_segment_is_recomputed_once(seed: int, parts: int) -> None:
    found = chooser(seed)
    kept, over = found.measured()
    cut_into_segments(found.ledger, int(np.argmax(over)), kept.live_bytes // parts)
    cut, _ = found.measured()
    again = [decision.buffer for decision in cut.decisions.recomputes]
    assert len(again) == len(set(again))
    assert cut.live_bytes < kept.live_bytes
    forward_us = sum(run.time_us for run in found.runs[: int(np.argmax(over)) + 1])
    assert 0 < found.ledger.again_us < forward_us


def least(seed: int, part: float) -> tuple[Residency, float, int]:
    made, draft = network(seed)
    kept_bytes = choose_residency(made.graph, draft, made.device.host_link, RECOMPUTE, 1 << 60).live_bytes
    available_bytes = int(part * kept_bytes)
    found = choose_residency(made.graph, draft, made.device.host_link, RECOMPUTE, available_bytes)
    return found, cost(made, draft, runs_of(made.graph, draft, draft.train), found.decisions)[1], available_bytes


def test_segments_fit_where_choosing_gap_by_gap_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with_segments = {seed: least(seed, 0.3) for seed in SEEDS}
    monkeypatch.setattr(effort, "SEGMENT_SHARES", ())
    without = {seed: least(seed, 0.3) for seed in SEEDS}
    gained = 0
    for seed, (found, time_us, available_bytes) in with_segments.items():
        other, other_us, _ = without[seed]
        assert found.live_bytes <= max(available_bytes, other.live_bytes)
        if other.live_bytes > available_bytes:
            gained += found.live_bytes <= available_bytes
        elif found.live_bytes <= available_bytes:
            assert time_us <= other_us * (1 + 1e-9)
            gained += time_us < other_us
    assert gained, "segments were never better: the test shows nothing"


def test_workspace_is_given_up_where_that_takes_less_time() -> None:
    made, draft = network(0)
    found = chooser(0)
    _, over = found.measured()
    # The run that takes most could do with a little workspace less, and be hardly slower.
    runs = runs_of(made.graph, draft, draft.train)
    sized = [i for i in np.argsort(-over) if i < len(runs) and found.ledger.scratch_bytes(int(i)) > 0]
    run = int(sized[0])
    available_bytes = int(over[run]) - 4096
    names = draft.train.launches[runs[run].start].operations
    workspace_bytes = found.ledger.scratch_bytes(run)
    points = {names: ((workspace_bytes - 4096, runs[run].time_us + 0.5), (0, runs[run].time_us + 1000.0))}
    link = made.device.host_link
    leaner = choose_residency(made.graph, draft, link, RECOMPUTE, available_bytes, points=points)
    without = choose_residency(made.graph, draft, link, RECOMPUTE, available_bytes)
    assert leaner.live_bytes <= available_bytes
    assert len(leaner.decisions.recomputes) < len(without.decisions.recomputes)
    assert (leaner.leaner[0][0], leaner.leaner_us) == (run, 0.5)
