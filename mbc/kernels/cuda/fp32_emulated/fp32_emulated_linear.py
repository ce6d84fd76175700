"""Linear layers in emulated fp32 (3xFP16), as convolutions of `fp32_emulated_conv`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, VECTOR_BYTES, OwnKernel, Slice, channels_first, gemm_us, shared_of
from mbc.kernels.cuda.conv.direct import linear_sizes
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import (
    PRODUCTS,
    SCALE_BYTES,
    SHARED_BYTES,
    STAGE_K,
    TENSOR_SHARE,
    TILE,
)
from mbc.kernels.launch_struct import Struct

# ROWS and FEW_COLUMNS are equal to the constants in the source.
ROWS = 128  # rows of a tile
FEW_COLUMNS = 64  # columns of a tile if the matrix has no more
MOVED_BYTES = 5 << 20  # bytes that move at 4 TB/s in the time of a stage


@dataclass(frozen=True, slots=True)
class Fp32EmulatedLinearArguments(Struct):
    """Integer arguments of a launch of a linear layer in emulated fp32.

    Attributes:
        depth: K.
        parts: Parts of K (split-K).
    """

    rows: int
    columns: int
    depth: int
    parts: int
    accumulate: int


@dataclass(frozen=True, slots=True)
class Gemm:
    """M (`rows`), N (`columns`, which are split before the GEMM) and K (`depth`), as in fp32_emulated_linear.cu."""

    rows: int
    columns: int
    depth: int

    @staticmethod
    def of(request: Request) -> Gemm:
        """Return the GEMM of a pass of a linear layer."""
        samples, inputs, outputs = linear_sizes(request)
        if request.kind == "linear":
            return Gemm(outputs, samples, inputs)
        if request.kind == "linear_backward_data":
            return Gemm(inputs, samples, outputs)
        return Gemm(outputs, inputs, samples)

    @property
    def elements(self) -> int:
        """Number of elements of the result."""
        return self.rows * self.columns

    @property
    def width(self) -> int:
        """Number of columns of a tile."""
        return TILE if self.columns > FEW_COLUMNS else FEW_COLUMNS

    @property
    def across(self) -> int:
        """Number of tiles side by side that cover all columns."""
        return math.ceil(self.columns / self.width)

    @property
    def tiles(self) -> int:
        """Number of tiles of the result."""
        return math.ceil(self.rows / ROWS) * self.across

    @property
    def stages(self) -> int:
        """Number of stages into which K is divided."""
        return math.ceil(self.depth / STAGE_K)

    @property
    def columns_bytes(self) -> int:
        """Bytes of the split columns of all tiles, and of a scale for every stage of each."""
        return self.across * self.stages * (self.width * STAGE_K * 4 + SCALE_BYTES)

    @property
    def parts(self) -> int:
        """Number of parts of K (split-K): blocks then end at about the same time and few partial results are merged."""
        merge_cost = 2 * self.elements * 4 / MOVED_BYTES  # time to merge a part, divided by the time of a stage

        def takes(parts: int) -> float:
            return (
                math.ceil(self.tiles * parts / REDUCTION_BLOCKS) * math.ceil(self.stages / parts)
                + (parts > 1) * merge_cost * parts
            )

        return min(range(1, min(REDUCTION_BLOCKS, self.stages) + 1), key=takes)


def _takes(request: Request) -> bool:
    """Return whether the layer is in fp32, with rows of a multiple of 16 bytes, which are copied together."""
    _, inputs, outputs = linear_sizes(request)
    words = VECTOR_BYTES // 4
    fp32 = request.precision is Precision.FP32 and {t.dtype for t in request.inputs} == {DType.FP32}
    return fp32 and inputs % words == 0 and outputs % words == 0


def _arguments(at: Slice) -> Fp32EmulatedLinearArguments:
    p = Gemm.of(at.request)
    return Fp32EmulatedLinearArguments(p.rows, p.columns, p.depth, p.parts, int(at.accumulate))


def _workspace_bytes(request: Request, layout: Layout) -> int:
    """Return the workspace for split columns and, with several parts, for a partial result of each part."""
    p = Gemm.of(request)
    return p.columns_bytes + (p.parts * p.elements * 4 if p.parts > 1 else 0)


def _time_us(request: Request, device: DeviceSpec) -> float:
    p = Gemm.of(request)
    operations = 2 * p.tiles * ROWS * p.width * p.stages * STAGE_K * PRODUCTS
    return gemm_us(request, device, operations, peak_tflops(device, Precision.FP16), TENSOR_SHARE)


_FORWARD = OwnKernel(
    "linear",
    "fp32_emulated/fp32_emulated_linear.cu",
    Fp32EmulatedLinearArguments,
    _arguments,
    layouts=channels_first,
    workspace=_workspace_bytes,
    time_us=_time_us,
    launches=3,  # counts split-K, which is usual here and rare in the filter pass
    launcher="fp32_emulated_linear",
    takes=_takes,
    shared=shared_of(SHARED_BYTES),
    needs=Instruction.WGMMA,
    emulates_fp32=True,
    aligned=True,
)

KERNELS = (
    _FORWARD,
    replace(_FORWARD, kind="linear_backward_data", launcher="fp32_emulated_linear_backward_data"),
    replace(
        _FORWARD,
        kind="linear_backward_filter",
        launcher="fp32_emulated_linear_backward_filter",
        launches=2,
        accumulates=True,
    ),
)
