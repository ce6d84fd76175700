"""What holds for every test."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# One thread each: the tests run in several processes, whose BLAS threads would wait for each other. NumPy reads this
# when it is imported, so nothing above may import it; the workers of pytest-xdist inherit it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# The same draws in every run, and none too slow on a busy machine: what fails does so for a change.
# `pytest --hypothesis-profile=anew` draws anew each time.
settings.register_profile("anew", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", parent=settings.get_profile("anew"), derandomize=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-digests", action="store_true", help="write down the digests of today's plans")
