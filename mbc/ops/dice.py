"""Losses of segmentation: Dice, Tversky, and cross entropy with both of them or with a focus on hard positions.

For an image and a class, p is the softmax (or the sigmoid) of the logits and t is the target, 1 where a position
belongs to the class and else 0. Over the positions that count, with the sums a of p t and b of v p + w t, the index is
(2 a + smooth) / ((2 - v - w) a + b + below): for v = w = 1 it is Dice (Milletari et al., "V-Net", 2016), for
v = 2 alpha and w = 2 beta Tversky (Salehi et al., 2017). The loss is the mean of (1 - index) ** power over images and
classes, plus `entropy` times the mean of the (focal) cross entropies.

The sums are an operation of their own, image by image, so that they can be computed in micro-batches, and one reading
of the logits gives all of them. Its gradient is one operation, too. Neither stores probabilities. Indices over the
batch, and cross entropies, need sums over all images of all ranks, the `total`; else each rank has its own images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.optional import optional
from mbc.ir.types import DType, TensorType
from mbc.ops.activation import sigmoid
from mbc.ops.activation_variants import softplus
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, NoAttributes, OpKind, ShapeError, master
from mbc.ops.bias import channel_sums
from mbc.ops.collective import over_all_ranks
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.loss import check_classes, log_softmax

LEAST = 1e-8  # least denominator of an index, as in nnU-Net, and least 1 - index of which a power is taken


@dataclass(frozen=True, slots=True)
class Dice(Attributes):
    """Settings of the loss, of its sums, and of the loss of these sums.

    Attributes:
        smooth: Number that is added to the numerator.
        ignored: Class numbers that are left out, at most one.
        below: Number that is added to the denominator; empty: `smooth`.
        first: First class that has an index.
        shares: Factors of p and t in the sum that is the denominator.
        squared: Whether the denominator has the squares of p and t.
        sigmoid: Whether p is the sigmoid of the logits, and the target is a tensor like the logits.
        batch: Whether a class has one index over all images.
        power: Power of 1 - index.
        entropy: Weight of the cross entropy.
        focus: Power of 1 - p (of p, where t is 0) with which a cross entropy is multiplied.
        weights: Factors of the cross entropies of class 0 (of zeros) and of all other classes (of ones).
        share: Share of the global mini-batch that this rank has.
    """

    smooth: float
    ignored: tuple[int, ...]
    below: tuple[float, ...] = optional(())
    first: int = optional(0)
    shares: tuple[float, ...] = optional((1.0, 1.0))
    squared: bool = optional(False)
    sigmoid: bool = optional(False)
    batch: bool = optional(False)
    power: float = optional(1.0)
    entropy: float = optional(0.0)
    focus: float = optional(0.0)
    weights: tuple[float, ...] = optional((1.0, 1.0))
    share: float = optional(1.0)

    @property
    def has_total(self) -> bool:
        """True if the loss needs the sums over all images of all ranks."""
        return self.batch or self.entropy != 0.0

    @property
    def added_below(self) -> float:
        """Number that is added to the denominator."""
        return sum(self.below or (self.smooth,))

    @property
    def missing(self) -> float:
        """Factor of the sum of p t in the denominator."""
        return 2.0 - sum(self.shares)

    def columns(self, classes: int) -> int:
        """Return the number of sums of a kind: one for each class with an index, and one of the cross entropies."""
        return max(0, classes - self.first) + (self.entropy != 0.0)


@dataclass(frozen=True, slots=True)
class DiceMeanBackward(Dice):
    """Settings of the gradient of the sums; `weight` is that of this loss in the total."""

    weight: float = 1.0

    @staticmethod
    def of(a: Dice, weight: float) -> DiceMeanBackward:
        """Return the settings of the gradient of a loss with this weight in the total."""
        return DiceMeanBackward(*(getattr(a, field.name) for field in fields(Dice)), weight=weight)


def _check_target(a: Dice, logits: TensorType, target: TensorType) -> None:
    if not a.sigmoid:
        check_classes(logits, target)
    elif target != logits or len(logits.shape) < 2 or target.dtype is DType.INT32:
        raise ShapeError(f"sigmoid=true needs a target of floats like the logits {logits}, but the target is {target}")
    if not a.columns(logits.shape[1]):
        raise ShapeError(f"background=false leaves none of the classes of {logits}")


def _shape(a: Dice, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    _check_target(a, *inputs)
    return (TensorType((1,), master(inputs[0].dtype)),)


def _sums_shape(a: Dice, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    _check_target(a, logits, target)
    rows, classes, *places = logits.shape
    return (TensorType((rows, 2 * a.columns(classes), *(1 for _ in places)), master(logits.dtype)),)


def _sums_backward_shape(a: Dice, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target, slopes = inputs
    if (slopes,) != _sums_shape(a, (logits, target)):
        raise ShapeError(f"a gradient for each sum of each image is needed, but they are {slopes}")
    return (logits,)


def _mean_shape(a: Dice, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    sums, *total = inputs
    rows, twice = (*sums.shape, 1, 1)[:2]
    if twice % 2 or sums.elements != rows * twice or sums.dtype is not master(sums.dtype):
        raise ShapeError(f"two sums for each class and image are needed, but they are {sums}")
    if total != [TensorType((twice,), sums.dtype)] * a.has_total:
        raise ShapeError(f"the sums {sums} of all images are needed as far as they are used, but got {total}")
    return (TensorType((1,), sums.dtype),)


def _mean_backward_shape(a: DiceMeanBackward, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    _mean_shape(a, inputs[:-1])
    control_shape(inputs[-1])
    return inputs[:1]


def overlaps(a: Dice, p: Any, t: Any, counts: Any) -> tuple[Any, Any]:
    """Return the two sums of each image and class with an index, [N, C], in NumPy, PyTorch or JAX.

    Args:
        a: The settings.
        p: Probabilities [N, C, positions].
        t: The target in the same shape.
        counts: 1 for each position that counts, else 0, [N, 1, positions].
    """
    p, t = p[:, a.first :], t[:, a.first :]
    size = a.shares[0] * p * p + a.shares[1] * t * t if a.squared else a.shares[0] * p + a.shares[1] * t
    return (p * t * counts).sum(2), (size * counts).sum(2)


def entropies(a: Dice, logs: tuple[Any, Any], t: Any, counts: Any) -> Any:
    """Return the sum of the cross entropies of each image, [N]; `logs` holds the logarithms of p and 1 - p."""
    log_p, log_q = logs
    first, others = a.weights
    ones = -t * log_p * counts * _focus(a, log_p)
    if not a.sigmoid:
        return ones[:, :1].sum((1, 2)) * first + ones[:, 1:].sum((1, 2)) * others
    zeros = (t - 1) * log_q * counts * _focus(a, log_q)
    return zeros.sum((1, 2)) * first + ones.sum((1, 2)) * others


def _focus(a: Dice, log_p: Any) -> Any:
    return (1 - np.e**log_p) ** a.focus if a.focus else 1


def combined(a: Dice, both: Any, size: Any, entropy: Any = 0.0, count: Any = 1.0) -> Any:
    """Return the loss of sums [images or 1, classes], and of the sum of `count` cross entropies."""
    loss = a.entropy * entropy / count if a.entropy else 0.0
    if both.shape[1]:
        losses = 1 - (2 * both + a.smooth) / (a.missing * both + size + a.added_below).clip(LEAST)
        loss = loss + (losses if a.power == 1 else losses.clip(LEAST) ** a.power).mean()
    return loss


def dice_loss(a: Dice, p: Any, logs: tuple[Any, Any], t: Any, counts: Any) -> Any:
    """Return the loss of all images, for arguments as in `overlaps` and `entropies`."""
    sums = overlaps(a, p, t, counts)
    both, size = (x.sum(0)[None] for x in sums) if a.batch else sums
    if not a.entropy:
        return combined(a, both, size)
    return combined(a, both, size, entropies(a, logs, t, counts).sum(), counts.sum() * (p.shape[1] if a.sigmoid else 1))


def _positions(a: Dice, logits: Array, target: Array) -> tuple[Array, Array, tuple[Array, Array], Array, Array]:
    """Return p, 1 - p, the logarithms of both and the target, [N, C, positions], and counts [N, 1, positions].

    Counts are 1, 0 where the class is left out, and NaN where the target is no class.
    """
    x = logits.astype(np.float64).reshape(*logits.shape[:2], -1)
    if a.sigmoid:
        t = target.astype(np.float64).reshape(x.shape)
        return sigmoid(x), sigmoid(-x), (-softplus(-x), -softplus(x)), t, np.ones_like(x[:, :1])
    labels = target.reshape(len(x), 1, -1)
    counts = np.where((labels >= 0) & (labels < x.shape[1]), 1.0, np.nan)
    counts[np.isin(labels, a.ignored)] = 0
    hot: Array = labels == np.array(range(x.shape[1]))[:, None]
    logs = log_softmax(x)
    return np.exp(logs), -np.expm1(logs), (logs, x), hot.astype(np.float64), counts


def _sums(a: Dice, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target = inputs
    p, _, logs, t, counts = _positions(a, logits, target)
    sums: list[Array] = list(overlaps(a, p, t, counts))
    if a.entropy:
        count = counts.sum(2) * (logits.shape[1] if a.sigmoid else 1)
        more = entropies(a, logs, t, counts)[:, None], count
        sums = [np.append(*pair, axis=1) for pair in zip(sums, more, strict=True)]
    return (np.append(*sums, axis=1).reshape(call.outputs[0].with_rows(len(logits)).shape).astype(logits.dtype),)


def _sums_backward(a: Dice, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target, slopes = inputs
    p, q, logs, t, counts = _positions(a, logits, target)
    of_both, of_sizes = np.split(slopes.astype(np.float64).reshape(len(slopes), -1, 1), 2, axis=1)
    last = max(0, logits.shape[1] - a.first)  # the column of the cross entropies
    by_p, slope = np.zeros_like(p), 2 * p[:, a.first :] if a.squared else 1
    by_p[:, a.first :] = of_both[:, :last] * t[:, a.first :] + of_sizes[:, :last] * a.shares[0] * slope
    gradient = p * q * by_p if a.sigmoid else p * (by_p - (p * by_p).sum(axis=1, keepdims=True))
    if a.entropy:
        gradient += of_both[:, last:] * _entropy_slope(a, p, q, logs, t)
    return (np.where(counts == 1, gradient, 0).reshape(logits.shape).astype(logits.dtype),)


def _entropy_slope(a: Dice, p: Array, q: Array, logs: tuple[Array, Array], t: Array) -> Array:
    """Return the derivative of the cross entropies by the logits."""
    first, others = a.weights
    if a.sigmoid:
        ones, zeros = (b**a.focus * (b - a.focus * c * log) for b, c, log in ((q, p, logs[0]), (p, q, logs[1])))
        return first * (1 - t) * zeros - others * t * ones
    own_p, own_q, log = ((x * t).sum(axis=1, keepdims=True) for x in (p, q, logs[0]))
    focused = own_q**a.focus - (a.focus * own_p * log * own_q ** (a.focus - 1) if a.focus else 0)
    return (first * t[:, :1] + others * t[:, 1:].sum(1, keepdims=True)) * focused * np.where(t == 1, -q, p)


def _halves(a: Dice, sums: Array, total: Sequence[Array]) -> tuple[Array, Array]:
    """Return the two sums of each class, [images or 1, classes], of which the indices are computed."""
    of = (total[0] if a.batch else sums).astype(np.float64).reshape(-1, 2, sums.shape[1] // 2)
    both, sizes = of[:, :, : of.shape[2] - (a.entropy != 0)].swapaxes(0, 1)
    return both, sizes


def _mean(a: Dice, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    sums, *total = inputs
    ends = total[0].astype(np.float64).reshape(2, -1)[:, -1] if total else ()
    with np.errstate(invalid="ignore", divide="ignore"):  # where no position counts
        return (np.array([combined(a, *_halves(a, sums, total), *ends)], sums.dtype),)


def sums_of_part(a: Dice, sums: Array) -> Array:
    """Return the sums over some images, the sum of the losses of their indices, and their number."""
    own = combined(replace(a, entropy=0.0), *_halves(replace(a, batch=False), sums, ()))
    return np.array([*channel_sums(sums), own * len(sums), len(sums)])


def loss_of_parts(a: Dice, parts: Array) -> float:
    """Return the loss of all images from the sum of the results of `sums_of_part`."""
    total, own, rows = parts[:-2], *parts[-2:]
    ends = total.reshape(2, -1)[:, -1] if a.entropy else ()
    if a.batch:
        return float(combined(a, *_halves(a, total[None], (total,)), *ends))
    return float(own / rows + combined(a, np.zeros((1, 0)), total, *ends))


def _mean_backward(a: DiceMeanBackward, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    sums, *total, control = inputs
    both, sizes = _halves(a, sums, total)
    factor = a.weight * float(control_record(control)["loss_scale"])
    below = a.missing * both + sizes + a.added_below
    inside, below = below > LEAST, below.clip(LEAST)
    index = (2 * both + a.smooth) / below
    outer = (
        -1.0 if a.power == 1 else np.where(index < 1 - LEAST, -a.power * (1 - index).clip(LEAST) ** (a.power - 1), 0)
    )
    outer = outer * factor / max(1, both.size) / (a.share if a.batch else 1)
    gradient = np.zeros((len(sums), 2, sums.shape[1] // 2))
    gradient[:, 0, : both.shape[1]] = outer * (2 - inside * a.missing * index) / below
    gradient[:, 1, : both.shape[1]] = -outer * inside * index / below
    if a.entropy:
        with np.errstate(invalid="ignore", divide="ignore"):
            gradient[:, 0, -1] = factor * a.entropy / (float(total[0][-1]) * a.share)
    return (gradient.reshape(sums.shape).astype(sums.dtype),)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a, loss = op.attributes, op.outputs[0]
    assert isinstance(a, Dice)
    sums = e.emit("dice_sums", a, op.inputs, (f"{loss}.sums",), f"{op.name}.sums")
    if a.has_total:
        sums += (over_all_ranks(e, "channel_sum", NoAttributes(), sums, f"{loss}.total"),)
        a = replace(a, share=1.0 if e.ranks is None else e.ranks.share)
    return e.emit("dice_mean", a, sums, op.outputs, op.name)


def _sums_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    logits, target = op.inputs
    if not g.needs(logits):
        return None, None
    return g.emit("dice_sums_backward", op.attributes, (logits, target, dy), logits)[0], None


def _mean_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a, (sums, *total) = op.attributes, op.inputs
    assert isinstance(a, Dice)
    none = (None,) * len(total)
    if not g.needs(sums):
        return (None, *none)
    backward = DiceMeanBackward.of(a, g.weight(op.outputs[0]))
    return (*g.emit("dice_mean_backward", backward, (sums, *total, dy), sums), *none)


OPS = (
    OpKind("dice", Dice, _shape, expand=_expand, reduces=True, loss=True),
    OpKind("dice_sums", Dice, _sums_shape, _sums, _sums_gradient, divisible=True, labelled=True, probabilities=(1,)),
    OpKind("dice_sums_backward", Dice, _sums_backward_shape, _sums_backward, divisible=True, probabilities=(1,)),
    OpKind("dice_mean", Dice, _mean_shape, _mean, _mean_gradient, reduces=True, loss=True),
    OpKind("dice_mean_backward", DiceMeanBackward, _mean_backward_shape, _mean_backward),
)

LAYERS: tuple[Layer, ...] = ()  # in `segmentation_loss`
