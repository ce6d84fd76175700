"""Reductions with fused rematerialization of ReLU's output.

All that they write is equal to the bit to the results of the launches that they replace.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mbc.ir.graph import Operation
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import DTYPE_CODES, Request
from mbc.ops.base import Array
from mbc.ops.relu_mask import CHANNELS
from mbc.optimize.fusion.catalogue import RELU_FUSED_REMAT
from mbc.optimize.fusion.pattern import LaunchPattern, Pattern, Statement
from tests.kernels.cuda.cases import Shape
from tests.kernels.cuda.groups import SAME, group
from tests.kernels.cuda.launching import Library, from_bytes, launched, request_of, to_bytes
from tests.kernels.cuda.test_emulated import GXX, build

pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")
FILES = ("batch_norm_relu.cu", "bn_backward_remat.cu")
# Whole vectors; odd numbers of everything; sums in several parts in either layout.
SHAPES: tuple[Shape, ...] = ((3, 16, 5, 6), (2, 7, 3, 5), (3, 8, 44, 44), (3, 2, 110, 112))
# Factors of x, its deviation and the summand, with which some positive results are too small for the type.
VANISHING = {Precision.FP16: (1.0, 1e15, 3e-8), Precision.BF16: (5e-22, 1e38, 5e-41), Precision.FP32: (5e-26, 1e38, 0)}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[Precision, Library]:
    """Return a library for each 16-bit type; both have fp32 kernels, too."""
    bf16, fp16 = (build(Path(tmp_path_factory.mktemp(t)), DTYPE_CODES[t], FILES) for t in ("bf16", "fp16"))
    return {Precision.FP32: bf16, Precision.BF16: bf16, Precision.FP16: fp16}


def _swapped(pattern: Pattern) -> Pattern:
    """Return the pattern with the operands of the residual sum in the other order."""
    swapped = (replace(s, inputs=s.inputs[::-1]) if s.outputs == ("s",) else s for s in pattern.statements)
    return replace(pattern, statements=tuple(swapped))


def _image(name: str) -> bool:
    return name in SAME


def _values(name: str, shape: Shape, precision: Precision, vanishing: bool) -> Array:
    rng = np.random.default_rng(sum(map(ord, name)))
    x, variance, beside = VANISHING[precision] if vanishing else (1.0, 1.0, 1.0)
    drawn = rng.standard_normal(shape if _image(name) else shape[1:2])
    if name.startswith("variance"):
        return variance * (0.5 + np.abs(drawn))
    if name.startswith("beta") and vanishing:
        return 0 * drawn
    scale = {"x": x, "x2": x, "mean": x / 4, "mean2": x / 4, "r": beside}
    return scale.get(name, 1.0) * drawn


class Bench:
    """Runs groups of operations on shared values, by their names."""

    def __init__(self, library: Library, shape: Shape, precision: Precision, layout: Layout, vanishing: bool):
        self.library, self.shape, self.precision, self.layout = library, shape, precision, layout
        self.vanishing = vanishing
        self.stored: dict[str, bytes] = {}

    def type_of(self, name: str) -> TensorType:
        return (
            TensorType(self.shape, self.precision.working) if _image(name) else TensorType(self.shape[1:2], DType.FP32)
        )

    def operand(self, name: str) -> bytes:
        if name not in self.stored:
            values = _values(name, self.shape, self.precision, self.vanishing)
            layout = self.layout if _image(name) else Layout.CHANNELS_FIRST
            self.stored[name] = to_bytes(values, self.type_of(name).dtype, layout)
        return self.stored[name]

    def request(self, operation: Operation) -> Request:
        return request_of(operation, [self.type_of(name) for name in operation.inputs], self.precision)

    def run(self, operation: Operation, places: dict[str, str] | None = None) -> dict[str, bytes]:
        """Return the outputs of a group; `places` maps outputs to overwritten inputs."""
        outputs, inputs = operation.outputs, operation.inputs
        shared = {outputs.index(results): inputs.index(old) for results, old in (places or {}).items()}
        operands = [self.operand(name) for name in inputs]
        results = launched(self.library, self.request(operation), operands, self.layout, shared)
        return dict(zip(outputs, results, strict=True))


def _by_output(pattern: Pattern) -> Pattern:
    """Return the pattern in which the gradient of ReLU reads its output instead of a bit mask."""
    through = Statement.parse("d = relu_backward(y, dy)")
    kept = (s for s in pattern.statements if s.kind != "relu_mask")
    return replace(pattern, statements=tuple(through if s.kind == "relu_backward_masked" else s for s in kept))


def _has_masks(pattern: Pattern) -> bool:
    return any(s.kind == "relu_mask" for s in pattern.statements)


def _apart(pattern: Pattern, shape: Shape, affine: bool) -> tuple[Operation, Operation]:
    """Return two separate launches: one that computes ReLU's output, and one that computes the sums."""
    gives = pattern.launches[0].writes
    relu = next(n for n, s in enumerate(pattern.statements) if s.kind == "relu")
    forward, everything = range(relu + 1), range(len(pattern.statements))
    behind = everything[relu + 1 :] if "d" in gives else everything
    first = group(pattern, LaunchPattern(tuple(forward), ("y",)), shape, affine)
    return first, group(pattern, LaunchPattern(tuple(behind), gives[1:]), shape, affine)


@pytest.mark.parametrize("precision", VANISHING)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("number", range(len(RELU_FUSED_REMAT)))
def test_equal_to_the_bit(
    number: int, affine: bool, layout: Layout, precision: Precision, libraries: dict[Precision, Library]
):
    for pattern in (RELU_FUSED_REMAT[number], _swapped(RELU_FUSED_REMAT[number])):
        for shape in SHAPES:
            if _has_masks(pattern) and shape[1] % CHANNELS != 0:
                continue
            for vanishing in (False, True):
                bench = Bench(libraries[precision], shape, precision, layout, vanishing)
                first, second = _apart(_by_output(pattern), shape, affine)
                bench.stored |= bench.run(first)
                wanted = {"y": bench.stored["y"], **bench.run(second)}
                fused_remat = group(pattern, pattern.launches[0], shape, affine)
                assert bench.run(fused_remat) == wanted, (shape, vanishing)
                inputs = fused_remat.inputs
                places = {"y": next(name for name in ("r", "x2", "x") if name in inputs)}
                if "d" in wanted:
                    places["d"] = "a" if "a" in inputs else "dy"
                assert bench.run(fused_remat, places) == wanted, (shape, vanishing, places)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("number", range(len(RELU_FUSED_REMAT)))
def test_the_mask_is_that_of_the_stored_values(number: int, precision: Precision, libraries: dict[Precision, Library]):
    """Some positive elements round to zero when stored; the mask must not let them through."""
    pattern, shape = RELU_FUSED_REMAT[number], SHAPES[0]
    bench = Bench(libraries[precision], shape, precision, Layout.CHANNELS_LAST, vanishing=True)
    results = bench.run(group(pattern, pattern.launches[0], shape, affine=True))
    y = from_bytes(results["y"], bench.type_of("y"), bench.layout)
    assert 0.02 < (y > 0).mean() < 0.45
    if "d" in results:
        d = from_bytes(results["d"], bench.type_of("d"), bench.layout)
        assert d[y > 0].any() and not d[y == 0].any()
