"""Copies that travel together where there is room."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mbc.hardware.streams import Stream
from mbc.optimize import effort
from mbc.optimize.remat.draft_state import Residency
from tests.optimize.remat.test_greedy import BOTH
from tests.optimize.remat.test_local_search import SEEDS, WORK, residency


def groups(result: Residency) -> int:
    """Return the number of groups of consecutive copies to the device."""
    streams = [launch.stream for launch in result.draft.train.launches]
    return sum(b is Stream.TO_DEVICE and a is not Stream.TO_DEVICE for a, b in pairwise(streams))


def test_prefetches_are_coalesced_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "MIN_COPY_US", 0.0)  # these networks are small
    monkeypatch.setattr(effort, "COALESCE_SPARE_SHARE", 0.0)
    together = {seed: residency(seed, BOTH, WORK) for seed in SEEDS}
    assert all(result.live_bytes <= available_bytes for result, available_bytes in together.values())
    monkeypatch.setattr(effort, "COALESCE_SPARE_SHARE", 1.0)  # no room is enough for that
    alone = {seed: residency(seed, BOTH, WORK)[0] for seed in SEEDS}
    assert all(together[seed][0].decisions == alone[seed].decisions for seed in SEEDS)
    assert sum(groups(result) for result, _ in together.values()) < sum(map(groups, alone.values()))
