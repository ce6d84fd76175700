"""1x1 convolutions at a stride of one, in bf16 and fp16: alone, with batch statistics in the epilogue, and recomputed
inside the reductions of batch normalisation's backward pass, which read it (`CONVOLUTION_FUSED_REMAT` of
`mbc.optimize.fusion.catalogue_conv1x1`), with ReLU's output recomputed, too (`RELU_AND_CONVOLUTION_FUSED_REMAT`), or
without writing it (`REMAT_INSIDE_REDUCTIONS`).

The same source computes them all, in the same order of additions: what is recomputed is the same to the bit. How long
reductions take with a GEMM in the same launch is not known where nobody has measured it: it is estimated at what both
take one after the other, so that no estimate takes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import OwnKernel, Slice, Struct, channels_last, moved_us, product_us, type_code
from mbc.kernels.cuda.conv.conv_operands import attributes
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import by_the
from mbc.kernels.cuda.fused.wiring import AFFINE, Wiring, affines, eps, products_of, run, taking
from mbc.kernels.cuda.norm.batch_norm import SUMS_BYTES
from mbc.ops.fused import gives_product

# As in the source.
PIXELS, FILTERS = 64, 128  # that a block makes at once
CHANNELS = 64  # of a stage
EIGHT = 8  # channels are copied, and filters written, so many at once
MOST_CHANNELS = 512
RESULTS = 2  # tiles of results
MOST_STAGES, MOST_BESIDE = 12, 6  # of pixels, and tiles of what is read for sums
ENOUGH_STAGES = 6  # beside tiles for sums: more room goes to the tiles
LEAST_STAGES, LEAST_BESIDE = 4, 2  # of the latter one where weights of two products take the room
SHARED_BYTES = 227 * 1024  # that a block may have where warpgroups multiply
ALIGNED_BYTES = 1008  # beside what is to begin at a multiple of 1,024
BARRIERS_BYTES = 384  # at most
MOST_BLOCKS = 132  # on a large GPU; a constant, so that sums are the same on all
TENSOR_SHARE = 0.6  # of the peak, by judgement


@dataclass(frozen=True, slots=True)
class Conv1x1Arguments(Struct):
    type: int
    pixels: int
    channels: int
    filters: int
    blocks: int
    stages: int
    beside: int


@dataclass(frozen=True, slots=True)
class Conv1x1RematArguments(Conv1x1Arguments):
    affine: int


def _takes(request: Request) -> bool:
    a, image, made = attributes(request), request.inputs[0], request.outputs[0]
    return (
        {image.dtype, made.dtype} in ({DType.BF16}, {DType.FP16})
        and (a.kernel, a.stride, a.pad) == ((1, 1), (1, 1), (0, 0, 0, 0))
        and by_the(EIGHT, request)
        and image.shape[1] <= MOST_CHANNELS
    )


def _made(request: Request) -> TensorType:
    """What a product makes, be it that it stays inside a group."""
    return products_of(request)[0].outputs[0]


def _pixels(request: Request) -> int:
    made = _made(request)
    return made.elements // made.shape[1]


def _blocks(request: Request) -> int:
    """Of the same filters."""
    across = math.ceil(_made(request).shape[1] / FILTERS)
    return max(1, min(MOST_BLOCKS // across, math.ceil(_pixels(request) / PIXELS)))


def arguments(at: Slice) -> Conv1x1Arguments:
    image, made = at.request.inputs[0], _made(at.request)
    stages, beside = _rings(at.request)
    return Conv1x1Arguments(
        type_code(image), _pixels(at.request), image.shape[1], made.shape[1], _blocks(at.request), stages, beside
    )


def _arguments_along(at: Slice) -> Conv1x1RematArguments:
    (affine,) = affines(at.request)
    return Conv1x1RematArguments(*arguments(at).integers(), affine=affine)


def _kept_bytes(request: Request) -> int:
    """Weights of a block, results, and what is always there."""
    chunks = sum(math.ceil(alone.inputs[0].shape[1] / CHANNELS) for alone in products_of(request))
    elements = FILTERS * chunks * CHANNELS + RESULTS * PIXELS * FILTERS
    return elements * request.inputs[0].dtype.size_bytes + ALIGNED_BYTES + BARRIERS_BYTES


def _beside(request: Request) -> list[TensorType]:
    """What the sums read of each pixel beside products."""
    return [i for i in request.inputs[2 * len(products_of(request)) :] if len(i.shape) == 4]


def _beside_bytes(request: Request) -> int:
    """Of a tile."""
    bits = sum(1 if i.dtype is DType.UINT8 else 8 * i.dtype.size_bytes for i in _beside(request))
    return PIXELS * FILTERS * bits // 8


def _rings(request: Request) -> tuple[int, int]:
    """Stages of pixels and tiles beside that there is room for; an even number of the first."""
    stage_bytes, tile_bytes = PIXELS * CHANNELS * request.inputs[0].dtype.size_bytes, _beside_bytes(request)
    available_bytes = SHARED_BYTES - _kept_bytes(request)
    if not tile_bytes:
        return min(MOST_STAGES, available_bytes // stage_bytes // 2 * 2), 0
    enough = available_bytes >= ENOUGH_STAGES * stage_bytes + LEAST_BESIDE * tile_bytes
    stages = ENOUGH_STAGES if enough else LEAST_STAGES
    return stages, max(0, min(MOST_BESIDE, (available_bytes - stages * stage_bytes) // tile_bytes))


def _shared_bytes(request: Request) -> int:
    stages, beside = _rings(request)
    stage_bytes = PIXELS * CHANNELS * request.inputs[0].dtype.size_bytes
    return _kept_bytes(request) + stages * stage_bytes + beside * _beside_bytes(request)


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _blocks(request) * _made(request).shape[1] * SUMS_BYTES


def _time_us(request: Request, device: DeviceSpec) -> float:
    operations = 2 * request.inputs[0].elements * request.outputs[0].shape[1]
    return product_us(request, device, operations, peak_tflops(device, request.precision), TENSOR_SHARE)


def _one_by_one_us(request: Request, device: DeviceSpec) -> float:
    """What the sums read and write, results of products among it; and a launch more for each of these."""
    products = products_of(request)
    read = (*request.inputs[2 * len(products) :], *(made for alone in products for made in alone.outputs))
    written = request.outputs[gives_product(request.attributes) :]
    sums_us = moved_us(replace(request, inputs=read, outputs=written), device)
    return sum(_time_us(alone, device) + device.launch_us for alone in products) + sums_us


BY_ITSELF = OwnKernel(
    "convolution",
    "conv/conv1x1.cu",
    Conv1x1Arguments,
    arguments,
    layouts=channels_last,
    time_us=_time_us,
    launcher="conv1x1",
    takes=_takes,
    shared=_shared_bytes,
    tensor_cores=True,
    warpgroups=True,
    aligned=True,
)


_WITH_STATISTICS = replace(with_statistics(BY_ITSELF, _blocks), bare=BY_ITSELF.name)


def with_more(product: OwnKernel, launcher: str, behind: str, wirings: Iterable[Wiring]) -> OwnKernel:
    """A product, or several, and what else is made of each of their results; `behind`: those operations."""
    wired = taking(*wirings)

    def takes(request: Request) -> bool:
        products = products_of(request)
        if not (wired(request) and all(map(product.takes, products))):
            return False
        # The signs of a pixel's filters are copied 16 bytes at once.
        with_relu_masks = any(i.dtype is DType.UINT8 for i in _beside(request))
        enough = _rings(request)[1] >= LEAST_BESIDE // len(products)
        return enough and (not with_relu_masks or _made(request).shape[1] % FILTERS == 0)

    return replace(
        product, kind=f"{product.kind}+{behind}", reals=eps, time_us=_one_by_one_us, launcher=launcher, takes=takes
    )


def with_sums(product: OwnKernel, launcher: str, between: str, wirings: Iterable[Wiring]) -> OwnKernel:
    """The same of sums; `between`: the operations between."""
    behind = "+".join(filter(None, (between, "batch_normalize_backward_reduce")))
    return replace(with_more(product, launcher, behind, wirings), workspace=_partial_bytes, launches=2)


def through(added: bool, signed: bool) -> str:
    """The operations of a gradient through relu, by its output or its signs (`signed`), of the sum of two (`added`)."""
    return f"{'add+' if added else ''}relu_backward{'_masked' if signed else ''}"


def normalized(added: bool, signed: bool) -> str:
    """The same behind those that make relu's output again, of a residual sum; and its signs."""
    return f"batch_normalize+add+relu{'+relu_mask' if signed else ''}+{through(added, signed)}"


def normalizing(kernel: OwnKernel) -> OwnKernel:
    """The same of a group that normalises, too: its launcher is told whether that has scale and shift."""
    return replace(kernel, struct=Conv1x1RematArguments, integers=_arguments_along)


def _repeating(kernel: OwnKernel) -> OwnKernel:
    """A launch that makes again what one of these kernels has made."""
    return replace(kernel, repeats=(BY_ITSELF.name, _WITH_STATISTICS.name))


def inside(kernel: OwnKernel) -> OwnKernel:
    """One that does not write it, offered where the image is smaller: else there is more to read than that."""

    def offered(request: Request) -> bool:
        return request.inputs[0].elements < _made(request).elements

    return _repeating(replace(kernel, offered=offered))


def _fused_remat(launcher: str, between: str, wirings: Iterable[Wiring]) -> OwnKernel:
    return _repeating(with_sums(BY_ITSELF, launcher, between, wirings))


def _of_gradient(between: str, wiring: Wiring) -> OwnKernel:
    """`between`: the operations whose result is the gradient that is summed up."""
    return _fused_remat("_".join(filter(None, ("conv1x1", *between.split("+"), "bn_reduce"))), between, (wiring,))


def _inside(between: str, wiring: Wiring) -> OwnKernel:
    """The same where the product is not written."""
    inputs, given = wiring
    launcher = f"conv1x1_unstored_{between.replace('+', '_')}_bn_reduce"
    return inside(with_sums(BY_ITSELF, launcher, between, ((inputs, given[1:]),)))


def _behind_add(operands: int, swapped: bool, added: bool, signed: bool) -> Wiring:
    """Read are image and weights, what normalises their product (`operands` with that), r, the gradient, or the two it
    is the sum of (`added`); written x, y, the gradient through relu and the sums of it. `signed`: the gradient goes
    through relu by the signs of y, which stay inside."""
    r, dy = operands + 1, operands + 2
    x = dy + (2 if added else 1)
    z, s, y = run(x + 1, 3)
    told = y + 1 if signed else y
    gradient, d = (told + 1, told + 2) if added else (dy, told + 1)
    forward = ((0, 1), (x, *run(2, operands - 1)), (r, z) if swapped else (z, r), (s,), *(((y,),) if signed else ()))
    backward = (*(((dy, dy + 1),) if added else ()), (gradient, told) if signed else (told, gradient), (x, d, 2, 3))
    return ((*forward, *backward), (x, y, d, d + 1, d + 2))


def _of_both(added: bool, signed: bool) -> OwnKernel:
    """Accesses: image, weights, mean, variance, scale and shift if the normalisation has them (`affine`), r, the
    gradient (of two: and the second one), x, y, d, dgamma, dbeta, workspace. Reals: eps of the normalisation, and of
    the sums. y may be written over r, d over a gradient."""
    launcher = f"conv1x1_add_relu_remat_bn_reduce{'_two_grads' if added else ''}{'_masked' if signed else ''}"
    wirings = (_behind_add(operands, swapped, added, signed) for operands in AFFINE for swapped in (False, True))
    return normalizing(_fused_remat(launcher, normalized(added, signed), wirings))


FORMS = tuple(product((False, True), repeat=2))  # of a sum of two gradients, and by signs, or not
_BEHIND_RELU: tuple[tuple[str, Wiring], ...] = (
    ("relu_backward", (((0, 1), (2, 3), (6, 7, 4, 5)), (6, 7, 8, 9))),
    ("add+relu_backward", (((0, 1), (2, 3), (4, 8), (7, 9, 5, 6)), (7, 9, 10, 11))),
    ("relu_backward_masked", (((0, 1), (2, 3), (6, 7, 4, 5)), (6, 7, 8, 9))),
    ("add+relu_backward_masked", (((0, 1), (2, 3), (8, 4), (7, 9, 5, 6)), (7, 9, 10, 11))),
)
FUSED_REMAT = (
    _of_gradient("", (((0, 1), (5, 2, 3, 4)), (5, 6, 7))),
    *(_of_gradient(*behind) for behind in _BEHIND_RELU),
    *(_of_both(*form) for form in FORMS),
)
INSIDE = tuple(_inside(*behind) for behind in _BEHIND_RELU)
KERNELS = (BY_ITSELF, _WITH_STATISTICS, *FUSED_REMAT, *INSIDE)
