"""Convolutions by mma.sync along one to three axes, with channels that do not fill a stage or a tile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.types import Precision
from mbc.kernels.base import DTYPE_CODES
from mbc.kernels.cuda import KERNELS, OWN
from mbc.kernels.cuda.conv import implicit_gemm, mma_gemm
from mbc.ops.convolution import Convolution
from tests.kernels.cuda.cases import Case, w
from tests.kernels.cuda.launching import Library, check, check_statistics
from tests.kernels.cuda.test_emulated import GXX, build
from tests.kernels.statistics import grouped

pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")
A100 = find_spec("a100-40")
FORWARD, BACKWARD_DATA, WITH_STATISTICS, BACKWARD_FILTER = implicit_gemm.KERNELS
# Samples, channels, filters, and size, kernel, stride and padding (before and after each axis).
SHAPES = (
    (1, 24, 40, Convolution((4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1))),
    (2, 40, 72, Convolution((5, 4, 7), (3, 1, 2), (2, 1, 3), (1, 0, 0, 0, 1, 0))),
    (3, 8, 248, Convolution((61,), (10,), (1,), (4, 5))),
    (1, 632, 120, Convolution((3, 5), (1, 1), (1, 1))),
    (2, 64, 16, Convolution((9, 9), (1, 1), (2, 2))),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    built = build(
        Path(tmp_path_factory.mktemp("kernels")),
        DTYPE_CODES[Precision.BF16],
        ("implicit_gemm.cu", "implicit_gemm_filter.cu"),
    )
    return replace(
        built, offered=lambda r: [c for c in OWN.candidates(r, A100) if KERNELS[c.name] in implicit_gemm.KERNELS]
    )


@pytest.mark.parametrize("blocks", [1, mma_gemm.MOST_BLOCKS])
@pytest.mark.parametrize(("samples", "channels", "filters", "a"), SHAPES)
def test_windows_along_any_axes(
    samples: int, channels: int, filters: int, a: Convolution, blocks: int, library: Library,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(mma_gemm, "MOST_BLOCKS", blocks)
    monkeypatch.setattr(mma_gemm, "MERGE_PIXELS", 0)  # as many parts as blocks
    image, weights = w(samples, channels, *a.size), w(filters, channels, *a.kernel)
    forward = Case("forward", FORWARD.kind, a, (image, weights))
    assert FORWARD.takes(forward.request(Precision.BF16))
    assert check(library, forward, Precision.BF16) > 0
    group = grouped(a)
    check_statistics(library, Case("statistics", group.kind, group.attributes, (image, weights)), Precision.BF16)
    gradient = Case("data", BACKWARD_DATA.kind, a, (w(samples, filters, *a.output_size), weights))
    if set(a.stride) == {1} and set(a.kernel) != {1}:
        assert BACKWARD_DATA.takes(gradient.request(Precision.BF16))
        assert check(library, gradient, Precision.BF16) > 0
    assert check(library, Case("filter", BACKWARD_FILTER.kind, a, (image, gradient.operands[0])), Precision.BF16) > 0
