"""Fixtures that all tests of plans of small networks share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from mbc.kernels import calibration as module

# Their launches wait for so much that they decide whether tensors as small as the tests' are fused, and how these lie.
LONG_TO_START = ("mbc lrn", "mbc bias_add_relu_max_pool", "mbc relu_max_pool", "mbc max_pool_backward_add")


@contextmanager
def plain_starts() -> Generator[None]:
    """Estimate kernels that are slow to start like all others."""
    shipped = module.calibration()
    shares = {key: share for key, share in shipped.shares.items() if not key.startswith(LONG_TO_START)}
    plain = replace(shipped, shares=shares)
    with patch.object(module, "calibration", lambda: plain):
        yield


@pytest.fixture(autouse=True, scope="module")
def _pools_start_as_other_kernels_do() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    with plain_starts():
        yield
