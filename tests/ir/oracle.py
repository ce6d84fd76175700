"""An independent reference: a Network in PyTorch, float64, differentiated by PyTorch. Shares no formula with mbc."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mbc.ir.graph import Network, Role
from mbc.ops.augment import Augment, View, centre, views
from mbc.ops.random import Dropout, dropout_keep

torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
F = torch.nn.functional


def run(
    network: Network, start: Mapping[str, np.ndarray], seed: int = 0, step: int = 0, training: bool = True
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """All values, and the gradient of the total loss for every parameter."""
    env: dict[str, Any] = {}
    for name, value in network.values.items():
        if value.role is not Role.INTERMEDIATE:
            array = start[name]
            dtype = {"i": torch.int64, "u": torch.uint8}.get(array.dtype.kind, torch.float64)
            tensor = torch.tensor(array, dtype=dtype)
            env[name] = tensor.requires_grad_(value.role is Role.PARAMETER)
    for op in network.operations:
        inputs = [env[v] for v in op.inputs]
        if isinstance(op.attributes, Dropout):
            keep = np.ones(inputs[0].shape)
            if training and op.attributes.probability:
                keyed = replace(op.attributes, key=zlib.crc32(op.name.encode()))
                keep = dropout_keep(keyed, inputs[0].shape, 0, seed, step) / (1 - keyed.probability)
            results = inputs[0] * torch.tensor(np.asarray(keep, np.float64))
        elif isinstance(op.attributes, Augment):
            keyed = replace(op.attributes, key=zlib.crc32(op.name.encode()))
            drawn = training and keyed.draws
            seen = views(keyed, network.batch, 0, seed, step) if drawn else [centre(keyed)] * network.batch
            results = torch.stack([augmented(keyed, image, view) for image, view in zip(inputs[0], seen, strict=True)])
        elif op.kind == "batch_norm":
            results = batch_norm(op.attributes, training, *inputs)
        else:
            results = MEANING[op.kind](op.attributes, *inputs)
        results = results if isinstance(results, tuple) else (results,)
        env.update(zip(op.outputs, results, strict=True))
    total = sum(weight * env[loss].sum() for loss, weight in network.losses)
    names = [n for n, v in network.values.items() if v.role is Role.PARAMETER]
    gradients = torch.autograd.grad(total, [env[n] for n in names], allow_unused=True)
    by_name = {n: g.numpy() for n, g in zip(names, gradients, strict=True) if g is not None}
    return {n: v.detach().numpy() for n, v in env.items()}, by_name


def augmented(a: Augment, image: Any, view: View) -> Any:
    """Return the view of one image, computed by PyTorch's functions for images."""
    pixels = (image.permute(2, 0, 1) if a.channels_last else image).double() / 255
    wide = F.pad(pixels, (8, 8, 8, 8))
    box = wide[:, 8 + view.top : 8 + view.top + view.height, 8 + view.left : 8 + view.left + view.width]
    if a.scale:
        box = F.interpolate(box[None], a.crop, mode="bilinear", align_corners=False)[0]
    box = box.flip(2) if view.mirrored else box
    if a.jitters:
        box = 0.5 + (box * view.brightness - 0.5) * view.contrast
        if len(box) == 3:
            luma = torch.einsum("c,chw->hw", torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64), box)
            box = torch.lerp(luma.expand_as(box), box, view.saturation)
        box = box.clamp(0, 1)
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (a.mean, a.std))
    return (box - mean) / std


def batch_norm(a: Any, training: bool, x: Any, *states: Any) -> Any:
    weight, bias = states[:2] if a.affine else (None, None)
    return F.batch_norm(x, states[-2], states[-1], weight, bias, training, a.momentum, a.eps)


def pad(x: Any, pads: tuple[int, ...], value: float = 0.0) -> Any:
    top, bottom, left, right = pads
    return F.pad(x, (left, right, top, bottom), value=value)


def convolution(a: Any, x: Any, w: Any) -> Any:
    return F.conv2d(pad(x, a.pad), w, None, a.stride, 0, a.dilation, a.groups)


def transposed(a: Any, x: Any, w: Any) -> Any:
    top, bottom, left, right = a.pad
    full = F.conv_transpose2d(x, w, None, a.stride, 0, 0, a.groups, a.dilation)
    height, width = top + a.size[0] + bottom, left + a.size[1] + right
    full = F.pad(full, (0, width - full.shape[3], 0, height - full.shape[2]))
    return full[:, :, top : top + a.size[0], left : left + a.size[1]]


def max_pool(a: Any, x: Any) -> Any:
    wide = pad(pad(x, a.pad, -torch.inf), (0, a.kernel[0], 0, a.kernel[1]), -torch.inf)
    p, q = a.output_size
    return F.max_pool2d(wide, a.kernel, a.stride)[:, :, :p, :q]


def average_pool(a: Any, x: Any) -> Any:
    p, q = a.output_size

    def sums(t: Any) -> Any:
        wide = pad(t, (0, a.kernel[0], 0, a.kernel[1]))
        return F.avg_pool2d(wide, a.kernel, a.stride, divisor_override=1)[:, :, :p, :q]

    ones = pad(torch.ones_like(x), a.pad, 1.0 if a.count_pad else 0.0)
    return sums(pad(x, a.pad)) / sums(ones)


def cross_entropy(a: Any, logits: Any, target: Any) -> Any:
    loss = F.cross_entropy(logits, target, label_smoothing=a.smoothing)
    return loss.reshape(1), (logits.argmax(1) == target).sum().reshape(1).to(logits.dtype)


def soft_cross_entropy(a: Any, logits: Any, target: Any) -> Any:
    loss = F.cross_entropy(logits, target, label_smoothing=a.smoothing)
    return loss.reshape(1), (logits.argmax(1) == target.argmax(1)).sum().reshape(1).to(logits.dtype)


def weighted_cross_entropy(a: Any, logits: Any, target: Any) -> Any:
    weights = torch.tensor(a.class_weights or (1.0,) * logits.shape[1], dtype=logits.dtype)
    ignored = a.ignored[0] if a.ignored else -100
    loss = F.cross_entropy(logits, target, weights, ignore_index=ignored, label_smoothing=a.smoothing)
    counts = target != ignored
    correct = ((logits.argmax(1) == target) & counts).sum() * target.numel() / counts.sum()
    return loss.reshape(1), correct.reshape(1).to(logits.dtype)


def kl_divergence(a: Any, logits: Any, target: Any) -> Any:
    total = F.kl_div(F.log_softmax(logits, 1), target, reduction="sum")
    return (total / (logits.numel() // logits.shape[1])).reshape(1)


def top_k(a: Any, logits: Any, target: Any) -> Any:
    hits = logits.topk(a.k, 1).indices == target.unsqueeze(1)
    return hits.any(1).to(logits.dtype).mean().reshape(1)


def counted_top_k(a: Any, logits: Any, target: Any) -> Any:
    right = (logits.topk(a.k, 1).indices == target.unsqueeze(1)).any(1)
    return right[target != a.ignored[0]].to(logits.dtype).mean().reshape(1)


def dice(a: Any, logits: Any, target: Any) -> Any:
    """Return MONAI's DiceLoss with softmax, without the ignored positions."""
    counts = torch.ones_like(target) if not a.ignored else (target != a.ignored[0]).to(target.dtype)
    hot = F.one_hot(target * counts, logits.shape[1]).movedim(-1, 1) * counts.unsqueeze(1)
    p = logits.softmax(1) * counts.unsqueeze(1)
    both, sizes = ((x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)).sum(2) for x in (p * hot, p + hot))
    return (1 - (2 * both + a.smooth) / (sizes + a.smooth)).mean().reshape(1)


def mean_iou(a: Any, logits: Any, target: Any) -> Any:
    counts = torch.ones_like(target, dtype=torch.bool) if not a.ignored else target != a.ignored[0]
    predicted, wanted = logits.argmax(1)[counts], target[counts]
    shares = [
        ((predicted == c) & (wanted == c)).sum().to(logits.dtype) / ((predicted == c) | (wanted == c)).sum()
        for c in range(logits.shape[1])
        if ((predicted == c) | (wanted == c)).any()
    ]
    return torch.stack(shares).to(logits.dtype).mean().reshape(1)


def bias_add(a: Any, y: Any, b: Any) -> Any:
    return y + b.reshape(1, -1, *(1,) * (y.ndim - 2))


def broadcast(a: Any, x: Any, y: Any) -> Any:
    if a.operator == "prelu":
        return F.prelu(x, y)
    x, y = (t.reshape(t.shape[0], *(1,) * (o.ndim - 1 - a.axis)) if t.ndim == 1 else t for t, o in ((x, y), (y, x)))
    if a.operator in ("rsub", "rdiv"):
        x, y = y, x
    return {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[a.operator.removeprefix("r")](x, y)


def select(a: Any, x: Any, y: Any) -> Any:
    x, y = (t.reshape(t.shape[0], *(1,) * (o.ndim - 1 - a.axis)) if t.ndim == 1 else t for t, o in ((x, y), (y, x)))
    if a.operator in ("maximum", "minimum"):
        return getattr(torch, a.operator)(x, y)
    x, y = (y, x) if a.operator[0] == "r" else (x, y)
    return x.masked_fill((y != 0) == a.operator.endswith("fill"), a.filled)


def relation(a: Any, x: Any, y: Any) -> Any:
    x, y = (t.reshape(t.shape[0], *(1,) * (o.ndim - 1 - a.axis)) if t.ndim == 1 else t for t, o in ((x, y), (y, x)))
    return getattr(torch, a.operator)(x, y).to(x.dtype)


def rearrange(a: Any, x: Any) -> Any:
    moved = x.reshape(len(x), *a.flat).permute(0, *(1 + i for i in a.order))
    return moved.reshape(len(x), *(math.prod(part) for part in a.permuted))


def strided_slice(a: Any, x: Any) -> Any:
    """Slices with steps, and zero padding: no network of the language spreads."""
    for axis, (start, step, count) in enumerate(zip(a.start, a.step, a.count, strict=True), 1):
        stop = start + (count - 1) * step + 1
        zeros = [0] * (2 * (x.ndim - axis))
        zeros[-2:] = [max(0, -start), max(0, stop - x.shape[axis])]
        x = F.pad(x, zeros)
        first = max(0, start)
        x = x.narrow(axis, first, stop - start)[(slice(None),) * axis + (slice(None, None, step),)]
    return x


def pad_outside(a: Any, x: Any) -> Any:
    pads = (a.before[2], a.after[2], a.before[1], a.after[1])
    return x.roll(a.before, (1, 2, 3)) if a.mode == "wrap" else F.pad(x, pads, mode=a.mode)


def reduce_sum(a: Any, x: Any) -> Any:
    mean = a.factor != 1.0
    return (x.mean(a.axes) if mean else x.sum(a.axes)).reshape(len(x), *a.shape)


def group_norm(a: Any, x: Any, weight: Any, bias: Any) -> Any:
    return torch.native_group_norm(x, weight, bias, len(x), x.shape[1], x[0, 0].numel(), a.groups, a.eps)


def standardize_filters(a: Any, w: Any, gain: Any = None) -> Any:
    """Return standardised filters, by a batch normalisation of one sample whose channels are the filters."""
    normal = F.batch_norm(w.reshape(1, len(w), -1), None, None, training=True, eps=a.eps).reshape(w.shape)
    kept = w.flatten(1)
    scale = a.factor if gain is None else a.factor * gain.reshape(-1, *(1,) * (w.ndim - 1))
    return normal * scale, kept.mean(1), 1 / torch.sqrt(kept.var(1, correction=0) + a.eps)


def layer_norm(a: Any, x: Any, weight: Any, bias: Any) -> Any:
    normalised = torch.native_layer_norm(x.movedim(1, -1), (x.shape[1],), weight, bias, a.eps)
    return tuple(part.movedim(-1, 1) for part in normalised)


def attention(a: Any, *operands: Any) -> Any:
    """Return attention, computed by einsum for each head."""
    q, k, v = operands[0].chunk(3, 1) if a.packed else operands[:3]
    results, logs = [], []
    for head, parts in enumerate(zip(*(x.chunk(a.heads, 1) for x in (q, k, v)), strict=True)):
        scores = torch.einsum("nc...t,nc...s->n...ts", parts[0], parts[1]) * a.scale
        if len(operands) > a.operands:
            bias = operands[a.operands]
            bias = bias[head % bias.shape[0], 0]
            bias = bias.expand(scores[0].reshape(-1, *scores.shape[-2:]).shape)
            scores = scores + bias.reshape(scores.shape[1:])
        if a.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        results.append(torch.einsum("n...ts,nc...s->nc...t", scores.softmax(-1), parts[2]))
        logs.append(scores.logsumexp(-1))
    return torch.cat(results, 1), torch.stack(logs, 1).unsqueeze(1)


def window_bias(a: Any, table: Any) -> Any:
    """Pair by pair of pixels."""
    (h, w), (down, across) = a.window, a.grid
    mask = table.new_zeros(table.shape[1], 1, down * across, h * w, h * w)
    for window, query, key in itertools.product(range(down * across), range(h * w), range(h * w)):
        (top, left), (y, x), (v, u) = divmod(window, across), divmod(query, w), divmod(key, w)
        # Where each pixel was before the shift: across the edge of the image is no neighbour.
        apart = 0.0
        for side, count, shift, first, p, q in ((h, down, a.shift[0], top, y, v), (w, across, a.shift[1], left, x, u)):
            wrapped = [first == count - 1 and at >= side - shift for at in (p, q)]
            apart = -100.0 if wrapped[0] != wrapped[1] else apart
        mask[:, 0, window, query, key] = table[(y - v + h - 1) * (2 * w - 1) + x - u + w - 1] + apart
    return mask


MEANING: dict[str, Callable[..., Any]] = {
    "convolution": convolution,
    "convolution_backward_data": transposed,
    "bias_add": bias_add,
    "linear": lambda a, x, w: F.linear(x.flatten(1), w),
    "matmul": lambda a, x, y: (x.mT if a.transpose_a else x) @ (y.mT if a.transpose_b else y),
    "relu": lambda a, x: F.relu(x),
    "leaky_relu": lambda a, x: F.leaky_relu(x, a.slope),
    "sigmoid": lambda a, x: torch.sigmoid(x),
    "tanh": lambda a, x: torch.tanh(x),
    "silu": lambda a, x: F.silu(x),
    "sqrt": lambda a, x: torch.sqrt(x),
    "abs": lambda a, x: torch.abs(x),
    "exp": lambda a, x: torch.exp(x),
    "log": lambda a, x: torch.log(x),
    "pow": lambda a, x: x**a.exponent,
    "gelu_tanh": lambda a, x: F.gelu(x, approximate="tanh"),
    "softmax": lambda a, x: x.softmax(a.axis),
    "log_softmax": lambda a, x: x.log_softmax(a.axis),
    "amax": lambda a, x: x.amax(a.axes).reshape(len(x), *a.shape),
    "gelu": lambda a, x: F.gelu(x),
    "relu6": lambda a, x: F.relu6(x),
    "hardsigmoid": lambda a, x: F.relu6(x + 3) / 6,  # F.hardsigmoid divides gradients by 6 in fp32
    "hardswish": lambda a, x: F.hardswish(x),
    "elu": lambda a, x: F.elu(x, a.alpha),
    "mish": lambda a, x: F.mish(x),
    "softplus": lambda a, x: F.softplus(x),
    "add": lambda a, x, y: x + y,
    "mul": lambda a, x, y: x * y,
    "broadcast_add": lambda a, x, gate: x + gate,
    "broadcast_mul": lambda a, x, gate: x * gate,
    "broadcast": broadcast,
    "select": select,
    "relation": relation,
    "clamp": lambda a, x: F.hardtanh(x, *a.bounds) if a.strict else torch.clamp(x, *a.bounds),
    "indicator": lambda a, x: getattr(torch, a.operator)(x, a.value).to(x.dtype),
    "detach": lambda a, x: x.detach(),
    "rearrange": rearrange,
    "strided_slice": strided_slice,
    "pad": pad_outside,
    "split": lambda a, x: torch.split(x, a.sizes, 1),
    "state": lambda a, x: x,
    "reduce_sum": reduce_sum,
    "scale": lambda a, x: a.factor * x + a.offset,
    "max_pool": max_pool,
    "avg_pool": average_pool,
    "adaptive_avg_pool": lambda a, x: F.adaptive_avg_pool2d(x, a.output_size),
    "adaptive_max_pool": lambda a, x: F.adaptive_max_pool2d(x, a.output_size),
    "lrn": lambda a, x: F.local_response_norm(x, a.size, a.alpha, a.beta, a.k),
    "upsample": lambda a, x: x.repeat_interleave(a.factor[0], 2).repeat_interleave(a.factor[1], 3),
    "resize": lambda a, x: F.interpolate(x, a.output_size, mode="bilinear" if a.bilinear else "nearest"),
    "group_norm": group_norm,
    "standardize_filters": standardize_filters,
    "layer_norm": layer_norm,
    "attention": attention,
    "window_bias": window_bias,
    "concat": lambda a, *xs: torch.cat(xs, 1),
    "flatten": lambda a, x: x.reshape(len(x), -1),
    "unflatten": lambda a, x: x.reshape(len(x), *a.sample_shape),
    "softmax_cross_entropy": cross_entropy,
    "soft_target_cross_entropy": soft_cross_entropy,
    "weighted_cross_entropy": weighted_cross_entropy,
    "top_k": top_k,
    "counted_top_k": counted_top_k,
    "dice": dice,
    "mean_iou": mean_iou,
    "mse": lambda a, x, y: F.mse_loss(x, y).reshape(1),
    "kl_divergence": kl_divergence,
    "l1": lambda a, x, y: F.l1_loss(x, y).reshape(1),
    "smooth_l1": lambda a, x, y: F.smooth_l1_loss(x, y, beta=a.beta).reshape(1),
    "probability_cross_entropy": lambda a, x, y: F.binary_cross_entropy(x, y).reshape(1),
    "binary_cross_entropy": lambda a, x, y: F.binary_cross_entropy_with_logits(
        x, y, pos_weight=torch.tensor(a.pos_weight, dtype=x.dtype)
    ).reshape(1),
}
