"""An independent reference: a Network by PyTorch's own functions in float64, differentiated by PyTorch."""

from __future__ import annotations

import importlib
import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mbc.ir.graph import Network, Role
from mbc.ops.augment import Augment, View, centre, views
from mbc.ops.random import Dropout, dropout_keep

torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
F = torch.nn.functional
FUNCTIONS: Any = importlib.import_module("mbc.equivalence.torch_functions").FUNCTIONS


def run(
    network: Network, start: Mapping[str, np.ndarray], seed: int = 0, step: int = 0, training: bool = True
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return all values, and the gradient of the total loss for every parameter."""
    env: dict[str, Any] = {}
    for name, value in network.values.items():
        if value.role is not Role.INTERMEDIATE:
            array = start[name]
            dtype = {"i": torch.int64, "u": torch.uint8}.get(array.dtype.kind, torch.float64)
            tensor = torch.tensor(array, dtype=dtype)
            env[name] = tensor.requires_grad_(value.role is Role.PARAMETER)
    for op in network.operations:
        inputs = [env[v] for v in op.inputs]
        if isinstance(op.attributes, Dropout):
            keep = np.ones(inputs[0].shape)
            if training and op.attributes.probability:
                keyed = replace(op.attributes, key=zlib.crc32(op.name.encode()))
                keep = dropout_keep(keyed, inputs[0].shape, 0, seed, step) / (1 - keyed.probability)
            results = inputs[0] * torch.tensor(np.asarray(keep, np.float64))
        elif isinstance(op.attributes, Augment):
            keyed = replace(op.attributes, key=zlib.crc32(op.name.encode()))
            drawn = training and keyed.draws
            seen = views(keyed, network.batch, 0, seed, step) if drawn else [centre(keyed)] * network.batch
            results = torch.stack([augmented(keyed, image, view) for image, view in zip(inputs[0], seen, strict=True)])
        elif op.kind == "batch_norm":
            results = batch_norm(op.attributes, training, *inputs)
        else:
            function = OWN.get(op.kind) or FUNCTIONS.get(op.kind)
            assert function, f"declare PyTorch's call of {op.kind} (OpKind.calls), or add it to torch_functions.py"
            results = function(op.attributes, *inputs)
        # Statistics beside the first output are for gradients, which PyTorch computes by itself.
        env.update(zip(op.outputs, results if isinstance(results, tuple) else (results,), strict=False))
    total = sum(weight * env[loss].sum() for loss, weight in network.losses)
    names = [n for n, v in network.values.items() if v.role is Role.PARAMETER]
    gradients = torch.autograd.grad(total, [env[n] for n in names], allow_unused=True)
    by_name = {n: g.numpy() for n, g in zip(names, gradients, strict=True) if g is not None}
    return {n: v.detach().numpy() for n, v in env.items()}, by_name


def augmented(a: Augment, image: Any, view: View) -> Any:
    """Return an augmented image, computed by PyTorch's functions from the drawn view."""
    pixels = (image.permute(2, 0, 1) if a.channels_last else image).double() / 255
    wide = F.pad(pixels, (8, 8, 8, 8))
    box = wide[:, 8 + view.top : 8 + view.top + view.height, 8 + view.left : 8 + view.left + view.width]
    if a.scale:
        box = F.interpolate(box[None], a.crop, mode="bilinear", align_corners=False)[0]
    box = box.flip(2) if view.mirrored else box
    if a.jitters:
        box = 0.5 + (box * view.brightness - 0.5) * view.contrast
        if len(box) == 3:
            luma = torch.einsum("c,chw->hw", torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64), box)
            box = torch.lerp(luma.expand_as(box), box, view.saturation)
        box = box.clamp(0, 1)
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (a.mean, a.std))
    return (box - mean) / std


def batch_norm(a: Any, training: bool, x: Any, *states: Any) -> Any:
    affine, running = a.split(states)
    training = (training and not a.frozen) or not running
    mean, variance = (state.detach() for state in running) if running else (None, None)
    return F.batch_norm(x, mean, variance, *(affine or (None, None)), training, a.momentum, a.eps)


def top_k(a: Any, logits: Any, target: Any) -> Any:
    hits = logits.topk(a.k, 1).indices == target.unsqueeze(1)
    return hits.any(1).to(logits.dtype).mean().reshape(1)


def counted_top_k(a: Any, logits: Any, target: Any) -> Any:
    right = (logits.topk(a.k, 1).indices == target.unsqueeze(1)).any(1)
    return right[target != a.ignored[0]].to(logits.dtype).mean().reshape(1)


def mean_iou(a: Any, logits: Any, target: Any) -> Any:
    counts = torch.ones_like(target, dtype=torch.bool) if not a.ignored else target != a.ignored[0]
    predicted, wanted = logits.argmax(1)[counts], target[counts]
    shares = [
        ((predicted == c) & (wanted == c)).sum().to(logits.dtype) / ((predicted == c) | (wanted == c)).sum()
        for c in range(logits.shape[1])
        if ((predicted == c) | (wanted == c)).any()
    ]
    return torch.stack(shares).to(logits.dtype).mean().reshape(1)


def window_bias(a: Any, table: Any) -> Any:
    """Return the bias of attention in windows, computed for each pair of pixels."""
    (h, w), (down, across) = a.window, a.grid
    mask = table.new_zeros(table.shape[1], 1, down * across, h * w, h * w)
    for window, query, key in itertools.product(range(down * across), range(h * w), range(h * w)):
        (top, left), (y, x), (v, u) = divmod(window, across), divmod(query, w), divmod(key, w)
        # Where each pixel was before the shift: pixels across the edge of the image are no neighbours.
        apart = 0.0
        for side, count, shift, first, p, q in ((h, down, a.shift[0], top, y, v), (w, across, a.shift[1], left, x, u)):
            wrapped = [first == count - 1 and at >= side - shift for at in (p, q)]
            apart = -100.0 if wrapped[0] != wrapped[1] else apart
        mask[:, 0, window, query, key] = table[(y - v + h - 1) * (2 * w - 1) + x - u + w - 1] + apart
    return mask


OWN: dict[str, Callable[..., Any]] = {
    "window_bias": window_bias,
    "top_k": top_k,
    "counted_top_k": counted_top_k,
    "mean_iou": mean_iou,
}
