"""Scaled dot-product attention, forward and backward: by FMA for any request, on tensor cores in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout
from mbc.kernels.base import Request
from mbc.kernels.calibration import mma_sync_tflops
from mbc.kernels.cuda.base import (
    REDUCTION_BLOCKS,
    Layouts,
    OwnKernel,
    Slice,
    always,
    gemm_us,
    layout_code,
    moved_us,
    no_workspace,
    type_code,
)
from mbc.kernels.launch_struct import Struct
from mbc.ops.attention import Attention, Sizes, biased, products_of, sizes

# DEPTHS and MMA_DEPTH are equal to the constants in the sources.
DEPTHS = (32, 64, 96, 128, 256)  # channels of a head that kernels are compiled for
MMA_DEPTH = 128
FMA_SHARE = 0.08  # share of the peak, not measured yet
# Share of the rate that convolutions by mma.sync reach. Measured on an H100 with 64 images of ViT-B/16 and DeiT-S: 92
# to 100 TFLOP/s of whole tiles.
MMA_SHARE = 0.27
# Products of the size of the scores. The backward pass computes the scores, and dy by the values, for queries and again
# for keys.
PRODUCTS = {"attention": 2, "attention_backward": 7, "attention_backward_bias": 2}


@dataclass(frozen=True, slots=True)
class AttentionArguments(Struct):
    """Integer arguments of a launch of attention, forward or backward.

    Attributes:
        bias_heads: 1: one bias for all heads; 0: there is no bias.
    """

    type: int
    layout: int
    rows: int
    heads: int
    groups: int
    queries: int
    keys: int
    depth: int
    packed: int
    causal: int
    bias_heads: int
    bias_groups: int


@dataclass(frozen=True, slots=True)
class AttentionBiasArguments(AttentionArguments):
    """Integer arguments of a launch that computes the gradient of the bias."""

    parts: int
    accumulate: int


_READ = "q k?!packed v?!packed bias?bias_heads y"
OPERANDS = {
    "attention": f"{_READ} logs",
    "attention_backward": f"{_READ} dy logs dq dk?!packed dv?!packed",
    "attention_backward_bias": f"{_READ} dy logs dbias partial",
}


def attention_of(request: Request) -> tuple[Attention, Sizes]:
    """Return the attributes and the sizes of a request of attention."""
    a = request.attributes
    assert isinstance(a, Attention)
    return a, sizes(a, request.inputs)


def _has_bias(request: Request) -> bool:
    return biased(attention_of(request)[0], len(request.inputs), request.kind != "attention")


def _fields(at: Slice) -> dict[str, int]:
    request = at.request
    (a, s), x = attention_of(request), request.inputs[0]
    heads, _, groups = request.inputs[a.operands].shape[:3] if _has_bias(request) else (0, 1, 0)
    return {
        "type": type_code(x),
        "layout": layout_code(at.layout),
        "rows": x.shape[0],
        "heads": s.heads,
        "groups": s.groups,
        "queries": s.queries,
        "keys": s.keys,
        "depth": s.depth,
        "packed": int(a.packed),
        "causal": int(a.causal),
        "bias_heads": heads,
        "bias_groups": groups,
    }


def arguments_of(at: Slice) -> AttentionArguments:
    """Return the integer arguments of a launch."""
    return AttentionArguments(**_fields(at))


def _tile(request: Request, tensor_cores: bool) -> tuple[int, int, int]:
    """Return the rows that a block holds, the positions of one step, and the bytes of a row, as in the sources."""
    depth = next(d for d in DEPTHS if attention_of(request)[1].depth <= d)
    if tensor_cores:
        return 64, 64 if depth <= 64 else 32, (depth + 8) * 2
    return 64 if depth <= 64 else 32, 16, (depth + 4) * 4


def _parts(request: Request, tensor_cores: bool) -> int:
    """Return the number of blocks among which the summands of one tile of the bias are divided."""
    s, bias = attention_of(request)[1], request.outputs[0]
    held, walked, _ = _tile(request, tensor_cores)
    heads, _, groups = bias.shape[:3]
    tiles = heads * groups * math.ceil(s.queries / held) * math.ceil(s.keys / walked)
    shared = request.inputs[0].shape[0] * (s.heads // heads) * (s.groups // groups)
    return max(1, min(shared, 2 * REDUCTION_BLOCKS // tiles))


def _shared(tensor_cores: bool) -> Callable[[Request], int]:
    def shared(request: Request) -> int:
        held, walked, row_bytes = _tile(request, tensor_cores)
        if request.kind == "attention":
            return (held + 2 * walked) * row_bytes
        return 2 * (held + walked) * row_bytes + 8 * max(held, walked)

    return shared


def _bias_arguments(tensor_cores: bool) -> Callable[[Slice], AttentionBiasArguments]:
    def arguments(at: Slice) -> AttentionBiasArguments:
        parts = _parts(at.request, tensor_cores)
        return AttentionBiasArguments(**_fields(at), parts=parts, accumulate=int(at.accumulate))

    return arguments


def _dots_bytes(request: Request, layout: Layout) -> int:
    """Return the workspace for one number for each row of the scores."""
    return request.inputs[-1].size_bytes


def _bias_workspace(tensor_cores: bool) -> Callable[[Request, Layout], int]:
    def workspace(request: Request, layout: Layout) -> int:
        return _parts(request, tensor_cores) * request.outputs[0].size_bytes + _dots_bytes(request, layout)

    return workspace


def scale_of(at: Slice) -> tuple[float, ...]:
    """Return the factor of the scores."""
    return (attention_of(at.request)[0].scale,)


def tiled_operations(request: Request, products: int, queries: int, keys: int) -> int:
    """Return the multiplications and additions of `products` products of the size of the scores.

    The scores are padded to tiles of `queries` by `keys`. Causal attention does about half of the work.
    """
    a, s = attention_of(request)
    scores = math.ceil(s.queries / queries) * queries * math.ceil(s.keys / keys) * keys
    whole = 2 * products * request.inputs[0].shape[0] * s.heads * s.groups * scores * s.depth
    return whole // 2 if a.causal else whole


def mma_us(request: Request, device: DeviceSpec, operations: int, share: float) -> float:
    """Return the time of products by mma.sync at this share of the rate that convolutions by mma.sync reach."""
    return operations / (mma_sync_tflops(device, request.precision) * 1e6 * share)


def _arithmetic_us(request: Request, device: DeviceSpec) -> float:
    operations = tiled_operations(request, PRODUCTS[request.kind], *_tile(request, tensor_cores=True)[:2])
    return mma_us(request, device, operations, MMA_SHARE)


def _fma_us(request: Request, device: DeviceSpec) -> float:
    operations = products_of(attention_of(request)[0], request.inputs, PRODUCTS[request.kind])
    return gemm_us(request, device, operations, device.fp32_tflops, FMA_SHARE)


def _ordered(request: Request) -> list[bool]:
    """Return for each operand whether it has the layout of images; the bias and the logarithms do not."""
    a, count = attention_of(request)[0], len(request.inputs)
    if request.kind == "attention":
        return [i < a.operands for i in range(count)] + [True, False]
    result = request.kind == "attention_backward"
    return [i < a.operands or i in (count - 3, count - 2) for i in range(count)] + [result] * len(request.outputs)


def _layouts(request: Request) -> Iterable[Layouts]:
    yield (Layout.CHANNELS_FIRST,) * len(_ordered(request))
    yield from channels_last(request)


def channels_last(request: Request) -> Iterable[Layouts]:
    """Yield the combination of layouts in which the images are channels last, if their order depends on the layout."""
    operands = (*request.inputs, *request.outputs)
    last = [image and t.ordered for image, t in zip(_ordered(request), operands, strict=True)]
    if any(last):
        yield tuple(Layout.CHANNELS_LAST if there else Layout.CHANNELS_FIRST for there in last)


def takes_tensor_cores(request: Request) -> bool:
    """Return whether the kernels on tensor cores can read the operands: 16 bits, channels last, vectors of 16 bytes."""
    a, s = attention_of(request)
    working = all(t.dtype in (DType.BF16, DType.FP16) for t in request.inputs[: a.operands])
    # Loads are vectors of 16 bytes. A packed operand of one position counts as channels first.
    return working and s.depth % 8 == 0 and s.depth <= MMA_DEPTH and any(True for _ in channels_last(request))


def _kernels(tensor_cores: bool) -> tuple[OwnKernel, ...]:
    file = f"attention/attention{'_mma' * tensor_cores}.cu"

    def kernel(
        kind: str,
        struct: type[Struct],
        arguments: Callable[[Slice], Struct],
        workspace: Callable[[Request, Layout], int],
        launches: int,
    ) -> OwnKernel:
        return OwnKernel(
            kind,
            file,
            struct,
            arguments,
            scale_of,
            layouts=channels_last if tensor_cores else _layouts,
            workspace=workspace,
            time_us=moved_us if tensor_cores else _fma_us,
            arithmetic_us=_arithmetic_us if tensor_cores else None,
            launches=launches,
            accumulates=kind == "attention_backward_bias",
            operands=OPERANDS[kind] + (" dots" if kind == "attention_backward" else ""),
            launcher=kind.replace("attention", "attention_mma", 1) if tensor_cores else "",
            takes=takes_tensor_cores if tensor_cores else always,
            shared=_shared(tensor_cores),
            needs=Instruction.MMA_SYNC if tensor_cores else None,
            aligned=tensor_cores,
            version=1 if kind == "attention" else 2,
        )

    return (
        kernel("attention", AttentionArguments, arguments_of, no_workspace, 1),
        kernel("attention_backward", AttentionArguments, arguments_of, _dots_bytes, 3),
        kernel(
            "attention_backward_bias",
            AttentionBiasArguments,
            _bias_arguments(tensor_cores),
            _bias_workspace(tensor_cores),
            3,
        ),
    )


KERNELS = (*_kernels(tensor_cores=False), *_kernels(tensor_cores=True))
