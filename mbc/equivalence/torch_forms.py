"""The meaning of operations on PyTorch's tensors, in the canonical order of the interpreter's arrays.

This file is imported only if PyTorch is installed; tests compare each form with the interpreter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from mbc.equivalence.torch_attention import (
    attention,
    attention_backward,
    attention_backward_bias,
    window_bias_backward,
)
from mbc.equivalence.torch_convolutions import (
    Tensor,
    convolution,
    convolution_data,
    convolution_filter,
    torch,
)
from mbc.equivalence.torch_functions import FUNCTIONS
from mbc.equivalence.torch_image_forms import IMAGE_FORMS, Form
from mbc.ops import KINDS, POINTWISE
from mbc.ops.base import Call
from mbc.ops.control_record import control_record
from mbc.ops.normalization import BatchNormalize, BatchNormalizeBackward
from mbc.ops.pooling import AveragePool, MaxPool, Pool, first_positions, window_divisors
from mbc.ops.relu_mask import CHANNELS
from mbc.ops.response import Lrn
from mbc.ops.update import AdamW, Ema, Sgd


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


def _average_pool(a: AveragePool, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    image = padded(a, inputs[0], 0.0)
    total = torch.zeros((*image.shape[:2], *a.output_size), dtype=image.dtype, device=image.device)
    for _, at in a.positions():
        total += image[at]
    return (total / torch.as_tensor(window_divisors(a), device=total.device),)


def _average_pool_backward(a: AveragePool, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    (dy,) = inputs
    share = dy / torch.as_tensor(window_divisors(a), device=dy.device)
    padded = torch.zeros((*dy.shape[:2], *a.covered), dtype=dy.dtype, device=dy.device)
    for _, at in a.positions():
        padded[at] += share
    return (padded[a.inside].contiguous(),)


def _window_sums(x: Tensor, before: int, after: int) -> Tensor:
    """Return the sum over channels c - before … c + after, for each channel c."""
    total, channels = x.clone(), x.shape[1]
    for shift in range(1, min(before, channels - 1) + 1):
        total[:, shift:] += x[:, :-shift]
    for shift in range(1, min(after, channels - 1) + 1):
        total[:, :-shift] += x[:, shift:]
    return total


def _lrn_divisor(a: Lrn, x: Tensor) -> Tensor:
    return a.k + a.alpha / a.size * _window_sums(x * x, a.size // 2, (a.size - 1) // 2)


def _lrn_backward(a: Lrn, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, dy = inputs
    d = _lrn_divisor(a, x)
    power = d**-a.beta
    shared = _window_sums(dy * x * power / d, (a.size - 1) // 2, a.size // 2)
    return (dy * power - 2 * a.alpha * a.beta / a.size * x * shared,)


def _upsample_backward(a: Any, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    blocks = itertools.chain(*zip(call.outputs[0].shape[2:], a.factor, strict=True))
    return (inputs[0].reshape(*inputs[0].shape[:2], *blocks).sum(dim=tuple(range(3, 3 + 2 * len(a.factor), 2))),)


def _guard(a: Any, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Return the control block by NumPy, given only the norm of all gradients, which is finite if they are."""
    control, loss, *gradients = inputs
    norm = sum(torch.linalg.vector_norm(gradient.double()) ** 2 for gradient in gradients) ** 0.5
    evaluate = KINDS["guard"].evaluate
    assert evaluate is not None
    loss_and_norm = [np.array([float(value)]) for value in (loss, norm)]
    (after,) = evaluate(a, [control.cpu().numpy(), *loss_and_norm], call)
    return (torch.from_numpy(after).to(control.device),)


def _unscaled(a: Sgd | AdamW, gradient: Tensor, record: Any) -> Tensor:
    unscaled = gradient / float(record["gradient_scale"])
    return unscaled.clamp(-a.clip_value, a.clip_value) if a.clip_value else unscaled


def _sgd(a: Sgd, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    parameter, gradient, control, *state = inputs
    record = control_record(control.cpu().numpy())
    if not record["proceed"]:
        return (parameter, *state)
    step = _unscaled(a, gradient, record) + a.weight_decay * parameter
    if state:
        state = [a.momentum * state[0] + step]
        step = step + a.momentum * state[0] if a.nesterov else state[0]
    return (parameter - float(record["learning_rate"]) * a.rate * step, *state)


def _accumulated(before: Tensor, value: Tensor, control: Tensor) -> Tensor:
    return before + value if control_record(control.cpu().numpy())["accumulated"] else value


def _by_numpy(kind: str) -> Callable[[Any, Sequence[Tensor], Call], tuple[Tensor, ...]]:
    """Return a form that NumPy computes: for control blocks, and for operations that are small in a step."""
    evaluate = KINDS[kind].evaluate
    assert evaluate is not None

    def form(a: Any, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
        results = evaluate(a, [x.cpu().numpy() for x in inputs], call)
        return tuple(torch.from_numpy(array).to(inputs[0].device) for array in results)

    return form


def _ema(a: Ema, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    average, value, control = inputs
    record = control_record(control.cpu().numpy())
    if not record["proceed"]:
        return (average,)
    return (value if record["updates"] <= 1 else a.decay * average + (1 - a.decay) * value,)


def _adamw(a: AdamW, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    parameter, gradient, control, m, v = inputs
    record = control_record(control.cpu().numpy())
    if not record["proceed"]:
        return parameter, m, v
    rate, count = float(record["learning_rate"]) * a.rate, int(record["updates"])
    g = _unscaled(a, gradient, record)
    m, v = a.beta1 * m + (1 - a.beta1) * g, a.beta2 * v + (1 - a.beta2) * g * g
    divisor = torch.sqrt(v / (1 - a.beta2**count)) + a.eps
    return (1 - rate * a.weight_decay) * parameter - rate / (1 - a.beta1**count) * m / divisor, m, v


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
    "avg_pool": _average_pool,
    "avg_pool_backward": _average_pool_backward,
    "lrn": _unary(lambda a, x: x * _lrn_divisor(a, x) ** -a.beta),
    "lrn_backward": _lrn_backward,
    "upsample_backward": _upsample_backward,
    "channel_slice": _unary(lambda a, x: x[:, a.start : a.start + a.count].clone()),
    "guard": _guard,
    "sgd_update": _sgd,
    "ema_update": _ema,
    **{kind: _by_numpy(kind) for kind in ("lars_ratio", "lars_update", "lamb_ratio", "lamb_update")},
    "accumulate": lambda a, inputs, call: (_accumulated(*inputs),),
    "check_loss": _by_numpy("check_loss"),
    "adamw_update": _adamw,
}


@cache
def form_of(kind: str) -> Form | None:
    """Return the form of a kind, by the PyTorch function of its only output or by autograd; None: NumPy computes it."""
    function = FUNCTIONS.get(kind)
    if kind not in FORMS and function is not None and KINDS[kind].divisible:
        return lambda a, inputs, call: _results(function(a, *inputs), call)
    forward = POINTWISE.get(kind.removesuffix("_backward"))
    if kind not in FORMS and forward is not None and forward.calls.torch and not forward.of_output:
        return _derivative(FUNCTIONS[forward.name])
    return FORMS.get(kind)


def _results(result: Any, call: Call) -> Sequence[Tensor]:
    return result if len(call.outputs) > 1 else (result,)


def _derivative(function: Callable[..., Tensor]) -> Form:
    """Return the gradient of a function's input, for the input and the gradient of its output."""

    def form(a: Any, inputs: Sequence[Tensor], call: Call) -> Sequence[Tensor]:
        x, dy = inputs
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(function(a, leaf), leaf, dy)

    return form
