"""Copies between a real GPU and its host: plausible rates, on which two measurements agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mbc.ir.types import Precision
from mbc.measure.gpu import Gpu
from mbc.measure.workbench import Bench


@pytest.fixture(scope="module")
def bench(gpu: Gpu) -> Iterator[Bench]:
    with Bench(gpu) as transfer_bench:
        yield transfer_bench


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_link_is_measured(bench: Bench, precision: Precision) -> None:
    bench.warm(precision)
    link = bench.host_link(precision)
    print(link)
    assert link.measured and bench.gpu.mark() == 0
    for alone_gb_s, both_gb_s in (
        (link.to_host_gb_s, link.to_host_both_gb_s),
        (link.to_device_gb_s, link.to_device_both_gb_s),
    ):
        assert 1 < both_gb_s <= alone_gb_s < 1000
        assert both_gb_s > 0.4 * alone_gb_s, "both directions at once move more than one of them alone"
    assert 0 < link.latency_us < 200
    for slowdown in (link.streaming, link.cached, link.computing):
        assert 1 <= max(slowdown.out, slowdown.back, slowdown.both) < 2, "copies overlap any kernel"
    again = bench.host_link(precision)
    assert again.to_host_gb_s == pytest.approx(link.to_host_gb_s, rel=0.1)
    assert again.to_device_gb_s == pytest.approx(link.to_device_gb_s, rel=0.1)
