"""The operations of a network as PyTorch's functions: calls from their declarations, and code for all others.

This file is imported only if PyTorch is installed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mbc.ops import KINDS
from mbc.ops.dice import dice_loss
from mbc.ops.framework_calls import Calls, function_of
from mbc.ops.rearrange import WRAP
from mbc.ops.resize import CUBIC, EXACT
from mbc.ops.window_bias import MASKED

torch: Any = importlib.import_module("torch")
F: Any = importlib.import_module("torch.nn.functional")

Tensor = Any  # PyTorch is not there when types are checked
_LINEAR = ("", "linear", "bilinear", "trilinear")  # by the number of spatial axes


def _of_rank(name: str, x: Tensor) -> Any:
    """Return the function for as many spatial axes as an image has."""
    return getattr(F, f"{name}{x.ndim - 2}d")


def _padded(x: Tensor, pad: Sequence[int], value: float = 0.0) -> Tensor:
    return F.pad(x, _last_first(pad), value=value) if any(pad) else x


def _last_first(pad: Sequence[int]) -> list[int]:
    """Return the padding of each axis in PyTorch's order, which begins with the last axis."""
    return [side for axis in range(len(pad) - 2, -1, -2) for side in pad[axis : axis + 2]]


def _convolution(a: Any, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    own = a.before if a.is_padded_evenly else 0
    x = x if a.is_padded_evenly else _padded(x, a.pad)
    return _of_rank("conv", x)(x, w, bias, a.stride, own, a.dilation, a.groups)


def _transposed(a: Any, x: Tensor, w: Tensor) -> Tensor:
    """Compute the image side with its padding, and cut the padding off."""
    whole = _of_rank("conv_transpose", x)(x, w, None, a.stride, 0, 0, a.groups, a.dilation)
    ends = map(sum, zip(a.before, a.size, a.after, strict=True))
    # Pixels that no window reached are zero.
    missing = (max(0, end - size) for end, size in zip(ends, whole.shape[2:], strict=True))
    return _padded(whole, [side for behind in missing for side in (0, behind)])[a.inside]


def _max_pool(a: Any, x: Tensor) -> Tensor:
    pool = _of_rank("max_pool", x)
    if _pads_itself(a):
        return pool(x, a.kernel, a.stride, a.before, a.spacing)
    return _whole(a, pool(_padded(x, _reach(a), float("-inf")), a.kernel, a.stride, 0, a.spacing))


def _pads_itself(a: Any) -> bool:
    """Return whether PyTorch's pooling takes the padding."""
    return not a.ceil and a.is_padded_evenly and all(2 * n <= k for n, k in zip(a.before, a.kernel, strict=True))


def _whole(a: Any, y: Tensor) -> Tensor:
    """Return the windows of the output, without those that begin in padding."""
    return y[(..., *map(slice, a.output_size))]


def _reach(a: Any) -> list[int]:
    """Return padding with which every window of the output is complete."""
    sides = zip(a.before, a.after, a.covered, a.size, strict=True)
    return [n for before, after, covered, size in sides for n in (before, max(after, covered - before - size))]


def _avg_pool(a: Any, x: Tensor) -> Tensor:
    pool = _of_rank("avg_pool", x)
    if a.count_pad and _pads_itself(a):
        return pool(x, a.kernel, a.stride, a.before)
    reach, inside = _reach(a), torch.ones_like(x[:1, :1])
    total = _whole(a, pool(_padded(x, reach), a.kernel, a.stride))
    if a.count_pad:
        # Padding counts, but not what ceil mode adds beyond it.
        inside = _padded(_padded(inside, a.pad, 1.0), [r - g for r, g in zip(reach, a.pad, strict=True)])
    else:
        inside = _padded(inside, reach)
    return total / _whole(a, pool(inside, a.kernel, a.stride))


def _upsample(a: Any, x: Tensor) -> Tensor:
    for axis, factor in enumerate(a.factor, 2):
        x = x.repeat_interleave(factor, axis)
    return x


def _resize(a: Any, x: Tensor) -> Tensor:
    """Call what `F.interpolate` calls, which takes sizes and factors together."""
    rank = len(a.size)
    name = {EXACT: "_upsample_nearest_exact", CUBIC: "upsample_bicubic"}.get(a.method)
    name = name or f"upsample_{_LINEAR[rank] if a.bilinear else 'nearest'}"
    factors = [after / before for before, after in zip(a.scale[::2], a.scale[1::2], strict=True)] or [None] * rank
    corners = [a.corners] if a.pixels > 1 else []
    return getattr(torch.ops.aten, f"{name}{rank}d")(x, a.output_size, *corners, *factors)


def wide(x: Tensor) -> Tensor:
    """Return a tensor in the type in which losses are computed."""
    return x if x.dtype == torch.float64 else x.float()


def _weighted_cross_entropy(a: Any, logits: Tensor, target: Tensor) -> Tensor:
    logits = wide(logits)
    # Filled on the device, class by class: a captured step must not copy from the host.
    weights = torch.ones(logits.shape[1], dtype=logits.dtype, device=logits.device)
    for number, weight in enumerate(a.class_weights):
        weights[number].fill_(weight)
    ignored = a.ignored[0] if a.ignored else -100
    return F.cross_entropy(logits, target, weights, ignore_index=ignored, label_smoothing=a.smoothing)


def _dice(a: Any, logits: Tensor, target: Tensor) -> Tensor:
    x = wide(logits).reshape(*logits.shape[:2], -1)
    if a.sigmoid:
        p, logs, t = x.sigmoid(), (F.logsigmoid(x), F.logsigmoid(-x)), wide(target).reshape(x.shape)
        counts = torch.ones_like(x[:, :1])
    else:
        labels, classes = target.reshape(len(x), 1, -1), torch.arange(x.shape[1], device=x.device).reshape(1, -1, 1)
        p, logs, t = x.softmax(1), (x.log_softmax(1), x), (labels == classes).to(x.dtype)
        counts = (labels != (a.ignored or (-1,))[0]).to(x.dtype)
    return dice_loss(a, p, logs, t, counts)


def _linear(a: Any, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.flatten(1), w, bias)


def _attention(a: Any, *operands: Tensor) -> Tensor:
    """[N, heads * D, ..., T] as [N * groups, heads, T, D], which torch's fused kernels take."""

    def headed(x: Tensor) -> Tensor:
        n, channels, *size = x.shape
        return x.reshape(n, a.heads, channels // a.heads, -1, size[-1]).permute(0, 3, 1, 4, 2).flatten(0, 1)

    q, k, v = (headed(x) for x in (operands[0].chunk(3, 1) if a.packed else operands[:3]))
    bias = None
    if len(operands) > a.operands:
        bias = operands[a.operands][:, 0].to(q.dtype).transpose(0, 1)
        bias = bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1) if bias.shape[0] > 1 else bias
    if a.causal and bias is not None:
        later = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
        bias = bias.masked_fill(later, float("-inf"))
    y = F.scaled_dot_product_attention(q, k, v, bias, is_causal=a.causal and bias is None, scale=a.scale)
    n, _, *size = operands[0].shape
    return y.unflatten(0, (n, -1)).permute(0, 2, 4, 1, 3).reshape(n, -1, *size)


def _window_bias(a: Any, table: Tensor) -> Tensor:
    numbers, mask = (torch.as_tensor(x, device=table.device) for x in (a.numbers(), a.mask()))
    return table[numbers].permute(2, 0, 1)[:, None, None] + MASKED * mask.to(table.dtype)


def _group_norm(a: Any, x: Tensor, *affine: Tensor) -> Tensor:
    return F.group_norm(x, a.groups, *(affine or (None, None)), a.eps)


def _layer_norm(a: Any, x: Tensor, *affine: Tensor) -> Tensor:
    return F.layer_norm(x.movedim(1, -1), (x.shape[1],), *(affine or (None, None)), a.eps).movedim(-1, 1)


def _standardize_filters(a: Any, w: Tensor, gain: Tensor | None = None) -> Tensor:
    scale = w.new_ones(len(w)) if gain is None else gain
    normal = F.batch_norm(w.reshape(1, len(w), -1), None, None, scale * a.factor, training=True, eps=a.eps)
    return normal.reshape(w.shape)


def _rearrange(a: Any, x: Tensor) -> Tensor:
    moved = x.reshape(len(x), *a.flat).permute(0, *(1 + i for i in a.order))
    return moved.reshape(len(x), *map(math.prod, a.permuted))


def _strided_slice(a: Any, x: Tensor) -> Tensor:
    """Slice without `spread`, which only backward passes use."""
    for axis, (start, step, count) in enumerate(zip(a.start, a.step, a.count, strict=True), 1):
        stop = start + (count - 1) * step + 1
        zeros = [0] * (2 * (x.ndim - axis))
        zeros[-2:] = [max(0, -start), max(0, stop - x.shape[axis])]
        x = F.pad(x, zeros, value=a.outside)
        first = max(0, start)
        x = x[(slice(None),) * axis + (slice(first, first + stop - start, step),)]
    return x


def _pad(a: Any, x: Tensor) -> Tensor:
    if a.rolls:
        return x.roll(a.before, tuple(range(1, x.ndim)))
    # The channels, which the language never pads, come first.
    sides = [side for pair in zip(a.before[1:], a.after[1:], strict=True) for side in pair]
    return F.pad(x, _last_first(sides), mode="circular" if a.mode == WRAP else a.mode)


def _broadcast(a: Any, x: Tensor, y: Tensor) -> Tensor:
    x, y = _aligned(a, x, y)
    if a.operator in ("prelu", "prelu_slope"):
        return torch.where(x > 0, x, x * y) if a.operator == "prelu" else torch.where(x > 0, 1.0, y)
    if a.operator in ("rsub", "rdiv"):
        x, y = y, x
    return {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[a.operator.removeprefix("r")](x, y)


_RELATIONS = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}


def _aligned(a: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands. A vector gets further axes, so that it is aligned with `axis` of the other operand."""
    first, second = (
        t.reshape(len(t), *(1,) * (other.ndim - 1 - a.axis)) if t.ndim == 1 else t for t, other in ((x, y), (y, x))
    )
    return first, second


def _select(a: Any, x: Tensor, y: Tensor) -> Tensor:
    x, y = _aligned(a, x, y)
    if a.operator in ("maximum", "minimum"):
        return (torch.maximum if a.operator == "maximum" else torch.minimum)(x, y)
    if a.operator.startswith("r"):
        x, y = y, x
    return torch.where(y == 0 if a.operator.endswith("fill") else y != 0, x, a.filled)


def _relation(a: Any, x: Tensor, y: Tensor) -> Tensor:
    x, y = _aligned(a, x, y)
    if a.operator.endswith("max_share"):
        x, y = (y, x) if a.operator.startswith("r") else (x, y)
        return torch.where(x == y, 0.5, torch.where(x < y, 0.0, 1.0)).to(x.dtype)
    return _RELATIONS[a.operator](x, y).to(x.dtype)


_OF_ONE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": lambda a, x: _of_rank("adaptive_avg_pool", x)(x, a.output_size),
    "adaptive_max_pool": lambda a, x: _of_rank("adaptive_max_pool", x)(x, a.output_size),
    "lrn": lambda a, x: F.local_response_norm(x, a.size, a.alpha, a.beta, a.k),
    "upsample": _upsample,
    "resize": _resize,
    "window_bias": _window_bias,
    "rearrange": _rearrange,
    "strided_slice": _strided_slice,
    "pad": _pad,
}
_OF_TWO: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "broadcast": _broadcast,
    "select": _select,
    "relation": _relation,
    "convolution_backward_data": _transposed,
    "weighted_cross_entropy": _weighted_cross_entropy,
    "dice": _dice,
}
_OF_THREE: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
}
_OF_ANY: dict[str, Callable[..., Tensor]] = {
    "convolution": _convolution,
    "linear": _linear,
    "standardize_filters": _standardize_filters,
    "attention": _attention,
}


def declared(calls: Calls) -> Callable[..., Tensor]:
    """Return the function of attributes and operands that a declaration names."""
    modules = {"torch": torch, "F": F, "getattr": getattr, "len": len, "wide": wide}
    call, exact = (function_of(text, modules) for text in (calls.torch, calls.exact or calls.torch))

    def function(a: Any, *operands: Tensor) -> Tensor:
        return (exact if operands[0].dtype == torch.float64 else call)(a, *operands)

    return function if calls.exact else call


# By kind; each takes the attributes and then the operands, and returns the first output. Batch norm and dropout have a
# state: they are not here.
FUNCTIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {name: declared(kind.calls) for name, kind in KINDS.items() if kind.calls.torch}
    | _OF_ONE
    | _OF_TWO
    | _OF_THREE
    | _OF_ANY
)
TAKES_BIAS = frozenset(("convolution", "linear"))  # as a last operand
