"""The meaning of later image operations on PyTorch's tensors: gates, resizing, normalisation of single images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mbc.equivalence.torch_convolutions import Tensor
from mbc.ops.base import Call

Form = Callable[[Any, Sequence[Tensor], Call], Sequence[Tensor]]


def _pixel_sum(x: Tensor) -> Tensor:
    return x.sum(dim=tuple(range(2, x.ndim)), keepdim=True)


IMAGE_FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "broadcast_mul": lambda a, inputs, call: (inputs[0] * inputs[1],),
        "broadcast_add": lambda a, inputs, call: (inputs[0] + inputs[1],),
        "pixel_sum": lambda a, inputs, call: (_pixel_sum(inputs[0]),),
        "pixel_dot": lambda a, inputs, call: (_pixel_sum(inputs[0] * inputs[1]),),
    }
)
