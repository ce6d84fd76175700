"""1x1 convolutions to at most four filters behind a norm and a (leaky) ReLU: the last layers of networks.

Forward and backward pass recompute the activation from the norm's input, so that neither the activation nor its
gradient is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, pixel_by_pixel, type_code
from mbc.kernels.cuda.conv.conv1x1_narrow import MOST_CHANNELS, is_vectorized, parts_of
from mbc.kernels.cuda.norm.batch_norm import SUMS_BYTES
from mbc.kernels.cuda.wiring import AFFINE, NORMALIZED, Wiring, members, run, taking
from mbc.kernels.launch_struct import Struct
from mbc.ops.convolution import Convolution
from mbc.ops.fused import weights_of

MOST_FILTERS = 4  # equal to MOST_NORM_FILTERS in the source: a thread keeps the constants of its channels in registers
MOST_PARTS = 2 * REDUCTION_BLOCKS  # of a sample: the blocks of the sums that a large GPU runs at a time


@dataclass(frozen=True, slots=True)
class Conv1x1NarrowNormArguments(Struct):
    """Integer arguments of a launch.

    Attributes:
        samples: Samples that have statistics of their own; 1 for batch normalisation.
        pixels: Pixels of such a sample, or of all images.
        parts: Blocks among which the pixels of a sample are divided for sums.
        by_sample: Whether the sums of the norm's gradient are those of samples, into which nothing is accumulated.
        affine: Whether the norm has scale and shift.
        count: Elements of a channel over which the norm's statistics were taken.
    """

    type: int
    samples: int
    pixels: int
    channels: int
    filters: int
    parts: int
    by_sample: int
    accumulate: int
    affine: int
    count: int


def _forward(operands: int) -> Wiring:
    z, y, product = run(operands + 2, 3)
    return (run(0, operands), (z,), (y, operands), (product, operands + 1)), (product + 1,)


def _sums(operands: int) -> Wiring:
    dy, z, y, da, dw, d = operands, *run(operands + 2, 5)
    start = (run(0, operands), (z,), (dy, operands + 1), (y, dy), (y, da), (0, d, 1, 2))
    return start, (dw, d + 1, d + 2)


def _backward(operands: int) -> Wiring:
    dy, z, y, da, d = operands, *run(operands + 4, 4)
    last = (0, d, 1, 2, operands + 2, operands + 3, *((3,) if operands == max(AFFINE) else ()))
    return (run(0, operands), (z,), (dy, operands + 1), (y, da), last), (d + 1,)


def _filters(request: Request) -> int:
    (weights,) = weights_of(request.attributes)
    return request.inputs[weights].shape[0]


def _taking(wiring: Callable[[int], Wiring]) -> Callable[[Request], bool]:
    wired = taking(*map(wiring, AFFINE))

    def takes(request: Request) -> bool:
        convolutions = (m.attributes for m in members(request).members if isinstance(m.attributes, Convolution))
        return (
            wired(request)
            and all(a.is_pointwise and a.groups == 1 for a in convolutions)
            and _filters(request) <= MOST_FILTERS
            and request.inputs[0].shape[1] <= MOST_CHANNELS
            and is_vectorized(request.inputs[0])
        )

    return takes


def _partial_bytes(request: Request, layout: Layout) -> int:
    a = _arguments(Slice(request, layout))
    return a.samples * a.parts * a.channels * a.filters * SUMS_BYTES


def _arguments(at: Slice) -> Conv1x1NarrowNormArguments:
    (x, mean, *_), group = at.request.inputs, members(at.request).members
    channels = x.shape[1]
    samples = mean.elements // channels
    pixels = x.elements // channels // samples
    return Conv1x1NarrowNormArguments(
        type_code(x), samples, pixels, channels, _filters(at.request), parts_of(x, pixels, MOST_PARTS),
        by_sample=int(len(mean.shape) > 1), accumulate=int(at.accumulate),
        affine=int(len(group[0].inputs) == max(AFFINE)), count=getattr(group[-1].attributes, "count", 0),
    )  # fmt: skip


def _reals(at: Slice) -> tuple[float, ...]:
    """Return the slope of the leaky ReLU, 0 for ReLU, and eps of the norm."""
    norm, activation, *_ = (member.attributes for member in members(at.request).members)
    return getattr(activation, "slope", 0.0), getattr(norm, "eps", 0.0)


def _kernels(norm: str, relu: str) -> tuple[OwnKernel, ...]:
    start, name = f"{norm}_normalize+{relu}", f"{norm}_norm_{relu}_conv1x1_narrow"
    data, through = "convolution_backward_data", f"{relu}_backward+{norm}_normalize_backward"
    forward = OwnKernel(
        f"{start}+convolution+bias_add",
        "conv/conv1x1_narrow_norm.cu",
        Conv1x1NarrowNormArguments,
        _arguments,
        _reals,
        layouts=pixel_by_pixel,
        operands=f"{NORMALIZED} weights bias y",
        launcher="norm_relu_conv1x1_narrow",
        named=name,
        takes=_taking(_forward),
        aligned=True,
        by_measurement=True,
    )
    sums = replace(
        forward,
        kind=f"{start}+{data}+convolution_backward_filter+{through}_reduce",
        workspace=_partial_bytes,
        launches=2,
        accumulates=True,
        operands=f"{NORMALIZED} dy weights dw dgamma dbeta workspace",
        launcher="norm_relu_conv1x1_narrow_sums",
        named=f"{name}_sums",
        takes=_taking(_sums),
    )
    backward = replace(
        forward,
        kind=f"{start}+{data}+{through}",
        operands=f"{NORMALIZED} dy weights dgamma dbeta dx",
        launcher="norm_relu_conv1x1_narrow_backward",
        named=f"{name}_backward",
        takes=_taking(_backward),
    )
    return forward, sums, backward


KERNELS = (*_kernels("batch", "relu"), *_kernels("instance", "relu"), *_kernels("instance", "leaky_relu"))
