"""Attention on PyTorch's tensors, as `mbc.ops.attention` defines it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mbc.ops.attention import Attention, biased
from mbc.ops.base import Call
from mbc.ops.window_bias import WindowBias

Tensor = Any


def _headed(x: Tensor, heads: int) -> Tensor:
    """Return [N, heads * D, ..., T] as [N, heads, groups, T, D]."""
    return x.reshape(x.shape[0], heads, x.shape[1] // heads, -1, x.shape[-1]).movedim(2, 4)


def _flat(x: Tensor, like: Tensor) -> Tensor:
    return x.movedim(4, 2).reshape(x.shape[0], -1, *like.shape[2:])


def _parts(a: Attention, inputs: Sequence[Tensor], backward: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, key, value and scores."""
    q, k, v = (_headed(x, a.heads) for x in (inputs[0].chunk(3, 1) if a.packed else inputs[:3]))
    scores = q @ k.mT * a.scale
    if biased(a, len(inputs), backward):
        scores = scores + inputs[a.operands][:, 0]
    if a.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return q, k, v, scores


def attention(a: Attention, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Return the output of attention, and the log-sum-exp of the scores."""
    _, _, v, scores = _parts(a, inputs, backward=False)
    return _flat(scores.softmax(-1) @ v, inputs[0]), scores.logsumexp(-1).reshape(call.outputs[1].shape)


def _score_gradients(a: Attention, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return query, key, dy, the probabilities and the gradients of the scores."""
    q, k, v, scores = _parts(a, inputs, backward=True)
    y, dy, logs = inputs[-3:]
    y, dy = _headed(y, a.heads), _headed(dy, a.heads)
    share = (scores - logs.reshape(*scores.shape[:-1], 1)).exp()
    return q, k, dy, share, share * (dy @ v.mT - (y * dy).sum(-1, keepdim=True))


def attention_backward(a: Attention, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    q, k, dy, share, dscores = _score_gradients(a, inputs)
    gradients = (dscores @ k * a.scale, dscores.mT @ q * a.scale, share.mT @ dy)
    flat = [_flat(dx, inputs[0 if a.packed else i]) for i, dx in enumerate(gradients)]
    return (torch.cat(flat, 1),) if a.packed else tuple(flat)


def window_bias_backward(a: WindowBias, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Return the gradient of the bias table."""
    (dy,) = inputs
    numbers = torch.as_tensor(a.numbers(), device=dy.device).reshape(-1)
    total = dy.sum((1, 2)).flatten(1)
    return (dy.new_zeros(a.offsets, dy.shape[0]).index_add(0, numbers, total.T),)


def attention_backward_bias(a: Attention, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Return the gradient of the bias."""
    shape = inputs[a.operands].shape
    total = _score_gradients(a, inputs)[-1].sum(0)
    for axis in (0, 1):
        if shape[2 * axis] == 1:
            total = total.sum(axis, keepdim=True)
    return (total.unsqueeze(1),)
