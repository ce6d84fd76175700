"""The backward pass of batch normalisation over the result of a 1x1 convolution, in bf16 and fp16: that is recomputed
inside by the GEMM of `mbc.kernels.cuda.conv.conv1x1` (`REMAT_INSIDE` of `mbc.optimize.fusion.catalogue_conv1x1`), from
an image that has fewer channels, so that there is less to read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mbc.kernels.cuda.base import OwnKernel, Slice
from mbc.kernels.cuda.conv.conv1x1 import (
    BY_ITSELF,
    Conv1x1RematArguments,
    arguments,
    inside,
    normalizing,
    with_more,
    with_sums,
)
from mbc.kernels.cuda.fused.wiring import AFFINE, Wiring, members, run
from mbc.ops.normalization import BatchNormalizeBackward

_PRODUCT = replace(BY_ITSELF, file="conv/conv1x1_bn_backward.cu")
_THROUGH_RELU = "batch_normalize+relu+relu_backward"


@dataclass(frozen=True, slots=True)
class Conv1x1BnBackwardArguments(Conv1x1RematArguments):
    count: int


def _arguments(at: Slice) -> Conv1x1BnBackwardArguments:
    last = members(at.request).members[-1]
    assert isinstance(last.attributes, BatchNormalizeBackward)
    affine = len(last.inputs) == 7
    return Conv1x1BnBackwardArguments(*arguments(at).integers(), affine=affine, count=last.attributes.count)


def _applying(launcher: str, behind: str, *wirings: Wiring) -> OwnKernel:
    kernel = inside(with_more(_PRODUCT, launcher, behind, wirings))
    return replace(kernel, struct=Conv1x1BnBackwardArguments, integers=_arguments)


def _summing(launcher: str, between: str, *wirings: Wiring) -> OwnKernel:
    return inside(with_sums(_PRODUCT, launcher, between, wirings))


def _plain(affine: bool) -> Wiring:
    """Read are image, weights, the gradient, mean, variance, dgamma, dbeta, and gamma if there is one (`affine`)."""
    x = 8 if affine else 7
    return ((0, 1), (x, *run(2, x - 2))), (x + 1,)


def _through_relu(operands: int, backward: bool) -> Wiring:
    """Read are image, weights, what normalises their product (`operands` with that), and the gradient behind relu;
    dgamma and dbeta, too, where dx is written of them (`backward`)."""
    dy = operands + 1
    x = dy + (3 if backward else 1)
    z, y, d = run(x + 1, 3)
    start = ((0, 1), (x, *run(2, operands - 1)), (z,), (y, dy))
    if not backward:
        return (*start, (x, d, 2, 3)), run(d + 1, 2)
    gamma = (4,) if operands == 5 else ()
    return (*start, (x, d, 2, 3, dy + 1, dy + 2, *gamma)), (d + 1,)


# Accesses, `affine` being whether the normalisation has scale and shift:
# image, weights, d, mean, variance, dgamma, dbeta, gamma (`affine`); dx, which may be written over d. Reals: eps.
# image, weights, mean, variance, scale and shift (`affine`), dy, dgamma, dbeta; dx, which may be written over dy.
# image, weights, mean, variance, scale and shift (`affine`), dy; dgamma, dbeta, workspace.
# Reals of these two: eps of the normalisation, and of its backward pass or of the sums.
# image, weights, d, mean, variance; dgamma, dbeta, workspace. Reals: eps.
KERNELS = (
    _applying("conv1x1_unstored_bn_backward", "batch_normalize_backward", _plain(True), _plain(False)),
    _applying(
        "conv1x1_unstored_bn_relu_backward",
        f"{_THROUGH_RELU}+batch_normalize_backward",
        *(_through_relu(operands, backward=True) for operands in AFFINE),
    ),
    normalizing(
        _summing(
            "conv1x1_unstored_bn_relu_bn_reduce",
            _THROUGH_RELU,
            *(_through_relu(operands, backward=False) for operands in AFFINE),
        )
    ),
    _summing("conv1x1_unstored_bn_reduce", "", (((0, 1), (5, 2, 3, 4)), (6, 7))),
)
