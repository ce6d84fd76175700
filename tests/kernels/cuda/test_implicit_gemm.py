"""Convolutions by mma.sync along one to three axes, with channels that do not fill a stage or a tile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.types import Precision
from mbc.kernels.base import DTYPE_CODES
from mbc.kernels.cuda import KERNELS, OWN
from mbc.kernels.cuda.conv import implicit_gemm, implicit_gemm_strided, mma_gemm
from mbc.ops.convolution import Convolution
from tests.kernels.cuda.cases import Case, w
from tests.kernels.cuda.launching import Library, check, check_statistics
from tests.kernels.cuda.test_emulated import GXX, build
from tests.kernels.statistics import grouped

pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")
A100 = find_spec("a100-40")
FORWARD, BACKWARD_DATA, WITH_STATISTICS, BACKWARD_FILTER = implicit_gemm.KERNELS
(STRIDED,) = implicit_gemm_strided.KERNELS
# Samples, channels, filters, and size, kernel, stride and padding (before and after each axis).
SHAPES = (
    (1, 24, 40, Convolution((4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1))),
    (2, 40, 72, Convolution((5, 4, 7), (3, 1, 2), (2, 1, 3), (1, 0, 0, 0, 1, 0))),
    (3, 8, 248, Convolution((61,), (10,), (1,), (4, 5))),
    (1, 632, 120, Convolution((3, 5), (1, 1), (1, 1))),
    (2, 64, 16, Convolution((9, 9), (1, 1), (2, 2))),
)
# Windows of three, two and seven at a stride of two; classes of several sizes, one without a result, and results that
# no window reaches; odd sizes, padding at one side only, and padding as large as the window.
STRIDED_SHAPES = (
    (2, 32, 40, Convolution((6, 8, 10), (3, 3, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1))),
    (1, 72, 24, Convolution((5, 7, 6), (3, 2, 3), (2, 1, 2), (0, 0, 1, 1, 1, 0))),
    (1, 136, 40, Convolution((13, 11), (7, 7), (2, 2), (3, 3, 3, 3))),
    (2, 64, 72, Convolution((3, 4, 5), (2, 2, 2), (2, 2, 2), (0, 0, 1, 0, 0, 1))),
    (3, 24, 8, Convolution((61,), (3,), (2,), (3, 1))),
    (1, 96, 32, Convolution((1, 9, 12), (1, 3, 3), (2, 4, 3), (0, 1, 2, 0, 0, 1))),
    (1, 16, 40, Convolution((5, 7), (2, 1), (1, 1), (2, 0, 0, 1))),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    built = build(
        Path(tmp_path_factory.mktemp("kernels")),
        DTYPE_CODES[Precision.BF16],
        ("implicit_gemm.cu", "implicit_gemm_filter.cu", "implicit_gemm_strided.cu"),
    )
    kernels = (*implicit_gemm.KERNELS, STRIDED)
    return replace(built, offered=lambda r: [c for c in OWN.candidates(r, A100) if KERNELS[c.name] in kernels])


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


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("blocks", [1, 5, mma_gemm.MOST_BLOCKS])
@pytest.mark.parametrize(("samples", "channels", "filters", "a"), (*STRIDED_SHAPES, SHAPES[1], SHAPES[4]))
def test_data_gradients_at_any_stride(
    samples: int, channels: int, filters: int, a: Convolution, blocks: int, together: bool, library: Library,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(mma_gemm, "MOST_BLOCKS", blocks)
    monkeypatch.setattr(implicit_gemm_strided, "_together", lambda _: a.stride[-1] if together else 1)
    gradient = Case("data", STRIDED.kind, a, (w(samples, filters, *a.output_size), w(filters, channels, *a.kernel)))
    assert STRIDED.takes(gradient.request(Precision.BF16))
    assert check(library, gradient, Precision.BF16) > 0


@pytest.mark.parametrize(("axes", "stride", "is_offered"), [(3, 2, True), (3, 1, False), (2, 2, False)])
def test_gpus_with_wgmma_only_measure_gradients_of_strided_volumes(axes: int, stride: int, is_offered: bool) -> None:
    a = Convolution((8,) * axes, (3,) * axes, (stride,) * axes, (1,) * 2 * axes)
    image, gradient, weights = w(1, 96, *a.size), w(1, 96, *a.output_size), w(96, 96, *a.kernel)
    for kind, operands in (("data", (gradient, weights)), ("filter", (image, gradient))):
        request = Case(kind, f"convolution_backward_{kind}", a, operands).request(Precision.BF16)
        old, new = (
            [c for c in OWN.candidates(request, gpu) if "implicit" in c.name] for gpu in (A100, find_spec("h200"))
        )
        assert [c.by_measurement for c in old] == [False] and [c.by_measurement for c in new] == [True] * is_offered
