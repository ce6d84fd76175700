"""Convolutions through cuDNN's graph API with batch statistics in the epilogue.

An engine reduces its result, and the squares, before it is written (cuDNN's operation GEN_STATS), so that the result
need not be read for that. The two sums of every channel lie in fp32 at the start of the workspace, and a small kernel
(templates/host/moments.cu) makes mean and variance of them.

cuDNN 9.19 has such engines ready for fp16, channels last, whole vectors of channels; for bf16 it compiles them at run
time, which no package does. In a survey for an H200 every layer that `_offered` takes had one within `_parts_bytes`.

Without a measurement no group is taken: the time of the engine that a plan gets is unknown, and is estimated at that of
its operations one after the other. That is enough for `mbc profile` to measure it, where fp16 is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import LAYOUT_CODES, Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.convolution_shapes import PASSES, Shapes, shapes_of
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

_VECTOR = 8  # channels of fp16 that are loaded together
_MOST_TAPS = 32  # of a filter
_TILE = 128  # pixels per pair of partial sums, at most, to be reduced at the end
_SLACK_BYTES = 4096


def sums_bytes(result: TensorType) -> int:
    """Workspace that the sums over each channel take, and over the squares. As `Moments` of convolution.cpp."""
    return padded(2 * result.shape[1] * DType.FP32.size_bytes, ALIGNMENT_BYTES)


def _parts_bytes(result: TensorType) -> int:
    pixels = result.elements // result.shape[1]
    return 2 * math.ceil(pixels / _TILE) * result.shape[1] * DType.FP32.size_bytes + _SLACK_BYTES


def _offered(shapes: Shapes) -> bool:
    a = shapes.attributes
    top, bottom, left, right = a.pad
    aligned = all(channels % _VECTOR == 0 for channels in shapes.filter.shape[:2])
    small = math.prod(a.kernel) <= _MOST_TAPS
    return aligned and small and a.groups == 1 and (top, left) == (bottom, right)


@dataclass(frozen=True)
class CudnnStatistics:
    """Of the provider `cudnn` (`mbc.kernels.cudnn`) what runs such a group, on the whole mini-batch only."""

    name: str = "cudnn"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """One, in fp16."""
        shapes = _shapes(request)
        if shapes is None or request.precision is not Precision.FP16 or not _offered(shapes):
            return
        alone = (
            min(c.time_us for c in CUDNN_CONVOLUTION.candidates(convolution_of(request), device)),
            min(c.time_us for c in OWN.candidates(statistics_of(request), device)),
        )
        settings = (
            ("deterministic", 1),
            ("engine", HEURISTIC_ENGINE),
            ("layout", LAYOUT_CODES[Layout.CHANNELS_LAST]),
        )
        workspace_bytes = sums_bytes(shapes.result) + padded(_parts_bytes(shapes.result), ALIGNMENT_BYTES)
        yield Candidate(self.name, WITH_STATISTICS, settings, LAYOUTS, workspace_bytes, sum(alone), measured=False)

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """As of a convolution by itself, channels last."""
        shapes = _shapes(call.request)
        if shapes is None or call.name != WITH_STATISTICS or not _offered(shapes):
            return Acceptance(f"cuDNN runs no such {call.request.kind} as '{call.name}'")
        if refusal := engine_refusal(call, device) or type_refusal(call, shapes):
            return Acceptance(refusal)
        if Layout.CHANNELS_LAST not in engine_layouts(call) or not call.lies_in(LAYOUTS):
            return Acceptance(f"its engine takes no operands that lie in {', '.join(call.layouts)}")
        return library_workspace(call, sums_bytes(shapes.result))

    def arguments(
        self,
        request: Request,
        name: str,
        settings: tuple[tuple[str, int], ...],
        layouts: tuple[Layout, ...],
        first_row: int,
        accumulate: bool,
        workspace_bytes: int,
    ) -> Arguments:
        """A `ConvolutionRow` and its knobs."""
        shapes = _shapes(request)
        if shapes is None:
            raise ValueError(f"cuDNN runs no {request.kind}")
        number = PASSES["convolution"]
        return row(shapes, number, request.precision, settings, layouts, accumulate, workspace_bytes, statistics=True)


def _shapes(request: Request) -> Shapes | None:
    """None where the request is not of images, gives not all three (result, mean, variance), or has the statistics of
    something else."""
    a = request.attributes
    if request.kind != WITH_STATISTICS or not isinstance(a, Fused) or len(request.outputs) != 3:
        return None
    convolution, statistics = a.members
    return shapes_of(convolution_of(request)) if statistics.inputs == convolution.outputs else None


CUDNN_STATISTICS = CudnnStatistics()
