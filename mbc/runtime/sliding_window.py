"""Predictions for images and volumes larger than a network's input, window by window.

The positions of the windows, their weights and the mirroring are nnU-Net's (Isensee et al., Nature Methods 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, islice, product
from typing import Any

import numpy as np

from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.ops import KINDS
from mbc.ops.activation import sigmoid
from mbc.ops.base import Array
from mbc.options import AVERAGES, WEIGHTINGS

Forward = Callable[[Array], Any]  # returns the output, or a tuple of outputs
SOFTMAX, SIGMOID, PLAIN = "softmax", "sigmoid", "plain"


@dataclass(frozen=True, slots=True)
class Windows:
    """Settings of a prediction.

    Attributes:
        overlap: Share of a window that the next one covers, too, on each axis: 0 or more, less than 1.
        weighting: Weights of a window's positions: `gaussian` (standard deviation an eighth of the window) or
            `constant`.
        mirror: Spatial axes, from 0. Each window is also predicted mirrored along each set of these axes.
        average: `probabilities` are averaged over windows and mirrored copies, or `logits`.
    """

    overlap: float = 0.5
    weighting: str = "gaussian"
    mirror: tuple[int, ...] = ()
    average: str = "probabilities"

    def check(self, axes: int) -> None:
        """Raise an error unless the settings make sense for a number of spatial axes.

        Raises:
            MbcError: MBC380.
        """
        words_fit = self.weighting in WEIGHTINGS and self.average in AVERAGES
        if not (words_fit and 0 <= self.overlap < 1 and {*self.mirror} <= {*range(axes)}):
            allowed = f"{' or '.join(WEIGHTINGS)} weighting, {' or '.join(AVERAGES)} as the average"
            remedy = f"give an overlap from 0 to below 1, {allowed}, and axes from 0 to {axes - 1}"
            raise MbcError("MBC380", f"images of {axes} axes cannot be predicted with {self}", remedy)


def head_of(graph: TrainingGraph) -> tuple[str, str]:
    """Return the output that is predicted, and the function that its loss applies: SOFTMAX, SIGMOID or PLAIN.

    The output has the size of the input, or else no positions. Outputs that a loss reads come before all others.

    Raises:
        MbcError: MBC381 if the network has several inputs, or no such output.
    """
    size = graph.values[graph.infer_inputs[0]].type.shape[2:]
    activations: dict[str, str] = {}
    for op in graph.train:
        of_regions = op.kind == "binary_cross_entropy" or getattr(op.attributes, "sigmoid", False)
        if KINDS[op.kind].classifies or KINDS[op.kind].labelled or of_regions:
            activations.setdefault(op.inputs[0], SIGMOID if of_regions else SOFTMAX)
    shapes = {name: graph.values[name].type.shape for name in graph.outputs}
    fitting = [name for name in shapes if len(shapes[name]) > 1 and shapes[name][2:] in (size, ())]
    if len(graph.infer_inputs) > 1 or not fitting:
        form = f"has the inputs {', '.join(graph.infer_inputs)} and the outputs {', '.join(graph.outputs)}"
        remedy = "one input, and an output of its size or without positions, are needed: call Module.forward yourself"
        raise MbcError("MBC381", f"network '{graph.name}' {form}: windows do not fit together", remedy)
    name = min(fitting, key=lambda name: (shapes[name][2:] != size, name not in activations))
    return name, activations.get(name, PLAIN)


def predict(graph: TrainingGraph, batch: int, forward: Forward, images: Array, windows: Windows) -> Array:
    """Return the output for images of any size; `Module.predict` explains arguments and result.

    Args:
        graph: The network.
        batch: Rows that `forward` takes at most.
        forward: Returns the output of the network, or a tuple of outputs.
        images: Read window by window. Images smaller than the network's input are padded with zeros on both sides.
        windows: The settings.

    Raises:
        MbcError: MBC380; MBC381, also for images with other axes or, if the output has no positions, of another size.
    """
    output, activation = head_of(graph)
    patch, size = graph.values[graph.infer_inputs[0]].type.shape[2:], images.shape[2:]
    windows.check(len(patch))
    shape = graph.values[output].type.shape
    dense = shape[2:] == patch
    if images.ndim != 2 + len(patch) or not (dense or size == patch):
        wanted = ", ".join(("rows", "channels", *("any" if dense else str(n) for n in patch)))
        message = f"images of the shape [{wanted}] can be predicted, got {list(images.shape)}"
        raise MbcError("MBC381", message, "reshape or resize the images")
    lacking = np.maximum(np.subtract(patch, size, dtype=int), 0)
    before = lacking // 2
    if lacking.any():
        images = np.pad(images, [(0, 0), (0, 0), *zip(before, lacking - before, strict=True)])
    corners = product(*(starts(n, m, windows.overlap) for n, m in zip(images.shape[2:], patch, strict=True)))
    regions = [tuple(map(slice, corner, np.add(corner, patch, dtype=int))) for corner in corners]
    axes = sorted({axis + 1 for axis in windows.mirror})
    flips = [flip for count in range(len(axes) + 1) for flip in combinations(axes, count)]
    whole, weight = (images.shape[2:], _weights(patch, windows.weighting)) if dense else ((), np.float32(1))
    sums, weights = np.zeros((len(images), shape[1], *whole), np.float32), np.zeros(whole, np.float32)
    for region in regions:
        weights[region if dense else ()] += weight * len(flips)
    jobs = product(range(len(images)), regions, flips)
    while some := list(islice(jobs, batch)):
        outputs: Any = forward(np.stack([np.flip(images[row][:, *region], flip) for row, region, flip in some]))
        values = np.array(outputs if len(graph.outputs) == 1 else outputs[graph.outputs.index(output)])
        values = _activated(values, activation) if windows.average == "probabilities" else values
        for (row, region, flip), value in zip(some, values, strict=True):
            sums[row][:, *(region if dense else ())] += weight * np.flip(value, flip if dense else ())
    sums /= weights
    sums = _activated(sums, activation) if windows.average == "logits" else sums
    return sums[:, :, *map(slice, before, before + size)] if dense else sums


def starts(size: int, patch: int, overlap: float) -> list[int]:
    """Return the first positions of windows along an axis: evenly spaced, at most `patch * (1 - overlap)` apart."""
    last = math.ceil((size - patch) / (patch * (1 - overlap)))
    return [round(number * (size - patch) / max(last, 1)) for number in range(last + 1)]


def _weights(patch: Sequence[int], weighting: str) -> Array:
    """Return the weights of a window's positions. No weight is 0: the least is exp(-8) for each axis."""
    if weighting == "constant":
        return np.ones(patch, np.float32)
    ramps = [np.exp(-0.5 * ((np.arange(n) - n // 2) / (n / 8)) ** 2) for n in patch]
    return np.asarray(reduce(np.multiply.outer, ramps, np.float64(1)), np.float32)


def _activated(values: Array, activation: str) -> Array:
    """Return probabilities of logits, classes on axis 1; the softmax overwrites the logits."""
    if activation == SIGMOID:
        return sigmoid(values)
    if activation == SOFTMAX:
        values -= values.max(axis=1, keepdims=True)
        np.exp(values, out=values)
        values /= values.sum(axis=1, keepdims=True)
    return values
