"""Convolutions with statistics in the epilogue, on a simulated GPU: which results are accepted or refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mbc.ir.types import Precision
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cudnn_statistics import LAYOUTS
from mbc.measure.need import Need
from mbc.measure.offers import Offer
from mbc.measure.protocols import Attempt
from mbc.measure.statistics_harness import allowed, distances, moments
from mbc.ops.base import Array
from tests.kernels.statistics import with_statistics
from tests.measure.test_harness import Behaviour, Kernels, Memory, bench_of, gpu, right

__all__ = ["gpu"]  # the fixture

SETTINGS = (("deterministic", 1), ("engine", 2), ("layout", 1))
WHOLE = 4  # dimensions of a result, which its statistics have not


def offer(request: Request) -> Offer:
    return Offer(Candidate("cudnn", request.kind, SETTINGS, LAYOUTS, 1 << 14, 0.0, False))


def attempted(gpu: Memory, behaviour: Behaviour, rows: int = 6) -> Attempt:
    request = with_statistics((rows, 8, 6, 5), 16, 3)
    kernel = offer(request)
    bench = bench_of(gpu, Kernels(gpu, behaviour))
    with bench.open(Need((request,), 1.0)) as harness, harness.at(request, [kernel]) as place:
        attempt = place.attempt(kernel, math.inf)
        assert not place.adds(attempt)
        if not attempt.refused:
            assert place.time(attempt, 1.0).median_us == 2000.0
        return attempt


@pytest.mark.parametrize("rows", [6, 1, 4, 11])
def test_right_statistics_are_admitted(gpu: Memory, rows: int) -> None:
    attempt = attempted(gpu, right, rows)
    assert attempt.refused == "" and 0 < attempt.error < 1e-3


def test_statistics_of_unrounded_results_are_admitted(gpu: Memory) -> None:
    """An engine may compute statistics of the stored result, as the reference does, or of the unrounded one."""
    seen: list[Array] = []

    def behaviour(_: Memory, result: Array, *rest: object) -> Array:
        if result.ndim == WHOLE:
            cut_off = np.random.default_rng(5).uniform(-0.5, 0.5, result.shape) * 2.0**-11
            seen[:] = [result.astype(np.float64) * (1 + cut_off)]
            seen.append(seen[0].var((0, 2, 3)))
            seen.append(seen[0].mean((0, 2, 3)))
            return result
        output = seen.pop()
        assert not np.array_equal(output, result)
        return output

    assert attempted(gpu, behaviour).refused == ""


@pytest.mark.parametrize(("number", "name"), [(1, "mean"), (2, "variance")])
@pytest.mark.parametrize("wrong", ["off", "unwritten", "of half the rows"])
def test_wrong_statistics_are_refused(gpu: Memory, number: int, name: str, wrong: str) -> None:
    count = 0

    def behaviour(_: Memory, result: Array, *rest: object) -> Array:
        nonlocal count
        place, count = count % 3, count + 1
        if place != number:
            return result
        return {"off": result + 2e-3 * result.std(), "unwritten": result * np.nan, "of half the rows": result / 2}[
            wrong
        ]

    attempt = attempted(gpu, behaviour)
    assert attempt.refused.startswith(f"its {name} is ")
    assert (attempt.error < 0) == (wrong == "unwritten")


def test_a_wrong_result_is_refused_whatever_its_statistics(gpu: Memory) -> None:
    attempt = attempted(gpu, lambda gpu, r, *_: r * 1.01 if r.ndim == WHOLE else r)
    assert attempt.refused.startswith("its result is ")


def test_moments_count_rows_as_often_as_they_come() -> None:
    period = np.random.default_rng(3).standard_normal((4, 5, 3, 2))
    for rows in (4, 6, 13):
        whole = period[np.arange(rows) % 4]
        mean, variance = moments(period, rows)
        np.testing.assert_allclose(mean, whole.mean((0, 2, 3)), atol=1e-14)
        np.testing.assert_allclose(variance, whole.var((0, 2, 3)), rtol=1e-12)


def test_a_mean_of_next_to_nothing_counts_by_its_elements() -> None:
    mean, variance = np.array([1e-6, -1e-6]), np.array([4.0, 4.0])
    off, same = distances(mean + 1e-7, variance, mean, variance)
    assert off == pytest.approx(5e-8) and same == 0.0


def test_the_tolerance_grows_with_rounding_errors() -> None:
    request = with_statistics((8, 8, 10, 10), 16, 1)
    assert allowed(request, 4) == pytest.approx((1e-5 + 1e-3 / 20, 1e-5 + 2e-3 / 20))
    assert allowed(with_statistics((8, 8, 40, 40), 16, 1), 4) < allowed(request, 4)
    assert request.precision is Precision.FP16
