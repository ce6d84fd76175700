"""The meaning of later image operations on PyTorch's tensors: gates, resizing, normalisation of single images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mbc.equivalence.torch_convolutions import Tensor, torch
from mbc.ops.base import Call
from mbc.ops.resize import Resize

Form = Callable[[Any, Sequence[Tensor], Call], Sequence[Tensor]]


def _pixel_sum(x: Tensor) -> Tensor:
    return x.sum(dim=tuple(range(2, x.ndim)), keepdim=True)


def _resize(a: Resize, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    (x,) = inputs
    for axis in (0, 1):
        first, second, share = (torch.as_tensor(t, device=x.device) for t in a.taps(axis))
        share = share.reshape(-1, *(1,) * (1 - axis))
        low, high = x.index_select(2 + axis, first), x.index_select(2 + axis, second)
        x = torch.where(share > 0, low * (1 - share) + high * share, low)
    return (x,)


def _resize_backward(a: Resize, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    (dy,) = inputs
    for axis in (0, 1):
        first, second, share = (torch.as_tensor(t, device=dy.device) for t in a.taps(axis))
        share = share.reshape(-1, *(1,) * (1 - axis))
        shape = list(dy.shape)
        shape[2 + axis] = a.size[axis]
        dx = torch.zeros(shape, dtype=dy.dtype, device=dy.device)
        dy = dx.index_add(2 + axis, first, dy * (1 - share)).index_add(2 + axis, second, dy * share)
    return (dy,)


IMAGE_FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "broadcast_mul": lambda a, inputs, call: (inputs[0] * inputs[1],),
        "broadcast_add": lambda a, inputs, call: (inputs[0] + inputs[1],),
        "resize": _resize,
        "resize_backward": _resize_backward,
        "pixel_sum": lambda a, inputs, call: (_pixel_sum(inputs[0]),),
        "pixel_dot": lambda a, inputs, call: (_pixel_sum(inputs[0] * inputs[1]),),
    }
)
