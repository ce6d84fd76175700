"""The layers `dice`, `tversky` and `focal`: settings of one operation on logits and class numbers or regions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mbc.ops.base import Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.dice import Dice
from mbc.ops.loss import resampled
from mbc.ops.weighted_cross_entropy import IGNORE_INDEX, ignored_by

OPS: tuple[OpKind, ...] = ()  # in `dice`
NONE = -1.0  # of a number that is at least 0


def _emit(builder: LayerBuilder, a: Dice, s: dict[str, Any], inputs: tuple[str, ...]) -> str:
    a = replace(a, ignored=ignored_by(s), sigmoid=s["sigmoid"])
    if a.sigmoid and a.ignored:
        raise ShapeError("ignore_index is for targets that are class numbers, but sigmoid=true takes regions")
    return builder.emit("dice", a, (inputs[0], resampled(builder, *inputs)))[0]


def _build_overlap(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    """Return the Dice loss, or the Tversky loss, which has `alpha` and `beta`.

    Raises:
        ShapeError: A setting is outside its range.
    """
    s: dict[str, Any] = {"alpha": 0.5, "beta": 0.5, "gamma": 1.0, "squared": False, "smooth_below": NONE, **settings}
    if s["smooth_below"] == NONE:
        s["smooth_below"] = s["smooth"]
    for name in ("smooth", "smooth_below", "alpha", "beta", "cross_entropy"):
        if not 0 <= s[name] < np.inf:
            raise ShapeError(f"{name} is {s[name]}, but must be at least 0")
    if not 0 < s["gamma"] < np.inf:
        raise ShapeError(f"gamma is {s['gamma']}, but must be positive")
    smooth = s["smooth"] * (2 if "alpha" in settings else 1)  # Dice adds it to twice the sums
    below, shares = () if s["smooth"] == s["smooth_below"] else (s["smooth_below"],), (2 * s["alpha"], 2 * s["beta"])
    a = Dice(smooth, (), below, int(not s["background"]), shares, s["squared"], batch=s["batch"])
    return _emit(builder, replace(a, power=s["gamma"], entropy=s["cross_entropy"]), s, inputs)


def _build_focal(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    gamma, alpha = settings["gamma"], settings["alpha"]
    if not (gamma == 0 or 1 <= gamma < np.inf):
        raise ShapeError(f"gamma is {gamma}, but must be 0 or at least 1")
    if not (alpha == NONE or 0 <= alpha <= 1):
        raise ShapeError(f"alpha is {alpha}, but must be from 0 to 1, or -1 for no weights")
    weights = (1.0, 1.0) if alpha == NONE else (1.0 - alpha, alpha)
    classes = sum(builder.type(inputs[0]).shape[1:2])  # none has an index
    return _emit(builder, Dice(0.0, (), first=classes, entropy=1.0, focus=gamma, weights=weights), settings, inputs)


_SIGMOID = Parameter("sigmoid", "bool", False)
_OVERLAP = (
    IGNORE_INDEX,
    *(Parameter("background", "bool", True), Parameter("batch", "bool", False), _SIGMOID),
    Parameter("cross_entropy", "float", 0.0),
)
_SMOOTH, _POWER = Parameter("smooth", "float", 1.0), Parameter("gamma", "float", 1.0)
_BELOW = (Parameter("squared", "bool", False), Parameter("smooth_below", "float", NONE))
_SHARES = (Parameter("alpha", "float", 0.5), Parameter("beta", "float", 0.5))
_FOCUS = (Parameter("gamma", "float", 2.0), Parameter("alpha", "float", NONE))
_DICE = (
    "(logits, target) |> dice: 1 - (2 sum(p t) + smooth) / (sum(p) + sum(t) + smooth_below) of the softmax p and the "
    "target t of each class, mean over images and classes. smooth_below = -1: as smooth. squared: sum(p^2) + sum(t^2) "
    "below. The section on losses of segmentation explains the other settings."
)
_TVERSKY = (
    "(logits, target) |> tversky: (1 - (a + smooth) / (a + alpha * sum(p (1 - t)) + beta * sum((1 - p) t) + smooth)) "
    "** gamma with a = sum(p t), otherwise as dice. A gamma other than 1 makes it focal."
)
_FOCAL = (
    "(logits, target) |> focal: cross entropy times (1 - p) ** gamma, with p the probability of the target, mean over "
    "rows and positions (sigmoid: over elements). alpha: weight of all classes but class 0 (sigmoid: of ones); class 0 "
    "(zeros) has 1 - alpha. -1: no weights."
)
LAYERS = (
    Layer("dice", (_SMOOTH, *_OVERLAP, *_BELOW), _build_overlap, (2, 2), _DICE, loss=True),
    Layer("tversky", (*_SHARES, _SMOOTH, *_OVERLAP, _POWER), _build_overlap, (2, 2), _TVERSKY, loss=True),
    Layer("focal", (*_FOCUS, IGNORE_INDEX, _SIGMOID), _build_focal, (2, 2), _FOCAL, loss=True),
)
