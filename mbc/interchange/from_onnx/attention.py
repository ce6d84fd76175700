"""Attention of heads that tensors hold, as products, softmax and products; rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.interchange.program import Array

_HIDES = -1e4  # the largest number by which exporters hide a key
_ALONE = "which differs between the samples"


@dataclass(frozen=True, slots=True)
class _Heads:
    """Query, key and value as [N, heads, T, D]; queries that share one head of keys follow one another."""

    query: Expression
    key: Expression
    value: Expression
    shared: int  # number of queries for each head of keys

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query.shape[2], self.key.shape[2]


def _attention(op: Operator) -> None:
    heads, past = _read_heads(op)
    (length, keys), (rows, count) = heads.lengths, heads.query.shape[:2]
    scale = op.real("scale", 1.0) if op.has("scale") else heads.query.shape[3] ** -0.5
    if op.input(6):
        raise Refused("it has a number of keys that are no padding, " + _ALONE, "give it keys without padding")
    grouped = heads.query.reshape((rows, count // heads.shared, heads.shared * length, heads.query.shape[3]))
    product = (grouped * scale).matmul(heads.key.permute((0, 1, 3, 2))).reshape((rows, count, length, keys))
    cap = op.real("softcap", 0.0)
    capped = (product / cap).apply("tanh") * cap if cap > 0 else product
    biased = _biased(op, capped, past)
    shares = biased.over("softmax", 3)
    mixed = shares.reshape((rows, count // heads.shared, heads.shared * length, keys)).matmul(heads.value)
    mixed = mixed.reshape((rows, count, length, heads.value.shape[3]))
    if len(op.sizes()) == 3:
        mixed = mixed.permute((0, 2, 1, 3)).reshape((rows, length, count * heads.value.shape[3]))
    beside = (product, capped, biased, shares)[op.integer("qk_matmul_output_mode", 0)]
    mixed.give(heads.key, heads.value, beside)


def _read_heads(op: Operator) -> tuple[_Heads, int]:
    """Return the operands, and how many of the keys are past keys.

    Raises:
        Refused: The number of heads is missing, or queries cannot share the heads of keys equally.
    """
    query, key, value = (Expression.of(op, position) for position in range(3))
    if len(query.shape) == 3:
        counts = op.integer("q_num_heads", 0), op.integer("kv_num_heads", 0)
        if min(counts) < 1:
            raise Refused("it does not say how many heads it has", "export the model again")
        query, key, value = (_apart(x, n) for x, n in ((query, counts[0]), (key, counts[1]), (value, counts[1])))
    past = 0
    if op.input(4) or op.input(5):
        before = Expression.of(op, 4), Expression.of(op, 5)
        past = before[0].shape[2]
        key, value = (p.join((x,), 2) for p, x in zip(before, (key, value), strict=True))
    shared, rest = divmod(query.shape[1], key.shape[1])
    if rest:
        raise Refused(
            f"{query.shape[1]} heads of queries share {key.shape[1]} heads of keys",
            "give each head of keys the same number of queries",
        )
    return _Heads(query, key, value, shared), past


def _apart(x: Expression, heads: int) -> Expression:
    rows, length, channels = x.shape
    return x.reshape((rows, length, heads, channels // heads)).permute((0, 2, 1, 3))


def _biased(op: Operator, scores: Expression, past: int) -> Expression:
    """Return scores with the mask added: causal, by window, or the operand `attn_mask`.

    Raises:
        Refused: A query attends to no key.
    """
    length, keys = scores.shape[2:]
    hidden = np.zeros((length, keys), np.float32)
    if op.integer("is_causal", 0):
        hidden = np.where(np.tri(length, keys, past, dtype=bool), 0.0, -np.inf)
    if op.input(3):
        mask = op.graph.array(op.input(3))
        if mask is None or not _only_hides(mask):
            scores = scores + Expression.of(op, 3)
        else:
            hidden = hidden + _mask_of_samples(mask, keys)
    left, right = op.integer("left_window_size", -1), op.integer("right_window_size", -1)
    ahead = np.arange(keys)[None, :] - np.arange(length)[:, None] - past
    far = ((ahead < -left) if left >= 0 else np.bool_(False)) | ((ahead > right) if right >= 0 else np.bool_(False))
    hidden = np.where(far, -np.inf, hidden)
    if not hidden.any():
        return scores
    if np.isneginf(hidden).all(-1).any():
        raise Refused("some of its queries attend to no key", "let each query attend to one")
    return scores + scores.constant("mask", hidden.reshape((1,) * (4 - hidden.ndim) + hidden.shape))


def _only_hides(mask: Array) -> bool:
    """Return True if each number of a mask hides a key or does nothing, so that the mask is no parameter."""
    return mask.dtype == np.bool_ or bool(((mask == 0) | (mask <= _HIDES)).all())


def _mask_of_samples(mask: Array, keys: int) -> Array:
    """Return a mask as numbers that are added to scores, for all samples; keys beyond the end of the mask are hidden.

    Raises:
        Refused: The mask differs between samples.
    """
    added = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask
    if added.ndim == 4 and len(added) > 1:
        if not (added == added[:1]).all():
            raise Refused("its mask is a constant, " + _ALONE, "make the mask an input of the model")
        added = added[:1]
    width = [(0, 0)] * (added.ndim - 1) + [(0, keys - added.shape[-1])]
    return np.pad(added, width, constant_values=-np.inf)


def _rotary(op: Operator) -> None:
    x = Expression.of(op)
    flat = len(x.shape) == 3
    if flat:
        count = op.integer("num_heads", 0)
        if count < 1:
            raise Refused("it does not say how many heads it has", "export the model again")
        x = x.reshape((*x.shape[:2], count, x.shape[2] // count))
    else:
        op.ignore("num_heads")  # the shape includes it
        x = x.permute((0, 2, 1, 3))
    width = op.integer("rotary_embedding_dim", 0) or x.shape[3]
    turned = x.slice(3, 0, width)
    interleaved, half = bool(op.integer("interleaved", 0)), width // 2
    a, b = (
        turned.slice(3, n, width, 2) if interleaved else turned.slice(3, n * half, (n + 1) * half) for n in range(2)
    )
    cos, sin = (_of_positions(op, position, x.shape[1], half) for position in (1, 2))
    real, imaginary = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        pairs = (*x.shape[:3], half, 1)
        result = real.reshape(pairs).join((imaginary.reshape(pairs),), 4).reshape((*x.shape[:3], width))
    else:
        result = real.join((imaginary,), 3)
    result = result.join((x.slice(3, width, x.shape[3]),), 3) if width < x.shape[3] else result
    (result.reshape(op.result) if flat else result.permute((0, 2, 1, 3))).give()


def _of_positions(op: Operator, position: int, length: int, half: int) -> Expression:
    """Return cosines or sines [N or 1, T, 1, D / 2], read from a table by position, or given for each position.

    Raises:
        Refused: The table is computed, or the positions differ between samples.
    """
    numbers = op.constant(3, "positions")
    table = op.graph.array(op.input(position))
    if numbers is None and table is None:
        numbers_of_positions = Expression.of(op, position)
        return numbers_of_positions.reshape((numbers_of_positions.shape[0], length, 1, half))
    if table is None:
        raise Refused("it takes rows of a computed table", "hold the table as a constant")
    rows = table[numbers] if numbers is not None else table
    if not (rows == rows[:1]).all():
        raise Refused("its positions are constants, " + _ALONE, "use the same positions for all samples")
    return Expression.of(op).constant(("cos", "sin")[position - 1], rows[:1].reshape(1, length, 1, half))


RULES: Mapping[str, Rule] = {"Attention": _attention, "RotaryEmbedding": _rotary}
NOT_TAKEN: Mapping[str, str] = {"FlexAttention": "use Attention", "LinearAttention": "use Attention"}
