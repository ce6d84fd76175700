"""The operations of a network in JAX: expressions from their declarations, and code for all other operations.

This file is imported only if JAX is installed. Shapes are those of mbc, with channels second. XLA itself decides the
order of elements in memory.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mbc.ops import KINDS
from mbc.ops.dice import dice_loss
from mbc.ops.framework_calls import function_of
from mbc.ops.window_bias import MASKED

jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
lax: Any = jax.lax

Tensor = Any  # JAX is not there when types are checked


def _convolution(a: Any, x: Tensor, w: Tensor) -> Tensor:
    sides = tuple(zip(a.before, a.after, strict=True))
    return lax.conv_general_dilated(x, w, a.stride, sides, rhs_dilation=a.dilation, feature_group_count=a.groups)


def _transposed(a: Any, x: Tensor, w: Tensor) -> Tensor:
    """Compute a transposed convolution as the data gradient of a convolution."""
    image = jax.ShapeDtypeStruct((x.shape[0], w.shape[1] * a.groups, *a.size), x.dtype)

    def forward(y: Tensor) -> Tensor:
        return _convolution(a, y, w)

    return jax.linear_transpose(forward, image)(x)[0]


def _window(a: Any, x: Tensor, start: float, add: Any, pad: bool = True) -> Tensor:
    """Reduce complete windows: positions beyond the padding have the value `start`.

    Without `pad` the array has the padding already.
    """
    before = a.before if pad else (0,) * a.rank
    sizes = zip(before, a.after if pad else before, a.output_size, a.stride, a.span, x.shape[2:], strict=True)
    pads = [(b, max(e, (count - 1) * stride + span - b - size)) for b, e, count, stride, span, size in sizes]
    whole = lax.reduce_window(
        x, x.dtype.type(start), add, (1, 1, *a.kernel), (1, 1, *a.stride), ((0, 0), (0, 0), *pads),
        window_dilation=(1, 1, *a.spacing),
    )  # fmt: skip
    return whole[(..., *map(slice, a.output_size))]


def _avg_pool(a: Any, x: Tensor) -> Tensor:
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    inside = jnp.ones((1, 1, *x.shape[2:]), wide.dtype)
    count = _window(a, inside, 0.0, lax.add)
    if a.count_pad:
        # Padding counts, but not what ceil mode adds beyond it.
        sides = ((0, 0), (0, 0), *zip(a.before, a.after, strict=True))
        count = _window(a, jnp.pad(inside, sides, constant_values=1), 0.0, lax.add, pad=False)
    return (_window(a, wide, 0.0, lax.add) / count).astype(x.dtype)


def _lrn(a: Any, x: Tensor) -> Tensor:
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    squares = jnp.pad(wide * wide, ((0, 0), (a.size // 2, (a.size - 1) // 2), *((0, 0),) * (x.ndim - 2)))
    sums = lax.reduce_window(
        squares, squares.dtype.type(0), lax.add, (1, a.size, *(1,) * (x.ndim - 2)), (1,) * x.ndim, "VALID"
    )
    return (wide / (a.k + a.alpha / a.size * sums) ** a.beta).astype(x.dtype)


def _cross_entropy(a: Any, logits: Tensor, target: Tensor) -> Tensor:
    wide = logits if logits.dtype == jnp.float64 else logits.astype(jnp.float32)
    logs = jax.nn.log_softmax(wide, 1)
    chosen = jnp.take_along_axis(logs, jnp.expand_dims(target, 1), 1)
    return -((1 - a.smoothing) * chosen.mean() + a.smoothing * logs.mean())


def _dice(a: Any, logits: Tensor, target: Tensor) -> Tensor:
    x = wide(logits).reshape(*logits.shape[:2], -1)
    if a.sigmoid:
        logs, t = (jax.nn.log_sigmoid(x), jax.nn.log_sigmoid(-x)), wide(target).reshape(x.shape)
        return dice_loss(a, jax.nn.sigmoid(x), logs, t, jnp.ones_like(x[:, :1]))
    labels = target.reshape(len(x), 1, -1)
    hot = (labels == jnp.arange(x.shape[1]).reshape(1, -1, 1)).astype(x.dtype)
    counts = (labels != (a.ignored or (-1,))[0]).astype(x.dtype)
    return dice_loss(a, jax.nn.softmax(x, 1), (jax.nn.log_softmax(x, 1), x), hot, counts)


def _weighted_cross_entropy(a: Any, logits: Tensor, target: Tensor) -> Tensor:
    classes = logits.shape[1]
    logs = jnp.moveaxis(jax.nn.log_softmax(wide(logits), 1), 1, -1)
    weights = jnp.asarray(a.class_weights or (1.0,) * classes, logs.dtype)
    counts = target >= 0
    for ignored in a.ignored:
        counts &= target != ignored
    hot = jax.nn.one_hot(target, classes, dtype=logs.dtype)
    losses = -(weights * ((1 - a.smoothing) * hot + a.smoothing / classes) * logs).sum(-1)
    return jnp.where(counts, losses, 0).sum() / jnp.where(counts, (weights * hot).sum(-1), 0).sum()


def wide(x: Tensor) -> Tensor:
    """Return a tensor in the type in which losses are computed."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _smooth_l1(a: Any, x: Tensor, y: Tensor) -> Tensor:
    d = jnp.abs(wide(x) - wide(y))
    return jnp.mean(jnp.where(d < a.beta, 0.5 * d * d / a.beta, d - 0.5 * a.beta))


def _probability_cross_entropy(a: Any, x: Tensor, y: Tensor) -> Tensor:
    p, y = wide(x), wide(y)
    of_one, of_zero = (jnp.maximum(jnp.log(v), -100.0) for v in (p, 1 - p))
    return -jnp.mean(y * of_one + (1 - y) * of_zero)


def batch_norm(a: Any, x: Tensor, affine: Sequence[Tensor], running: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the result in a training step, and the running statistics after it, if there are."""
    axes = (0, *range(2, x.ndim))
    shape = (1, -1, *([1] * (x.ndim - 2)))
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    here, spread = running if a.frozen else (wide.mean(axes), wide.var(axes))
    factor = lax.rsqrt(spread + a.eps)
    weight, bias = affine or (1.0, 0.0)
    scale, offset = factor * weight, bias - here * factor * weight
    y = (wide * scale.reshape(shape) + offset.reshape(shape)).astype(x.dtype)
    count = x.size // x.shape[1]
    unbiased = spread * (count / max(1, count - 1))
    if not a.frozen:
        after = zip(running, (here, unbiased), strict=False)
        running = [(1 - a.momentum) * old + a.momentum * new for old, new in after]
    return y, *running


def _resize(a: Any, x: Tensor) -> Tensor:
    for axis in range(len(a.size)):
        pixels, weights = a.taps(axis)
        weights = weights.reshape(*weights.shape, *(1,) * (len(a.size) - 1 - axis)).astype(x.dtype)
        x = sum(jnp.take(x, at, 2 + axis) * weight for at, weight in zip(pixels, weights, strict=True))
    return x


def _upsample(a: Any, x: Tensor) -> Tensor:
    for axis, factor in enumerate(a.factor, 2):
        x = jnp.repeat(x, factor, axis)
    return x


def _group_norm(a: Any, x: Tensor, *affine: Tensor) -> Tensor:
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    grouped, axes = wide.reshape(x.shape[0], a.groups, -1, *x.shape[2:]), a.axes(x.ndim)
    mean, spread = grouped.mean(axes, keepdims=True), grouped.var(axes, keepdims=True)
    shape = (1, -1, *([1] * (x.ndim - 2)))
    normal = ((grouped - mean) * lax.rsqrt(spread + a.eps)).reshape(x.shape)
    if affine:
        normal = normal * affine[0].reshape(shape) + affine[1].reshape(shape)
    return normal.astype(x.dtype)


def _standardize_filters(a: Any, w: Tensor, gain: Tensor | None = None) -> Tensor:
    axes = tuple(range(1, w.ndim))
    mean, spread = w.mean(axes, keepdims=True), w.var(axes, keepdims=True)
    scale = 1.0 if gain is None else gain.reshape(-1, *([1] * (w.ndim - 1)))
    return (w - mean) * lax.rsqrt(spread + a.eps) * scale * a.factor


def _attention(a: Any, *operands: Tensor) -> Tensor:
    def headed(x: Tensor) -> Tensor:
        n, channels, *size = x.shape
        return jnp.moveaxis(x.reshape(n, a.heads, channels // a.heads, -1, size[-1]), 2, 4)

    q, k, v = (headed(x) for x in (jnp.split(operands[0], 3, 1) if a.packed else operands[:3]))
    scores = (q @ k.mT).astype(jnp.promote_types(q.dtype, jnp.float32)) * a.scale
    if len(operands) > a.operands:
        scores = scores + operands[a.operands][:, 0]
    if a.causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    powers = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    y = (powers / powers.sum(-1, keepdims=True)).astype(v.dtype) @ v
    n, _, *size = operands[0].shape
    return jnp.moveaxis(y, 4, 2).reshape(n, -1, *size)


def _window_bias(a: Any, table: Tensor) -> Tensor:
    return jnp.moveaxis(table[a.numbers()], -1, 0)[:, None, None] + MASKED * jnp.asarray(a.mask(), table.dtype)


def _rearrange(a: Any, x: Tensor) -> Tensor:
    moved = x.reshape(len(x), *a.flat).transpose(0, *(1 + i for i in a.order))
    return moved.reshape(len(x), *map(math.prod, a.permuted))


def _strided_slice(a: Any, x: Tensor) -> Tensor:
    """Slice without `spread`, which only backward passes use."""
    for axis, (start, step, count) in enumerate(zip(a.start, a.step, a.count, strict=True), 1):
        stop = start + (count - 1) * step + 1
        zeros = [(0, 0)] * x.ndim
        zeros[axis] = (max(0, -start), max(0, stop - x.shape[axis]))
        x = jnp.pad(x, zeros, constant_values=a.outside)
        first = max(0, start)
        x = x[(slice(None),) * axis + (slice(first, first + stop - start, step),)]
    return x


def _pad(a: Any, x: Tensor) -> Tensor:
    if a.rolls:
        return jnp.roll(x, a.before, tuple(range(1, x.ndim)))
    sides = ((0, 0), *zip(a.before, a.after, strict=True))
    return jnp.pad(x, sides, mode="edge" if a.mode == "replicate" else a.mode)


def _adaptive(a: Any, x: Tensor, of: Callable[..., Tensor]) -> Tensor:
    parts = [of(x[pixels], axis=tuple(range(2, x.ndim))) for _, pixels in a.windows()]
    return jnp.stack(parts, -1).reshape(*x.shape[:2], *a.output_size)


def _split(a: Any, x: Tensor) -> Any:
    ends: list[int] = list(itertools.accumulate(a.sizes))
    return jnp.split(x, ends[:-1], 1)


def _broadcast(a: Any, x: Tensor, y: Tensor) -> Tensor:
    x, y = _aligned(a, x, y)
    if a.operator == "prelu":
        return jnp.where(x > 0, x, x * y)
    if a.operator in ("rsub", "rdiv"):
        x, y = y, x
    return {"add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide}[a.operator.removeprefix("r")](
        x, y
    )


def _aligned(a: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    rank = max(x.ndim, y.ndim)
    return x.reshape(a.aligned(x.shape, rank)), y.astype(x.dtype).reshape(a.aligned(y.shape, rank))


def _select(a: Any, x: Tensor, y: Tensor) -> Tensor:
    x, y = _aligned(a, x, y)
    if a.operator in ("maximum", "minimum"):
        return (jnp.maximum if a.operator == "maximum" else jnp.minimum)(x, y)
    if a.operator.startswith("r"):
        x, y = y, x
    return jnp.where(y == 0 if a.operator.endswith("fill") else y != 0, x, a.filled)


def _relation(a: Any, x: Tensor, y: Tensor) -> Tensor:
    x, y = _aligned(a, x, y)
    return getattr(x, f"__{a.operator}__")(y).astype(x.dtype)


_OF_ONE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "max_pool": lambda a, x: _window(a, x, float("-inf"), lax.max),
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": lambda a, x: _adaptive(a, x, jnp.mean),
    "adaptive_max_pool": lambda a, x: _adaptive(a, x, jnp.max),
    "lrn": _lrn,
    "upsample": _upsample,
    "resize": _resize,
    "rearrange": _rearrange,
    "strided_slice": _strided_slice,
    "pad": _pad,
    "split": _split,
}
_OF_TWO: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "convolution": _convolution,
    "convolution_backward_data": _transposed,
    "linear": lambda a, x, w: x.reshape(x.shape[0], -1) @ w.T,
    "broadcast": _broadcast,
    "select": _select,
    "relation": _relation,
    "softmax_cross_entropy": _cross_entropy,
    "weighted_cross_entropy": _weighted_cross_entropy,
    "dice": _dice,
    "smooth_l1": _smooth_l1,
    "probability_cross_entropy": _probability_cross_entropy,
}
_MODULES = {"jax": jax, "jnp": jnp, "getattr": getattr, "len": len, "wide": wide}
# By kind; each takes the attributes and then the operands. Batch norm and dropout have a state: they are not here.
FUNCTIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        **{name: function_of(kind.calls.jax, _MODULES) for name, kind in KINDS.items() if kind.calls.jax},
        **_OF_ONE,
        **_OF_TWO,
        "standardize_filters": _standardize_filters,
        "group_norm": _group_norm,
        "layer_norm": _group_norm,
        "attention": _attention,
        "window_bias": _window_bias,
    }
)
PRODUCTS = frozenset(
    ("convolution", "convolution_backward_data", "linear", "matmul", "attention")
)  # whose operands are cast
