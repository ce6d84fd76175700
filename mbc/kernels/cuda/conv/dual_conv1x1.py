"""Two products of convolutions of one place at a step of one in a launch, in bf16 and fp16: what the sums of batch
normalisation's backward pass are over, made again from its image, and the gradient that comes back to them (`PAIR_SUMS`
and `PAIR_FUSED_REMAT` of `mbc.optimize.fusion.catalogue_conv1x1`). Both are as in `mbc.kernels.cuda.conv.conv1x1`,
rounded as if they had been stored, and neither is written. Accesses are told by `behind_relu` and `relu_along`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mbc.kernels.cuda.base import Slice
from mbc.kernels.cuda.conv.conv1x1 import BY_ITSELF, FORMS, PointwiseAlongArguments, arguments, inside
from mbc.kernels.cuda.conv.conv1x1_backward_data import behind_relu, relu_along
from mbc.kernels.cuda.fused.wiring import affines


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

KERNELS = tuple(
    inside(of(_PAIR, "pointwise_pair", *form, made=True)) for of in (behind_relu, relu_along) for form in FORMS
)
