"""Two 1x1 GEMMs in one launch, in bf16 and fp16, for the reductions of batch normalization's backward pass.

One GEMM recomputes x from its image, the other computes the gradient of ReLU's output (`PAIR_REDUCTIONS` and
`PAIR_FUSED_REMAT` of `mbc.optimize.fusion.catalogue_conv1x1`). Both are those of `mbc.kernels.cuda.conv.conv1x1`,
rounded as if they had been stored, and neither result is written. For the accesses see `relu_backward_reduction` and
`add_relu_remat`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mbc.kernels.cuda.base import Slice
from mbc.kernels.cuda.conv.conv1x1 import PLAIN, Conv1x1RematArguments, arguments, not_stored
from mbc.kernels.cuda.conv.conv1x1_backward_data import add_relu_remat, relu_backward_reduction
from mbc.kernels.cuda.wiring import affines


@dataclass(frozen=True, slots=True)
class DualConv1x1Arguments(Conv1x1RematArguments):
    """Integer arguments of a launch of two GEMMs.

    Attributes:
        gradient_channels: K of the second GEMM; `channels` is that of the first.
    """

    gradient_channels: int


def _arguments(at: Slice) -> DualConv1x1Arguments:
    affine, channels = int(any(affines(at.request))), at.request.inputs[2].shape[1]
    return DualConv1x1Arguments(*arguments(at).integers(), affine=affine, gradient_channels=channels)


_DUAL = replace(
    PLAIN,
    kind="convolution+convolution_backward_data",
    file="conv/dual_conv1x1.cu",
    struct=DualConv1x1Arguments,
    integers=_arguments,
)

_NAME = "dual_conv1x1"
KERNELS = tuple(
    not_stored(kernel)
    for kernel in (
        *(relu_backward_reduction(_DUAL, _NAME, added=True, by_mask=mask, x_from_gemm=True) for mask in (False, True)),
        *(add_relu_remat(_DUAL, _NAME, by_mask=mask, x_from_gemm=True) for mask in (False, True)),
    )
)
