"""The backward pass of batch normalization over the result of a 1x1 convolution, in bf16 and fp16.

The result is recomputed by the GEMM of `mbc.kernels.cuda.conv.conv1x1` and not written (`REMAT_INSIDE` of
`mbc.optimize.fusion.catalogue_conv1x1`). The image has fewer channels than the result, so that fewer bytes are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mbc.kernels.cuda.base import OwnKernel, Slice
from mbc.kernels.cuda.conv.conv1x1 import (
    PLAIN,
    Conv1x1RematArguments,
    arguments,
    not_stored,
    with_affine,
    with_epilogue,
    with_reduction,
)
from mbc.kernels.cuda.wiring import AFFINE, SCALE_SHIFT, Wiring, members, run
from mbc.ops.batch_normalize import BatchNormalizeBackward

_GEMM = replace(PLAIN, file="conv/conv1x1_bn_backward.cu")
_RELU_BACKWARD = "batch_normalize+relu+relu_backward"


@dataclass(frozen=True, slots=True)
class Conv1x1BnBackwardArguments(Conv1x1RematArguments):
    """Integer arguments of a launch that computes the gradient of a normalization's input.

    Attributes:
        count: Elements of a channel in the whole mini-batch.
    """

    count: int


def _arguments(at: Slice) -> Conv1x1BnBackwardArguments:
    last = members(at.request).members[-1]
    assert isinstance(last.attributes, BatchNormalizeBackward)
    affine = len(last.inputs) == 7
    return Conv1x1BnBackwardArguments(*arguments(at).integers(), affine=affine, count=last.attributes.count)


def _gradient_kernel(launcher: str, epilogue: str, *wirings: Wiring) -> OwnKernel:
    kernel = not_stored(with_epilogue(_GEMM, launcher, epilogue, wirings))
    return replace(kernel, struct=Conv1x1BnBackwardArguments, integers=_arguments)


def _reduction_kernel(launcher: str, between: str, *wirings: Wiring) -> OwnKernel:
    return not_stored(with_reduction(_GEMM, launcher, between, wirings))


def _gradient_wiring(affine: bool) -> Wiring:
    """Return the wiring of a convolution and batch_normalize_backward.

    Inputs: image, weights, the gradient, mean, variance, dgamma, dbeta, and gamma if there is one (`affine`).
    """
    x = 8 if affine else 7
    return ((0, 1), (x, *run(2, x - 2))), (x + 1,)


def _relu_backward_wiring(operands: int, backward: bool) -> Wiring:
    """Return the wiring of a convolution, its normalization, ReLU and their backward pass.

    Inputs: image, weights, the operands of the normalization (`operands` in all, with x), and the gradient of ReLU's
    output; with `backward` also dgamma and dbeta, and the output is dx.
    """
    dy = operands + 1
    x = dy + (3 if backward else 1)
    z, y, d = run(x + 1, 3)
    start = ((0, 1), (x, *run(2, operands - 1)), (z,), (y, dy))
    if not backward:
        return (*start, (x, d, 2, 3)), run(d + 1, 2)
    gamma = (4,) if operands == 5 else ()
    return (*start, (x, d, 2, 3, dy + 1, dy + 2, *gamma)), (d + 1,)


# dx may be written over dy. Reals: eps of the normalization, if there is one, and of the gradient or the sums.
KERNELS = (
    replace(
        _gradient_kernel(
            "conv1x1_unstored_bn_backward", "batch_normalize_backward", _gradient_wiring(True), _gradient_wiring(False)
        ),
        operands="image weights dy mean variance dgamma dbeta gamma?affine dx",
    ),
    replace(
        _gradient_kernel(
            "conv1x1_unstored_bn_relu_backward",
            f"{_RELU_BACKWARD}+batch_normalize_backward",
            *(_relu_backward_wiring(operands, backward=True) for operands in AFFINE),
        ),
        operands=f"image weights mean variance {SCALE_SHIFT} dy dgamma dbeta dx",
    ),
    replace(
        with_affine(
            _reduction_kernel(
                "conv1x1_unstored_bn_relu_bn_reduce",
                _RELU_BACKWARD,
                *(_relu_backward_wiring(operands, backward=False) for operands in AFFINE),
            )
        ),
        operands=f"image weights mean variance {SCALE_SHIFT} dy dgamma dbeta workspace",
    ),
    replace(
        _reduction_kernel("conv1x1_unstored_bn_reduce", "", (((0, 1), (5, 2, 3, 4)), (6, 7))),
        operands="image weights dy mean variance dgamma dbeta workspace",
    ),
)
