"""Top-k accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, Struct, image_of
from mbc.kernels.cuda.pointwise.loss import entropy_parts, partial_bytes
from mbc.ops.top_k import TopK


@dataclass(frozen=True, slots=True)
class TopKArguments(Struct):
    type: int
    layout: int
    rows: int
    classes: int
    inner: int
    k: int
    parts: int


def _arguments(at: Slice) -> TopKArguments:
    a = at.request.attributes
    assert isinstance(a, TopK)
    return TopKArguments(*image_of(at), a.k, entropy_parts(at.request.inputs[0], at.layout))


def _workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(entropy_parts(request.inputs[0], layout))


KERNELS = (OwnKernel("top_k", "pointwise/top_k.cu", TopKArguments, _arguments, workspace=_workspace, launches=2),)
