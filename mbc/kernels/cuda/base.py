"""What one of mbc's own kernels is: its file, the structure its launcher reads, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import DTYPE_CODES, LAYOUT_CODES, Call, Request
from mbc.kernels.calibration import Effort, group
from mbc.ops.fused import launch_kind

PROVIDER = "mbc"
VECTOR_BYTES = 16
# Blocks that share a reduction: an H200's multiprocessors. A constant, so that sums have one order on every GPU.
REDUCTION_BLOCKS = 132
THREADS = 256  # of a block; as in templates/kernels/shared/launch.cuh

Layouts = tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Struct:
    """The integers of a launch, named and ordered as the structure of the same name in templates/kernels."""

    def integers(self) -> tuple[int, ...]:
        return tuple(int(value) for value in astuple(self))


@dataclass(frozen=True, slots=True)
class Slice:
    """One launch: a request in one layout, for rows that start at `first_row` of the mini-batch."""

    request: Request
    layout: Layout
    first_row: int = 0
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Channels:
    """A tensor [rows, channels, ...] with everything after the channels as one extent; a vector has rows only."""

    rows: int
    channels: int
    inner: int

    @staticmethod
    def of(type_: TensorType) -> Channels:
        rows, channels, *rest = (*type_.shape, 1) if len(type_.shape) == 1 else type_.shape
        return Channels(rows, channels, math.prod(rest))


def image_of(at: Slice, x: TensorType | None = None) -> tuple[int, int, int, int, int]:
    """Type, layout, rows, channels and inner extent of an operand, the first one unless it is given."""
    x = x or at.request.inputs[0]
    c = Channels.of(x)
    return type_code(x), layout_code(at.layout), c.rows, c.channels, c.inner


def no_workspace(_: Request, layout: Layout) -> int:
    return 0


def no_shared(_: Request) -> int:
    return 0


def shared_of(size_bytes: int) -> Callable[[Request], int]:
    """The same for every request."""

    def shared(_: Request) -> int:
        return size_bytes

    return shared


def no_reals(_: Slice) -> tuple[float, ...]:
    return ()


def no_trailing(_: Slice) -> tuple[int, ...]:
    return ()


def moved_us(request: Request, device: DeviceSpec) -> float:
    """Time to read every input and write every output once."""
    moved_bytes = sum(t.size_bytes for t in (*request.inputs, *request.outputs))
    return moved_bytes / (device.copy_gb_s * 1e3)


def gemm_us(request: Request, device: DeviceSpec, operations: int, peak_tflops: float, share: float) -> float:
    """Time of a GEMM at this share of the peak, or of the bytes that it moves, whichever is longer."""
    return max(operations / (peak_tflops * 1e6 * share), moved_us(request, device))


def touched_us(request: Request, device: DeviceSpec) -> float:
    """The same where only a part of some inputs is read."""
    reads = launch_kind(request.kind, request.attributes).reads
    shares = reads(request.attributes, request.inputs) if reads else (1.0,) * len(request.inputs)
    read_bytes = sum(share * t.size_bytes for share, t in zip(shares, request.inputs, strict=True))
    return (read_bytes + sum(t.size_bytes for t in request.outputs)) / (device.copy_gb_s * 1e3)


def always(_: Request) -> bool:
    return True


def same_layout(request: Request) -> Iterable[Layouts]:
    """Every operand channels first; every operand channels last, where that is another order in memory."""
    operands = (*request.inputs, *request.outputs)
    yield (Layout.CHANNELS_FIRST,) * len(operands)
    (last,) = pixel_by_pixel(request)
    if Layout.CHANNELS_LAST in last:
        yield last


def channels_last(request: Request) -> Iterable[Layouts]:
    """Of `same_layout` what comes second."""
    return (layouts for layouts in same_layout(request) if Layout.CHANNELS_LAST in layouts)


def pixel_by_pixel(request: Request) -> Iterable[Layouts]:
    """Every operand channels last; those that lie the same in both layouts are channels first, all of them included."""
    operands = (*request.inputs, *request.outputs)
    yield tuple(Layout.CHANNELS_LAST if t.ordered else Layout.CHANNELS_FIRST for t in operands)


def channels_first(request: Request) -> Iterable[Layouts]:
    """Channels first only: where operands are matrices, vectors or scalars."""
    yield (Layout.CHANNELS_FIRST,) * (len(request.inputs) + len(request.outputs))


def layout_of(request: Request, layouts: Layouts) -> Layout:
    """The one layout of a launch: that of the operands for which it makes a difference."""
    operands = (*request.inputs, *request.outputs)
    last = any(o is Layout.CHANNELS_LAST and t.ordered for t, o in zip(operands, layouts, strict=True))
    return Layout.CHANNELS_LAST if last else Layout.CHANNELS_FIRST


def type_code(type_: TensorType) -> int:
    return DTYPE_CODES[type_.dtype.value]


def layout_code(layout: Layout) -> int:
    return LAYOUT_CODES[layout]


@dataclass(frozen=True)
class OwnKernel:
    """One way to run the operation `kind`, by a launcher in `file` of templates/kernels.

    launcher            its C function in the source, less `mbc_`; empty: `kind`
    named               what candidates and plans call it; empty: as its launcher. Where one launcher serves several
                        kernels, whose launches differ in arguments only, all but one of them have names of their own
    takes               which requests of the kind it can run
    offered             which of those get an estimated candidate; measured ones count all the same
    struct              the integers that the launcher reads, made by `integers`
    trailing            integers that follow the structure, as many as the structure says
    layouts             combinations of layouts that the search may choose from; the kernel takes no others, unless
    accepts_layouts     is given, which then decides whether it takes the layouts of a call's operands
    workspace           exact bytes for a request in a layout; its accesses end with a workspace where this is not 0
    time_us             estimated time of the kernels, launch not included
    launches            how many kernels run one after another
    shared              bytes of shared memory of a block, where not all GPUs may have so much
    tensor_cores        whether it needs tensor cores that compute in bf16 and tf32
    clusters            whether its blocks read each other's shared memory
    warpgroups          whether it needs tensor cores that warpgroups start (wgmma)
    emulates_fp32       whether in fp32 it computes one product by several of fp16 or tf32 (`allow_emulated_fp32`)
    aligned             whether operands have to begin at multiples of 16 bytes, as whole buffers of a plan do
    bitwise_equal_to    for fused rematerialization: the kernels whose result it recomputes to the bit; empty: any
    without_statistics  for statistics in the epilogue: the kernel that computes the same bits without them
    version             one more when the kernel was rewritten, or a new one has to be measured against it: measurements
                        of another version count as estimates
    """

    kind: str
    file: str
    struct: type[Struct]
    integers: Callable[[Slice], Struct]
    reals: Callable[[Slice], tuple[float, ...]] = no_reals
    trailing: Callable[[Slice], tuple[int, ...]] = no_trailing
    layouts: Callable[[Request], Iterable[Layouts]] = same_layout
    accepts_layouts: Callable[[Call], bool] | None = None
    workspace: Callable[[Request, Layout], int] = no_workspace
    time_us: Callable[[Request, DeviceSpec], float] = moved_us
    launches: int = 1
    accumulates: bool = False
    launcher: str = ""
    named: str = ""
    takes: Callable[[Request], bool] = always
    offered: Callable[[Request], bool] = always
    shared: Callable[[Request], int] = no_shared
    tensor_cores: bool = False
    clusters: bool = False
    warpgroups: bool = False
    emulates_fp32: bool = False
    aligned: bool = False
    bitwise_equal_to: tuple[str, ...] = ()
    without_statistics: str = ""
    version: int = 1

    @property
    def name(self) -> str:
        """What candidates and plans call it."""
        return self.named or self.launcher or self.kind

    @property
    def function(self) -> str:
        """The C function that launches it."""
        return f"mbc_{self.launcher or self.kind}"

    def refusal(self, call: Call) -> str:
        """Why it cannot run a call, whatever its workspace; empty where it can. What `layouts`, `takes` and
        `accumulates` declare, with the types that its sources are compiled for."""
        request = call.request
        if request.kind != self.kind:
            return f"it runs {self.kind}, not {request.kind}"
        if call.settings != self.settings:
            return f"its settings are {dict(self.settings)}, not {dict(call.settings)}"
        if not {t.dtype for t in call.operands} <= _stored_types(request.precision):
            return f"its operands may not be of types {', '.join(dict.fromkeys(t.dtype for t in call.operands))}"
        if not self.takes(request):
            return f"it does not take operands of {', '.join(map(str, call.operands))} with these settings"
        if not (self.accepts_layouts(call) if self.accepts_layouts else call.lies_in(*self.layouts(request))):
            return f"it does not take operands that lie in {', '.join(call.layouts)}"
        if call.accumulate and not self.accumulates:
            return "it cannot add to its output"
        return ""

    @property
    def settings(self) -> tuple[tuple[str, int], ...]:
        """What tells its candidates from those of its earlier versions."""
        return (("version", self.version),) if self.version > 1 else ()


def _stored_types(precision: Precision) -> frozenset[DType]:
    """Of operands on a GPU: values, masters, class numbers and indices, bits and control blocks."""
    return frozenset((precision.working, precision.master, DType.INT32, DType.UINT8)) - {DType.FP64}


def effort_of(kernel: OwnKernel, request: Request, layouts: Layouts, device: DeviceSpec) -> Effort:
    """What its time is estimated from."""
    alone = kernel.launches == 1 or not kernel.workspace(request, layout_of(request, layouts))
    launches_us = (1 if alone else kernel.launches) * device.launch_us
    lying = "-".join(dict.fromkeys(layouts))
    named = group(PROVIDER, kernel.name, request.precision)
    return Effort(named, lying, launches_us, 0.0, kernel.time_us(request, device))
