"""Convolutions through cuDNN's graph API: the workspace that a plan reserves, and estimated times.

A plan made without a profile names no engine (`engine` = -1): the generated module takes the first configuration that
cuDNN's heuristics offer, whose numerical notes agree with the precision and whose workspace fits the planned bytes.
Such a configuration always exists: in a survey of 108 layers (ResNet, AlexNet, VGG, Inception, DenseNet, MobileNet,
U-Net and odd shapes) x 4 batch sizes x 3 passes x 2 layouts x 4 precisions with cuDNN 9.19 for an H200, at least one
admitted engine needed no workspace. The planned bytes decide only how fast a configuration may be, so there are two
candidates for each layout:

  bare   no workspace: often a direct kernel without tensor cores. A filter gradient of fp32 operands gets the few bytes
         with which engines that split the sum count its parts (`cudnn_estimates`). Without them, strict fp32 with
         channels first has only a direct kernel in 136 of 140 cases: 0.1 to 1 TFLOP/s where other engines reach 20
  lean   room for partial sums (`sums_bytes`), where engines read the operands in their layout: channels first in strict
         fp32 (filter gradients channels last), channels last with aligned channels for tensor cores
  full   elsewhere: also room for copies of operands in the other layout or with channels padded for wide loads

Over the survey, with lean or full the very first admitted configuration fits in 95 % of the cases and one of the first
four in 99 %.

A filter gradient of bf16 or fp16 operands is computed in their type in the workspace and then widened to fp32: no
engine writes fp32 from them. The workspace of such a candidate, measured or not, begins with those bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout, Precision
from mbc.kernels.base import LAYOUT_CODES, Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.calibration import Effort, estimate_us, library_precision
from mbc.kernels.convolution_shapes import PASSES, LibraryConvolution, Shapes, library_fields, shapes_of
from mbc.kernels.cudnn_estimates import (
    ALIGNMENT_BYTES,
    copies_bytes,
    effort_of,
    is_natural,
    least_bytes,
    padded,
    sums_bytes,
    widened_bytes,
)
from mbc.kernels.launch_struct import Struct

HEURISTIC_ENGINE = -1
_LAYOUTS = {code: layout for layout, code in LAYOUT_CODES.items()}


@dataclass(frozen=True, slots=True)
class ConvolutionRow(LibraryConvolution):
    """Integer arguments of a convolution, which templates/host/convolution.cpp reads.

    Pairs (type, value) follow, `knobs` of them, and then a `DepthRow` if the convolution has three spatial axes.

    Attributes:
        statistics: Forward pass: whether mean and variance of the result's channels are computed.
        engine: -1: the first configuration of the heuristics that is admitted and fits.
    """

    layout: int
    math: int
    deterministic: int
    statistics: int
    pad_top: int
    pad_bottom: int
    pad_left: int
    pad_right: int
    engine: int
    knobs: int


@dataclass(frozen=True, slots=True)
class DepthRow(Struct):
    """Integer arguments of the first of three spatial axes."""

    depth: int
    kernel: int
    out: int
    pad_front: int
    pad_back: int
    stride: int
    dilation: int

    @staticmethod
    def of(shapes: Shapes) -> DepthRow:
        """Return the arguments of a convolution along three axes."""
        a, sizes = shapes.attributes, (t.shape[2] for t in (shapes.image, shapes.filter, shapes.result))
        return DepthRow(*sizes, *a.pad[:2], stride=a.stride[0], dilation=a.dilation[0])


def _math(precision: Precision) -> int:
    """Return the code of `Math` in convolution.cpp; 0 admits no tensor cores."""
    return 0 if precision is Precision.FP32 else 1


@dataclass(frozen=True)
class CudnnConvolution:
    """The part of the provider `cudnn` (`mbc.kernels.cudnn`) that runs single convolutions."""

    name: str = "cudnn"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Return two candidates for each layout: bare, and lean or full, whichever gives engines full speed."""
        return (candidate for candidate, _ in self.estimated(request, device))

    def estimated(self, request: Request, device: DeviceSpec) -> Iterable[tuple[Candidate, Effort]]:
        """Yield each candidate with the effort that its time was estimated from."""
        shapes = shapes_of(request)
        if shapes is None or request.precision is Precision.FP64:
            return
        if request.precision is Precision.BF16 and not device.has_bf16_and_tf32:
            return  # only GPUs of compute capability 8.0 and higher compute in bf16
        number, precision = PASSES[request.kind], library_precision(device, request.precision)
        bare_bytes = least_bytes(shapes.filter, shapes.image.dtype) if number == 2 else 0
        for layout in (Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST):
            full_bytes = sums_bytes(shapes, number)
            if not is_natural(shapes, number, layout, precision):
                full_bytes += copies_bytes(shapes, number, precision, layout)
            for workspace_bytes, bare in ((bare_bytes, True), (full_bytes, False)):
                effort = effort_of(shapes, request.kind, layout, precision, device, bare)
                yield self._candidate(request, layout, workspace_bytes, effort), effort

    def _candidate(self, request: Request, layout: Layout, workspace_bytes: int, effort: Effort) -> Candidate:
        return Candidate(
            provider=self.name,
            name=request.kind,
            settings=(("deterministic", 1), ("engine", HEURISTIC_ENGINE), ("layout", LAYOUT_CODES[layout])),
            layouts=(layout, layout, layout),
            workspace_bytes=padded(workspace_bytes, ALIGNMENT_BYTES),
            time_us=estimate_us(effort),
            measured=False,
            accumulates=PASSES[request.kind] == 2,
        )

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """Return whether the call's settings, types and layouts suit cuDNN's graph API.

        Only cuDNN on the GPU can tell whether the engine exists and whether the workspace is enough.
        """
        shapes = shapes_of(call.request)
        if shapes is None or call.name != call.request.kind:
            return Acceptance(f"cuDNN cannot run {call.request.kind} with these operands as '{call.name}'")
        if refusal := engine_refusal(call, device) or type_refusal(call, shapes):
            return Acceptance(refusal)
        if not call.has_layouts(*((layout,) * 3 for layout in engine_layouts(call))):
            return Acceptance(f"its engine does not take operands in the layouts {', '.join(call.layouts)}")
        front_bytes = 0
        if call.request.kind == "convolution_backward_filter":
            chosen_later = dict(call.settings).get("engine", HEURISTIC_ENGINE) == HEURISTIC_ENGINE
            front_bytes = (least_bytes if chosen_later else widened_bytes)(shapes.filter, shapes.image.dtype)
        return library_workspace(call, front_bytes)

    def arguments(self, call: Call, first_row: int) -> Arguments:
        """Return the integers of a `ConvolutionRow` and its knobs."""
        shapes = shapes_of(call.request)
        if shapes is None:
            raise ValueError(f"cuDNN cannot run {call.request.kind}")
        return row(shapes, call)


def engine_refusal(call: Call, device: DeviceSpec) -> str:
    """Return why cuDNN's graph API cannot run a call with its settings on a device; empty if it can."""
    precision, given = call.request.precision, dict(call.settings)
    if precision is Precision.FP64 or (precision is Precision.BF16 and not device.has_bf16_and_tf32):
        return f"{device.architecture} does not compute in {precision}"
    named = {key for key in given if key.startswith("knob") and key.removeprefix("knob").isdecimal()}
    if len(given) != len(call.settings) or not given.keys() - named <= {"deterministic", "engine", "layout"}:
        return f"its settings must be an engine, a layout and knobs, not {given}"
    valid = given.get("layout", 0) in _LAYOUTS and given.get("deterministic", 0) in (0, 1)
    if not valid or given.get("engine", HEURISTIC_ENGINE) < HEURISTIC_ENGINE:
        return f"a value of its settings is out of range: {given}"
    return ""


def engine_layouts(call: Call) -> tuple[Layout, ...]:
    """Return the layouts that the call's engine takes: the one in its settings, or both if the settings name none."""
    named = dict(call.settings).get("layout")
    return tuple(_LAYOUTS.values()) if named is None else (_LAYOUTS[named],)


def type_refusal(call: Call, shapes: Shapes) -> str:
    """Return why cuDNN's convolutions cannot take these types or cannot add to this result; empty if they can."""
    gradient, working = call.request.kind == "convolution_backward_filter", call.request.precision.working
    types = (shapes.image.dtype, shapes.result.dtype, shapes.filter.dtype)
    if types != (working, working, call.request.precision.master if gradient else working):
        return f"it does not take operands of {', '.join(map(str, call.operands))}"
    if call.accumulate and not gradient:
        return "it cannot add to its output"
    return ""


def library_workspace(call: Call, front_bytes: int) -> Acceptance:
    """Accept a call whose workspace has at least `front_bytes` for mbc; cuDNN alone can judge the rest."""
    if call.workspace_bytes < front_bytes:
        return Acceptance(workspace_refusal=f"the filter gradient needs {front_bytes} bytes before it is widened")
    return Acceptance(proved=False, aligned=True)


def row(shapes: Shapes, call: Call, statistics: bool = False) -> Arguments:
    """Return the integers of a `ConvolutionRow` and its knobs."""
    given = dict(call.settings)
    # A plan calls an operand with one pixel or one channel channels first, whatever the layout of the other operands.
    seen = max(LAYOUT_CODES[layout] for layout in call.layouts)
    knobs = tuple((int(k.removeprefix("knob")), v) for k, v in call.settings if k.startswith("knob"))
    top, bottom, left, right = shapes.attributes.pad[-4:]
    fields = ConvolutionRow(
        **library_fields(shapes, call),
        layout=given.get("layout", seen),
        math=_math(call.request.precision),
        deterministic=given.get("deterministic", 0),
        statistics=statistics,
        pad_top=top,
        pad_bottom=bottom,
        pad_left=left,
        pad_right=right,
        engine=given.get("engine", HEURISTIC_ENGINE),
        knobs=len(knobs),
    )
    depth = DepthRow.of(shapes).integers() if shapes.attributes.rank > 2 else ()
    return Arguments((*fields.integers(), *(n for knob in knobs for n in knob), *depth))


CUDNN_CONVOLUTION = CudnnConvolution()
