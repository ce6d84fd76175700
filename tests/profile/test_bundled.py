"""The rates of the host link in the profiles that come with mbc."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.hardware.transfers import KernelClass, measured_link
from mbc.profile.paths import BUNDLED, COMPRESSED
from mbc.profile.read_profile import read_profile

MOST_SLOWDOWN = 1.05  # a GEMM at the peak of the GPU has more, which steps do not run
PROFILES = sorted(BUNDLED.glob(f"*{COMPRESSED}"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name)
def test_copies_hardly_slow_down_kernels(path: Path):
    link = measured_link(read_profile(path).constants)
    assert link is not None
    for kernels in KernelClass:
        assert max(link.slowdown(kernels).out, link.slowdown(kernels).back, link.slowdown(kernels).both) < MOST_SLOWDOWN


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name)
def test_a_direction_alone_is_not_slower_than_beside_the_other(path: Path):
    link = measured_link(read_profile(path).constants)
    assert link is not None
    assert link.to_host_gb_s >= link.to_host_both_gb_s
    assert link.to_device_gb_s >= link.to_device_both_gb_s


def test_there_are_some():
    assert len(PROFILES) >= 2
