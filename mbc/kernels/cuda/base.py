"""Declaration of one of mbc's own kernels: its file, the structure that its launcher reads, and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import DTYPE_CODES, LAYOUT_CODES, Call, Request
from mbc.kernels.calibration import OWN_PROVIDER, Effort, group
from mbc.kernels.launch_operands import Launcher
from mbc.kernels.launch_struct import Struct
from mbc.ops import KINDS
from mbc.ops.fused import Fused, launch_kind

PROVIDER = OWN_PROVIDER
VECTOR_BYTES = 16
# Folders of kernels whose indices within a sample have 32 bits, and sources there whose indices have 64 bits.
_NARROW_INDICES = ("conv/", "fp32_emulated/")
_WIDE_INDICES = ("conv/conv1x1_narrow", "conv/direct", "conv/linear", "conv/matmul")
# Blocks that share a reduction: a constant on every GPU, so that sums have one order and equal bits. It is an H200's
# number of multiprocessors.
REDUCTION_BLOCKS = 132
THREADS = 256  # threads of a block; equal to the constant in templates/kernels/shared/launch.cuh

Layouts = tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """One launch: a request in one layout, for rows that start at `first_row` of the mini-batch."""

    request: Request
    layout: Layout
    first_row: int = 0
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Channels:
    """A tensor [rows, channels, ...] with all axes after the channels as one extent; a vector has rows only."""

    rows: int
    channels: int
    inner: int

    @staticmethod
    def of(type_: TensorType) -> Channels:
        """Return the extents of a type."""
        rows, channels, *rest = (*type_.shape, 1) if len(type_.shape) == 1 else type_.shape
        return Channels(rows, channels, math.prod(rest))


def image_of(at: Slice, x: TensorType | None = None) -> tuple[int, int, int, int, int]:
    """Return type, layout, rows, channels and inner extent of `x`, or of the first operand if `x` is None."""
    x = x or at.request.inputs[0]
    c = Channels.of(x)
    return type_code(x), layout_code(at.layout), c.rows, c.channels, c.inner


def no_workspace(_: Request, layout: Layout) -> int:
    """Return 0: the `workspace` callback of kernels without workspace."""
    return 0


def no_shared(_: Request) -> int:
    """Return 0: the `shared` callback of kernels whose shared memory every GPU has."""
    return 0


def shared_of(size_bytes: int) -> Callable[[Request], int]:
    """Return a `shared` callback that returns this size for every request."""

    def shared(_: Request) -> int:
        return size_bytes

    return shared


def no_reals(_: Slice) -> tuple[float, ...]:
    """Return no numbers: the `reals` callback of kernels without floating-point arguments."""
    return ()


def attributes_of(*names: str) -> Callable[[Slice], tuple[float, ...]]:
    """Return a `reals` callback that returns these attributes of the operation."""

    def reals(at: Slice) -> tuple[float, ...]:
        return tuple(float(getattr(at.request.attributes, name)) for name in names)

    return reals


def no_trailing(_: Slice) -> tuple[int, ...]:
    """Return no numbers: the `trailing` callback of kernels that read only their structure."""
    return ()


def moved_us(request: Request, device: DeviceSpec) -> float:
    """Return the time to read every input and write every output once, in microseconds."""
    return _bytes_us(sum(t.size_bytes for t in (*request.inputs, *request.outputs)), device)


def gemm_us(request: Request, device: DeviceSpec, operations: int, peak_tflops: float, share: float) -> float:
    """Return the time of a GEMM at this share of the peak, or of the bytes that it moves, whichever is longer."""
    return max(operations / (peak_tflops * 1e6 * share), moved_us(request, device))


def touched_us(request: Request, device: DeviceSpec) -> float:
    """Return the time to read the share of each input that is used, and to write every output once, in microseconds."""
    return _bytes_us(_touched_bytes(request), device)


def _touched_bytes(request: Request) -> float:
    is_kind = isinstance(request.attributes, Fused) or request.kind in KINDS  # neither: a change of layout or type
    reads = launch_kind(request.kind, request.attributes).reads if is_kind else None
    shares = reads(request.attributes, request.inputs) if reads else (1.0,) * len(request.inputs)
    read_bytes = sum(share * t.size_bytes for share, t in zip(shares, request.inputs, strict=True))
    return read_bytes + sum(t.size_bytes for t in request.outputs)


def _uncached_us(request: Request, device: DeviceSpec) -> float:
    """Return the least time of a kernel: that of the bytes which are more than the L2 cache holds.

    It is 0 on a GPU whose rates were measured: shares of the bandwidth above one were fitted there.
    """
    return 0.0 if device.measured else _bytes_us(max(0.0, _touched_bytes(request) - device.l2_bytes), device)


def _bytes_us(moved_bytes: float, device: DeviceSpec) -> float:
    return moved_bytes / (device.copy_gb_s * 1e3)


def always(_: Request) -> bool:
    """Return True: the `takes` and `offered` callback of kernels without conditions."""
    return True


def never(_: Request) -> bool:
    """Return False: the `measured_anyway` callback of kernels that are superseded for all requests."""
    return False


def planar(request: Request) -> bool:
    """Return whether no operand has more than two spatial axes."""
    return all(len(t.shape) <= 4 for t in (*request.inputs, *request.outputs))


def in_space(numbers: tuple[int, ...], missing: int) -> tuple[int, int, int]:
    """Return the numbers of depth, height and width; `missing` stands for axes that signals and images lack."""
    depth, height, width = (*(missing,) * (3 - len(numbers)), *numbers)
    return depth, height, width


def in_plane(numbers: tuple[int, ...], missing: int) -> tuple[int, int]:
    """Return the numbers of height and width; `missing` stands for the height of images along one axis."""
    return in_space(numbers, missing)[1:]


def axis_fields(numbers: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return integers of launches such as `kernel_depth` from numbers along the spatial axes by prefix (`kernel_`)."""
    return {
        f"{prefix}{axis}": number
        for prefix, along in numbers.items()
        for axis, number in zip(("depth", "height", "width"), in_space(along, 1), strict=True)
    }


def same_layout(request: Request) -> Iterable[Layouts]:
    """Yield all operands channels first. Also yield all operands channels last, if that is another order in memory."""
    operands = (*request.inputs, *request.outputs)
    yield (Layout.CHANNELS_FIRST,) * len(operands)
    (last,) = pixel_by_pixel(request)
    if Layout.CHANNELS_LAST in last:
        yield last


def channels_last(request: Request) -> Iterable[Layouts]:
    """Return the combination of layouts with channels last, or none if no operand has several axes."""
    return (layouts for layouts in same_layout(request) if Layout.CHANNELS_LAST in layouts)


def pixel_by_pixel(request: Request) -> Iterable[Layouts]:
    """Yield one combination: all operands channels last, except those with one order in both layouts.

    The exceptions count as channels first. If all operands have one order in both layouts, the combination is all
    channels first.
    """
    operands = (*request.inputs, *request.outputs)
    yield tuple(Layout.CHANNELS_LAST if t.ordered else Layout.CHANNELS_FIRST for t in operands)


def channels_first(request: Request) -> Iterable[Layouts]:
    """Yield all operands channels first, for operands that are matrices, vectors or scalars."""
    yield (Layout.CHANNELS_FIRST,) * (len(request.inputs) + len(request.outputs))


def layout_of(request: Request, layouts: Layouts) -> Layout:
    """Return the one layout of a launch: the layout of those operands whose order depends on it."""
    operands = (*request.inputs, *request.outputs)
    last = any(o is Layout.CHANNELS_LAST and t.ordered for t, o in zip(operands, layouts, strict=True))
    return Layout.CHANNELS_LAST if last else Layout.CHANNELS_FIRST


def type_code(type_: TensorType) -> int:
    """Return the code of the operand's type, as structures of arguments hold it."""
    return DTYPE_CODES[type_.dtype.value]


def layout_code(layout: Layout) -> int:
    """Return the code of a layout, as structures of arguments hold it."""
    return LAYOUT_CODES[layout]


@dataclass(frozen=True)
class OwnKernel:
    """One way to run the operation `kind`, by a launcher in `file` of templates/kernels.

    Attributes:
        kind: Kind of the operations that the kernel runs.
        file: Source file below templates/kernels; empty: the source is generated from the request's program.
        struct: Integers that the launcher reads.
        integers: Returns the structure for a launch.
        reals: Returns the floating-point numbers that the launcher reads.
        trailing: Returns integers that follow the structure; the structure holds their number.
        layouts: Returns the combinations of layouts that the search may choose from. The kernel takes no others, unless
            `accepts_layouts` is given.
        accepts_layouts: Decides whether the kernel takes the layouts of a call's operands.
        workspace: Returns the exact bytes for a request in a layout. If it is not 0, the last access is a workspace.
        time_us: Returns the estimated time of the kernels, without launch overhead; only that of the bytes that they
            move if there is `arithmetic_us`.
        arithmetic_us: Returns the time of matrix products at the peak of the instructions that the kernel `needs`, for
            kernels that overlap products and copies; None: `time_us` includes it.
        launches: Number of kernels that run one after another.
        accumulates: Whether the kernel can add to its output.
        operands: Names of the operands of a launch in order, by which its source reads them (`launch_operands`);
            empty: it reads them by position.
        launcher: C function in the source, without the prefix `mbc_`; empty: `kind`.
        flat: Returns whether the second launcher runs a request. It is in a source of its own, so that a library has
            only the sources that its requests need. The names of this launcher and its source end with `_flat`. None:
            there is one launcher.
        named: Name in candidates and plans; empty: the launcher's. If launches of several kernels differ only in
            arguments, the kernels share one launcher, and all but one of them have names of their own.
        takes: Returns whether the kernel can run a request of its kind.
        offered: Returns whether a request that the kernel takes gets an estimated candidate. Measured candidates count
            in any case.
        by_measurement: Whether only measured times make the search choose the kernel. It is True for kernels whose
            estimate no measurement has confirmed.
        shared: Returns the shared memory of a block in bytes, where not all GPUs have enough of it.
        needs: Instructions that the kernel needs and not every GPU has.
        superseded_by: Instructions by which other kernels are faster. The search gets this kernel only on GPUs that
            lack them; a plan for such a GPU also runs on newer ones.
        measured_anyway: Returns whether the search gets the kernel where it is superseded, too, because no other kernel
            takes the request. Only measured times make the search choose it there.
        emulates_fp32: Whether the kernel computes one fp32 product by several fp16 or tf32 products
            (`allow_emulated_fp32`).
        aligned: Whether operands must begin at multiples of 16 bytes, as whole buffers of a plan do.
        bitwise_equal_to: Kernels whose result a fused rematerialization recomputes to the bit; empty: any kernel.
        without_statistics: For statistics in the epilogue: the kernel that computes the same bits without them.
        version: Number that is raised when the kernel is rewritten, or when a new kernel must be measured against it.
            Measurements of other versions count as estimates.
        estimated_as: Kernel whose calibrated shares estimate the time; empty: its own.
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
    arithmetic_us: Callable[[Request, DeviceSpec], float] | None = None
    launches: int = 1
    accumulates: bool = False
    operands: str = ""
    launcher: str = ""
    flat: Callable[[Request], bool] | None = None
    named: str = ""
    takes: Callable[[Request], bool] = always
    offered: Callable[[Request], bool] = always
    by_measurement: bool = False
    shared: Callable[[Request], int] = no_shared
    needs: Instruction | None = None
    superseded_by: Instruction | None = None
    measured_anyway: Callable[[Request], bool] = never
    emulates_fp32: bool = False
    aligned: bool = False
    bitwise_equal_to: tuple[str, ...] = ()
    without_statistics: str = ""
    version: int = 1
    estimated_as: str = ""

    @property
    def name(self) -> str:
        """Name of the kernel in candidates and plans."""
        return self.named or self.launcher or self.kind

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        """C functions that launch the kernel, with the names of their operands."""
        ends = ("",) if self.flat is None else ("", "_flat")
        return tuple(Launcher(f"{self.launcher or self.kind}{end}", self.operands, self.struct) for end in ends)

    @property
    def files(self) -> tuple[str, ...]:
        """Source files of these functions."""
        return (self.file,) if self.flat is None else (self.file, self.file.replace(".cu", "_flat.cu"))

    def symbol(self, request: Request) -> str:
        """Return the C function that launches the kernel for a request."""
        is_flat = self.flat is not None and self.flat(request)
        return self.launchers[int(is_flat)].symbol

    def runs(self, request: Request) -> bool:
        """Return whether the kernel takes a request, and its index arithmetic holds for the sizes of all operands.

        Fast convolutions number the elements of a sample with 32 bits. Kernels that move memory divide by reciprocals
        (`Reciprocal` in device.cuh), which are exact if an index times an extent is below 2^64.
        """
        if not self.takes(request):
            return False
        if self.file.startswith(_WIDE_INDICES):
            return True
        sizes = ((t.elements, t.elements // max(t.shape[0], 1)) for t in (*request.inputs, *request.outputs) if t.shape)
        if self.file.startswith(_NARROW_INDICES):
            return all(sample < 1 << 31 for _, sample in sizes)
        return all(elements * sample < 1 << 64 for elements, sample in sizes)

    def refusal(self, call: Call) -> str:
        """Return why the kernel cannot run a call, whatever its workspace; empty if it can.

        The answer follows from `layouts`, `runs`, `accumulates` and the types that the sources are compiled for.
        """
        request = call.request
        if request.kind != self.kind:
            return f"it runs {self.kind}, not {request.kind}"
        if call.settings != self.settings:
            return f"its settings are {dict(self.settings)}, not {dict(call.settings)}"
        if not {t.dtype for t in call.operands} <= _stored_types(request.precision):
            return f"it does not take operands of the types {', '.join(dict.fromkeys(t.dtype for t in call.operands))}"
        if not self.runs(request):
            return f"it does not take operands of {', '.join(map(str, call.operands))} with these settings"
        if not (self.accepts_layouts(call) if self.accepts_layouts else call.has_layouts(*self.layouts(request))):
            return f"it does not take operands in the layouts {', '.join(call.layouts)}"
        if call.accumulate and not self.accumulates:
            return "it cannot add to its output"
        return ""

    @property
    def settings(self) -> tuple[tuple[str, int], ...]:
        """The version, from 2 on: it separates candidates from those of earlier versions."""
        return (("version", self.version),) if self.version > 1 else ()


def _stored_types(precision: Precision) -> frozenset[DType]:
    """Return the types that operands on a GPU may have.

    These are: values, master weights, class numbers and indices, bits and control blocks.
    """
    return frozenset((precision.working, precision.master, DType.INT32, DType.UINT8)) - {DType.FP64}


def effort_of(kernel: OwnKernel, request: Request, layouts: Layouts, device: DeviceSpec) -> Effort:
    """Return the effort that the kernel's time is estimated from."""
    alone = kernel.launches == 1 or not kernel.workspace(request, layout_of(request, layouts))
    launches_us = (1 if alone else kernel.launches) * device.launch_us
    variant = "-".join(dict.fromkeys(layouts))
    named = group(PROVIDER, kernel.estimated_as or kernel.name, request.precision, device)
    effort = Effort(
        named, variant, launches_us, 0.0, kernel.time_us(request, device), least_us=_uncached_us(request, device)
    )  # fmt: skip
    if kernel.arithmetic_us is None:
        return effort
    return replace(effort, arithmetic_us=kernel.arithmetic_us(request, device), family=f"{PROVIDER} {kernel.needs}")
