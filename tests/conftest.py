"""What holds for every test."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# One thread each: the tests run in several processes, whose BLAS threads would wait for each other. NumPy reads this
# when it is imported, so nothing above may import it; the workers of pytest-xdist inherit it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

pytest_plugins = ("tests.shares",)

# The same draws in every run, and none too slow on a busy machine: what fails does so for a change.
# `pytest --hypothesis-profile=anew` draws anew each time.
settings.register_profile("anew", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", parent=settings.get_profile("anew"), derandomize=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-expected", action="store_true", help="write expected texts and digests anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skipped rather than deselected: the closing line counts them, with several workers, too."""
    if not (os.environ.get("MBC_ALL_TESTS") or config.getoption("--update-expected")):
        for item in items:
            if item.get_closest_marker("exhaustive"):
                item.add_marker(pytest.mark.skip(reason="exhaustive: runs in make test-all"))


@pytest.fixture
def update_expected(request: pytest.FixtureRequest) -> bool:
    """Whether expected texts are to be written anew, for a change that is meant to change them."""
    return bool(request.config.getoption("--update-expected"))
