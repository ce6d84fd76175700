"""Root mean square normalization: forward, backward, and the gradient of the scale."""

from __future__ import annotations

from mbc.kernels.cuda.base import OwnKernel, Slice, image_of, pixel_by_pixel
from mbc.kernels.cuda.norm.batch_norm import parts, sums_workspace
from mbc.kernels.cuda.norm.group_norm import FILE, GroupNormArguments, GroupNormReduceArguments
from mbc.ops.rms_norm import RmsNorm


def _eps(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, RmsNorm)
    return (a.eps,)


def _arguments(at: Slice) -> GroupNormArguments:
    return GroupNormArguments(*image_of(at), groups=0)


def _reduce(at: Slice) -> GroupNormReduceArguments:
    count = parts(at.request.inputs[0], at.layout)
    return GroupNormReduceArguments(*image_of(at), groups=0, parts=count, accumulate=int(at.accumulate))


KERNELS = (
    OwnKernel("rms_norm", FILE, GroupNormArguments, _arguments, _eps, layouts=pixel_by_pixel),
    OwnKernel("rms_norm_backward", FILE, GroupNormArguments, _arguments, layouts=pixel_by_pixel),
    OwnKernel(
        "rms_norm_backward_reduce",
        FILE,
        GroupNormReduceArguments,
        _reduce,
        layouts=pixel_by_pixel,
        workspace=sums_workspace,
        launches=2,
        accumulates=True,
    ),
)
