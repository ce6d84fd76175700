"""Gradients of the image of 1x1 convolutions at a stride of one, in bf16 and fp16: the GEMM of
`mbc.kernels.cuda.conv.conv1x1` with transposed weights. Alone, and with the reductions of batch normalisation's
backward pass that are over it (`DATA_SUMS` and `DATA_GRADIENT_FUSED_REMAT` of `mbc.optimize.fusion.catalogue_conv1x1`).

What is called channels there are here those of the gradient that is read, and filters those of the one that is written.
A result is rounded as if it had been stored before anything else reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mbc.kernels.cuda.base import OwnKernel
from mbc.kernels.cuda.conv.conv1x1 import BY_ITSELF, FORMS, normalized, normalizing, through, with_sums
from mbc.kernels.cuda.fused.wiring import AFFINE, Numbers, Wiring, run

_BY_ITSELF = replace(
    BY_ITSELF,
    kind="convolution_backward_data",
    file="conv/conv1x1_backward_data.cu",
    launcher="conv1x1_backward_data",
)


def _sums_of(a: int, b: int) -> tuple[tuple[Numbers], ...]:
    """The member that adds two values, whichever comes first."""
    return ((a, b),), ((b, a),)


def _through_relu(added: bool, signed: bool, made: bool = False) -> Iterable[Wiring]:
    """Read are a gradient and weights, another gradient that is added to their product (`added`), relu's output, or its
    signs (`signed`), x, mean and variance; written the gradient through relu, and the sums. `made`: x is a product,
    too, whose image and weights are read before."""
    products = ((0, 1), (2, 3)) if made else ((0, 1),)
    b = 2 * len(products)
    told = b + 1 if added else b
    x, mean, a = told + (3 if made else 1), told + (1 if made else 2), told + 4
    dy, d = (a + 1, a + 2) if added else (a, a + 1)
    through = (dy, told) if signed else (told, dy)
    for add in _sums_of(a, b) if added else ((),):
        yield (*products, *add, through, (x, d, mean, mean + 1)), (d, d + 1, d + 2)


def _of_relu(operands: int, written: bool) -> Wiring:
    """Read are a gradient, weights, and the `operands` of the normalisation; `written`: with relu's output."""
    dy = 2 + operands
    z, y, d = run(dy + 1, 3)
    given = (dy, *((y,) if written else ()), d + 1, d + 2)
    return ((0, 1), run(2, operands), (z,), (y, dy), (2, d, 3, 4)), given


def _behind_add(operands: int, added: bool, signed: bool, made: bool = False) -> Iterable[Wiring]:
    """Read are a gradient, weights, the `operands` of the normalisation, r, and another gradient (`added`); written
    relu's output, the gradient through it, and the sums. `signed`: by the signs of the output, which stay inside.
    `made`: what is normalised is a product, too, whose image and weights are read before."""
    products = ((0, 1), (2, 3)) if made else ((0, 1),)
    mean = 2 * len(products) + (0 if made else 1)
    r = mean + operands - 1
    b, inside = r + 1, r + (2 if added else 1)
    x, a = (inside, inside + 1) if made else (mean - 1, inside)
    z, s, y = run(a + 1, 3)
    told = y + 1 if signed else y
    dy, d = (told + 1, told + 2) if added else (a, told + 1)
    signs = ((y,),) if signed else ()
    through = (dy, told) if signed else (told, dy)
    for forward in _sums_of(z, r):
        for add in _sums_of(a, b) if added else ((),):
            start = (*products, (x, *run(mean, operands - 1)), *forward, (s,), *signs, *add)
            yield (*start, through, (x, d, mean, mean + 1)), (y, d, d + 1, d + 2)


def behind_relu(kernel: OwnKernel, name: str, added: bool, signed: bool, made: bool = False) -> OwnKernel:
    """`name[_add]_relu_bn_reduce[_masked]`. Accesses: gradient, weights, [b], y or its signs, x, mean, variance; d,
    dgamma, dbeta, workspace. If x is `made`, too, its image and weights come first instead of it. Reals: eps of the
    sums. d may be written over b.

    d is the product (rounded) + b, through relu. The sums are over what is written before it is rounded, and x."""
    launcher = f"{name}{'_add' if added else ''}_relu_bn_reduce{'_masked' if signed else ''}"
    return with_sums(kernel, launcher, through(added, signed), _through_relu(added, signed, made))


def _without_add(written: bool) -> OwnKernel:
    """`conv1x1_backward_data_bn_relu[_remat]_bn_reduce`. Accesses: gradient, weights, x, mean, variance, scale and
    shift if the normalisation has them (`affine`); dy, [y], dgamma, dbeta, workspace. Reals: eps of the normalisation,
    and of the sums. y may be written over x.

    dy is the product (rounded), y = relu(normalize(x)), as it is stored. The sums are over dy where y lets it through,
    and x."""
    launcher = f"conv1x1_backward_data_bn_relu{'_remat' if written else ''}_bn_reduce"
    wirings = (_of_relu(operands, written) for operands in AFFINE)
    return normalizing(with_sums(_BY_ITSELF, launcher, "batch_normalize+relu+relu_backward", wirings))


def relu_along(kernel: OwnKernel, name: str, added: bool, signed: bool, made: bool = False) -> OwnKernel:
    """`name_add_relu_remat_bn_reduce[_two_grads][_masked]`. Accesses: gradient, weights, x, mean, variance,
    scale and shift if the normalisation has them (`affine`), r, [b]; y, d, dgamma, dbeta, workspace. If x is `made`,
    too: as above. Reals: eps of the normalisation, and of the sums. y may be written over x or r, d over b.

    y = relu(normalize(x) + r), d is the product (rounded) + b where y, as it is stored, lets it through. The sums are
    over what is written of d before it is rounded, and x."""
    launcher = f"{name}_add_relu_remat_bn_reduce{'_two_grads' if added else ''}{'_masked' if signed else ''}"
    wirings = (wiring for operands in AFFINE for wiring in _behind_add(operands, added, signed, made))
    return with_sums(kernel, launcher, normalized(added, signed), wirings)


KERNELS = (
    _BY_ITSELF,
    *(behind_relu(_BY_ITSELF, "conv1x1_backward_data", *form) for form in FORMS),
    *(_without_add(written) for written in (False, True)),
    *(normalizing(relu_along(_BY_ITSELF, "conv1x1_backward_data", *form)) for form in FORMS),
)
