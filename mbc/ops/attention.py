"""Scaled dot-product attention: every position of an image takes a mean of the values of all positions.

Vaswani et al., "Attention is all you need", 2017. An operand is [N, heads * D, ..., T], the result of a pointwise
convolution: D channels a head, T positions along the last axis. Each index of the axes between (windows), each head and
each sample attends separately. Results are y, and the logarithm of each sum of exponentials, [N, 1, heads, ..., T].
From the logarithms the backward pass recomputes the probabilities (Dao et al., "FlashAttention", 2022). Scores are
never in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError, master
from mbc.ops.products import product

MOST_DEPTH = 256  # channels of a head that kernels can hold in shared memory


@dataclass(frozen=True, slots=True)
class Attention(Attributes):
    """Settings of attention.

    Attributes:
        heads: Number of heads.
        scale: Factor of the products of queries and keys.
        causal: Whether position t attends only to positions up to t.
        packed: Whether query, key and value are the thirds of the channels of one operand.
    """

    heads: int
    scale: float
    causal: bool = False
    packed: bool = False

    @property
    def operands(self) -> int:
        """Number of tensors that hold query, key and value."""
        return 1 if self.packed else 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of attention: `groups` of `queries` x `keys` scores for each sample and head, with K = `depth`."""

    heads: int
    depth: int
    groups: int
    queries: int
    keys: int


def sizes(a: Attention, inputs: tuple[TensorType, ...]) -> Sizes:
    """Return the sizes of attention for the types of its operands.

    Raises:
        ShapeError: Query, key and value do not fit together.
    """
    q = inputs[0]
    k = inputs[0] if a.packed else inputs[1]
    for x in inputs[: a.operands]:
        if len(x.shape) < 3 or x.dtype != q.dtype or x.shape[:1] + x.shape[2:-1] != q.shape[:1] + q.shape[2:-1]:
            raise ShapeError(f"{' and '.join(map(str, inputs[: a.operands]))} are not query, key and value of one type")
        if x.shape[-1] != k.shape[-1] and x is not q:
            raise ShapeError(f"{x} does not have a value for each of the {k.shape[-1]} keys")
    channels = q.shape[1] // 3 if a.packed else q.shape[1]
    if (a.packed and q.shape[1] % 3) or a.heads < 1 or channels % a.heads:
        raise ShapeError(f"the channels of {q} are not those of {a.heads} heads{' of three tensors' * a.packed}")
    if any(x.shape[1] != q.shape[1] for x in inputs[: a.operands]):
        raise ShapeError(f"{' and '.join(map(str, inputs[: a.operands]))} do not have equally many channels")
    if channels // a.heads > MOST_DEPTH:
        raise ShapeError(f"heads of {channels // a.heads} channels are too wide: at most {MOST_DEPTH} are possible")
    groups = math.prod(q.shape[2:-1])
    return Sizes(a.heads, channels // a.heads, groups, q.shape[-1], k.shape[-1])


def _bias(a: Attention, inputs: tuple[TensorType, ...], x: TensorType) -> None:
    """Check a bias [heads or 1, 1, groups or 1, T, S], without rows.

    The bias has no channels either, so that its layout is always the same.

    Raises:
        ShapeError: The bias has another shape or type.
    """
    s = sizes(a, inputs)
    shape = x.shape
    fits = len(shape) == 5 and shape[1] == 1 and shape[3:] == (s.queries, s.keys)
    if not fits or shape[0] not in (1, s.heads) or shape[2] not in (1, s.groups) or x.dtype != inputs[0].dtype:
        raise ShapeError(
            f"the bias {x} does not fit scores of {s.heads} heads x 1 x {s.groups} groups x {s.queries} x {s.keys}"
        )


def _results(a: Attention, inputs: tuple[TensorType, ...]) -> tuple[TensorType, TensorType]:
    s, q = sizes(a, inputs), inputs[0]
    y = TensorType((q.shape[0], s.heads * s.depth, *q.shape[2:]), q.dtype)
    return y, TensorType((q.shape[0], 1, s.heads, *q.shape[2:]), master(q.dtype))


def _shape(a: Attention, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    if len(inputs) not in (a.operands, a.operands + 1):
        raise ShapeError(f"attention takes {a.operands} operands and a bias, not {len(inputs)}")
    for bias in inputs[a.operands :]:
        _bias(a, inputs, bias)
    return _results(a, inputs)


def biased(a: Attention, count: int, backward: bool) -> bool:
    """Return whether `count` operands include a bias, which y, dy and the logarithms follow in the backward pass."""
    return count - a.operands - 3 * backward > 0


def _rowless(backward: bool) -> Callable[[Attention, int], tuple[int, ...]]:
    """Return the function that returns the position of the bias, if there is one."""
    return lambda a, count: (a.operands,) if biased(a, count, backward) else ()


def _backward_operands(a: Attention, inputs: tuple[TensorType, ...]) -> None:
    *read, y, dy, logs = inputs
    if len(read) < a.operands or _shape(a, tuple(read)) != (y, logs) or dy != y:
        raise ShapeError(f"result {y}, gradient {dy} and {logs} do not fit attention of {inputs[0]}")


def _backward_shape(a: Attention, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    _backward_operands(a, inputs)
    return inputs[: a.operands]


def _bias_shape(a: Attention, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    _backward_operands(a, inputs)
    if not biased(a, len(inputs), backward=True):
        raise ShapeError("attention without a bias has no gradient of a bias")
    bias = inputs[a.operands]
    return (TensorType(bias.shape, master(bias.dtype)),)


@dataclass(frozen=True)
class _Parts:
    """Query, key and value, [N, heads, groups, T, D], and the scores, in float64."""

    q: Array
    k: Array
    v: Array
    scores: Array


def _headed(x: Array, heads: int) -> Array:
    """Return [N, heads * D, ..., T] as [N, heads, groups, T, D]."""
    n, channels = x.shape[:2]
    return np.moveaxis(x.reshape(n, heads, channels // heads, -1, x.shape[-1]), 2, 4)


def _flat(x: Array, like: Sequence[int]) -> Array:
    """Return [N, heads, groups, T, D] as [N, heads * D, ..., T]."""
    return np.moveaxis(x, 4, 2).reshape(x.shape[0], -1, *like[2:])


def _parts(a: Attention, inputs: Sequence[Array], backward: bool) -> _Parts:
    given = [x.astype(np.float64) for x in inputs[: a.operands]]
    q, k, v = (_headed(x, a.heads) for x in (np.split(given[0], 3, axis=1) if a.packed else given))
    scores = product(q, np.swapaxes(k, -1, -2)) * a.scale
    if biased(a, len(inputs), backward):
        scores = scores + inputs[a.operands][:, 0].astype(np.float64)
    if a.causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    return _Parts(q, k, v, scores)


def _evaluate(a: Attention, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    p, x = _parts(a, inputs, backward=False), inputs[0]
    most = p.scores.max(axis=-1, keepdims=True)
    powers = np.exp(p.scores - most)
    total = powers.sum(axis=-1, keepdims=True)
    y = _flat(product(powers / total, p.v), x.shape)
    return y.astype(x.dtype), (most + np.log(total)).reshape(call.outputs[1].shape).astype(x.dtype)


def _score_gradients(a: Attention, inputs: Sequence[Array]) -> tuple[_Parts, Array, Array, Array]:
    """Return the parts, dy, the probabilities and the gradients of the scores."""
    p = _parts(a, inputs, backward=True)
    y, dy, logs = (x.astype(np.float64) for x in inputs[-3:])
    y, dy = _headed(y, a.heads), _headed(dy, a.heads)
    share = np.exp(p.scores - logs.reshape(*p.scores.shape[:-1], 1))
    dot = np.sum(y * dy, axis=-1, keepdims=True)
    return p, dy, share, share * (product(dy, np.swapaxes(p.v, -1, -2)) - dot)


def _backward(a: Attention, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    p, dy, share, dscores = _score_gradients(a, inputs)
    operand_gradients = (
        product(dscores, p.k) * a.scale,
        product(np.swapaxes(dscores, -1, -2), p.q) * a.scale,
        product(np.swapaxes(share, -1, -2), dy),
    )
    flat = [_flat(dx, inputs[0 if a.packed else i].shape) for i, dx in enumerate(operand_gradients)]
    gradients = [np.concatenate(flat, axis=1)] if a.packed else flat
    return tuple(dx.astype(inputs[0].dtype) for dx in gradients)


def _backward_bias(a: Attention, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    bias = inputs[a.operands]
    total = _score_gradients(a, inputs)[3].sum(axis=0)
    axes = tuple(axis for axis in (0, 1) if bias.shape[2 * axis] == 1)
    return (total.sum(axis=axes).reshape(bias.shape).astype(bias.dtype),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a = op.attributes
    assert isinstance(a, Attention)
    gradients: list[str | None] = [None] * len(op.inputs)
    read, operands = (*op.inputs, op.outputs[0], dy, op.outputs[1]), op.inputs[: a.operands]
    if any(map(g.needs, operands)):
        gradients[: a.operands] = g.emit("attention_backward", a, read, *operands)
    if biased(a, len(op.inputs), backward=False) and g.needs(op.inputs[-1]):
        (gradients[-1],) = g.emit("attention_backward_bias", a, read, op.inputs[-1])
    return tuple(gradients)


def _flops(a: Attention, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> int:
    return products_of(a, inputs, 2)


def products_of(a: Attention, inputs: tuple[TensorType, ...], count: int) -> int:
    """Return the multiplications and additions of `count` products of the scores' size; about half if causal."""
    s = sizes(a, inputs)
    whole = 2 * count * inputs[0].shape[0] * s.heads * s.groups * s.queries * s.keys * s.depth
    return whole // 2 if a.causal else whole


def _backward_flops(a: Attention, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> int:
    return products_of(a, inputs, 5)


def _bias_flops(a: Attention, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> int:
    return products_of(a, inputs, 2)


OPS = (
    OpKind(
        "attention",
        Attention,
        _shape,
        _evaluate,
        _gradient,
        divisible=True,
        flops=_flops,
        rowless=_rowless(backward=False),
    ),
    OpKind(
        "attention_backward",
        Attention,
        _backward_shape,
        _backward,
        divisible=True,
        flops=_backward_flops,
        rowless=_rowless(backward=True),
    ),
    OpKind(
        "attention_backward_bias",
        Attention,
        _bias_shape,
        _backward_bias,
        divisible=True,
        accumulates=True,
        reduces=True,
        flops=_bias_flops,
        rowless=_rowless(backward=True),
    ),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    heads, scale = settings["heads"], settings["scale"]
    if heads < 1:
        raise ShapeError(f"heads is {heads}, but must be at least 1")
    if not math.isfinite(scale) or scale < 0:
        raise ShapeError(f"scale is {scale}, but must be positive, or 0 for 1 / sqrt(channels of a head)")
    packed = len(inputs) < 3
    a = Attention(heads, 1.0, settings["causal"], packed)
    depth = sizes(a, tuple(map(builder.type, inputs))).depth
    a = Attention(heads, scale or 1 / math.sqrt(depth), settings["causal"], packed)
    return builder.emit("attention", a, inputs)[0]


LAYERS = (
    Layer(
        "attention",
        (Parameter("heads", "int"), Parameter("causal", "bool", False), Parameter("scale", "float", 0.0)),
        _build,
        (1, 4),
        "Scaled dot-product attention along the last axis: of query, key and value, [N, C, ..., T] each, or of one "
        "tensor with the channels of all three; last a bias [heads or 1, 1, groups or 1, T, S], without rows.",
        broadcasts=True,
    ),
)
