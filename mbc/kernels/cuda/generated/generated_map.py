"""The declarations of generated kernels: of single operations, and those that are made for a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Channels, OwnKernel, Slice, always, layout_code
from mbc.kernels.cuda.generated.lowering import Lowered, lower
from mbc.kernels.cuda.generated.placement import axes_of
from mbc.kernels.cuda.norm.batch_norm import partial_bytes, parts, sample_of
from mbc.kernels.cuda.strided import trailing
from mbc.kernels.launch_struct import Struct
from mbc.ops import activation, activation_variants, arithmetic, comparison, elementary, piecewise, reduce
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
        accumulates=bool(program.sums) and not program.by_sample,
        launcher=program.name,
        estimated_as="add",
    )


def _lowered(at: Slice) -> Lowered:
    lowered = lower(at.request)
    assert lowered is not None
    return lowered


def _integers(at: Slice) -> GeneratedArguments:
    result = _lowered(at).result
    c = Channels.of(result)
    layout = _effective(result, at.layout)
    program = _lowered(at).program
    shared = sample_of(result) if program.by_sample else result
    sums = (parts(shared, layout), int(at.accumulate)) if program.sums else (0, 0)
    return GeneratedArguments(result.elements, layout_code(layout), c.rows, c.channels, c.inner, *sums)


def _effective(result: TensorType, layout: Layout) -> Layout:
    """Return the layout that a launch counts with: channels of one pixel are adjacent in memory in both."""
    return Layout.CHANNELS_LAST if Channels.of(result).inner == 1 else layout


def _workspace(request: Request, layout: Layout) -> int:
    lowered = lower(request)
    if lowered is None or not lowered.program.sums:
        return 0
    samples = lowered.result.shape[0] if lowered.program.by_sample else 1
    shared = sample_of(lowered.result) if lowered.program.by_sample else lowered.result
    return samples * partial_bytes(shared, _effective(lowered.result, layout), STATE_BYTES)


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
        for family in (activation, activation_variants, arithmetic, comparison, elementary, piecewise, reduce)
        for kind in family.OPS
        if kind.device is not None
    ),
    generated_as("batch_normalize_backward_frozen"),
    *(generated_as(kind.name) for kind in INSTANCE_OPS if kind.device is not None),
    *(generated_as(kind, version=3) for kind in ("bias_add", "batch_normalize", "batch_normalize_backward")),
)
