"""Grouped convolutions as matrix products: windows are gathered into columns, and BLAS multiplies them.

Shapes, with as many axes in `...` as images have: x [n, C, ...], w [K, C / groups, ...], y [n, K, ...]. Columns are
[groups, C / groups * positions of a window, n * windows]. Rows are taken in chunks, so that the columns stay in a cache
and memory stays bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mbc.ops.base import Array
from mbc.ops.products import product
from mbc.ops.window import Window

_COLUMN_BYTES = 8 << 20


def correlate(a: Window, x: Array, w: Array, groups: int) -> Array:
    """Return the result of the forward pass, y."""
    rows, outputs = x.shape[0], w.shape[0]
    matrix = w.reshape(groups, outputs // groups, -1)
    y = np.empty((rows, outputs, *a.output_size), x.dtype)
    for chunk in _chunks(a, x):
        columns = _columns(a, x[chunk], groups)
        y[chunk] = product(matrix, columns).reshape(outputs, -1, *a.output_size).swapaxes(0, 1)
    return y


def spread(a: Window, dy: Array, w: Array, groups: int) -> Array:
    """Return the gradient of an image, the adjoint of `correlate` in x."""
    (rows, outputs), channels = dy.shape[:2], w.shape[1] * groups
    matrix = w.reshape(groups, outputs // groups, -1).transpose(0, 2, 1)
    dx = np.empty((rows, channels, *a.size), dy.dtype)
    for chunk in _chunks(a, dx):
        gradient = _by_channel(dy[chunk]).reshape(groups, outputs // groups, -1)
        columns = product(matrix, gradient).reshape(channels, math.prod(a.kernel), -1, *a.output_size)
        padded = np.zeros((channels, columns.shape[2], *a.covered), dy.dtype)
        for number, at in a.positions():
            padded[at] += columns[:, number]
        dx[chunk] = padded[a.inside].swapaxes(0, 1)
    return dx


def correlate_filter(a: Window, x: Array, dy: Array, groups: int) -> Array:
    """Return the gradient of the filter, [K, C / groups, ...], the adjoint of `correlate` in w."""
    outputs, channels = dy.shape[1], x.shape[1]
    total = np.zeros((groups, outputs // groups, channels // groups * math.prod(a.kernel)), dy.dtype)
    for chunk in _chunks(a, x):
        gradient = _by_channel(dy[chunk]).reshape(groups, outputs // groups, -1)
        total += product(gradient, _columns(a, x[chunk], groups).transpose(0, 2, 1))
    return total.reshape(outputs, channels // groups, *a.kernel)


def _chunks(a: Window, x: Array) -> Iterator[slice]:
    """Return slices of the rows of x whose columns take about `_COLUMN_BYTES`."""
    row_bytes = max(1, math.prod((x.shape[1], *a.kernel, *a.output_size)) * x.itemsize)
    step = max(1, _COLUMN_BYTES // row_bytes)
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def _by_channel(x: Array) -> Array:
    """Return [n, C, ...] transposed to [C, n, ...], contiguous."""
    return np.ascontiguousarray(x.swapaxes(0, 1))


def _columns(a: Window, x: Array, groups: int) -> Array:
    rows, channels = x.shape[:2]
    padded = x.swapaxes(0, 1)
    if a.covered != a.size:
        padded = np.zeros((channels, rows, *a.covered), x.dtype)
        padded[a.inside] = x.swapaxes(0, 1)
    columns = np.empty((channels, math.prod(a.kernel), rows, *a.output_size), x.dtype)
    for number, at in a.positions():
        columns[:, number] = padded[at]
    return columns.reshape(groups, channels // groups * math.prod(a.kernel), -1)
