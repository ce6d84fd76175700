"""The provider `cudnn_legacy`: convolutions through cuDNN's legacy API.

Since Hopper, only the legacy API has FFT and Winograd on every GPU. A candidate is an algorithm's number in the
enumeration of its pass, a layout and a math type. Only cuDNN on the GPU itself can tell how much workspace and time it
needs (`mbc.measure.legacy_algorithms` asks). See NVIDIA, "cuDNN API", the functions cudnnConvolutionForward,
cudnnConvolutionBackwardData and cudnnConvolutionBackwardFilter.

A filter gradient of bf16 or fp16 operands is computed in their type at the start of the workspace and then widened to
fp32, as in `mbc.kernels.cudnn_convolution`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import LAYOUT_CODES, Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.convolution_shapes import LibraryConvolution, Shapes, library_fields, shapes_of
from mbc.kernels.cudnn_convolution import library_workspace, type_refusal
from mbc.kernels.cudnn_estimates import widened_bytes

# Names of the algorithms of each pass, in the order of their numbers in cuDNN's header.
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
    "convolution_backward_filter": ("ALGO_0", "ALGO_1", "FFT", "ALGO_3", "WINOGRAD", "WINOGRAD_NONFUSED", "FFT_TILING"),
}
# These algorithms add with atomics, as the header says. On an H200 they alone gave different bits from run to run.
_NONDETERMINISTIC = {
    ("convolution_backward_data", "ALGO_0"),
    ("convolution_backward_filter", "ALGO_0"),
    ("convolution_backward_filter", "ALGO_3"),
}
MATHS = {"DEFAULT": 0, "TENSOR_OP": 1, "FMA": 3}  # cudnnMathType_t
_ADMITTED_MATHS = {
    Precision.FP32: ("FMA",),
    Precision.TF32: ("DEFAULT", "FMA"),  # the default rounds fp32 operands to TF32
    Precision.BF16: ("TENSOR_OP", "DEFAULT"),
    Precision.FP16: ("TENSOR_OP", "DEFAULT"),
}
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class LegacyRow(LibraryConvolution):
    """Integer arguments of a convolution, which templates/host/legacy_convolution.cpp reads.

    Attributes:
        math: A cudnnMathType_t.
        algorithm: Number in the enumeration of its pass.
    """

    layout: int
    math: int
    algorithm: int
    pad_height: int
    pad_width: int


@dataclass(frozen=True, slots=True)
class LegacyChoice:
    """One algorithm of the request's pass, in one layout with one math type; algorithm and math type are names."""

    algorithm: str
    layout: Layout
    math: str


def admitted_maths(precision: Precision) -> tuple[str, ...]:
    """Return the math types whose rounding `precision` allows, the preferred one first; none for fp64."""
    return _ADMITTED_MATHS.get(precision, ())


def legacy_shapes(request: Request) -> Shapes | None:
    """Return the shapes of a convolution that the legacy API can run, else None.

    The legacy API takes convolutions along two axes with symmetric padding, of fewer than 2^31 elements.
    """
    shapes = shapes_of(request)
    if shapes is None or len(request.inputs[0].shape) != 4 or not shapes.attributes.is_padded_evenly:
        return None
    return shapes if max(shapes.image.elements, shapes.filter.elements, shapes.result.elements) < 1 << 31 else None


def legacy_candidate(request: Request, choice: LegacyChoice, workspace_bytes: int) -> Candidate:
    """Return `choice` as a candidate without a time.

    Args:
        request: A convolution that `legacy_shapes` takes.
        choice: Algorithm, layout and math type.
        workspace_bytes: Workspace that cuDNN asks for the algorithm alone, without the bytes of a gradient to be
            widened.
    """
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
    """Return a profile's notes on `choice`, sorted: the algorithm's name, the math type, its rounding."""
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
        """Return no candidates, because candidates of this provider come from profiles only.

        Which algorithms take a shape, and with how much workspace, depends on the GPU and on the version of cuDNN. It
        is not documented, and the legacy API answers only on the GPU. A plan with too small a guess of the workspace
        could not run.
        """
        return ()

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """Return whether the call's settings, types and layouts suit the legacy API.

        Only cuDNN on the GPU can tell whether the algorithm takes the shape and whether the workspace is enough.
        """
        shapes, given = legacy_shapes(call.request), dict(call.settings)
        if shapes is None or call.name != call.request.kind:
            return Acceptance(f"cuDNN's legacy API cannot run {call.request.kind} with these operands as '{call.name}'")
        named = len(given) == len(call.settings) and given.keys() == {"algorithm", "layout", "math"}
        maths = [MATHS[name] for name in admitted_maths(call.request.precision)]
        layouts = [layout for layout, code in LAYOUT_CODES.items() if code == given.get("layout")]
        if not named or not layouts or given["algorithm"] not in range(len(ALGORITHMS[call.name])):
            return Acceptance(f"cuDNN's legacy API has no algorithm with the settings {given}")
        if given["math"] not in maths:
            return Acceptance(f"{call.request.precision} does not allow the math type {given['math']}")
        if refusal := type_refusal(call, shapes):
            return Acceptance(refusal)
        if not call.has_layouts((layouts[0],) * 3):
            return Acceptance(f"it does not take operands in the layouts {', '.join(call.layouts)}")
        gradient = call.request.kind == "convolution_backward_filter"
        return library_workspace(call, widened_bytes(shapes.filter, shapes.image.dtype) if gradient else 0)

    def arguments(self, call: Call, first_row: int) -> Arguments:
        """Return the integers of a `LegacyRow`.

        Raises:
            MbcError: MBC083 if the legacy API has no such call.
        """
        shapes, given = legacy_shapes(call.request), dict(call.settings)
        if shapes is None or given.keys() != {"algorithm", "layout", "math"}:
            raise MbcError(
                "MBC083",
                f"cuDNN's legacy API cannot run {call.request.kind} with the settings {given}",
                "the plan was edited or written by another version of mbc: compile the source again",
            )
        height, _, width, _ = shapes.attributes.pad
        row = LegacyRow(**library_fields(shapes, call), **given, pad_height=height, pad_width=width)
        return Arguments(row.integers())


CUDNN_LEGACY = CudnnLegacy()
