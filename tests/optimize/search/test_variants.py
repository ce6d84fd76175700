"""Variants of the search: the workspace limits under which kernels are selected."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.search import variants
from mbc.optimize.search.variants import placed_variants, undecided
from mbc.options import UNLIMITED_BYTES
from tests.optimize.planned import roomy_problem

KEPT = AllowedTechniques(recompute=True, offload=0.0, host_bytes=0)


def ways_to(available_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the live bytes of each variant that the search tries if no step fits yet."""
    looked_at: list[Any] = []
    variant_of = variants.Undecided.searched

    def noted(*arguments: Any) -> Any:
        way = variant_of(*arguments)
        looked_at.append(way.residency.live_bytes)
        return way

    with monkeypatch.context() as patched:
        patched.setattr(variants.Undecided, "searched", noted)
        step = undecided(roomy_problem("residual", available_bytes), KEPT, UNLIMITED_BYTES)
        assert list(placed_variants(step, math.inf, defer_reads=False))
    return looked_at


def test_far_too_large_steps_are_tried_with_least_workspace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    most_bytes = max(ways_to(1 << 40, monkeypatch))
    near = ways_to(most_bytes // 2, monkeypatch)
    far = ways_to(most_bytes // 5, monkeypatch)
    assert min(near) > most_bytes // 2 and len(near) > len(far)
    assert len(far) == 2 and far[0] > far[1], "there might have been less of it, and there is not enough"


def test_steps_that_cannot_fit_are_not_searched_thoroughly(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []
    improved = variants._Variant.improved

    def noted(variant: Any, available_bytes: int) -> Any:
        searched.append(variant.residency.least_bytes)
        return improved(variant, available_bytes)

    monkeypatch.setattr(variants._Variant, "improved", noted)
    most_bytes = max(ways_to(1 << 40, monkeypatch))
    searched.clear()
    ways_to(most_bytes // 2, monkeypatch)
    assert not searched
    ways_to(int(0.7 * most_bytes), monkeypatch)
    assert searched and max(searched) <= 0.7 * most_bytes
