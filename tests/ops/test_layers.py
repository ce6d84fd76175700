"""Layers of the language: their settings, errors and parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mbc.ir.graph import Role
from mbc.ir.types import DType
from mbc.ops import KINDS, LAYERS, POINTWISE
from mbc.ops.base import ShapeError
from tests.ir.networks import Writer

CALLS = {
    **dict.fromkeys(("add", "sub", "mul", "div", "concat", "stack", "maximum", "minimum", "where"), ("axis",)),
    **dict.fromkeys(("sum", "mean"), ("axes", "keep")),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), ("factor",)),
    **dict.fromkeys(("adaptive_avgpool", "adaptive_maxpool"), ("size",)),
    "clamp": ("min", "max"),
    "hardtanh": ("min", "max"),
    "indicator": ("operator", "value"),
    "compare": ("operator", "axis"),
    "masked_fill": ("value", "axis"),
    "prelu": ("channels",),
    "instance_norm": ("eps", "affine"),
    "softmax": ("axis",),
    "amax": ("axes", "keep"),
    "pow": ("exponent",),
    "attention": ("heads", "causal", "scale"),
    "window_bias": ("heads", "window", "size", "shift"),
    "windows": ("window",),
    "join_windows": ("size", "window"),
    "roll": ("shift",),
    "matmul": ("transpose_a", "transpose_b"),
    "parameter": ("shape", "value", "std"),
    "constant": ("shape", "value"),
    "split": ("sizes", "axis"),
    "chunk": ("count", "axis"),
    "slice": ("axis", "start", "stop", "step"),
    "permute": ("axes",),
    "reshape": ("sizes",),
    "padding": ("pad", "mode", "value"),
    "channel_shuffle": ("groups",),
    "conv": ("channels", "kernel", "stride", "pad", "dilation", "groups", "bias", "init", "standardize", "gain"),
    "conv_transpose": ("channels", "kernel", "stride", "pad", "output_pad", "dilation", "groups", "bias", "init"),
    "linear": ("features", "bias", "init"),
    "bn": ("eps", "momentum", "affine", "sync", "frozen", "track"),
    "group_norm": ("groups", "eps", "affine"),
    "layer_norm": ("eps", "affine"),
    "lrn": ("size", "alpha", "beta", "k"),
    "maxpool": ("kernel", "stride", "pad", "ceil", "dilation"),
    "avgpool": ("kernel", "stride", "pad", "count_pad", "ceil"),
    "upsample": ("factor", "size", "mode", "align_corners"),
    "dropout": ("p", "channels"),
    "drop_path": ("p",),
    "leaky_relu": ("slope",),
    "elu": ("alpha", "scale", "input_scale"),
    "celu": ("alpha",),
    "softplus": ("beta", "threshold"),
    **dict.fromkeys(("softshrink", "hardshrink"), ("threshold",)),
    "threshold": ("threshold", "value"),
    **dict.fromkeys(("glu", "log_softmax"), ("axis",)),
    "softmax_cross_entropy": ("smoothing", "ignore_index", "class_weights"),
    "top_k": ("k", "ignore_index"),
    "dice": (
        *("smooth", "ignore_index", "background", "batch", "sigmoid", "cross_entropy", "squared", "smooth_below"),
    ),
    "tversky": (
        *("alpha", "beta", "smooth", "ignore_index", "background", "batch", "sigmoid", "cross_entropy", "gamma"),
    ),
    "focal": ("gamma", "alpha", "ignore_index", "sigmoid"),
    "augment": (
        *("crop", "pad", "flip", "scale", "ratio", "brightness", "contrast", "saturation", "mean", "std", "order"),
    ),
    "mean_iou": ("ignore_index",),
    "smooth_l1": ("beta",),
    "binary_cross_entropy": ("pos_weight", "logits"),
    "kl_divergence": ("logits",),
    "nll": ("ignore_index", "class_weights"),
}


def test_positional_order_of_settings() -> None:
    for name, layer in LAYERS.items():
        declared = POINTWISE[name].settings if name in POINTWISE and POINTWISE[name].help else ()
        assert tuple(p.name for p in layer.parameters) == CALLS.get(name, declared), name
        assert layer.help


def test_kinds_have_their_names() -> None:
    assert all(name == kind.name for name, kind in KINDS.items())
    assert all(kind.evaluate or kind.expand for kind in KINDS.values())
    assert all(kind.reduces for kind in KINDS.values() if kind.accumulates)


def test_parameters_of_layers() -> None:
    w = Writer(2)
    x = w.input("image", 4, 6, 6)
    x = w("conv", x, path="conv", channels=8, kernel=3, groups=2, bias=True)
    x = w("bn", x, path="bn")
    x = w("conv_transpose", x, path="up", channels=6, kernel=2, stride=2)
    w("linear", x, path="head", features=5)
    states = {s.value: (w.graph.values[s.value].type.shape, s.initializer.kind) for s in w.states}
    assert states == {
        "conv.weight": ((8, 2, 3, 3), "he"),
        "conv.bias": ((8,), "constant"),
        "bn.weight": ((8,), "constant"),
        "bn.bias": ((8,), "constant"),
        "bn.running_mean": ((8,), "constant"),
        "bn.running_var": ((8,), "constant"),
        "up.weight": ((8, 6, 2, 2), "he"),
        "head.weight": ((5, 6 * 8 * 8), "he"),
        "head.bias": ((5,), "constant"),
    }
    fans = {s.value: (s.initializer.fan_in, s.initializer.fan_out) for s in w.states if s.initializer.kind == "he"}
    assert fans == {"conv.weight": (18, 36), "up.weight": (8, 24), "head.weight": (384, 5)}
    assert w.graph.values["bn.running_var"].role is Role.STATISTIC


def test_sizes_that_users_expect() -> None:
    w = Writer(2)
    image = w.input("image", 3, 227, 227)
    assert w.type(w("conv", image, channels=96, kernel=11, stride=4)).shape == (2, 96, 55, 55)
    assert w.type(w("conv", image, channels=8, kernel=(1, 7), pad=(0, 3))).shape == (2, 8, 227, 227)
    assert w.type(w("conv", image, channels=8, kernel=2, pad=(0, 1, 0, 1))).shape == (2, 8, 227, 227)
    assert w.type(w("conv", image, channels=8, kernel=3, pad=2, dilation=2)).shape == (2, 8, 227, 227)
    assert w.type(w("maxpool", image, kernel=3, stride=2)).shape == (2, 3, 113, 113)
    assert w.type(w("maxpool", image, kernel=2)).shape == (2, 3, 113, 113)
    assert w.type(w("maxpool", image, kernel=2, ceil=True)).shape == (2, 3, 114, 114)
    assert w.type(w("global_avgpool", image)).shape == (2, 3, 1, 1)
    up = w("conv_transpose", image, channels=4, kernel=3, stride=2, pad=1, output_pad=1)
    assert w.type(up).shape == (2, 4, 454, 454)
    assert w.type(w("upsample", image, factor=(2, 1))).shape == (2, 3, 454, 227)
    assert w.type(w("upsample", image, size=(7, 500), mode="bilinear")).shape == (2, 3, 7, 500)
    assert w.type(w("concat", image, image)).shape == (2, 6, 227, 227)
    assert w.type(w("flatten", image)).shape == (2, 3 * 227 * 227)
    for reduction in ("sum", "mean", "amax"):
        assert w.type(w(reduction, image, axes=(2,))).shape == (2, 3, 227)
        assert w.type(w(reduction, image, axes=(2,), keep=True)).shape == (2, 3, 1, 227)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("conv", {"channels": 4, "kernel": 9}, "a window of 9 x 9 does not fit into an image of 6 x 6 with padding 0"),
    ("conv", {"channels": 4, "kernel": 5, "dilation": 3, "pad": (1, 2)}, "a window of 13 x 13 does not fit into"),
    ("conv", {"channels": 0, "kernel": 3}, "channels is 0, but must be at least 1"),
    ("conv", {"channels": 4, "kernel": 0}, "kernel is 0, but must be at least 1"),
    ("conv", {"channels": 4, "kernel": 3, "stride": 0}, "stride is 0, but must be at least 1"),
    ("conv", {"channels": 4, "kernel": 3, "pad": -1}, "pad is -1, but must be at least 0"),
    ("conv", {"channels": 4, "kernel": 3, "groups": 3}, "groups is 3, which must divide both 4 input and 4 output"),
    (
        "conv",
        {"channels": 4, "kernel": 3, "standardize": -1e-5},
        "standardize is -1e-05, but must be 0 (none) or above",
    ),
    ("conv", {"channels": 4, "kernel": 3, "standardize": 1e-5, "gain": -1.0}, "gain is -1.0, but must be 0 (none) or"),
    ("conv", {"channels": 4, "kernel": 3, "gain": 1.0}, "gain is for standardised filters: give standardize, too"),
    ("conv_transpose", {"channels": 4, "kernel": 3, "output_pad": 1}, "output_pad (1, 1) must be smaller than stride"),
    ("conv_transpose", {"channels": 4, "kernel": 1, "pad": 3}, "the size of the output is 0, but must be at least 1"),
    ("linear", {"features": 0}, "features is 0, but must be at least 1"),
    ("bn", {"eps": 0.0}, "eps is 0.0, but must be positive"),
    ("bn", {"momentum": 1.5}, "momentum is 1.5, but must be between 0 and 1"),
    ("bn", {"frozen": True, "track": False}, "frozen statistics are running statistics: leave out track=false"),
    ("group_norm", {"groups": 3}, "groups is 3, which must divide the 4 channels"),
    ("layer_norm", {"eps": 0.0}, "eps is 0.0, but must be positive"),
    ("attention", {"heads": 0}, "heads is 0, but must be at least 1"),
    ("attention", {"heads": 1}, "the channels of fp32[2, 4, 6, 6] are not those of 1 heads of three tensors"),
    ("windows", {"window": 4}, "window is (4, 4), which must divide (6, 6), the size of fp32[2, 4, 6, 6]"),
    ("join_windows", {"size": 6, "window": 3}, "does not have the windows of (3, 3) of an image of (6, 6)"),
    ("roll", {"shift": (0, 6)}, "shift is (0, 6), but must be less than (6, 6), the size of fp32[2, 4, 6, 6]"),
    ("lrn", {"size": 0}, "size is 0, but must be at least 1"),
    ("lrn", {"k": 0.0}, "k (0.0) must be positive"),
    ("maxpool", {"kernel": 2, "pad": 2}, "leaves windows of 2 x 2 without any pixel"),
    ("avgpool", {"kernel": 7}, "a window of 7 x 7 does not fit into an image of 6 x 6"),
    ("upsample", {"factor": -1.5}, "factor is -1.5, but must be positive"),
    ("upsample", {"factor": (2, 0.1)}, "size is (12, 0), but must be at least 1"),
    ("upsample", {"factor": 2, "align_corners": True}, "align_corners is for mode=linear and mode=bicubic, not for"),
    ("padding", {"pad": 7, "mode": "circular"}, "6 elements cannot be padded by 7 and 7 (circular)"),
    ("padding", {"pad": 1, "mode": "reflect", "value": 1.0}, "value is for mode=zero, not for mode=reflect"),
    ("upsample", {"size": (0, 3)}, "size is (0, 3), but must be at least 1"),
    ("upsample", {}, "upsample takes either a factor, as in upsample(2), or a size"),
    ("upsample", {"factor": 2, "size": 12}, "upsample takes either a factor, as in upsample(2), or a size"),
    ("dropout", {"p": 1.0}, "p is 1.0, but must be at least 0 and less than 1"),
    ("drop_path", {"p": -0.1}, "p is -0.1, but must be at least 0 and less than 1"),
    ("celu", {"alpha": 0.0}, "alpha is 0, but celu divides by alpha"),
    ("softplus", {"beta": 0.0}, "beta is 0, but softplus divides by beta"),
    ("softshrink", {"threshold": -1.0}, "threshold is -1.0, but must be at least 0"),
    ("clamp", {}, "clamp needs min, max or both"),
    ("clamp", {"min": math.inf}, "every number is outside"),
]


@pytest.mark.parametrize(("layer", "settings", "message"), REFUSED)
def test_settings_that_make_no_sense_are_refused(layer: str, settings: dict[str, Any], message: str) -> None:
    w = Writer(2)
    with pytest.raises(ShapeError) as error:
        w(layer, w.input("image", 4, 6, 6), **settings)
    assert message in str(error.value)


def test_operands_that_do_not_fit_are_refused_with_both_shapes() -> None:
    w = Writer(2)
    image, wide, vector = w.input("image", 4, 6, 6), w.input("wide", 4, 6, 7), w.input("vector", 4)
    target = w.input("target", classes=True)
    cases: list[tuple[str, tuple[str, ...], dict[str, Any], str]] = [
        ("add", (image, wide), {}, "the shapes fp32[2, 4, 6, 6] and fp32[2, 4, 6, 7] differ, and neither is [N, C] or"),
        ("concat", (image, wide), {}, "differ in more than their channels: for a skip connection, the strides"),
        ("conv", (vector,), {"channels": 1, "kernel": 1}, "with one to three spatial axes, but got fp32[2, 4]"),
        ("softmax_cross_entropy", (image, target), {}, "but the target is int32[2]"),
        ("softmax_cross_entropy", (vector, target), {"smoothing": 1.5}, "smoothing is 1.5, but must be from 0 to 1"),
        ("nll", (vector, target), {}, "nll takes the log_softmax of logits over axis 1, and nothing else"),
        ("mse", (vector, image), {}, "mse compares float tensors of one shape, but got fp32[2, 4] and"),
        ("softmax_cross_entropy", (vector, vector), {"ignore_index": 3}, "ignore_index is for targets that are class"),
        ("softmax_cross_entropy", (vector, wide), {}, "or probabilities in the shape of the logits"),
        ("softmax_cross_entropy", (vector, target), {"class_weights": (1.0,)}, "has 1 weights, but there are 4"),
        ("softmax_cross_entropy", (vector, target), {"class_weights": (1.0, 1.0, -1.0, 1.0)}, "must be finite and at"),
        ("softmax_cross_entropy", (vector, target), {"class_weights": (0.0,) * 4}, "class_weights are all 0"),
        ("top_k", (vector, target), {"k": 5}, "k is 5, but must be from 1 to 4, the number of classes"),
        ("top_k", (vector, target), {"k": 0}, "k is 0, but must be from 1 to 4"),
        ("top_k", (vector, vector), {"k": 1}, "the target is fp32[2, 4]"),
        ("top_k", (vector, target), {"k": 5, "ignore_index": 1}, "k is 5, but must be from 1 to 4"),
        ("attention", (image, image, image), {"heads": 3}, "the channels of fp32[2, 4, 6, 6] are not those of 3 heads"),
        ("attention", (image, image, wide), {"heads": 2}, "does not have a value for each of the 6 keys"),
        ("attention", (image, vector, image), {"heads": 2}, "are not query, key and value of one type"),
        ("attention", (image, wide, wide, image), {"heads": 2}, "does not fit scores of 2 heads x 1 x 6 groups"),
        ("attention", (image,) * 3, {"heads": 2, "scale": -1.0}, "scale is -1.0, but must be positive, or 0 for"),
        ("dice", (vector, target), {"smooth": -1.0}, "smooth is -1.0, but must be at least 0"),
        ("dice", (vector, target), {"sigmoid": True}, "sigmoid=true needs a target of floats like the logits"),
        ("dice", (vector, vector), {"sigmoid": True, "ignore_index": 1}, "sigmoid=true takes regions"),
        ("tversky", (vector, target), {"gamma": 0.0}, "gamma is 0.0, but must be positive"),
        ("focal", (vector, target), {"gamma": 0.5}, "gamma is 0.5, but must be 0 or at least 1"),
        ("focal", (vector, target), {"alpha": 2.0}, "alpha is 2.0, but must be from 0 to 1, or -1 for no weights"),
        ("dice", (vector, vector), {}, "the target is fp32[2, 4]"),
        ("mean_iou", (vector, vector), {}, "the target is fp32[2, 4]"),
        ("l1", (vector, image), {}, "l1 compares float tensors of one shape, but got fp32[2, 4] and fp32[2, 4, 6, 6]"),
        ("smooth_l1", (vector, vector), {"beta": 0.0}, "beta is 0.0, but must be positive"),
        ("binary_cross_entropy", (vector, vector), {"pos_weight": -1.0}, "pos_weight is -1.0, but must be positive"),
        ("binary_cross_entropy", (target, target), {}, "binary_cross_entropy compares float tensors of one shape"),
        ("linear", (target,), {"features": 1}, "linear needs a tensor with rows and features, but got int32[2]"),
    ]  # fmt: skip
    for layer, inputs, settings, message in cases:
        with pytest.raises(ShapeError) as error:
            w(layer, *inputs, **settings)
        assert message in str(error.value), layer


@pytest.mark.parametrize(("size", "is_rounded"), [((6, 7), True), ((7, 5), True), ((7, 8), False), ((4, 6), False)])
def test_a_concatenation_of_sizes_that_a_stride_rounded_has_a_hint(size: tuple[int, int], is_rounded: bool) -> None:
    w = Writer(2)
    with pytest.raises(ShapeError, match="differ in more than their channels") as error:
        w("concat", w.input("image", 4, 6, 6), w.input("other", 4, *size))
    assert ("for a skip connection" in str(error.value)) == is_rounded


def test_batch_norm_of_one_value_is_refused() -> None:
    w = Writer(1)
    with pytest.raises(ShapeError, match="has one value per channel"):
        w("bn", w.input("features", 4))


def test_a_target_must_be_of_classes() -> None:
    w = Writer(2)
    logits, target = w.input("logits", 4), w.input("target", 1)
    with pytest.raises(ShapeError):
        w("softmax_cross_entropy", logits, target)
    assert w.type(logits).dtype is DType.FP32
