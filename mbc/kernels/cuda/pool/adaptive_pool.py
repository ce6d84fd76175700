"""Pooling to any size."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.kernels.cuda.base import OwnKernel, Slice, in_space, layout_code, type_code
from mbc.kernels.cuda.pool.pooling import PooledArguments
from mbc.ops.adaptive_pool import AdaptiveMaxPool, AdaptivePool

FILE = "pool/adaptive_pool.cu"


@dataclass(frozen=True, slots=True)
class AdaptivePoolArguments(PooledArguments):
    """Integer arguments of a launch of adaptive pooling."""

    index: int


def _arguments(at: Slice) -> AdaptivePoolArguments:
    y, a = at.request.outputs[0], at.request.attributes
    assert isinstance(a, AdaptivePool)
    index = int(isinstance(a, AdaptiveMaxPool) and a.index)
    (rows, channels), axes = y.shape[:2], (*in_space(a.size, 1), *in_space(a.output_size, 1))
    return AdaptivePoolArguments(type_code(y), layout_code(at.layout), rows, channels, *axes, index=index)


KERNELS = tuple(
    OwnKernel(f"adaptive_{kind}", FILE, AdaptivePoolArguments, _arguments, operands=operands)
    for kind, operands in (
        ("avg_pool", "from to"),
        ("avg_pool_backward", "from to"),
        ("max_pool", "from to index?index"),
        ("max_pool_backward", "index from to"),
    )
)
