"""1x1 convolutions with fused rematerialization, and their data gradients.

Results are equal to the bit to those of the launches that they replace, except for the order of reductions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.graph import Operation
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import DTYPE_CODES
from mbc.kernels.cuda import KERNELS, OWN
from mbc.kernels.cuda.conv import conv1x1, mma_gemm
from mbc.measure.statistics_harness import distances, moments
from mbc.ops.convolution import Convolution
from mbc.optimize.fusion.catalogue_conv1x1 import CONVOLUTION_FUSED_REMAT
from mbc.optimize.fusion.pattern import LaunchPattern, Pattern
from tests.kernels.cuda.cases import Case, w
from tests.kernels.cuda.groups import POINT_FORMS, POINTS, Sizes, point_operand, points
from tests.kernels.cuda.launching import TOLERANCES, Library, from_bytes, launched, relative_error, request_of, to_bytes
from tests.kernels.cuda.test_emulated import GXX, build
from tests.kernels.statistics import grouped

pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")
PRODUCTS = tuple(
    f"{source}{form}.cu"
    for source in ("conv1x1", "conv1x1_backward_data", "conv1x1_bn_backward", "dual_conv1x1")
    for form in ("", "_mma")
)
FILES = (*PRODUCTS, "batch_norm_relu.cu", "batch_norm.cu", "bn_backward_remat.cu")
FORWARD = CONVOLUTION_FUSED_REMAT[0]
# What is written over something that is read.
PLACES = (("d", "a"), ("d", "b"), ("d", "dy"), ("d", "y"), ("y", "r"), ("y", "x"), ("dx", "d"), ("dx", "dy"))
MADE_BY = {"convolution": "conv1x1", "convolution_backward_data": "conv1x1_backward_data"}


@pytest.fixture(scope="module", params=[Precision.BF16, pytest.param(Precision.FP16, marks=pytest.mark.exhaustive)])
def both_forms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Precision, Library]:
    return request.param, build(Path(tmp_path_factory.mktemp("kernels")), DTYPE_CODES[request.param], FILES)


@pytest.fixture(params=["h200", "a100-40"])
def library(request: pytest.FixtureRequest, both_forms: tuple[Precision, Library]) -> tuple[Precision, Library]:
    """Kernels as a GPU gets them: with wgmma, or with mma.sync."""
    device, (precision, library) = find_spec(request.param), both_forms
    return precision, replace(library, offered=lambda request: list(OWN.candidates(request, device)))


class Bench:
    """Runs operations of a pattern on shared values, by their names."""

    def __init__(self, library: tuple[Precision, Library], pattern: Pattern, sizes: Sizes) -> None:
        self.precision, self.library = library
        self.pattern, self.sizes = pattern, sizes
        self.stored: dict[str, bytes] = {}

    def operand(self, name: str) -> tuple[bytes, TensorType]:
        operand = point_operand(name, self.pattern, self.sizes)
        type_ = operand.type(self.precision)
        if name not in self.stored:
            values = operand.make(np.random.default_rng(sum(map(ord, name))), operand.shape)
            last = len(operand.shape) == 4 and operand.shape[2:] != (1, 1)
            self.stored[name] = to_bytes(values, type_.dtype, Layout.CHANNELS_LAST if last else Layout.CHANNELS_FIRST)
        return self.stored[name], type_

    def run(self, operation: Operation, name: str = "", places: dict[str, str] | None = None) -> dict[str, bytes]:
        """Return the outputs of an operation by the kernel `name`; `places` maps outputs to overwritten inputs."""
        operands, types = zip(*map(self.operand, operation.inputs), strict=True)
        shared = {operation.outputs.index(o): operation.inputs.index(i) for o, i in (places or {}).items()}
        request = request_of(operation, types, self.precision)
        results = launched(self.library, request, operands, shared=shared, name=name)
        return dict(zip(operation.outputs, results, strict=True))


def _named(value: Pattern | LaunchPattern | Sizes) -> str:
    if isinstance(value, Pattern):
        return "+".join(statement.kind for statement in value.statements[1:])
    return ".".join(value.writes) if isinstance(value, LaunchPattern) else str(value)


@pytest.mark.parametrize("blocks", [1, conv1x1.REDUCTION_BLOCKS])
@pytest.mark.parametrize(("pattern", "part", "sizes"), POINT_FORMS, ids=_named)
def test_equal_to_the_launches_by_themselves(
    pattern: Pattern,
    part: LaunchPattern,
    sizes: Sizes,
    blocks: int,
    library: tuple[Precision, Library],
    monkeypatch: pytest.MonkeyPatch,
):
    """`blocks`: one block for all tiles of its filters, or as many blocks as tiles."""
    monkeypatch.setattr(conv1x1, "REDUCTION_BLOCKS", blocks)
    monkeypatch.setattr(mma_gemm, "MOST_BLOCKS", blocks)
    bench = Bench(library, pattern, sizes)
    fused_remat = points(pattern, part, sizes)
    results = bench.run(fused_remat)
    products = {n: pattern.statements[n] for n in part.statements if pattern.statements[n].kind in MADE_BY}
    for n, statement in products.items():
        bench.stored |= bench.run(
            points(pattern, LaunchPattern((n,), statement.outputs), sizes), MADE_BY[statement.kind]
        )
    of_products = {name for statement in products.values() for name in statement.outputs}
    behind = tuple(name for name in part.writes if name not in of_products)
    wanted = {name: bench.stored[name] for name in part.writes if name in of_products}
    wanted |= bench.run(points(pattern, LaunchPattern(part.statements[len(products) :], behind), sizes))
    for name in results.keys() & {"dgamma", "dbeta"}:
        sums, other = (np.frombuffer(values.pop(name), np.float32) for values in (results, wanted))
        assert relative_error(sums, other) < 1e-5
    assert results == wanted
    places = [(new, old) for new, old in PLACES if new in results and old in fused_remat.inputs]
    for name, old in places:
        again = bench.run(fused_remat, places={name: old})
        assert {name: again[name] for name in results} == results


@pytest.mark.parametrize("sizes", POINTS, ids=str)
def test_the_same_with_statistics(sizes: Sizes, library: tuple[Precision, Library]):
    """A fused rematerialization may repeat a convolution that had statistics in its epilogue."""
    bench = Bench(library, FORWARD, sizes)
    alone = points(FORWARD, LaunchPattern((0,), ("x",)), sizes)
    assert isinstance(alone.attributes, Convolution)
    results = bench.run(replace(grouped(alone.attributes), inputs=alone.inputs))
    assert results["x"] == bench.run(alone, "conv1x1")["x"]


def test_statistics_of_results_far_from_zero(library: tuple[Precision, Library], monkeypatch: pytest.MonkeyPatch):
    """Distances are from a near element, even for a thread that has no element of its block's first tile."""
    monkeypatch.setattr(conv1x1, "REDUCTION_BLOCKS", 1)
    monkeypatch.setattr(mma_gemm, "MOST_BLOCKS", 1)
    sizes = (2, 128, (5, 13), 256)
    bench = Bench(library, FORWARD, sizes)
    image = 1 + np.random.default_rng(1).standard_normal((2, 128, 5, 13)) / 100
    _, type_ = bench.operand("image")
    bench.stored["image"] = to_bytes(image, type_.dtype, Layout.CHANNELS_LAST)
    alone = points(FORWARD, LaunchPattern((0,), ("x",)), sizes)
    assert isinstance(alone.attributes, Convolution)
    results = bench.run(replace(grouped(alone.attributes), inputs=alone.inputs))
    result = from_bytes(results["x"], TensorType((2, 256, 5, 13), type_.dtype), Layout.CHANNELS_LAST)
    wanted = moments(result.astype(np.float64), len(result))
    assert np.median(np.abs(wanted[0]) / np.sqrt(wanted[1])) > 30
    mean, variance = (np.frombuffer(results[name], np.float32) for name in ("mean", "variance"))
    assert max(distances(mean, variance, *wanted)) <= TOLERANCES[DType.FP32]


@pytest.mark.parametrize(
    ("channels", "stride"), [(conv1x1.MOST_CHANNELS + 64, 1), (64, 2)], ids=["too many channels", "a step of two"]
)
def test_not_taken(channels: int, stride: int):
    a = Convolution((5, 5), (1, 1), (stride, stride))
    case = Case("not taken", "convolution", a, (w(2, channels, 5, 5), w(64, channels, 1, 1)))
    assert not KERNELS["conv1x1"].takes(case.request(Precision.BF16))
