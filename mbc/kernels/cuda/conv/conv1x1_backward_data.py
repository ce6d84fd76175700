"""Data gradients of 1x1 convolutions at a stride of one, in bf16 and fp16.

They are the GEMM of `mbc.kernels.cuda.conv.conv1x1` with transposed weights: alone, or with the reductions of batch
normalization's backward pass that read it (`DATA_GRADIENT_REDUCTIONS` and `DATA_GRADIENT_FUSED_REMAT` of
`mbc.optimize.fusion.catalogue_conv1x1`).

In this file `channels` are those of the gradient that is read, and `filters` those of the gradient that is written.
A result is rounded as if it had been stored before anything else reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mbc.kernels.cuda.base import OwnKernel
from mbc.kernels.cuda.conv.conv1x1 import (
    PLAIN,
    add_relu_remat_kinds,
    relu_backward_kinds,
    with_affine,
    with_reduction,
    without_mask_read,
)
from mbc.kernels.cuda.wiring import AFFINE, SCALE_SHIFT, Numbers, Wiring, run

_PLAIN = replace(
    PLAIN, kind="convolution_backward_data", file="conv/conv1x1_backward_data.cu", launcher="conv1x1_backward_data"
)


def _add_wirings(a: int, b: int) -> tuple[tuple[Numbers], ...]:
    """Return the inputs of the member that adds two values, in either order."""
    return ((a, b),), ((b, a),)


def _relu_backward_wiring(added: bool, by_mask: bool, x_from_gemm: bool = False) -> Iterable[Wiring]:
    """Yield the wirings of a data gradient, ReLU's backward pass and the reductions.

    Inputs: a gradient and weights, another gradient that is added to the data gradient (`added`), ReLU's output or its
    bit mask (`by_mask`), x, mean and variance. Outputs: the gradient through ReLU and the reductions. `x_from_gemm`: x
    is recomputed from an image and weights, which come first.
    """
    gemms = ((0, 1), (2, 3)) if x_from_gemm else ((0, 1),)
    b = 2 * len(gemms)
    relu_operand = b + 1 if added else b
    x, mean, a = relu_operand + (3 if x_from_gemm else 1), relu_operand + (1 if x_from_gemm else 2), relu_operand + 4
    dy, d = (a + 1, a + 2) if added else (a, a + 1)
    relu_inputs = (dy, relu_operand) if by_mask else (relu_operand, dy)
    for add in _add_wirings(a, b) if added else ((),):
        yield (*gemms, *add, relu_inputs, (x, d, mean, mean + 1)), (d, d + 1, d + 2)


def _relu_wiring(operands: int) -> Wiring:
    """Return the wiring of a data gradient with a recomputed normalization and ReLU.

    Inputs: a gradient, weights, and the `operands` of the normalization.
    """
    dy = 2 + operands
    z, y, d = run(dy + 1, 3)
    return ((0, 1), run(2, operands), (z,), (y, dy), (2, d, 3, 4)), (dy, d + 1, d + 2)


def _add_relu_wiring(operands: int, by_mask: bool, x_from_gemm: bool = False) -> Iterable[Wiring]:
    """Yield the wirings of a data gradient with a recomputed normalization, residual sum and ReLU.

    Inputs: a gradient, weights, the `operands` of the normalization, r, and another gradient. Outputs: ReLU's output,
    the gradient through it, and the reductions. `by_mask`: the group has the bit mask, which is not written.
    `x_from_gemm`: the input of the normalization is recomputed from an image and weights, which come first.
    """
    gemms = ((0, 1), (2, 3)) if x_from_gemm else ((0, 1),)
    mean = 2 * len(gemms) + (0 if x_from_gemm else 1)
    r = mean + operands - 1
    b, not_stored = r + 1, r + 2
    x, a = (not_stored, not_stored + 1) if x_from_gemm else (mean - 1, not_stored)
    z, s, y = run(a + 1, 3)
    relu_operand = y + 1 if by_mask else y
    dy, d = relu_operand + 1, relu_operand + 2
    masks = ((y,),) if by_mask else ()
    relu_inputs = (dy, relu_operand) if by_mask else (relu_operand, dy)
    for forward in _add_wirings(z, r):
        for add in _add_wirings(a, b):
            start = (*gemms, (x, *run(mean, operands - 1)), *forward, (s,), *masks, *add)
            yield (*start, relu_inputs, (x, d, mean, mean + 1)), (y, d, d + 1, d + 2)


def relu_backward_reduction(
    kernel: OwnKernel, name: str, added: bool, by_mask: bool, x_from_gemm: bool = False
) -> OwnKernel:
    """Return the kernel `name[_add]_relu_bn_reduce[_masked]`.

    d is the data gradient (rounded) + dy2, through ReLU, by its output or a bit mask. d may be written over dy2. The
    reductions are over d before it is rounded, and x. `x_from_gemm`: image and weights come first instead of x. Reals:
    eps of the reductions.
    """
    launcher = f"{name}{'_add' if added else ''}_relu_bn_reduce{'_masked' if by_mask else ''}"
    wirings = _relu_backward_wiring(added, by_mask, x_from_gemm)
    gemms, x = _gemms_and_x(x_from_gemm)
    operands = f"{gemms} {'dy2 ' if added else ''}relu {x} mean variance d dgamma dbeta workspace"
    return replace(with_reduction(kernel, launcher, relu_backward_kinds(added, by_mask), wirings), operands=operands)


def _gemms_and_x(x_from_gemm: bool) -> tuple[str, str]:
    """Return the names of the operands of the GEMMs, and of x, which the first of two GEMMs recomputes."""
    return ("image weights dy weights2", "-x") if x_from_gemm else ("dy weights", "x")


def _normalize_relu() -> OwnKernel:
    """Return the kernel `conv1x1_backward_data_bn_relu_bn_reduce`.

    dx is the data gradient (rounded), y = relu(normalize(x)) in its stored type. The reductions are over dx where y is
    positive, and x. Reals: eps of the normalization, and of the reductions.
    """
    launcher, wirings = "conv1x1_backward_data_bn_relu_bn_reduce", map(_relu_wiring, AFFINE)
    kernel = with_affine(with_reduction(_PLAIN, launcher, "batch_normalize+relu+relu_backward", wirings))
    return replace(kernel, operands=f"dy weights x mean variance {SCALE_SHIFT} dx dgamma dbeta workspace")


def add_relu_remat(kernel: OwnKernel, name: str, by_mask: bool, x_from_gemm: bool = False) -> OwnKernel:
    """Return the kernel `name_add_relu_remat_bn_reduce_two_grads[_masked]`.

    y = relu(normalize(x) + r); d is the data gradient (rounded) + dy2 where y, in its stored type, is positive. y may
    be written over x or r, d over dy2. The reductions are over d before it is rounded, and x. `x_from_gemm`: image and
    weights come first instead of x. Reals: eps of the normalization, and of the reductions.
    """
    launcher = f"{name}_add_relu_remat_bn_reduce_two_grads"
    wirings = (wiring for operands in AFFINE for wiring in _add_relu_wiring(operands, by_mask, x_from_gemm))
    gemms, x = _gemms_and_x(x_from_gemm)
    operands = f"{gemms} {x} mean variance {SCALE_SHIFT} r dy2 y d dgamma dbeta workspace"
    reduction = replace(
        with_reduction(kernel, launcher, add_relu_remat_kinds(True, by_mask), wirings), operands=operands
    )
    return without_mask_read(reduction) if by_mask else reduction


KERNELS = (
    _PLAIN,
    relu_backward_reduction(_PLAIN, "conv1x1_backward_data", added=False, by_mask=False),
    *(relu_backward_reduction(_PLAIN, "conv1x1_backward_data", added=True, by_mask=mask) for mask in (False, True)),
    _normalize_relu(),
    *(with_affine(add_relu_remat(_PLAIN, "conv1x1_backward_data", mask)) for mask in (False, True)),
)
