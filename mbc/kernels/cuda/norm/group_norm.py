"""Group and layer normalization: forward, backward, and the gradients of scale and shift."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.kernels.cuda.base import OwnKernel, Slice, image_of, pixel_by_pixel, same_layout
from mbc.kernels.cuda.image import ImageArguments
from mbc.kernels.cuda.norm.batch_norm import parts, sums_workspace
from mbc.kernels.cuda.wiring import taking
from mbc.ops.group_norm import GroupNorm, LayerNorm

FILE = "norm/group_norm.cu"


@dataclass(frozen=True, slots=True)
class GroupNormArguments(ImageArguments):
    """Integer arguments of a launch of the forward pass or of the gradient of x.

    Attributes:
        groups: 0: each pixel is a set.
        affine: Whether there are scale and shift.
    """

    groups: int
    affine: int = 1


@dataclass(frozen=True, slots=True)
class GroupNormReduceArguments(ImageArguments):
    """Integer arguments of a launch that computes the gradients of scale and shift."""

    groups: int
    parts: int
    accumulate: int


def _groups(at: Slice) -> int:
    a = at.request.attributes
    return a.groups if isinstance(a, GroupNorm) else 0


def _eps(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, GroupNorm | LayerNorm)
    return (a.eps,)


def _arguments(at: Slice) -> GroupNormArguments:
    # Beside tensors and statistics there are two vectors forward, and one backward.
    affine = len(at.request.inputs) in (3, 5)
    return GroupNormArguments(*image_of(at), groups=_groups(at), affine=int(affine))


def _reduce(at: Slice) -> GroupNormReduceArguments:
    count = parts(at.request.inputs[0], at.layout)
    return GroupNormReduceArguments(*image_of(at), groups=_groups(at), parts=count, accumulate=int(at.accumulate))


# Layer normalization has one group at each pixel and uses the same launchers. It needs channels last, because with
# channels first the channels of a pixel are far apart.
_SINGLE = tuple(
    kernel
    for kind, layouts, version in (("group_norm", same_layout, 1), ("layer_norm", pixel_by_pixel, 2))
    for kernel in (
        OwnKernel(
            kind,
            FILE,
            GroupNormArguments,
            _arguments,
            _eps,
            layouts=layouts,
            operands="x gamma?affine beta?affine y mean inverse",
            launcher="group_norm",
            named=kind,
            version=version,
        ),
        OwnKernel(
            f"{kind}_backward",
            FILE,
            GroupNormArguments,
            _arguments,
            layouts=layouts,
            operands="x dy mean inverse gamma?affine dx",
            launcher="group_norm_backward",
            named=f"{kind}_backward",
            version=version,
        ),
        OwnKernel(
            f"{kind}_backward_reduce",
            FILE,
            GroupNormReduceArguments,
            _reduce,
            layouts=layouts,
            workspace=sums_workspace,
            launches=2,
            accumulates=True,
            launcher="group_norm_backward_reduce",
            named=f"{kind}_backward_reduce",
            version=version,
        ),
    )
)
# A residual branch: the input's gradient is the sum of the gradients through the normalization and around it.
_ADDED = OwnKernel(
    "layer_norm_backward+add",
    FILE,
    GroupNormArguments,
    _arguments,
    layouts=pixel_by_pixel,
    launcher="layer_norm_backward_add",
    takes=taking(*((((0, 1, 2, 3, 4), summands), (7,)) for summands in ((5, 6), (6, 5)))),
)
KERNELS = (*_SINGLE, _ADDED)
