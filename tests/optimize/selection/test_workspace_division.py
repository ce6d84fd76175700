"""A total of workspace is divided exactly among operations, or refused with the least sufficient total."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbc.errors import MbcError
from mbc.ops.fused import kind_of
from mbc.optimize.candidates.pareto import ParetoFront, Point
from mbc.optimize.candidates.table import least_workspace_bytes
from mbc.optimize.search.search import Limits
from mbc.optimize.selection.workspace_division import fastest_division
from mbc.units import show_enough
from tests.optimize.selection.test_select import plan, table

PAGE = 256


@st.composite
def fronts(draw: st.DrawFn) -> dict[str, ParetoFront]:
    all_fronts: dict[str, ParetoFront] = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        sizes = sorted(draw(st.sets(st.integers(0, 8), min_size=1, max_size=4)))
        times = sorted(draw(st.sets(st.integers(1, 50), min_size=len(sizes), max_size=len(sizes))), reverse=True)
        all_fronts[name] = tuple(Point(size * PAGE, float(t), ()) for size, t in zip(sizes, times, strict=True))
    return all_fronts


@given(fronts(), st.integers(0, 24))
def test_no_division_of_the_total_is_faster(all_fronts: dict[str, ParetoFront], pages: int):
    total = pages * PAGE
    ways = [way for way in itertools.product(*all_fronts.values()) if sum(p.workspace_bytes for p in way) <= total]
    if not ways:
        with pytest.raises(MbcError, match="MBC201"):
            fastest_division(all_fronts, total)
        return
    parts = fastest_division(all_fronts, total)
    assert sum(parts.values()) <= total
    taken = sum(
        next(p.time_us for p in front if p.workspace_bytes == parts[name]) for name, front in all_fronts.items()
    )
    assert taken == min(sum(p.time_us for p in way) for way in ways)


def test_a_plan_keeps_to_the_total():
    candidates = table(100.0, 10.0, 0, 1 << 20)
    result = plan(candidates, Limits(total_bytes=2 << 20))
    for program in (result.train, result.infer):
        numbers = {a.buffer for launch in program.launches for a in launch.accesses}
        assert sum(result.buffers[n].size_bytes for n in numbers if result.buffers[n].value is None) <= 2 << 20
    assert result.bounds.fastest_us < result.predictions.train_us


def test_a_total_that_is_too_small_names_the_least():
    candidates = table(100.0, 10.0, 4096, 4096)
    least_bytes = max(
        sum(least_workspace_bytes(candidates.fronts(o)) for o in program if not kind_of(o).view)
        for program in (candidates.graph.train, candidates.graph.infer)
    )
    plan(candidates, Limits(total_bytes=least_bytes))
    for total_bytes in (4096, least_bytes - 1):
        with pytest.raises(MbcError, match=r"MBC201.*need .* of workspace together, but the total is") as caught:
            plan(candidates, Limits(total_bytes=total_bytes))
        assert show_enough(least_bytes) in caught.value.remedy
