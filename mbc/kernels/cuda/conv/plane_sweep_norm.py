"""Convolutions that sweep planes behind a norm and a (leaky) ReLU, which they recompute from the norm's input.

Forward, with statistics of the result, and for the filter gradient. So the activation between two convolutions is never
stored.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Slice
from mbc.kernels.cuda.conv.plane_sweep_conv import (
    BACKWARD_FILTER,
    FORWARD,
    PlaneSweepFilterArguments,
    PlaneSweepNormArguments,
    norm_arguments,
    norm_reals,
    reduction_parts,
)
from mbc.kernels.cuda.norm.batch_norm import STATISTICS_BYTES
from mbc.kernels.cuda.wiring import AFFINE, NORMALIZED, Wiring, for_norm_relus, product_of, run, taking


@dataclass(frozen=True, slots=True)
class PlaneSweepNormFilterArguments(PlaneSweepFilterArguments):
    """Integer arguments of a launch of the filter gradient with a norm before the convolution.

    Attributes:
        samples: Samples that have statistics of their own; 1 for batch normalisation.
        affine: Whether the norm has scale and shift.
    """

    samples: int
    affine: int


def _forward_wiring(operands: int) -> Wiring:
    z, y, p, mean, variance = run(operands + 1, 5)
    return (run(0, operands), (z,), (y, operands), (p,)), (p, mean, variance)


def _filter_wiring(operands: int) -> Wiring:
    z, y, dw = run(operands + 1, 3)
    return (run(0, operands), (z,), (y, operands)), (dw,)


_forward_wired, _filter_wired = taking(*map(_forward_wiring, AFFINE)), taking(*map(_filter_wiring, AFFINE))


def _takes(request: Request) -> bool:
    return _forward_wired(request) and FORWARD.takes(product_of(request))


def _takes_filter(request: Request) -> bool:
    return _filter_wired(request) and BACKWARD_FILTER.takes(product_of(request))


def _partial_bytes(request: Request, layout: Layout) -> int:
    return reduction_parts(request) * request.outputs[1].elements * STATISTICS_BYTES


def _filter_arguments(at: Slice) -> PlaneSweepNormFilterArguments:
    x, mean, *_ = at.request.inputs
    samples, affine = mean.elements // x.shape[1], norm_arguments(at).affine
    return PlaneSweepNormFilterArguments(*astuple(BACKWARD_FILTER.integers(at)), samples=samples, affine=affine)


_WITH_STATISTICS = for_norm_relus(
    replace(
        FORWARD,
        kind="{norm}_normalize+{relu}+convolution+{norm}_statistics",
        file="conv/plane_sweep_conv_norm.cu",
        struct=PlaneSweepNormArguments,
        integers=norm_arguments,
        reals=norm_reals,
        workspace=_partial_bytes,
        launches=2,
        operands=f"{NORMALIZED} weights y mean2 variance2 workspace",
        launcher="norm_relu_plane_sweep_conv_statistics",
        named="{norm}_norm_{relu}_plane_sweep_conv_statistics",
        takes=_takes,
        by_measurement=True,
    )
)
_BACKWARD_FILTER = for_norm_relus(
    replace(
        BACKWARD_FILTER,
        kind="{norm}_normalize+{relu}+convolution_backward_filter",
        file="conv/plane_sweep_conv_norm_filter.cu",
        struct=PlaneSweepNormFilterArguments,
        integers=_filter_arguments,
        reals=norm_reals,
        operands=f"{NORMALIZED} dy dw workspace",
        launcher="norm_relu_plane_sweep_conv_backward_filter",
        named="{norm}_norm_{relu}_plane_sweep_conv_backward_filter",
        takes=_takes_filter,
        by_measurement=True,
    )
)

KERNELS = (*_WITH_STATISTICS, *_BACKWARD_FILTER)
