"""Mean and variance of the sums that a convolution's epilogue leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mbc.kernels.base import Arguments
from tests.kernels.cuda.launching import Library
from tests.kernels.cuda.test_emulated import GXX, build

pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")
GUARD = np.float32(-7.0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build(Path(tmp_path_factory.mktemp("moments")), 0, ("moments.cu",))


def moments(library: Library, sums: np.ndarray, squares: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance as the kernel computes them, and assert that it writes nothing else."""
    memory, channels = library.memory, len(sums)
    given = np.concatenate([sums, squares]).astype(np.float32)
    places = [memory.allocate(given.nbytes), *(memory.allocate(4 * (channels + 1)) for _ in range(2))]
    memory.write(places[0], given.tobytes())
    for place in places[1:]:
        memory.write(place, np.full(channels + 1, GUARD).tobytes())
    library.launch("mbc_moments", places, Arguments((channels, count)))
    mean, variance = (np.frombuffer(memory.read(place, 4 * (channels + 1)), np.float32) for place in places[1:])
    assert memory.read(places[0], given.nbytes) == given.tobytes() and mean[-1] == variance[-1] == GUARD
    memory.free_all()
    return mean[:-1], variance[:-1]


@pytest.mark.parametrize("channels", [1, 8, 1000])
def test_moments_are_those_of_the_elements(library: Library, channels: int) -> None:
    count = 4096
    elements = np.random.default_rng(channels).normal(3.0, 2.0, (count, channels))
    mean, variance = moments(library, elements.sum(0), np.square(elements).sum(0), count)
    np.testing.assert_allclose(mean, elements.mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, elements.var(0), rtol=1e-5)


def test_a_mean_far_from_zero_costs_only_the_digits_of_the_sums(library: Library) -> None:
    count, centers = 1 << 20, np.array([10.0, 100.0, 1000.0], np.float32)
    sums, squares = ((count * s).astype(np.float32) for s in (centers, np.square(centers) + 1.0))
    exact = squares.astype(np.float64) / count - np.square(sums.astype(np.float64) / count)
    mean, variance = moments(library, sums, squares, count)
    np.testing.assert_array_equal(mean, centers)
    np.testing.assert_array_equal(variance, exact.astype(np.float32))


def test_no_variance_is_below_zero(library: Library) -> None:
    """For equal elements the rounded sum of squares may be too small."""
    sums = np.array([3.0, 0.0], np.float32)
    mean, variance = moments(
        library, sums, np.array([np.nextafter(np.float32(3.0), np.float32(0)), 0.0], np.float32), 3
    )
    np.testing.assert_array_equal(mean, [1.0, 0.0])
    np.testing.assert_array_equal(variance, [0.0, 0.0])


def test_nan_stays_nan(library: Library) -> None:
    """An overflow stays infinite or NaN, because loss scaling looks for such values."""
    mean, variance = moments(
        library, np.array([np.inf, np.nan, 1.0], np.float32), np.array([np.inf, np.nan, np.inf], np.float32), 4
    )
    assert np.isinf(mean[0]) and np.isnan(mean[1]) and np.isnan(variance[:2]).all() and np.isinf(variance[2])
