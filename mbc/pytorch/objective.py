"""Losses of PyTorch (objects, functions or names of the language) as losses of the language."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

from mbc.equivalence.torch_functions import FUNCTIONS
from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.interchange.steps import Imported
from mbc.interchange.write import LOSSES, Objective
from mbc.pytorch.copies import copy_model
from mbc.pytorch.model_tensors import entries_of
from mbc.pytorch.targets import OF_CLASSES, Target, target_of
from mbc.source import Source

torch: Any = importlib.import_module("torch")
nn = torch.nn
functional = nn.functional
_FUNCTIONS: dict[Any, str] = {
    functional.cross_entropy: "softmax_cross_entropy",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy",
    functional.mse_loss: "mse",
    functional.l1_loss: "l1",
    functional.smooth_l1_loss: "smooth_l1",
    functional.huber_loss: "smooth_l1",
    functional.nll_loss: "nll",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REMEDY = (
    f"pass one of {', '.join(LOSSES)}; nn.CrossEntropyLoss, NLLLoss, KLDivLoss, BCELoss, BCEWithLogitsLoss, MSELoss, "
    "L1Loss, SmoothL1Loss, HuberLoss, a function of theirs, or any function of the outputs and the targets"
)


def losses_of(given: Any) -> tuple[Objective | None, ...]:
    """Return the objective of each output.

    Args:
        given: A loss, or a list of losses, pairs (loss, weight) and None.

    Raises:
        MbcError: MBC331 for a loss that mbc does not have.
    """
    entries = (given,) if _is_weighted(given) else entries_of(given)
    return tuple(None if entry is None else _objective(entry) for entry in entries)


def is_own(loss: Any) -> bool:
    """Return whether a loss is a function that the language does not have, so that PyTorch computes it."""
    if not callable(loss) or isinstance(loss, type) or getattr(loss, "reduction", "") == "none":
        return False
    try:
        return not losses_of(loss)
    except MbcError:
        return True


def judges_of(given: Any) -> list[Any]:
    """Return the losses of the outputs as functions of PyTorch, in float64; None for an output without a loss."""
    by_name = {name: function for function, name in reversed(_FUNCTIONS.items())}
    return [
        by_name.get(loss) or _judge(Objective(*_named(loss))) if isinstance(loss, str)
        else copy_model(loss, dtype=torch.float64) if isinstance(loss, nn.Module)
        else loss
        for loss in _losses(given)
    ]  # fmt: skip


def _named(text: str) -> tuple[str, str]:
    """Return name and settings of a loss that is given as the language writes it, such as `dice(batch=true)`."""
    name, _, settings = text.partition("(")
    return name.strip(), settings.strip().removesuffix(")")


def _judge(objective: Objective) -> Any:
    """Return a loss of the language as a function of PyTorch."""

    def judge(output: Any, target: Any) -> Any:
        shape = tuple(output.shape)
        sizes, line = ", ".join(map(str, ("batch", *shape[1:]))), objective.line("x", "t", shape)
        text = f"input x[{sizes}] : float\n input t{objective.target(shape)}\n output x |> relu\n {line}"
        network = lower(parse(Source("loss", f"network judge(batch = {shape[0]}) {{\n{text}\n}}"))).network
        of = next(op for op in network.operations if "t" in op.inputs)
        return FUNCTIONS[of.kind](of.attributes, output, target)

    return judge


def _losses(given: Any) -> list[Any]:
    entries = (given,) if _is_weighted(given) else entries_of(given)
    return [entry[0] if _is_weighted(entry) else entry for entry in entries]


def loss_modules(given: Any) -> list[Any]:
    """Return the modules of PyTorch among the losses."""
    return [m for entry in entries_of(given) for m in entries_of(entry) if isinstance(m, nn.Module)]


def fitted(objectives: Sequence[Objective | None], given: Any, network: Imported, targets: Any) -> list[Target | None]:
    """Return the targets of a network's outputs; None for an output without a loss.

    Args:
        objectives: The objective of each output.
        given: The losses as the user passed them.
        network: The network.
        targets: An example of the targets, or None.

    Raises:
        MbcError: MBC331 if the numbers of losses and outputs differ, or a loss has another number of classes.
    """
    outputs = [network.shapes[value] for value in network.outputs]
    if len(outputs) != len(objectives):
        losses = "one loss" if len(objectives) == 1 else f"{len(objectives)} losses"
        each = ", ".join(["(loss, 1.0)", *["(loss, 0.4)"] * (len(outputs) - 1)])
        raise MbcError(
            "MBC331",
            f"the model has {len(outputs)} outputs and {losses}: each output has a target of its own and a weight",
            f"pass a loss with its weight for each output (None for an output without a loss): loss=[{each}]",
        )
    if not any(objectives):
        raise MbcError("MBC331", "no output has a loss", "pass a loss for at least one output")
    examples = iter(() if targets is None else entries_of(targets))
    fitted_targets: list[Target | None] = []
    for objective, loss, value, shape in zip(objectives, _losses(given), network.outputs, outputs, strict=True):
        if objective is not None:
            _check_classes(objective, shape)
            _check_log_probabilities(objective, network, value)
        fitted_targets.append(None if objective is None else target_of(objective, loss, next(examples, None)))
    return fitted_targets


def _check_classes(objective: Objective, shape: tuple[int, ...]) -> None:
    if objective.loss in OF_CLASSES and len(shape) < 2:
        raise MbcError(
            "MBC331",
            f"the loss {objective.loss} needs a number for each class, but the output has the shape {list(shape)}",
            "return logits of the shape [N, C, ...]",
        )
    _, has_weights, weights = objective.settings.partition("class_weights=(")
    count = len([w for w in weights.partition(")")[0].split(",") if w.strip()])
    if has_weights and count != shape[1]:
        raise MbcError(
            "MBC331",
            f"the loss has weights of {count} classes, but the output has {shape[1]} classes",
            "give each class a weight",
        )


def _check_log_probabilities(objective: Objective, network: Imported, value: int) -> None:
    """Raise MBC331 for a loss of log-probabilities on other outputs, for which PyTorch computes another number.

    Raises:
        MbcError: MBC331.
    """
    of_logits = objective.loss == "kl_divergence" and "logits=false" not in objective.settings
    maker = next((step for step in network.steps if value in step.results), None)
    normalised = maker is not None and maker.op == "log_softmax" and maker.settings.get("axis", 1) == 1
    if objective.loss in ("nll", "kl_divergence") and not of_logits and not normalised:
        raise MbcError(
            "MBC331",
            f"the loss {objective.loss} takes log-probabilities, but this output is not the log_softmax of its classes",
            "end the model with log_softmax(…, dim=1), or use nn.CrossEntropyLoss of logits",
        )


def _is_weighted(given: Any) -> bool:
    entries = entries_of(given)
    return len(entries) == 2 and isinstance(entries[1], (int, float))


def _objective(given: Any) -> Objective:
    loss, weight = given if _is_weighted(given) else (given, 1.0)
    if isinstance(loss, nn.Module) and any(getattr(loss, name, None) for name in _HOOKS):
        kind = loss.__class__.__name__
        raise MbcError("MBC331", f"the loss {kind} has hooks, which mbc would not call", "remove them")
    if isinstance(loss, str):
        name, settings = _named(loss)
        if name not in LOSSES:
            raise MbcError("MBC331", f"the loss {loss!r} is not one that mbc has", _REMEDY)
        return Objective(name, settings, float(weight))
    if loss is functional.binary_cross_entropy:
        return Objective("binary_cross_entropy", "logits=false", float(weight))
    if isinstance(loss, FunctionType) and loss in _FUNCTIONS:
        return Objective(_FUNCTIONS[loss], "", float(weight))
    objective = Objective(*_of_module(loss), float(weight))
    if isinstance(loss, nn.HuberLoss):
        objective = replace(objective, factor=float(getattr(loss, "delta", 1.0)))
    return _reduced(objective, loss)


def _reduced(objective: Objective, given: Any) -> Objective:
    """Return the objective with the reduction of PyTorch's loss.

    Raises:
        MbcError: MBC331 for a reduction that mbc does not have.
    """
    kind, reduction = given.__class__, getattr(given, "reduction", "mean")
    if kind is nn.KLDivLoss and reduction in ("mean", "batchmean"):
        return replace(objective, reduction={"mean": "elements", "batchmean": "rows"}[reduction])
    if reduction == "mean":
        return objective
    if reduction == "sum" and "class_weights" not in objective.settings and getattr(given, "ignore_index", -1) < 0:
        return replace(objective, reduction="sum")
    of = " with class weights or an ignored class" if reduction == "sum" else ""
    raise MbcError("MBC331", f"the loss {kind.__name__}{of} has reduction={reduction!r}", "use reduction='mean'")


def _of_module(given: Any) -> tuple[str, str]:
    kind = given.__class__
    if kind is nn.NLLLoss:
        return "nll", _of_classes(given)
    if kind is nn.KLDivLoss and not given.log_target:
        return "kl_divergence", "logits=false"
    if kind is nn.BCELoss and given.weight is None:
        return "binary_cross_entropy", "logits=false"
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
    if kind is nn.HuberLoss:
        return "smooth_l1", f"beta={float(given.delta)!r}"
    name = getattr(given, "__name__", kind.__name__)
    raise MbcError("MBC331", f"the loss {name}, with these settings, is not one that mbc has", _REMEDY)


def _cross_entropy(given: Any) -> str:
    smoothing = [f"smoothing={float(given.label_smoothing)!r}"] if given.label_smoothing else []
    return ", ".join([*smoothing, *filter(None, (_of_classes(given),))])


def _of_classes(given: Any) -> str:
    settings = [f"ignore_index={given.ignore_index}"] if given.ignore_index >= 0 else []  # see `mbc.pytorch.targets`
    if given.weight is not None:
        weights = [repr(float(w)) for w in given.weight.tolist()]
        settings.append(f"class_weights=({', '.join(weights)}{',' if len(weights) == 1 else ''})")
    return ", ".join(settings)
