"""Convolutions through cuDNN's graph API with batch statistics in the epilogue.

An engine sums its result, and the squares of it, before it writes the result (cuDNN's operation GEN_STATS), so that
nobody has to read the result for the statistics. The two sums of every channel are in fp32 at the start of the
workspace, and a small kernel (templates/host/moments.cu) computes mean and variance from them.

cuDNN 9.19 has precompiled engines of this kind for fp16, channels last, whole vectors of channels. For bf16 it compiles
them at run time, which no package does. In a survey for an H200 every layer that `_offered` takes had an engine within
`_parts_bytes`.

Without a measurement the search never chooses such a group: the time of the engine is unknown, and the estimate is the
time of the two operations one after the other. The candidate exists so that `mbc profile` measures it in fp16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import LAYOUT_CODES, Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.convolution_shapes import Shapes, shapes_of
from mbc.kernels.cuda import OWN
from mbc.kernels.cudnn_convolution import (
    CUDNN_CONVOLUTION,
    HEURISTIC_ENGINE,
    engine_layouts,
    engine_refusal,
    library_workspace,
    row,
    type_refusal,
)
from mbc.kernels.cudnn_estimates import ALIGNMENT_BYTES, padded
from mbc.kernels.statistics import WITH_STATISTICS, convolution_of, statistics_of
from mbc.ops.fused import Fused

LAYOUTS = (*(Layout.CHANNELS_LAST,) * 3, *(Layout.CHANNELS_FIRST,) * 2)  # of image, filter, result; mean, variance

_VECTOR = 8  # channels of fp16 in one load
_MOST_TAPS = 32  # pixels of a filter
_TILE = 128  # most pixels that one pair of partial sums covers
_SLACK_BYTES = 4096


def sums_bytes(result: TensorType) -> int:
    """Return the workspace for the sums of each channel and of its squares, as in `Moments` of convolution.cpp."""
    return padded(2 * result.shape[1] * DType.FP32.size_bytes, ALIGNMENT_BYTES)


def _parts_bytes(result: TensorType) -> int:
    pixels = result.elements // result.shape[1]
    return 2 * math.ceil(pixels / _TILE) * result.shape[1] * DType.FP32.size_bytes + _SLACK_BYTES


def _offered(shapes: Shapes) -> bool:
    a = shapes.attributes
    aligned = all(channels % _VECTOR == 0 for channels in shapes.filter.shape[:2])
    small = math.prod(a.kernel) <= _MOST_TAPS
    return aligned and small and a.groups == 1 and a.rank == 2 and a.is_padded_evenly


@dataclass(frozen=True)
class CudnnStatistics:
    """The part of the provider `cudnn` (`mbc.kernels.cudnn`) that runs such groups, on the whole mini-batch only."""

    name: str = "cudnn"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Yield one candidate in fp16, none in other precisions."""
        shapes = _shapes(request)
        if shapes is None or request.precision is not Precision.FP16 or not _offered(shapes):
            return
        alone = (
            min(c.time_us for c in CUDNN_CONVOLUTION.candidates(convolution_of(request), device)),
            min(c.time_us for c in OWN.candidates(statistics_of(request), device)),
        )
        settings = (("deterministic", 1), ("engine", HEURISTIC_ENGINE), ("layout", LAYOUT_CODES[Layout.CHANNELS_LAST]))
        workspace_bytes = sums_bytes(shapes.result) + padded(_parts_bytes(shapes.result), ALIGNMENT_BYTES)
        yield Candidate(self.name, WITH_STATISTICS, settings, LAYOUTS, workspace_bytes, sum(alone), measured=False)

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """Return whether cuDNN's graph API runs the call; the rules are those of a channels-last convolution."""
        shapes = _shapes(call.request)
        if shapes is None or call.name != WITH_STATISTICS or not _offered(shapes):
            return Acceptance(f"cuDNN cannot run {call.request.kind} with these operands as '{call.name}'")
        if refusal := engine_refusal(call, device) or type_refusal(call, shapes):
            return Acceptance(refusal)
        if Layout.CHANNELS_LAST not in engine_layouts(call) or not call.has_layouts(LAYOUTS):
            return Acceptance(f"its engine does not take operands in the layouts {', '.join(call.layouts)}")
        return library_workspace(call, sums_bytes(shapes.result))

    def arguments(self, call: Call, first_row: int) -> Arguments:
        """Return the integers of a `ConvolutionRow` and its knobs."""
        shapes = _shapes(call.request)
        if shapes is None:
            raise ValueError(f"cuDNN cannot run {call.request.kind}")
        return row(shapes, call, statistics=True)


def _shapes(request: Request) -> Shapes | None:
    """Return the shapes of the convolution, or None if the request is no such group of images.

    None also if an output of the three (result, mean, variance) is missing, or the statistics are of another tensor.
    """
    a = request.attributes
    if request.kind != WITH_STATISTICS or not isinstance(a, Fused) or len(request.outputs) != 3:
        return None
    convolution, statistics = a.members
    return shapes_of(convolution_of(request)) if statistics.inputs == convolution.outputs else None


CUDNN_STATISTICS = CudnnStatistics()
