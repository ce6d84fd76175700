"""Attention as products and softmax, which every runtime supports, and the bias of windows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mbc.interchange.to_onnx.nodes import Operator, Rule
from mbc.ops.window_bias import MASKED

_TOKENS, _DEPTHS = (
    (0, 3, 1, 4, 2),
    (0, 3, 1, 2, 4),
)  # [N, heads, D, groups, T] -> [N, groups, heads, T, D] or [..., D, T]
_NO_SHARE = float(np.finfo(np.float32).min)


def _attention(op: Operator) -> None:
    """Append attention of [N, heads * D, groups, T], separately for each group and head."""
    a = op.a
    lengths = [op.shape(0)[-1]] * 3 if a.packed else [op.shape(n)[-1] for n in range(3)]
    channels = op.result[1]
    groups = math.prod(op.result[2:-1])
    parts = _thirds(op, channels) if a.packed else op.inputs[:3]
    heads = [op.reshaped(x, (a.heads, channels // a.heads, groups, t)) for x, t in zip(parts, lengths, strict=True)]
    q, k, v = (op.step("Transpose", x, perm=p) for x, p in zip(heads, (_TOKENS, _DEPTHS, _TOKENS), strict=True))
    scores = op.step("Mul", op.step("MatMul", q, k), op.floats(a.scale))
    for bias in op.inputs[a.operands :]:  # [heads or 1, 1, groups or 1, T, S] -> [1, groups or 1, heads or 1, T, S]
        scores = op.step("Add", scores, op.step("Transpose", bias, perm=(1, 2, 0, 3, 4)))
    if a.causal:
        later = ~np.tri(lengths[0], lengths[1], dtype=bool)
        scores = op.step("Add", scores, op.floats(np.where(later, _NO_SHARE, 0.0)))
    mixed = op.step("MatMul", op.step("Softmax", scores, axis=-1), v)
    back = op.step("Transpose", mixed, perm=(0, 2, 4, 1, 3))
    op.last("Reshape", back, op.whole(0, *op.result[1:]))


def _thirds(op: Operator, channels: int) -> list[str]:
    """Return query, key and value, which are the three thirds of the channels."""
    begins = (0, channels, 2 * channels)
    ends = (op.whole(begin + channels) for begin in begins)
    one = op.whole(1)
    return [op.step("Slice", op.inputs[0], op.whole(n), end, one) for n, end in zip(begins, ends, strict=True)]


def _window_bias(op: Operator) -> None:
    """Append the rows of the table that pairs of pixels use: [T, T, heads] -> [heads, 1, windows, T, T]."""
    rows = op.step("Gather", op.inputs[0], op.nodes.constant(op.a.numbers().astype(np.int64)), axis=0)
    turned = op.step("Transpose", rows, perm=(2, 0, 1))
    shape = op.result
    if shape[2] == 1 and not op.a.mask().any():
        op.last("Unsqueeze", turned, op.whole(1, 2))
        return
    op.last("Add", op.step("Unsqueeze", turned, op.whole(1, 2)), op.floats(MASKED * op.a.mask()))


RULES: Mapping[str, Rule] = {"attention": _attention, "window_bias": _window_bias}
