"""Top-k accuracy over all positions, or over those whose class is not ignored."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, image_of
from mbc.kernels.cuda.pointwise.loss import SCORE_BYTES, entropy_parts, partial_bytes
from mbc.kernels.launch_struct import Struct
from mbc.ops.top_k import TopK, TopKMean

FILE = "pointwise/top_k.cu"


@dataclass(frozen=True, slots=True)
class TopKArguments(Struct):
    """Integer arguments of a launch of top-k accuracy."""

    type: int
    layout: int
    rows: int
    classes: int
    inner: int
    k: int
    ignores: int
    ignored: int
    parts: int


def _arguments(at: Slice) -> TopKArguments:
    a = at.request.attributes
    assert isinstance(a, TopK | TopKMean)
    ignored = a.ignored if isinstance(a, TopKMean) else ()
    parts = entropy_parts(at.request.inputs[0], at.layout)
    return TopKArguments(*image_of(at), a.k, bool(ignored), sum(ignored), parts)


def _workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(entropy_parts(request.inputs[0], layout))


def _mean_workspace(request: Request, layout: Layout) -> int:
    return entropy_parts(request.inputs[0], layout) * SCORE_BYTES


def _mean_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, TopKMean)
    return (a.share,)


KERNELS = (
    OwnKernel("top_k", FILE, TopKArguments, _arguments, workspace=_workspace, launches=2),
    OwnKernel("top_k_mean", FILE, TopKArguments, _arguments, _mean_reals, workspace=_mean_workspace, launches=2),
)
