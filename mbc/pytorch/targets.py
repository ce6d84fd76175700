"""Targets of a step: the labels that a loss ignores, and the errors of targets."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mbc.errors import MbcError
from mbc.interchange.write import Objective
from mbc.pytorch.model_tensors import readable

torch: Any = importlib.import_module("torch")
# The number that replaces an ignored negative label, because labels of the language count from 0.
LEFT_OUT = 2**31 - 1
OF_CLASSES = ("softmax_cross_entropy", "nll")  # losses of class numbers


@dataclass(frozen=True, slots=True)
class Target:
    """How one target is read.

    Attributes:
        objective: The loss that it is for.
        ignored: The negative label that PyTorch's loss ignores; None if there is none.
        is_planned: Whether the network ignores these labels, under the number `LEFT_OUT`.
    """

    objective: Objective
    ignored: int | None
    is_planned: bool

    def read(self, given: Any) -> Any:
        """Return a target in the form that a step takes."""
        if self.is_planned and self.ignored is not None:
            labels = torch.as_tensor(given)
            given = torch.where(labels == self.ignored, LEFT_OUT, labels)
        return readable(given)


def target_of(objective: Objective, loss: Any, example: Any) -> Target:
    """Return how a target is read.

    PyTorch ignores labels of -100 by default. The network ignores them only if the example has such labels.

    Args:
        objective: The loss.
        loss: PyTorch's loss, or the name of a loss.
        example: An example of the target, or None.

    Raises:
        MbcError: MBC331 if labels are ignored and the loss has another reduction than the mean.
    """
    ignored = getattr(loss, "ignore_index", 0)
    if objective.loss not in OF_CLASSES or isinstance(loss, str):
        return Target(objective, None, False)
    if example is not None and torch.as_tensor(example).is_floating_point():
        return Target(replace(objective, soft=True), None, False)
    ignored = -100 if not hasattr(loss, "ignore_index") else ignored
    if ignored >= 0:
        return Target(objective, None, False)
    is_planned = ignored != -100 or (example is not None and bool((torch.as_tensor(example) == ignored).any()))
    if is_planned and objective.reduction != "mean":
        message = f"a target has labels of {ignored}, which the loss ignores, but the loss has reduction='sum'"
        raise MbcError("MBC331", message, "use reduction='mean'")
    if is_planned:
        settings = ", ".join([*filter(None, (objective.settings,)), f"ignore_index={LEFT_OUT}"])
        objective = replace(objective, settings=settings)
    return Target(objective, ignored, is_planned)


def explain(targets: Sequence[Target], given: Sequence[Any], error: MbcError) -> MbcError:
    """Return the reason why a step refused its targets, in PyTorch's terms; otherwise the error itself."""
    for target, value in zip(targets, given, strict=False):
        if target.objective.loss not in OF_CLASSES or not isinstance(value, torch.Tensor | np.ndarray):
            continue
        tensor = torch.as_tensor(value)
        if tensor.is_floating_point() and not target.objective.soft:
            message = (
                f"a target holds floats in the shape {list(tensor.shape)}, but the trainer was made for class numbers"
            )
            remedy = "pass labels.long(); for probabilities of each class, mbc.from_torch(..., targets=probabilities)"
            return MbcError("MBC331", message, remedy)
        if target.ignored is not None and not target.is_planned and bool((tensor == target.ignored).any()):
            message = f"a target has labels of {target.ignored}, which the loss ignores, but the trainer does not"
            remedy = (
                "give from_torch an example of the targets that has such labels: mbc.from_torch(..., targets=labels)"
            )
            return MbcError("MBC331", message, remedy)
    return error
