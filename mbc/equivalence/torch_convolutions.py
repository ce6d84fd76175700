"""Convolutions in float64 by PyTorch's matrix products, with windows as columns, for some samples at a time.

cuDNN, which a plan's launches may call, is not used here. This file is imported only if PyTorch is installed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mbc.ops.base import Call
from mbc.ops.convolution import Convolution

torch: Any = importlib.import_module("torch")
functional: Any = importlib.import_module("torch.nn.functional")

Tensor = Any  # type checkers run without PyTorch

_COLUMN_BYTES = 1 << 30


def _columns(a: Convolution, x: Tensor) -> Tensor:
    """Return the windows of images as columns: [rows, groups, C / groups * positions, windows]."""
    if not a.is_pointwise:
        padded = x.new_zeros((*x.shape[:2], *a.covered))
        padded[a.inside] = x
        x = torch.stack([padded[at] for _, at in a.positions()], 2)
    return x.reshape(x.shape[0], a.groups, -1, math.prod(a.output_size))


def _row_slices(a: Convolution, rows: int, channels: int) -> Iterator[slice]:
    """Return slices of the rows whose columns take a bounded amount of memory."""
    row_bytes = 8 * channels * math.prod(a.kernel) * math.prod(a.output_size)
    step = max(1, _COLUMN_BYTES // row_bytes)
    return (slice(start, start + step) for start in range(0, rows, step))


def convolution(a: Convolution, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Return the convolution of images [N, C, ...] and filters [K, C / groups, ...]."""
    x, w = inputs
    matrix = w.reshape(a.groups, w.shape[0] // a.groups, -1)
    parts = [torch.matmul(matrix, _columns(a, x[rows])) for rows in _row_slices(a, x.shape[0], x.shape[1])]
    return (torch.cat(parts).reshape(x.shape[0], w.shape[0], *a.output_size),)


def convolution_data(a: Convolution, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Return the gradient of a convolution's images."""
    dy, w = inputs
    channels = w.shape[1] * a.groups
    matrix = w.reshape(a.groups, w.shape[0] // a.groups, -1).transpose(1, 2)
    parts: list[Tensor] = []
    for rows in _row_slices(a, dy.shape[0], channels):
        part = dy[rows]
        columns = torch.matmul(matrix, part.reshape(part.shape[0], a.groups, w.shape[0] // a.groups, -1))
        columns = columns.reshape(part.shape[0], channels, -1, *a.output_size)
        padded = columns.new_zeros((part.shape[0], channels, *a.covered))
        for number, at in a.positions():
            padded[at] += columns[:, :, number]
        parts.append(padded[a.inside])
    return (torch.cat(parts),)


def convolution_filter(a: Convolution, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    """Return the gradient of a convolution's filters."""
    x, dy = inputs
    outputs, channels = dy.shape[1], x.shape[1]
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for rows in _row_slices(a, x.shape[0], channels):
        part = dy[rows].reshape(-1, a.groups, outputs // a.groups, math.prod(a.output_size))
        total = total + torch.einsum("ngkl,ngcl->gkc", part, _columns(a, x[rows]))
    return (total.reshape(outputs, channels // a.groups, *a.kernel),)
