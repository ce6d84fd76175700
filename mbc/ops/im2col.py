"""Grouped convolutions as matrix products: windows are gathered into columns, and BLAS multiplies them.

Shapes: x [n, C, H, W], w [K, C / groups, r, s], y [n, K, P, Q]. Columns are [groups, C / groups * r * s, n * P * Q].
Rows are taken in chunks, so that the columns stay in a cache and memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mbc.ops.base import Array
from mbc.ops.products import product
from mbc.ops.window import Pads, Pair

_COLUMN_BYTES = 8 << 20


def correlate(x: Array, w: Array, stride: Pair, pad: Pads, dilation: Pair, groups: int, output: Pair) -> Array:
    """Return the result of the forward pass, y of size `output`."""
    rows, outputs, (r, s) = x.shape[0], w.shape[0], w.shape[2:]
    matrix = w.reshape(groups, outputs // groups, -1)
    y = np.empty((rows, outputs, *output), x.dtype)
    for chunk in _chunks(x, r * s * output[0] * output[1]):
        columns = _columns(x[chunk], (r, s), stride, pad, dilation, groups, output)
        image = product(matrix, columns).reshape(outputs, -1, *output)
        y[chunk] = image.transpose(1, 0, 2, 3)
    return y


def spread(dy: Array, w: Array, stride: Pair, pad: Pads, dilation: Pair, groups: int, size: Pair) -> Array:
    """Return the gradient of an image of size `size`, the adjoint of `correlate` in x."""
    (rows, outputs, p, q), (r, s) = dy.shape, w.shape[2:]
    channels = w.shape[1] * groups
    matrix = w.reshape(groups, outputs // groups, -1).transpose(0, 2, 1)
    dx = np.empty((rows, channels, *size), dy.dtype)
    top, bottom, left, right = pad
    for chunk in _chunks(dx, r * s * p * q):
        gradient = _by_channel(dy[chunk]).reshape(groups, outputs // groups, -1)
        columns = product(matrix, gradient).reshape(channels, r, s, -1, p, q)
        padded = np.zeros((channels, columns.shape[3], size[0] + top + bottom, size[1] + left + right), dy.dtype)
        for i in range(r):
            for j in range(s):
                padded[_at(i, j, stride, dilation, (p, q))] += columns[:, i, j]
        image = padded[:, :, top : top + size[0], left : left + size[1]]
        dx[chunk] = image.transpose(1, 0, 2, 3)
    return dx


def correlate_filter(x: Array, dy: Array, kernel: Pair, stride: Pair, pad: Pads, dilation: Pair, groups: int) -> Array:
    """Return the gradient of the filter, [K, C / groups, r, s], the adjoint of `correlate` in w."""
    (_, outputs, p, q), channels = dy.shape, x.shape[1]
    window = kernel[0] * kernel[1]
    total = np.zeros((groups, outputs // groups, channels // groups * window), dy.dtype)
    for chunk in _chunks(x, window * p * q):
        columns = _columns(x[chunk], kernel, stride, pad, dilation, groups, (p, q))
        gradient = _by_channel(dy[chunk]).reshape(groups, outputs // groups, -1)
        total += product(gradient, columns.transpose(0, 2, 1))
    return total.reshape(outputs, channels // groups, *kernel)


def _chunks(x: Array, per_channel: int) -> Iterator[slice]:
    """Return slices of the rows of x whose columns take about `_COLUMN_BYTES`.

    Columns have `per_channel` elements for each row and channel.
    """
    row_bytes = max(1, x.shape[1] * per_channel * x.itemsize)
    step = max(1, _COLUMN_BYTES // row_bytes)
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def _by_channel(x: Array) -> Array:
    """Return [n, C, ...] transposed to [C, n, ...], contiguous."""
    return np.ascontiguousarray(x.swapaxes(0, 1))


def _at(i: int, j: int, stride: Pair, dilation: Pair, output: Pair) -> tuple[slice, ...]:
    """Return the pixels of a padded [C, n, H, W] image that filter tap (i, j) reads."""
    top, left = i * dilation[0], j * dilation[1]
    return (
        slice(None),
        slice(None),
        slice(top, top + stride[0] * (output[0] - 1) + 1, stride[0]),
        slice(left, left + stride[1] * (output[1] - 1) + 1, stride[1]),
    )


def _columns(x: Array, kernel: Pair, stride: Pair, pad: Pads, dilation: Pair, groups: int, output: Pair) -> Array:
    rows, channels, height, width = x.shape
    top, bottom, left, right = pad
    if any(pad):
        padded = np.zeros((channels, rows, height + top + bottom, width + left + right), x.dtype)
        padded[:, :, top : top + height, left : left + width] = x.swapaxes(0, 1)
    else:
        padded = x.swapaxes(0, 1)
    columns = np.empty((channels, *kernel, rows, *output), x.dtype)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            columns[:, i, j] = padded[_at(i, j, stride, dilation, output)]
    return columns.reshape(groups, channels // groups * kernel[0] * kernel[1], -1)
