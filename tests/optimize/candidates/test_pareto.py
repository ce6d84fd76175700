"""Fronts of divisions are exact: brute force over every multiset of slices finds no other point."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbc.ir.types import Layout
from mbc.kernels.base import Candidate
from mbc.optimize import effort
from mbc.optimize.candidates.pareto import Point, accumulating_us, fixed_division, pareto_front, worthwhile


def candidate(time_us: float, workspace_bytes: int, accumulates: bool = True, accumulate_us: float = 0.0) -> Candidate:
    return Candidate(
        "p", "k", (), (Layout.CHANNELS_FIRST,), workspace_bytes, time_us, True, True, accumulates, accumulate_us
    )


def divisions(sizes: Sequence[int], rows: int) -> Iterator[tuple[int, ...]]:
    """Yield every multiset of sizes that adds up to `rows`."""
    if rows == 0:
        yield ()
    for i, size in enumerate(sizes):
        if size <= rows:
            for rest in divisions(sizes[i:], rows - size):
                yield (size, *rest)


def brute_force(offers: Mapping[int, Sequence[Candidate]], rows: int, sums: bool) -> list[tuple[int, float]]:
    """Return the front by trying every division, with every candidate for each slice, and each slice as the first."""
    best: dict[int, float] = {}
    for division in divisions(sorted(offers), rows):
        for chosen in itertools.product(*(offers[size] for size in division)):
            workspace = max(c.workspace_bytes for c in chosen)
            if sums:
                adding = [accumulating_us(c) for c in chosen]
                times = (c.time_us + sum(adding[:i]) + sum(adding[i + 1 :]) for i, c in enumerate(chosen))
                time_us = min(times)
            else:
                time_us = sum(c.time_us for c in chosen)
            best[workspace] = min(best.get(workspace, math.inf), time_us)
    front: list[tuple[int, float]] = []
    for workspace, time_us in sorted(best.items()):
        if time_us < (front[-1][1] if front else math.inf):
            front.append((workspace, time_us))
    return front


# Whole numbers, so that sums are exact in any order.
CANDIDATES = st.builds(
    candidate, st.integers(1, 40).map(float), st.integers(0, 5), st.booleans(), st.integers(0, 40).map(float)
)


@given(st.data(), st.integers(1, 7), st.booleans())
def test_the_front_is_that_of_brute_force(data: st.DataObject, rows: int, sums: bool):
    sizes = data.draw(st.lists(st.integers(1, rows), min_size=1, max_size=4, unique=True), "sizes")
    offers = {size: data.draw(st.lists(CANDIDATES, min_size=1, max_size=3)) for size in sizes}
    front = pareto_front(offers, rows, sums)
    assert [(p.workspace_bytes, p.time_us) for p in front] == brute_force(offers, rows, sums)
    for point in front:
        check(point, rows, sums)


def check(point: Point, rows: int, sums: bool):
    """Assert that the slices of a point have its rows, workspace and time."""
    assert sum(s.rows for s in point.micro_batches) == rows
    assert max(s.candidate.workspace_bytes for s in point.micro_batches) == point.workspace_bytes
    times = [
        accumulating_us(s.candidate) if sums and place else s.candidate.time_us
        for place, s in enumerate(point.micro_batches)
    ]
    assert sum(times) == pytest.approx(point.time_us)


def test_unequal_slices():
    offers = {3: [candidate(1.0, 8)], 2: [candidate(1.0, 8)], 5: [candidate(10.0, 0)]}
    front = pareto_front(offers, 5, accumulates=False)
    assert [[s.rows for s in point.micro_batches] for point in front] == [[5], [3, 2]]


def test_a_kernel_that_cannot_add_may_come_first():
    offers = {2: [candidate(1.0, 0, accumulates=False), candidate(5.0, 0, accumulate_us=2.0)]}
    (point,) = pareto_front(offers, 4, accumulates=True)
    assert point.time_us == 3.0
    assert [s.candidate.accumulates for s in point.micro_batches] == [False, True]


def test_nothing_adds_up():
    assert pareto_front({2: [candidate(1.0, 0, accumulates=False)]}, 4, accumulates=True) == ()


def test_a_given_division_takes_the_fastest_of_each_workspace():
    offers = {4: [candidate(4.0, 0), candidate(2.0, 10)], 2: [candidate(3.0, 0), candidate(1.0, 5)]}
    front = fixed_division(offers, (4, 2), accumulates=False)
    assert [(p.workspace_bytes, p.time_us) for p in front] == [(0, 7.0), (5, 5.0), (10, 3.0)]


def test_many_rows_and_candidates():
    """All sizes up to 512 rows are tried; `benchmarks/planning_time.py` measures how long that takes."""
    offers = {rows: [candidate(5.0 + rows / (1 + k), rows * k * k) for k in range(12)] for rows in range(1, 513)}
    front = pareto_front(offers, 512, accumulates=True)
    for point in front:
        check(point, 512, sums=True)
    for one, other in itertools.pairwise(front):
        assert one.workspace_bytes < other.workspace_bytes and one.time_us > other.time_us


# Times that differ by less than it takes, and by more.
NEAR = st.builds(
    candidate, st.sampled_from([1.0, 2.0, 3.0, 198.0, 200.0, 201.0, 203.0]), st.integers(0, 5), st.booleans()
)


@given(st.data(), st.integers(1, 7), st.booleans())
def test_a_reduced_front_gains_enough_and_loses_little(data: st.DataObject, rows: int, sums: bool):
    sizes = data.draw(st.lists(st.integers(1, rows), min_size=1, max_size=4, unique=True), "sizes")
    offers = {size: data.draw(st.lists(NEAR, min_size=1, max_size=3)) for size in sizes}
    front, whole = pareto_front(offers, rows, sums), pareto_front({rows: offers.get(rows, ())}, rows, sums)
    left = worthwhile(front, whole)
    assert list(left) == sorted(left, key=lambda p: p.workspace_bytes)
    assert all(a.time_us > b.time_us and a.workspace_bytes < b.workspace_bytes for a, b in itertools.pairwise(left))

    def fastest(points, limit_bytes):
        return min((p.time_us for p in points if p.workspace_bytes <= limit_bytes), default=math.inf)

    for point in front:
        assert fastest(left, point.workspace_bytes) <= point.time_us * effort.DIVISION_GAIN
    for point in left:
        alone_us = fastest(whole, point.workspace_bytes)
        assert len(point.micro_batches) == 1 or point.time_us * effort.DIVISION_GAIN < alone_us


@given(st.data(), st.integers(1, 5), st.integers(2, 1000), st.booleans())
def test_sizes_in_steps_are_as_sizes_in_rows(data: st.DataObject, rows: int, step: int, sums: bool):
    sizes = data.draw(st.lists(st.integers(1, rows), min_size=1, max_size=4, unique=True), "sizes")
    offers = {size: data.draw(st.lists(CANDIDATES, min_size=1, max_size=3)) for size in sizes}
    front = pareto_front({size * step: offered for size, offered in offers.items()}, rows * step, sums)
    assert [(p.workspace_bytes, p.time_us) for p in front] == brute_force(offers, rows, sums)
    for point in front:
        check(point, rows * step, sums)


def test_a_mini_batch_of_any_size_takes_no_table_of_its_size():
    front = pareto_front({2**40: [candidate(3.0, 8)], 2**30: [candidate(0.001, 0)]}, 2**40, accumulates=False)
    assert [(p.workspace_bytes, len(p.micro_batches)) for p in front] == [(0, 1024)]
