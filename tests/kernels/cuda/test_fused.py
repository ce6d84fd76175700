"""Fused kernels in fp16: all of them decide alike which elements ReLU lets through."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import DTYPE_CODES
from mbc.kernels.cuda import kernel_of
from mbc.ops.base import Array
from mbc.optimize.fusion.catalogue import PATTERNS
from tests.kernels.cuda.cases import CASES, Case
from tests.kernels.cuda.groups import group, groups_in
from tests.kernels.cuda.launching import Library, check, launched, offered_anywhere, request_of, to_bytes
from tests.kernels.cuda.matrix import chosen, matrix
from tests.kernels.cuda.test_emulated import GXX, PAIRS, build

pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")
SHAPE = (3, 16, 5, 6)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    requests = [case.request(Precision.FP16) for case in groups_in(Precision.FP16)]
    kernels = [kernel_of(c.name, request) for request in requests for c in offered_anywhere(request)]
    files = sorted({Path(file).name for kernel in kernels if kernel is not None for file in kernel.files})
    return build(Path(tmp_path_factory.mktemp("fused")), DTYPE_CODES["fp16"], files)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build(tmp_path_factory.mktemp("pools"), DTYPE_CODES["fp16"], ("max_pool.cu", "max_pool_backward.cu"))


POOLS = [case for case in CASES if case.kind in ("max_pool", "max_pool_backward")]
QUICK_POOLS = {id_.replace("-bf16", "-fp16") for id_ in chosen(PAIRS)}


@pytest.mark.parametrize(("case", "precision"), matrix([(case, Precision.FP16) for case in POOLS], quick=QUICK_POOLS))
def test_pools_in_half_precision(case: Case, precision: Precision, pools: Library):
    """Largest elements of two bytes are found by integers, which differ between the types."""
    check(pools, case, precision)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "precision"), matrix((case, Precision.FP16) for case in groups_in(Precision.FP16)))
def test_in_half_precision(case: Case, precision: Precision, library: Library):
    check(library, case, precision)


@pytest.mark.exhaustive
def test_activations_that_round_to_zero_let_nothing_through(library: Library):
    """Activations near the smallest fp16 number: where the stored activation is zero, so is its gradient."""
    rng = np.random.default_rng(1)
    image, vector = TensorType(SHAPE, DType.FP16), TensorType(SHAPE[1:2], DType.FP32)

    def stored(values: Array, type_: TensorType) -> bytes:
        return to_bytes(values, type_.dtype, Layout.CHANNELS_LAST if type_ is image else Layout.CHANNELS_FIRST)

    x, dy = stored(rng.standard_normal(SHAPE), image), stored(rng.standard_normal(SHAPE), image)
    mean, variance = stored(np.zeros(16), vector), stored(np.full(16, 1e15), vector)  # deviation: one part in 3e7
    gamma, beta = stored(np.ones(16), vector), stored(np.zeros(16), vector)
    forward = group(PATTERNS[0], PATTERNS[0].launches[0], SHAPE, affine=True)
    backward = next(p for p in PATTERNS if len(p.launches) == 2 and p.statements[1].kind == "relu")
    again = group(backward, backward.launches[0], SHAPE, affine=True)
    apart = next(p for p in PATTERNS if p.statements[0].kind == "relu_backward" and len(p.launches[0].writes) == 3)
    singly = group(apart, apart.launches[0], SHAPE, affine=True)
    normalized = request_of(forward, [image, *[vector] * 4], Precision.FP16)
    (y,) = launched(library, normalized, [x, mean, variance, gamma, beta])
    positive = np.frombuffer(y, np.float16) > 0
    assert 0.05 < positive.mean() < 0.45, "some of what is positive vanishes, and some does not"
    sums = request_of(again, [image, *[vector] * 4, image], Precision.FP16)
    masked = request_of(singly, [image, image, image, vector, vector], Precision.FP16)
    results = launched(library, sums, [x, mean, variance, gamma, beta, dy])
    _, *wanted = launched(library, masked, [y, dy, x, mean, variance])
    assert results == wanted
