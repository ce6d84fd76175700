"""Two 1x1 GEMMs in one launch, in bf16 and fp16: what the reductions of batch normalisation's backward pass are over,
recomputed from its image, and the gradient that comes back to them (`PAIR_SUMS` and `PAIR_FUSED_REMAT` of
`mbc.optimize.fusion.catalogue_conv1x1`). Both are as in `mbc.kernels.cuda.conv.conv1x1`,
rounded as if they had been
stored, and neither is written. Accesses are told by `behind_relu` and `relu_along`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mbc.kernels.cuda.base import Slice
from mbc.kernels.cuda.conv.conv1x1 import BY_ITSELF, FORMS, Conv1x1RematArguments, arguments, inside
from mbc.kernels.cuda.conv.conv1x1_backward_data import behind_relu, relu_along
from mbc.kernels.cuda.fused.wiring import affines


@dataclass(frozen=True, slots=True)
class DualConv1x1Arguments(Conv1x1RematArguments):
    gradient_channels: int


def _arguments(at: Slice) -> DualConv1x1Arguments:
    affine, channels = int(any(affines(at.request))), at.request.inputs[2].shape[1]
    return DualConv1x1Arguments(*arguments(at).integers(), affine=affine, gradient_channels=channels)


_PAIR = replace(
    BY_ITSELF,
    kind="convolution+convolution_backward_data",
    file="conv/dual_conv1x1.cu",
    struct=DualConv1x1Arguments,
    integers=_arguments,
)

KERNELS = tuple(
    inside(of(_PAIR, "dual_conv1x1", *form, made=True)) for of in (behind_relu, relu_along) for form in FORMS
)
