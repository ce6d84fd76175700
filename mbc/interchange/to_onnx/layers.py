"""Convolutions, matrix products, normalisation and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mbc.interchange.to_onnx.nodes import NotExported, Operator, Rule

_BIASED = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2}  # number of inputs without the bias


def _window(op: Operator) -> dict[str, Any]:
    pads = [*op.a.before, *op.a.after]
    return {"kernel_shape": list(op.a.kernel), "strides": list(op.a.stride), "pads": pads}


def _conv(op: Operator) -> None:
    op.last("Conv", *op.inputs, **_window(op), dilations=list(op.a.dilation), group=op.a.groups)


def _standardize_filters(op: Operator) -> None:
    """Append weight standardisation as an instance norm of the filters, as the channels of one sample."""
    filters = op.shape()[0]
    flat = op.step("Reshape", op.inputs[0], op.whole(1, filters, -1))
    scale = op.floats(np.full(filters, op.a.factor))
    scale = op.step("Mul", op.inputs[1], scale) if len(op.inputs) > 1 else scale
    normal = op.step("InstanceNormalization", flat, scale, op.floats(np.zeros(filters)), epsilon=op.a.eps)
    op.last("Reshape", normal, op.whole(*op.result))


def _conv_transpose(op: Operator) -> None:
    less = map(sum, zip(op.a.before, op.a.after, strict=True))
    sizes = zip(op.a.size, op.shape()[2:], op.a.stride, op.a.span, less, strict=True)
    more = [size - ((given - 1) * stride + span - pad) for size, given, stride, span, pad in sizes]
    op.last(
        "ConvTranspose", *op.inputs, **_window(op), dilations=list(op.a.dilation), group=op.a.groups,
        output_padding=more,
    )  # fmt: skip


def _linear(op: Operator) -> None:
    x = op.inputs[0] if len(op.shape()) == 2 else op.step("Flatten", op.inputs[0], axis=1)
    op.last("Gemm", x, op.inputs[1], transB=1)


def _bias(op: Operator) -> None:
    x, bias = op.inputs
    node = op.nodes.maker(x)
    if node is not None and len(node.input) == _BIASED.get(node.op_type):
        op.nodes.widen(x, bias, op.outputs[0])
        return
    rank = len(op.shape())
    shaped = op.state(bias, (*op.shape(1), *(1,) * (rank - 2)))
    op.last("Add", x, shaped)


def _matmul(op: Operator) -> None:
    operands: list[str] = []
    for position, transposed in enumerate((op.a.transpose_a, op.a.transpose_b)):
        rank = len(op.shape(position))
        order = [*range(rank - 2), rank - 1, rank - 2]
        value = op.inputs[position]
        operands.append(op.step("Transpose", value, perm=order) if transposed else value)
    op.last("MatMul", *operands)


def _batch_norm(op: Operator) -> None:
    x, mean, variance, *vectors = op.inputs
    kept = 1.0 - op.nodes.momenta.get(mean, 0.1)
    op.last("BatchNormalization", x, *_affine(op, vectors), mean, variance, epsilon=op.a.eps, momentum=kept)


def _affine(op: Operator, vectors: Sequence[str]) -> Sequence[str]:
    """Return scale and offset, which ONNX needs: ones and zeros without trained ones."""
    channels = op.shape()[1]
    return vectors or (op.floats(np.ones(channels)), op.floats(np.zeros(channels)))


def _group_norm(op: Operator) -> None:
    x, *vectors = op.inputs
    if op.a.groups == op.shape()[1]:
        op.last("InstanceNormalization", x, *_affine(op, vectors), epsilon=op.a.eps)
    else:
        op.last("GroupNormalization", x, *_affine(op, vectors), num_groups=op.a.groups, epsilon=op.a.eps)


def _instance_norm(op: Operator) -> None:
    x, _, _, *vectors = op.inputs
    op.last("InstanceNormalization", x, *_affine(op, vectors), epsilon=op.a.eps)


def _nothing(op: Operator) -> None:
    """Append nothing, because ONNX's instance norm takes the statistics itself."""


def _layer_norm(op: Operator) -> None:
    """Append a layer norm over the channels, which ONNX expects as the last axis."""
    x, *vectors = op.inputs
    affine = _affine(op, vectors)
    rank = len(op.shape())
    if rank == 2:
        op.last("LayerNormalization", x, *affine, axis=-1, epsilon=op.a.eps)
        return
    outer = op.step("Transpose", x, perm=[0, *range(2, rank), 1])
    normalised = op.step("LayerNormalization", outer, *affine, axis=-1, epsilon=op.a.eps)
    op.last("Transpose", normalised, perm=[0, rank - 1, *range(1, rank - 1)])


def _lrn(op: Operator) -> None:
    if op.a.size % 2 == 0:
        raise NotExported(
            f"its window has {op.a.size} channels, and ONNX places even windows differently", "use an odd size"
        )
    op.last("LRN", op.inputs[0], size=op.a.size, alpha=op.a.alpha, beta=op.a.beta, bias=op.a.k)


def _pool(kind: str, op: Operator) -> None:
    if op.a.kernel == op.a.size == op.shape()[2:] and not any(op.a.pad):
        op.last(f"Global{kind}Pool", op.inputs[0])
        return
    behind = _behind(op)
    x, before, more = op.inputs[0], op.a.before, {}
    if kind == "Average":
        counted = op.a.count_pad
        if counted and behind != op.a.after:  # pixels that ceil mode adds do not count, but padding does
            x = op.step("Pad", x, op.whole(0, 0, *before, 0, 0, *op.a.after))
            behind = tuple(b - own for b, own in zip(behind, op.a.after, strict=True))
            before, counted = (0,) * len(before), False
        more = {"count_include_pad": int(counted)}
    elif set(op.a.spacing) != {1}:
        more = {"dilations": list(op.a.spacing)}
    op.last(f"{kind}Pool", x, **{**_window(op), "pads": [*before, *behind]}, **more)


def _behind(op: Operator) -> tuple[int, ...]:
    """Return the padding after each axis with which the result has its size if sizes are rounded down.

    In ceil mode PyTorch and mbc drop a last window that would begin in the padding. ONNX's shape inference keeps such a
    window, so the export never writes ceil_mode.
    """
    behind: list[int] = []
    axes = zip(op.shape()[2:], op.result[2:], op.a.span, op.a.stride, op.a.before, op.a.after, strict=True)
    for size, output, span, stride, before, after in axes:
        fits = (size + before + after - span) // stride + 1 == output
        behind.append(after if fits else (output - 1) * stride + span - size - before)
    return tuple(behind)


def _adaptive_average(op: Operator) -> None:
    """Append means over windows of different sizes, as products with a matrix on either side."""
    height, width = (_shares(size, output) for size, output in zip(op.a.size, op.a.output_size, strict=True))
    rows = op.step("MatMul", op.floats(height), op.inputs[0])
    op.last("MatMul", rows, op.floats(width.T.copy()))


def _shares(size: int, output: int) -> np.ndarray[Any, Any]:
    """Return the weight [output, size] of each pixel in each window."""
    shares = np.zeros((output, size), np.float32)
    for window in range(output):
        begin, end = window * size // output, -(-(window + 1) * size // output)
        shares[window, begin:end] = 1.0 / (end - begin)
    return shares


def _adaptive_maximum(op: Operator) -> None:
    raise NotExported("its windows differ in size, which ONNX does not have", "use maxpool")


RULES: dict[str, Rule] = {
    "convolution": _conv,
    "standardize_filters": _standardize_filters,
    "convolution_backward_data": _conv_transpose,
    "linear": _linear,
    "bias_add": _bias,
    "matmul": _matmul,
    "batch_normalize": _batch_norm,
    "group_norm": _group_norm,
    "instance_statistics": _nothing,
    "instance_normalize": _instance_norm,
    "layer_norm": _layer_norm,
    "lrn": _lrn,
    "max_pool": partial(_pool, "Max"),
    "avg_pool": partial(_pool, "Average"),
    "adaptive_avg_pool": _adaptive_average,
    "adaptive_max_pool": _adaptive_maximum,
}
