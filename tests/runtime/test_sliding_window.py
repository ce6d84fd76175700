"""Predictions in windows: equal to a loop over windows and mirrored copies, in one, two and three axes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.options import Options
from mbc.runtime.module import Module
from mbc.runtime.sliding_window import Windows, predict
from mbc.source import Source

PATCH = (4, 6, 8)
SOURCE = """network net(batch = 3) {{
  input image[batch, 2, {size}] : float  input target[batch, {size}] : class
  y = image |> conv(3, 3, pad=1, bias=true)
  output y
  loss (y, target) |> softmax_cross_entropy
}}"""
CASES = [
    ((11,), Windows()), ((3,), Windows(mirror=(0,))), ((9, 13), Windows(0.25, "constant", (1,))),
    ((7, 4), Windows(average="logits", mirror=(0, 1))), ((7, 5, 9), Windows(0, mirror=(0, 2))), (PATCH, Windows()),
]  # fmt: skip


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=0)


def reference(net, image, windows):
    size, patch = np.array(image.shape[1:]), np.array(PATCH[: image.ndim - 1])
    missing = np.maximum(patch - size, 0)
    padded = np.pad(image, np.vstack([[0, 0], np.stack([missing // 2, missing - missing // 2], 1)]))
    counts = 1 + np.ceil((size + missing - patch) / (patch * (1 - windows.overlap))).astype(int)
    starts = map(np.linspace, 0 * patch, size + missing - patch, counts)
    turns = product(*([(), (axis + 1,)] if axis in windows.mirror else [()] for axis in range(len(patch))))
    apart = [8 * (x - n // 2) / n for x, n in zip(np.indices(PATCH[: len(size)]), patch, strict=True)]
    weight = np.exp(-np.square(apart).sum(0) / 2) if windows.weighting == "gaussian" else np.ones(patch)
    sums, weights = np.zeros((3, *size + missing)), np.zeros(size + missing)
    for corner, axes in product(product(*starts), [sum(turn, ()) for turn in turns]):
        at = tuple(slice(round(x), round(x) + n) for x, n in zip(corner, patch, strict=True))
        y = np.flip(net.forward(np.flip(padded[:, *at], axes)[None])[0].astype(np.float64), axes)
        sums[:, *at] += weight * (y if windows.average == "logits" else softmax(y))
        weights[at] += weight
    mean = sums / weights if windows.average == "probabilities" else softmax(sums / weights)
    return mean[:, *map(slice, missing // 2, missing // 2 + size)]


@pytest.mark.parametrize(("size", "windows"), CASES)
def test_it_equals_a_loop_over_windows(size, windows):
    images, calls = np.random.default_rng(0).standard_normal((2, 2, *size)).astype(np.float32), []
    source = Source("net.mbc", SOURCE.format(size=", ".join(map(str, PATCH[: len(size)]))))
    with Module(compile_plan(source, Options(gpu="h200")), seed=2, device="cpu", shadow=False) as net:
        result = predict(net.plan.graph, 3, lambda x: calls.append(len(x)) or net.forward(x), images, windows)
        np.testing.assert_allclose(result, [reference(net, x, windows) for x in images], rtol=2e-5, atol=1e-6)
        assert set(calls[:-1]) <= {3} and 1 <= calls[-1] <= 3  # full mini-batches, except for the last one
        if size == PATCH:  # one window
            np.testing.assert_allclose(result, [softmax(y) for y in net.forward(images)], rtol=1e-5)
        with pytest.raises(
            MbcError, match=r"MBC381: images of the shape \[rows, channels, any.* can be predicted, got"
        ):
            net.predict(images[0])


def net_of(layers, target, loss):
    text = f"network net(batch = 3) {{\n  input image[batch, 2, 4] : float\n  input target[batch{target}\n"
    text += f"  y = image |> {layers}\n  output y\n  loss (y, target) |> {loss}\n}}"
    return Module(compile_plan(Source("net.mbc", text), Options(gpu="h200")), seed=2, device="cpu", shadow=False)


def test_classes_regions_and_outputs_of_another_size():
    image = np.random.default_rng(0).standard_normal((1, 2, 4)).astype(np.float32)
    with net_of("conv(1, 4) |> linear(3)", "] : class", "softmax_cross_entropy") as net:
        expected = [softmax(net.forward(np.flip(image, axes))[0]) for axes in ((), 2)]
        np.testing.assert_allclose(net.predict(image, Windows(mirror=(0,)))[0], sum(expected) / 2, rtol=1e-5)
        with pytest.raises(MbcError, match=r"MBC381: images of the shape \[rows, channels, 4\] can be predicted, got"):
            net.predict(image[..., 1:])
    for loss in ("binary_cross_entropy", "dice(sigmoid=true)", "focal(sigmoid=true)"):
        net = net_of("conv(3, 3, pad=1)", ", 3, 4] : float", loss)
        np.testing.assert_allclose(net.predict(image), 1 / (1 + np.exp(-np.asarray(net.forward(image)))), rtol=1e-5)
    with net_of("conv(3, 3, pad=1)", ", 3, 4] : float", "mse") as net:
        np.testing.assert_allclose(net.predict(image), net.forward(image), rtol=1e-5)
    net = net_of("conv(3, 3)", ", 2] : class", "softmax_cross_entropy")
    with net, pytest.raises(MbcError, match=r"MBC381: .*: windows do not fit together"):
        net.predict(image)


@pytest.mark.parametrize("settings", [{"overlap": -0.1}, {"weighting": "flat"}, {"average": "sums"}, {"mirror": (1,)}])
def test_settings_that_make_no_sense(settings):
    net = net_of("conv(3, 3, pad=1)", ", 4] : class", "softmax_cross_entropy")
    with net, pytest.raises(MbcError, match=r"MBC380: images of 1 axes cannot be predicted with Windows\("):
        net.predict(np.zeros((1, 2, 4), np.float32), Windows(**settings))
