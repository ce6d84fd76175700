"""The declarations of generated kernels: of single operations, and those that are made for a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Channels, Layouts, OwnKernel, Slice, always, layout_code, layout_of, same_layout
from mbc.kernels.cuda.generated.lowering import Lowered, lower
from mbc.kernels.cuda.generated.placement import axes_of, summed_image
from mbc.kernels.cuda.norm.batch_norm import partial_bytes, parts, sample_of
from mbc.kernels.cuda.strided import trailing
from mbc.kernels.launch_struct import Struct
from mbc.ops import activation, activation_variants, arithmetic, comparison, elementary, piecewise
from mbc.ops.instance_norm import OPS as INSTANCE_OPS

STATE_BYTES = 8  # of GeneratedReduction: two sums


@dataclass(frozen=True, slots=True)
class GeneratedArguments(Struct):
    """Integer arguments of a generated kernel; extents and strides of its repeated operands follow.

    Attributes:
        parts: Blocks that share a reduction; 0 without sums.
        accumulate: Whether sums are added to the present ones.
    """

    elements: int
    layout: int
    rows: int
    channels: int
    inner: int
    parts: int = 0
    accumulate: int = 0


@lru_cache(maxsize=4096)
def generated_kernel(request: Request) -> OwnKernel | None:
    """Return the kernel that is generated for a request; None if there is none."""
    lowered = lower(request)
    if lowered is None:
        return None
    program = lowered.program
    return replace(
        _GENERATED,
        kind=request.kind,
        file=program.file,
        layouts=_layouts,
        accumulates=bool(program.sums) and not program.of_samples,
        launcher=program.name,
        estimated_as="add",
    )


def _lowered(at: Slice) -> Lowered:
    lowered = lower(at.request)
    assert lowered is not None
    return lowered


def _integers(at: Slice) -> GeneratedArguments:
    lowered = _lowered(at)
    image, shared, layout = _images(lowered, at.layout)
    c = Channels.of(image)
    sums = (parts(shared, layout), int(at.accumulate)) if lowered.program.sums else (0, 0)
    return GeneratedArguments(image.elements, layout_code(layout), c.rows, c.channels, c.inner, *sums)


def _image(lowered: Lowered, layout: Layout) -> tuple[TensorType, Layout] | None:
    """Return the image and the layout that a launch counts with; None if it cannot run in this layout.

    Where channels of one pixel are adjacent in memory in both layouts, they count as last.
    """
    if lowered.small is not None:
        return summed_image(lowered.small, lowered.result, layout)
    return lowered.result, Layout.CHANNELS_LAST if Channels.of(lowered.result).inner == 1 else layout


def _images(lowered: Lowered, layout: Layout) -> tuple[TensorType, TensorType, Layout]:
    """Return the image of a launch, what of it is reduced by itself, and the layout."""
    image_and_layout = _image(lowered, layout)
    assert image_and_layout is not None
    image, counted = image_and_layout
    return image, sample_of(image) if lowered.program.of_samples else image, counted


def _layouts(request: Request) -> Iterator[Layouts]:
    """Yield the layouts in which a launch can run."""
    lowered = lower(request)
    return (one for one in same_layout(request) if lowered and _image(lowered, layout_of(request, one)))


def _workspace(request: Request, layout: Layout) -> int:
    lowered = lower(request)
    if lowered is None or not lowered.program.sums:
        return 0
    image, shared, layout = _images(lowered, layout)
    return image.shape[0] // shared.shape[0] * partial_bytes(shared, layout, STATE_BYTES)


def _reals(at: Slice) -> tuple[float, ...]:
    return _lowered(at).reals


def _trailing(at: Slice) -> tuple[int, ...]:
    lowered = _lowered(at)
    repeated = lowered.program.repeated
    if not repeated:
        return ()
    operands = [(at.request.inputs[n], lowered.places[n]) for n in repeated]
    return trailing(axes_of(operands, lowered.result, at.layout), len(repeated))


_GENERATED = OwnKernel("", "", GeneratedArguments, _integers, _reals, _trailing, workspace=_workspace, launches=2)


def generated_as(kind: str, named: str = "", takes: Callable[[Request], bool] = always, version: int = 1) -> OwnKernel:
    """Return the declaration of a generated kernel with a name of its own; the program is that of the request."""

    def can_run(request: Request) -> bool:
        return takes(request) and lower(request) is not None

    return replace(_GENERATED, kind=kind, named=named, takes=can_run, version=version)


# Single operations, whose kernels have their names in plans and profiles. Others have had two versions before.
KERNELS = (
    *(
        generated_as(kind.name)
        for family in (activation, activation_variants, arithmetic, comparison, elementary, piecewise)
        for kind in family.OPS
        if kind.device is not None
    ),
    generated_as("expand"),
    generated_as("batch_normalize_backward_frozen"),
    *(generated_as(kind.name) for kind in INSTANCE_OPS if kind.device is not None),
    *(generated_as(kind, version=3) for kind in ("bias_add", "batch_normalize", "batch_normalize_backward")),
)
