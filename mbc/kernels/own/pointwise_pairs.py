"""Two products of convolutions of one place at a step of one in a launch, in bf16 and fp16: what the sums of batch
normalisation's backward pass are over, made again from its image, and the gradient that comes back to them (`PAIR_SUMS`
and `PAIR_ALONG` of `mbc.optimize.point_patterns`). Both are as in `mbc.kernels.own.pointwise`, rounded as if they had
been stored, and neither is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from mbc.kernels.own.base import OwnKernel, Slice
from mbc.kernels.own.groups import AFFINE, affines
from mbc.kernels.own.pointwise import BY_ITSELF, PointwiseAlongArguments, arguments, inside, with_sums
from mbc.kernels.own.pointwise_gradients import behind_add, through_relu

LEAST_BESIDE = 1  # tiles: weights of both products take the room


@dataclass(frozen=True, slots=True)
class PointwisePairArguments(PointwiseAlongArguments):
    gradient_channels: int


def _arguments(at: Slice) -> PointwisePairArguments:
    affine, channels = int(any(affines(at.request))), at.request.inputs[2].shape[1]
    return PointwisePairArguments(*arguments(at).integers(), affine=affine, gradient_channels=channels)


_PAIR = replace(
    BY_ITSELF,
    kind="convolution+convolution_backward_data",
    file="pointwise_pairs.cu",
    struct=PointwisePairArguments,
    integers=_arguments,
)


def _sums(added: bool, signed: bool) -> OwnKernel:
    """`pointwise_pair[_add]_relu_sums[_signed]`. Accesses: image, weights, gradient, weights, [b], y or its signs,
    mean, variance; d, dgamma, dbeta, workspace. Reals: eps of the sums. d may be written over b.

    As `pointwise_data[_add]_relu_sums[_signed]`, with x the product of image and weights."""
    between = f"{'add+' if added else ''}relu_backward{'_signs' if signed else ''}"
    launcher = f"pointwise_pair{'_add' if added else ''}_relu_sums{'_signed' if signed else ''}"
    wirings = through_relu(added, signed, made=True)
    return inside(with_sums(_PAIR, launcher, between, wirings, LEAST_BESIDE))


def _along(added: bool, signed: bool) -> OwnKernel:
    """`pointwise_pair_add_relu_and_sums[_of_two][_signed]`. Accesses: image, weights, gradient, weights, mean,
    variance, scale and shift if the normalisation has them (`affine`), r, [b]; y, d, dgamma, dbeta, workspace. Reals:
    eps of the normalisation, and of the sums. y may be written over r, d over b.

    As `pointwise_data_add_relu_and_sums[_of_two][_signed]`, with x the product of image and weights."""
    backward = "relu_backward_signs" if signed else "relu_backward"
    between = f"batch_normalize+add+relu{'+relu_signs' if signed else ''}{'+add' if added else ''}+{backward}"
    launcher = f"pointwise_pair_add_relu_and_sums{'_of_two' if added else ''}{'_signed' if signed else ''}"
    wirings = (wiring for operands in AFFINE for wiring in behind_add(operands, added, signed, made=True))
    return inside(with_sums(_PAIR, launcher, between, wirings, LEAST_BESIDE))


_FORMS = tuple(product((False, True), repeat=2))  # of a sum of two gradients, and by signs, or not

KERNELS = (*(_sums(added, signed) for added, signed in _FORMS), *(_along(added, signed) for added, signed in _FORMS))
