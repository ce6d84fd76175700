"""The meaning of operations on PyTorch's tensors, in the canonical order of the interpreter's arrays.

This file is imported only if PyTorch is installed; tests compare each form with the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mbc.equivalence.torch_attention import attention, attention_backward, attention_backward_bias, window_bias_backward
from mbc.equivalence.torch_convolutions import Tensor, convolution, convolution_data, convolution_filter, torch
from mbc.equivalence.torch_functions import FUNCTIONS
from mbc.equivalence.torch_image_forms import IMAGE_FORMS, Form
from mbc.ops import KINDS, POINTWISE
from mbc.ops.base import Call
from mbc.ops.batch_normalize import BatchNormalize, BatchNormalizeBackward
from mbc.ops.pooling import MaxPool, Pool, first_positions
from mbc.ops.relu_mask import CHANNELS


def _sums(x: Tensor) -> Tensor:
    """Return the sums over all axes but axis 1."""
    return x.sum(dim=(0, *range(2, x.ndim)))


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    """Return the vector reshaped so that it broadcasts along the channels of x."""
    return vector.reshape((1, -1) + (1,) * (x.ndim - 2))


def _statistics(a: Any, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    (x,) = inputs
    count = x.numel() // x.shape[1]
    mean = _sums(x) / count
    return mean, _sums((x - _per_channel(mean, x)) ** 2) / count


def _normalize(a: BatchNormalize, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, mean, variance, *affine = inputs
    scale = (variance + a.eps).rsqrt()
    if affine:
        scale = scale * affine[0]
    y = (x - _per_channel(mean, x)) * _per_channel(scale, x)
    return (y + _per_channel(affine[1], x) if affine else y,)


def _normalize_sums(a: BatchNormalize, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, dy, mean, variance = inputs
    return _sums(dy * (x - _per_channel(mean, x))) * (variance + a.eps).rsqrt(), _sums(dy)


def _normalize_backward(a: BatchNormalizeBackward, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, dy, mean, variance, dgamma, dbeta, *gamma = inputs
    inverse = (variance + a.eps).rsqrt()
    slope, shift = inverse * dgamma / a.count, dbeta / a.count
    scale = inverse * gamma[0] if gamma else inverse
    return (
        (dy - _per_channel(shift, x) - (x - _per_channel(mean, x)) * _per_channel(slope, x)) * _per_channel(scale, x),
    )


def _normalize_backward_frozen(a: BatchNormalize, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    dy, variance, *gamma = inputs
    scale = (variance + a.eps).rsqrt() * (gamma[0] if gamma else 1.0)
    return (dy * _per_channel(scale, dy),)


def _by_sample(form: Form) -> Form:
    """Return a form of batch normalisation with the channels of each sample as channels of their own."""

    def rule(a: Any, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
        x = inputs[0]
        count = len(x) * x.shape[1]
        tall = [
            v.reshape(1, count, *x.shape[2:]) if v.shape == x.shape else v.reshape(-1).repeat(count // v.numel())
            for v in inputs
        ]
        return tuple(y.reshape(t.shape) for y, t in zip(form(a, tall, call), call.outputs, strict=True))

    return rule


def _pack(y: Tensor) -> Tensor:
    rows, channels, *rest = y.shape
    bits = (y > 0).reshape(rows, channels // CHANNELS, CHANNELS, -1).to(torch.uint8)
    weights = (1 << torch.arange(CHANNELS, device=y.device)).to(torch.uint8).reshape(1, 1, -1, 1)
    return (bits * weights).sum(2, dtype=torch.uint8).reshape(rows, channels // CHANNELS, *rest)


def _let_through(dy: Tensor, signs: Tensor) -> Tensor:
    rows, groups = signs.shape[:2]
    shifts = torch.arange(CHANNELS, device=dy.device, dtype=torch.uint8).reshape(1, 1, -1, 1)
    bits = (signs.reshape(rows, groups, 1, -1) >> shifts) & 1
    return torch.where(bits.reshape(dy.shape) > 0, dy, 0.0)


def padded(a: Pool, x: Tensor, fill: float) -> Tensor:
    """Return images with the padding that their windows reach."""
    image = x.new_full((*x.shape[:2], *a.covered), fill)
    image[a.inside] = x
    return image


def _max_pool(a: MaxPool, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    image = padded(a, inputs[0], -math.inf)
    best = torch.full((*image.shape[:2], *a.output_size), -math.inf, dtype=image.dtype, device=image.device)
    first = torch.as_tensor(first_positions(a), device=image.device).to(torch.uint8)
    index = first.expand(best.shape).clone()
    for position, at in a.positions():
        seen = image[at]
        better = ~(seen <= best) & (~torch.isnan(best) | torch.isnan(seen))
        best = torch.where(better, seen, best)
        index = torch.where(better, position, index)
    return (best, index) if a.index else (best,)


def _max_pool_backward(a: MaxPool, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    index, dy = inputs
    padded = torch.zeros((*dy.shape[:2], *a.covered), dtype=dy.dtype, device=dy.device)
    for position, at in a.positions():
        padded[at] += torch.where(index == position, dy, 0.0)
    return (padded[a.inside].contiguous(),)


def _unary(rule: Callable[[Any, Tensor], Tensor]) -> Form:
    return lambda a, inputs, call: (rule(a, inputs[0]),)


def _binary(rule: Callable[[Any, Tensor, Tensor], Tensor]) -> Form:
    return lambda a, inputs, call: (rule(a, inputs[0], inputs[1]),)


FORMS: dict[str, Form] = {
    **IMAGE_FORMS,
    "convolution": convolution,
    "convolution_backward_data": convolution_data,
    "convolution_backward_filter": convolution_filter,
    "linear_backward_data": _binary(lambda a, dy, w: (dy @ w).reshape(dy.shape[0], *a.sample_shape)),
    "linear_backward_filter": _binary(lambda a, x, dy: dy.T @ x.flatten(1)),
    "window_bias_backward": window_bias_backward,
    "attention": attention,
    "attention_backward": attention_backward,
    "attention_backward_bias": attention_backward_bias,
    "channel_sum": _unary(lambda a, dy: _sums(dy)),
    "batch_statistics": _statistics,
    "batch_normalize": _normalize,
    "batch_normalize_backward_reduce": _normalize_sums,
    "batch_normalize_backward": _normalize_backward,
    "batch_normalize_backward_frozen": _normalize_backward_frozen,
    "instance_statistics": _by_sample(_statistics),
    "instance_normalize": _by_sample(_normalize),
    "instance_normalize_backward_reduce": _by_sample(_normalize_sums),
    "instance_normalize_backward": _by_sample(_normalize_backward),
    "relu_backward": _binary(lambda a, y, dy: torch.where(y > 0, dy, 0.0)),
    "leaky_relu_backward": _binary(lambda a, y, dy: torch.where(y > 0, dy, dy * a.slope)),
    "sigmoid_backward": _binary(lambda a, y, dy: dy * y * (1 - y)),
    "tanh_backward": _binary(lambda a, y, dy: dy * (1 - y * y)),
    "relu6_backward": _binary(lambda a, y, dy: torch.where((y > 0) & (y < 6), dy, 0.0)),
    "elu_backward": _binary(lambda a, y, dy: torch.where(y > 0, dy, dy * (y + a.alpha))),
    "sqrt_backward": _binary(lambda a, y, dy: dy / (2 * y)),
    "exp_backward": _binary(lambda a, y, dy: dy * y),
    "softplus_backward": _binary(lambda a, y, dy: dy * -torch.expm1(-y)),
    "relu_mask": _unary(lambda a, y: _pack(y)),
    "relu_backward_masked": _binary(lambda a, dy, signs: _let_through(dy, signs)),
    "max_pool": _max_pool,
    "max_pool_backward": _max_pool_backward,
    "channel_slice": _unary(lambda a, x: x[:, a.start : a.start + a.count].clone()),
}


# Operations whose gradients are autograd's, as those of all functions of `POINTWISE` that read their input.
_DERIVED = frozenset(("adaptive_avg_pool", "avg_pool", "lrn", "resize", "upsample"))


@cache
def form_of(kind: str) -> Form | None:
    """Return the form of a kind, by the PyTorch function of its only output or by autograd; None: NumPy computes it."""
    function = FUNCTIONS.get(kind)
    if kind not in FORMS and function is not None and KINDS[kind].divisible:
        return lambda a, inputs, call: _results(function(a, *inputs), call)
    base = kind.removesuffix("_backward")
    if kind not in FORMS and base != kind and (base in _DERIVED or _reads_input(base)):
        return _derivative(FUNCTIONS[base])
    return FORMS.get(kind)


def _reads_input(name: str) -> bool:
    """Return whether the gradient of a function that PyTorch has reads the input rather than the output."""
    return name in POINTWISE and name in FUNCTIONS and not POINTWISE[name].of_output


def _results(result: Any, call: Call) -> Sequence[Tensor]:
    return result if len(call.outputs) > 1 else (result,)


def _derivative(function: Callable[..., Tensor]) -> Form:
    """Return the gradient of a function's input, for the input, unless the function is linear, and dy."""

    def form(a: Any, inputs: Sequence[Tensor], call: Call) -> Sequence[Tensor]:
        *read, dy = inputs
        x = read[0] if read else dy.new_zeros(call.outputs[0].shape)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(function(a, leaf), leaf, dy)

    return form
