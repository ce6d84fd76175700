"""Convolutions through cuDNN's legacy API, the only one that has FFT and Winograd on every GPU since Hopper.

An algorithm is named by its number in the enumeration of its pass, a layout and a math type: what it needs and how long
it takes only cuDNN on the GPU itself can say (`mbc.measure.cudnn_legacy` asks). See NVIDIA, "cuDNN API", the
functions cudnnConvolutionForward, cudnnConvolutionBackwardData and cudnnConvolutionBackwardFilter.

A filter gradient of bf16 or fp16 operands is computed in their type at the start of the workspace and then widened to
fp32, as by `mbc.kernels.cudnn_convolution`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import DTYPE_CODES, LAYOUT_CODES, Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.convolution_shapes import PASSES, Shapes, shapes_of
from mbc.kernels.cudnn_convolution import library_workspace, type_refusal
from mbc.kernels.cudnn_estimates import widened_bytes

# Names of the algorithms of each pass at the place of their number, as the header has them.
ALGORITHMS = {
    "convolution": (
        "IMPLICIT_GEMM",
        "IMPLICIT_PRECOMP_GEMM",
        "GEMM",
        "DIRECT",
        "FFT",
        "FFT_TILING",
        "WINOGRAD",
        "WINOGRAD_NONFUSED",
    ),
    "convolution_backward_data": ("ALGO_0", "ALGO_1", "FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED"),
    "convolution_backward_filter": (
        "ALGO_0",
        "ALGO_1",
        "FFT",
        "ALGO_3",
        "WINOGRAD",
        "WINOGRAD_NONFUSED",
        "FFT_TILING",
    ),
}
# They add with atomics, as the header says. On an H200 these gave other bits from run to run, and no others did.
_NONDETERMINISTIC = {
    ("convolution_backward_data", "ALGO_0"),
    ("convolution_backward_filter", "ALGO_0"),
    ("convolution_backward_filter", "ALGO_3"),
}
MATHS = {"DEFAULT": 0, "TENSOR_OP": 1, "FMA": 3}  # cudnnMathType_t
_ADMITTED_MATHS = {
    Precision.FP32: ("FMA",),
    Precision.TF32: ("DEFAULT", "FMA"),  # of fp32 operands the default rounds to TF32
    Precision.BF16: ("TENSOR_OP", "DEFAULT"),
    Precision.FP16: ("TENSOR_OP", "DEFAULT"),
}
_ALIGNMENT_BYTES = 256

# The integers of a launch, in order. As `LegacyRow` of templates/host/legacy_convolution.cpp.
ROW_FIELDS = (
    "pass",
    "type",
    "layout",
    "math",
    "algorithm",
    "accumulate",
    "rows",
    "channels",
    "height",
    "width",
    "filters",
    "kernel_height",
    "kernel_width",
    "out_height",
    "out_width",
    "pad_height",
    "pad_width",
    "stride_height",
    "stride_width",
    "dilation_height",
    "dilation_width",
    "groups",
    "workspace_bytes",
)


@dataclass(frozen=True, slots=True)
class LegacyChoice:
    """One algorithm of the request's pass, in one layout with one math type; both as words."""

    algorithm: str
    layout: Layout
    math: str


def admitted_maths(precision: Precision) -> tuple[str, ...]:
    """Math types whose rounding `precision` allows, the one to prefer first; none for fp64."""
    return _ADMITTED_MATHS.get(precision, ())


def legacy_shapes(request: Request) -> Shapes | None:
    """None where the legacy API has no such call: not a convolution of images, or its padding is not symmetric."""
    shapes = shapes_of(request)
    if shapes is None:
        return None
    top, bottom, left, right = shapes.attributes.pad
    return shapes if (top, left) == (bottom, right) else None


def legacy_candidate(request: Request, choice: LegacyChoice, workspace_bytes: int) -> Candidate:
    """`choice` as a candidate whose time is not known. `workspace_bytes` is what cuDNN asks for the algorithm alone."""
    shapes = legacy_shapes(request)
    assert shapes is not None
    adds = request.kind == "convolution_backward_filter"
    if adds:
        workspace_bytes += widened_bytes(shapes.filter, shapes.image.dtype)
    return Candidate(
        provider="cudnn_legacy",
        name=request.kind,
        settings=(
            ("algorithm", ALGORITHMS[request.kind].index(choice.algorithm)),
            ("layout", LAYOUT_CODES[choice.layout]),
            ("math", MATHS[choice.math]),
        ),
        layouts=(choice.layout,) * 3,
        workspace_bytes=-(-workspace_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES,
        time_us=0.0,
        measured=False,
        deterministic=(request.kind, choice.algorithm) not in _NONDETERMINISTIC,
        accumulates=adds,
    )


def legacy_notes(request: Request, choice: LegacyChoice) -> tuple[str, ...]:
    """What a profile says of `choice` in words, sorted: the algorithm's name, the math, what its rounding is."""
    notes = {choice.algorithm, f"{choice.math}_MATH"}
    if (request.kind, choice.algorithm) in _NONDETERMINISTIC:
        notes.add("NONDETERMINISTIC")
    if choice.math == "DEFAULT" and request.inputs[0].dtype is DType.FP32:
        notes.add("TF32")
    return tuple(sorted(notes))


@dataclass(frozen=True)
class CudnnLegacy:
    """The provider `cudnn_legacy`."""

    name: str = "cudnn_legacy"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """None: which algorithms take a shape, and with how much workspace, depends on the GPU and the version of
        cuDNN, undocumented, and the legacy API answers only where the GPU is. A workspace that
        is guessed too small would make a plan that cannot run. Candidates come from profiles."""
        return ()

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """That the algorithm takes the shape, and that the workspace is enough for it, cuDNN says on the GPU."""
        shapes, given = legacy_shapes(call.request), dict(call.settings)
        if shapes is None or call.name != call.request.kind:
            return Acceptance(f"cuDNN's legacy API runs no {call.request.kind} as '{call.name}'")
        named = len(given) == len(call.settings) and given.keys() == {"algorithm", "layout", "math"}
        maths = [MATHS[name] for name in admitted_maths(call.request.precision)]
        layouts = [layout for layout, code in LAYOUT_CODES.items() if code == given.get("layout")]
        if not named or not layouts or given["algorithm"] not in range(len(ALGORITHMS[call.name])):
            return Acceptance(f"there is no such algorithm: {given}")
        if given["math"] not in maths:
            return Acceptance(f"in {call.request.precision} none of its math types is {given['math']}")
        if refusal := type_refusal(call, shapes):
            return Acceptance(refusal)
        if not call.lies_in((layouts[0],) * 3):
            return Acceptance(f"it does not take operands that lie in {', '.join(call.layouts)}")
        gradient = call.request.kind == "convolution_backward_filter"
        return library_workspace(call, widened_bytes(shapes.filter, shapes.image.dtype) if gradient else 0)

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
        """A `LegacyRow`. MBC083 where the plan names no call of the legacy API."""
        shapes, given = legacy_shapes(request), dict(settings)
        if shapes is None or given.keys() != {"algorithm", "layout", "math"}:
            raise MbcError(
                "MBC083",
                f"cuDNN's legacy API cannot run {request.kind} with the settings {given}",
                "the plan was changed or made by another version: compile the source again",
            )
        a = shapes.attributes
        integers = (
            PASSES[request.kind],
            DTYPE_CODES[shapes.image.dtype.value],
            given["layout"],
            given["math"],
            given["algorithm"],
            int(accumulate),
            *shapes.image.shape,
            shapes.filter.shape[0],
            *shapes.filter.shape[2:],
            *shapes.result.shape[2:],
            *a.pad[::2],
            *a.stride,
            *a.dilation,
            a.groups,
            workspace_bytes,
        )
        return Arguments(integers)


CUDNN_LEGACY = CudnnLegacy()
