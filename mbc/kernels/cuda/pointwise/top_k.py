"""Top-k accuracy over all positions, or over those whose class is not ignored."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, attributes_of, image_of
from mbc.kernels.cuda.image import ImageArguments
from mbc.kernels.cuda.pointwise.loss import SCORE_BYTES, entropy_parts, partial_bytes
from mbc.ops.top_k import TopK, TopKMean

FILE = "pointwise/top_k.cu"


@dataclass(frozen=True, slots=True)
class TopKArguments(ImageArguments):
    """Integer arguments of a launch of top-k accuracy; channels are classes."""

    parts: int
    k: int
    ignores: int
    ignored: int


def _arguments(at: Slice) -> TopKArguments:
    a = at.request.attributes
    assert isinstance(a, TopK | TopKMean)
    ignored = a.ignored if isinstance(a, TopKMean) else ()
    parts = entropy_parts(at.request.inputs[0], at.layout)
    return TopKArguments(*image_of(at), parts, a.k, bool(ignored), sum(ignored))


def _workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(entropy_parts(request.inputs[0], layout))


def _mean_workspace(request: Request, layout: Layout) -> int:
    return entropy_parts(request.inputs[0], layout) * SCORE_BYTES


KERNELS = (
    OwnKernel("top_k", FILE, TopKArguments, _arguments, workspace=_workspace, launches=2),
    OwnKernel(
        "top_k_mean", FILE, TopKArguments, _arguments, attributes_of("share"), workspace=_mean_workspace, launches=2
    ),
)
