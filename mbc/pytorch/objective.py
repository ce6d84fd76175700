"""A loss of torch, by its object, its function or a name of the language -> the layer that computes it."""

from __future__ import annotations

import importlib
from types import FunctionType
from typing import Any

from mbc.errors import MbcError
from mbc.interchange.write import LOSSES

torch: Any = importlib.import_module("torch")
nn = torch.nn
functional = nn.functional
_FUNCTIONS: dict[Any, str] = {
    functional.cross_entropy: "softmax_cross_entropy",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy",
    functional.mse_loss: "mse",
    functional.l1_loss: "l1",
    functional.smooth_l1_loss: "smooth_l1",
}
_REMEDY = (
    f"pass one of {', '.join(LOSSES)}; nn.CrossEntropyLoss, BCEWithLogitsLoss, MSELoss, L1Loss, SmoothL1Loss, or their "
    "functions"
)


def loss_of(given: Any) -> tuple[str, str]:
    """Name and settings of a loss: `softmax_cross_entropy`, `smoothing=0.1`. MBC331 for any other, by name."""
    if isinstance(given, str):
        if given not in LOSSES:
            raise MbcError("MBC331", f"the loss {given!r} is not one that mbc has", _REMEDY)
        return given, ""
    if isinstance(given, FunctionType) and given in _FUNCTIONS:
        return _FUNCTIONS[given], ""
    return _of_module(given)


def _of_module(given: Any) -> tuple[str, str]:
    kind = given.__class__
    if getattr(given, "reduction", "mean") != "mean":
        raise MbcError("MBC331", f"the loss {kind.__name__} has reduction={given.reduction!r}", "use reduction='mean'")
    if kind is nn.CrossEntropyLoss:
        return "softmax_cross_entropy", _cross_entropy(given)
    if kind is nn.BCEWithLogitsLoss and given.weight is None:
        if given.pos_weight is None:
            return "binary_cross_entropy", ""
        if given.pos_weight.numel() == 1:
            return "binary_cross_entropy", f"pos_weight={given.pos_weight.item()!r}"
    if kind is nn.MSELoss:
        return "mse", ""
    if kind is nn.L1Loss:
        return "l1", ""
    if kind is nn.SmoothL1Loss and given.beta > 0:
        return "smooth_l1", f"beta={float(given.beta)!r}"
    if kind is nn.HuberLoss and given.delta == 1:
        return "smooth_l1", "beta=1.0"
    name = getattr(given, "__name__", kind.__name__)
    raise MbcError("MBC331", f"the loss {name}, set as it is, is not one that mbc has", _REMEDY)


def _cross_entropy(given: Any) -> str:
    settings: list[str] = []
    if given.label_smoothing:
        settings.append(f"smoothing={float(given.label_smoothing)!r}")
    if given.ignore_index != -100:  # torch's default, which no label of mbc's can be
        if given.ignore_index < 0:
            raise MbcError(
                "MBC331", f"the loss ignores the class {given.ignore_index}", "use an ignore_index of at least 0"
            )
        settings.append(f"ignore_index={given.ignore_index}")
    if given.weight is not None:
        weights = [repr(float(w)) for w in given.weight.tolist()]
        settings.append(f"class_weights=({', '.join(weights)}{',' if len(weights) == 1 else ''})")
    return ", ".join(settings)
