"""Convolutions through cuDNN's graph API, by themselves: what a plan reserves for them and how long they should take.

A plan that no profile informs names no engine (`engine` = -1): the generated module takes the first configuration that
cuDNN's heuristics offer, whose numerical notes agree with the precision and whose workspace fits the planned bytes.
Such a configuration always exists: in a survey of 108 layers (ResNet, AlexNet, VGG, Inception, DenseNet, MobileNet,
U-Net and odd shapes) x 4 batch sizes x 3 passes x 2 layouts x 4 precisions with cuDNN 9.19 for an H200, at least one
admitted engine needed no workspace. What the planned bytes decide is how fast a configuration may be, so there are two
candidates a layout:

  bare   no workspace: often a direct kernel without tensor cores. Filter gradients of fp32 operands get what engines
         that split the sum count their parts with (`_counters_bytes`): in strict fp32 with channels first there is
         without it a direct kernel alone in 136 of 140 cases, some 0.1 to 1 TFLOP/s where others do 20
  lean   room for partial sums (`_sums_bytes`), where engines work on the operands as they lie: channels first in strict
         fp32 (filter gradients channels last), channels last on aligned channels for tensor cores
  full   elsewhere: besides, copies of operands in the other layout or with channels padded to what loads want

Over the survey, with lean or full the very first admitted configuration fits in 95 % of the cases and one of the first
four in 99 %.

A filter gradient of bf16 or fp16 operands is computed in their type in the workspace and then widened to fp32: no
engine writes fp32 from them. The workspace of such a candidate, measured or not, begins with those bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import DTYPE_CODES, LAYOUT_CODES, Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.calibration import WITHOUT_WORKSPACE, Effort, busy, estimate_us, group, peak_tflops
from mbc.ops.convolution import Convolution, read_share

PASSES = {"convolution": 0, "convolution_backward_data": 1, "convolution_backward_filter": 2}

# The integers of a launch, in order; pairs (type, value) of knobs follow. As `ConvolutionRow` of
# templates/host/convolution.cpp.
ROW_FIELDS = (
    "pass",
    "type",
    "layout",
    "math",
    "deterministic",
    "accumulate",
    "statistics",
    "rows",
    "channels",
    "height",
    "width",
    "filters",
    "kernel_height",
    "kernel_width",
    "out_height",
    "out_width",
    "pad_top",
    "pad_bottom",
    "pad_left",
    "pad_right",
    "stride_height",
    "stride_width",
    "dilation_height",
    "dilation_width",
    "groups",
    "workspace_bytes",
    "engine",
    "knobs",
)
HEURISTIC_ENGINE = -1
_LAYOUTS = {code: layout for layout, code in LAYOUT_CODES.items()}

ALIGNMENT_BYTES = 256
_MOST_SUMS_BYTES = 32 << 20
_LEAST_SUMS_BYTES = 3 << 19  # small filters of large images split further: 1.5 MiB, but not above their own size
_SUMS_PER_PASS = {0: 2, 1: 2, 2: 16}  # partial results of a split reduction, in sizes of the filter
_SLACK_BYTES = 4096  # pointers, counters and alignment of parts
# On an H100 in bf16 what groups of 4 to 32 channels computed in a second was in proportion to their channels, and would
# be at 128 what a convolution without groups computes.
_GROUP_TILE_CHANNELS = 128
_COUNTED_BYTES = 512  # of a filter gradient, by one of the bytes that engines count finished parts of its sum with


@dataclass(frozen=True, slots=True)
class Shapes:
    """One convolution as cuDNN sees it, whatever the pass: image, filter, result."""

    image: TensorType
    filter: TensorType
    result: TensorType
    attributes: Convolution

    @property
    def operations(self) -> int:
        """Multiplications and additions of one pass."""
        return 2 * self.result.elements * math.prod(self.filter.shape[1:])

    @property
    def depthwise(self) -> bool:
        return self.attributes.groups > 1 and self.filter.shape[1] == 1

    @property
    def is_product(self) -> bool:
        """Whether the convolution is one GEMM over the pixels as they lie."""
        a = self.attributes
        return a.kernel == a.stride == (1, 1) and not any(a.pad) and a.groups == 1

    def product(self, number: int) -> tuple[int, int, int]:
        """M, N and K of the implicit GEMM of a pass."""
        filters, *terms = self.filter.shape
        if number == 0:
            return self.result.elements // filters, filters, math.prod(terms)
        if number == 2:
            return filters, math.prod(terms), self.result.elements // filters
        a = self.attributes
        # With a stride each pixel of the image takes part in some positions of the filter only.
        positions = max(1, math.prod(a.kernel) // math.prod(a.stride))
        return self.image.elements // self.image.shape[1], self.image.shape[1], filters // a.groups * positions

    def touched_bytes(self, number: int) -> int:
        """Of the image: what is read of it, but a data gradient writes zeros where nothing comes from."""
        size_bytes = self.image.size_bytes
        return size_bytes if number == 1 else round(size_bytes * read_share(self.attributes))


def shapes_of(request: Request) -> Shapes | None:
    """None where the request is not a convolution of images."""
    number = PASSES.get(request.kind)
    if number is None or not isinstance(request.attributes, Convolution):
        return None
    operands = (*request.inputs, *request.outputs)
    if len(operands) != 3 or any(len(t.shape) != 4 for t in operands):
        return None
    order = {0: (0, 1, 2), 1: (2, 1, 0), 2: (0, 2, 1)}[number]
    image, filter_, result = (operands[i] for i in order)
    return Shapes(image, filter_, result, request.attributes)


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _math(precision: Precision) -> int:
    """As `Math` of convolution.cpp: 0 admits no tensor cores."""
    return 0 if precision is Precision.FP32 else 1


def _channel_multiple(precision: Precision) -> int:
    """Channels of which 16-byte loads of the operands take whole numbers; strict engines load one by one."""
    return {Precision.FP32: 1, Precision.TF32: 4}.get(precision, 8)


def widened_bytes(filter_: TensorType, working: DType) -> int:
    """Workspace that a filter gradient takes in the type of its operands, 0 where that is fp32 already."""
    if working not in (DType.BF16, DType.FP16):
        return 0
    return padded(filter_.elements * working.size_bytes, ALIGNMENT_BYTES)


def _counters_bytes(filter_: TensorType, working: DType) -> int:
    """What it takes to count the parts of a filter gradient; engines for bf16 and fp16 do with none."""
    return filter_.size_bytes // _COUNTED_BYTES + ALIGNMENT_BYTES if working is DType.FP32 else 0


def least_bytes(filter_: TensorType, working: DType) -> int:
    """Workspace of a filter gradient that gets none to be fast with."""
    return padded(widened_bytes(filter_, working) + _counters_bytes(filter_, working), ALIGNMENT_BYTES)


def _sums_bytes(shapes: Shapes, number: int) -> int:
    working = shapes.image.dtype
    sums = _SUMS_PER_PASS[number] * (shapes.filter.elements * working.size_bytes + 512)
    if number == 2:
        sums = max(sums, min(_LEAST_SUMS_BYTES, (shapes.image.size_bytes + shapes.result.size_bytes) // 8))
    widened = widened_bytes(shapes.filter, working) if number == 2 else 0
    return widened + min(sums, _MOST_SUMS_BYTES) + _SLACK_BYTES


def _copies_bytes(shapes: Shapes, precision: Precision, layout: Layout) -> int:
    """Copies of the operands as engines want them: all of them, or, where half-precision operands lie right but for
    their alignment, those whose channels are not aligned."""
    multiple, groups, size = _channel_multiple(precision), shapes.attributes.groups, shapes.image.dtype.size_bytes
    rows, channels, height, width = shapes.image.shape
    filters, per_group, kernel_height, kernel_width = shapes.filter.shape
    out_height, out_width = shapes.result.shape[2:]
    wide, deep = padded(per_group, multiple), padded(filters // groups, multiple)
    image = rows * wide * groups * height * width
    filter_ = deep * groups * wide * kernel_height * kernel_width
    result = rows * deep * groups * out_height * out_width
    if layout is Layout.CHANNELS_LAST and precision in (Precision.BF16, Precision.FP16) and groups == 1:
        top, bottom, left, right = shapes.attributes.pad
        if top == bottom and left == right:
            image *= wide != channels
            result *= deep != filters
    return (image + filter_ + result) * size + 3 * 512


def _natural(shapes: Shapes, number: int, layout: Layout, precision: Precision) -> bool:
    """Whether the engines of this precision work on the operands as they lie."""
    if shapes.depthwise:
        return layout is Layout.CHANNELS_LAST or (precision is Precision.FP32 and number != 2)
    top, bottom, left, right = shapes.attributes.pad
    if shapes.attributes.groups > 1 or top != bottom or left != right:
        return False
    if precision is Precision.FP32:
        return (layout is Layout.CHANNELS_LAST) == (number == 2)
    multiple = _channel_multiple(precision)
    aligned = shapes.filter.shape[0] % multiple == 0 and shapes.filter.shape[1] % multiple == 0
    return layout is Layout.CHANNELS_LAST and aligned


def _variant(shapes: Shapes, number: int, layout: Layout, precision: Precision) -> str:
    """How engines come at the operands: what estimates have in common."""
    strided = number == 1 and shapes.attributes.stride != (1, 1)
    if shapes.depthwise or shapes.attributes.groups > 1:
        return "depthwise" if shapes.depthwise else "grouped strided" if strided else "grouped"
    multiple = _channel_multiple(precision)
    if any(channels % multiple for channels in shapes.filter.shape[:2]):
        return "unaligned"
    # A GEMM either way: rows of pixels can be loaded where rows of channels are not.
    product = shapes.is_product and precision is not Precision.FP32
    if product and math.prod(shapes.image.shape[2:]) % multiple == 0:
        return "straight"
    if not _natural(shapes, number, layout, precision):
        return "converted"
    # The data gradient of a strided convolution is as many small ones as a window of strides has pixels.
    return "strided" if strided else "straight"


def _filling(shapes: Shapes) -> float:
    """What tensor cores compute over what counts: narrow groups are blocks on the diagonal of a GEMM of whole tiles."""
    grouped = shapes.attributes.groups > 1 and not shapes.depthwise
    return max(1.0, _GROUP_TILE_CHANNELS / shapes.filter.shape[1]) if grouped else 1.0


def _effort(shapes: Shapes, kind: str, layout: Layout, precision: Precision, device: DeviceSpec, bare: bool) -> Effort:
    number = PASSES[kind]
    variant = _variant(shapes, number, layout, precision)
    # Direct kernels, which are left where operands cannot be copied, use no tensor cores.
    direct = bare and variant not in ("straight", "strided")
    peak = device.fp32_tflops if direct else peak_tflops(device, precision)
    half = precision in (Precision.BF16, Precision.FP16)
    filling = _filling(shapes) if half and not direct else 1.0
    share = busy(*shapes.product(number), device)
    moved_bytes = shapes.filter.size_bytes + shapes.result.size_bytes + shapes.touched_bytes(number)
    return Effort(
        group("cudnn", kind, precision),
        f"{WITHOUT_WORKSPACE} {variant}" if bare else variant,
        device.launch_us,
        shapes.operations * filling / (peak * 1e6 * share),
        moved_bytes / (device.copy_gb_s * 1e3),
    )


@dataclass(frozen=True)
class CudnnConvolution:
    """Of the provider `cudnn` (`mbc.kernels.cudnn`) what runs one operation."""

    name: str = "cudnn"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Two a layout: bare, and lean or full, whichever engines need for their full speed."""
        return (candidate for candidate, _ in self.estimated(request, device))

    def estimated(self, request: Request, device: DeviceSpec) -> Iterable[tuple[Candidate, Effort]]:
        """Each candidate with what its time was estimated from."""
        shapes = shapes_of(request)
        if shapes is None or request.precision is Precision.FP64:
            return
        if request.precision is Precision.BF16 and not device.has_bf16:
            return  # bf16 came with compute capability 8.0
        number = PASSES[request.kind]
        bare_bytes = least_bytes(shapes.filter, shapes.image.dtype) if number == 2 else 0
        for layout in (Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST):
            full_bytes = _sums_bytes(shapes, number)
            if not _natural(shapes, number, layout, request.precision):
                full_bytes += _copies_bytes(shapes, request.precision, layout)
            for workspace_bytes, bare in ((bare_bytes, True), (full_bytes, False)):
                effort = _effort(shapes, request.kind, layout, request.precision, device, bare)
                yield self._candidate(request, layout, workspace_bytes, effort), effort

    def _candidate(self, request: Request, layout: Layout, workspace_bytes: int, effort: Effort) -> Candidate:
        return Candidate(
            provider=self.name,
            name=request.kind,
            settings=(
                ("deterministic", 1),
                ("engine", HEURISTIC_ENGINE),
                ("layout", LAYOUT_CODES[layout]),
            ),
            layouts=(layout, layout, layout),
            workspace_bytes=padded(workspace_bytes, ALIGNMENT_BYTES),
            time_us=estimate_us(effort),
            measured=False,
            accumulates=PASSES[request.kind] == 2,
        )

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """That there is an engine of this number, and that the workspace is enough for it, cuDNN says on the GPU."""
        shapes = shapes_of(call.request)
        if shapes is None or call.name != call.request.kind:
            return Acceptance(f"cuDNN runs no {call.request.kind} as '{call.name}'")
        if refusal := engine_refusal(call, device) or type_refusal(call, shapes):
            return Acceptance(refusal)
        if not call.lies_in(*((layout,) * 3 for layout in engine_layouts(call))):
            return Acceptance(f"its engine takes no operands that lie in {', '.join(call.layouts)}")
        front_bytes = 0
        if call.request.kind == "convolution_backward_filter":
            chosen_later = dict(call.settings).get("engine", HEURISTIC_ENGINE) == HEURISTIC_ENGINE
            front_bytes = (least_bytes if chosen_later else widened_bytes)(shapes.filter, shapes.image.dtype)
        return library_workspace(call, front_bytes)

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
        shapes = shapes_of(request)
        if shapes is None:
            raise ValueError(f"cuDNN runs no {request.kind}")
        return row(shapes, PASSES[request.kind], request.precision, settings, layouts, accumulate, workspace_bytes)


def engine_refusal(call: Call, device: DeviceSpec) -> str:
    """Why cuDNN's graph API cannot run a call with its settings on a device; empty where nothing speaks against it."""
    precision, given = call.request.precision, dict(call.settings)
    if precision is Precision.FP64 or (precision is Precision.BF16 and not device.has_bf16):
        return f"{device.architecture} computes nothing in {precision}"
    named = {key for key in given if key.startswith("knob") and key.removeprefix("knob").isdecimal()}
    if len(given) != len(call.settings) or not given.keys() - named <= {"deterministic", "engine", "layout"}:
        return f"its settings are no engine, layout and knobs: {given}"
    known = given.get("layout", 0) in _LAYOUTS and given.get("deterministic", 0) in (0, 1)
    if not known or given.get("engine", HEURISTIC_ENGINE) < HEURISTIC_ENGINE:
        return f"there are no such settings: {given}"
    return ""


def engine_layouts(call: Call) -> tuple[Layout, ...]:
    """In which an engine takes all operands: that of its settings, either where they name none."""
    named = dict(call.settings).get("layout")
    return tuple(_LAYOUTS.values()) if named is None else (_LAYOUTS[named],)


def type_refusal(call: Call, shapes: Shapes) -> str:
    """Why the types of operands, or adding to the result, are beyond cuDNN's convolutions; empty where they are not."""
    gradient, working = call.request.kind == "convolution_backward_filter", call.request.precision.working
    found = (shapes.image.dtype, shapes.result.dtype, shapes.filter.dtype)
    if found != (working, working, call.request.precision.master if gradient else working):
        return f"it does not take operands of {', '.join(map(str, call.operands))}"
    if call.accumulate and not gradient:
        return "it cannot add to its output"
    return ""


def library_workspace(call: Call, front_bytes: int) -> Acceptance:
    """A call whose workspace begins with `front_bytes` for mbc and goes on with what cuDNN alone can judge."""
    if call.workspace_bytes < front_bytes:
        return Acceptance(
            workspace_refusal=f"it begins with {front_bytes} bytes for the filter gradient before it is widened"
        )
    return Acceptance(proved=False, aligned=True)


def row(
    shapes: Shapes,
    number: int,
    precision: Precision,
    settings: tuple[tuple[str, int], ...],
    layouts: tuple[Layout, ...],
    accumulate: bool,
    workspace_bytes: int,
    statistics: bool = False,
) -> Arguments:
    """A `ConvolutionRow` and its knobs, for the pass of this number."""
    given = dict(settings)
    # Where an operand has one pixel or one channel the plan calls it channels first, whatever its neighbours are.
    seen = max(LAYOUT_CODES[layout] for layout in layouts)
    knobs = tuple((int(k.removeprefix("knob")), v) for k, v in settings if k.startswith("knob"))
    a = shapes.attributes
    integers = (
        number,
        DTYPE_CODES[shapes.image.dtype.value],
        given.get("layout", seen),
        _math(precision),
        given.get("deterministic", 0),
        int(accumulate),
        int(statistics),
        *shapes.image.shape,
        shapes.filter.shape[0],
        *shapes.filter.shape[2:],
        *shapes.result.shape[2:],
        *a.pad,
        *a.stride,
        *a.dilation,
        a.groups,
        workspace_bytes,
        given.get("engine", HEURISTIC_ENGINE),
        len(knobs),
        *(n for knob in knobs for n in knob),
    )
    return Arguments(integers)


CUDNN_CONVOLUTION = CudnnConvolution()
