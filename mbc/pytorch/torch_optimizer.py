"""An optimizer of PyTorch, with its hyperparameters and parameter groups, as entries of the `train` section."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mbc.errors import MbcError
from mbc.frontend.sections import MOST_ACCUMULATED

torch: Any = importlib.import_module("torch")
_TAKEN = "torch.optim.SGD, AdamW, or Adam without weight decay"
# Other hyperparameters of a group, and the only value that mbc supports.
_PLAIN = {"dampening": 0, "maximize": False, "amsgrad": False, "differentiable": False}


@dataclass(frozen=True, slots=True)
class Updates:
    """The updates of an optimizer.

    Attributes:
        entry: The optimizer as the language writes it, with the weight decay of the first group.
        factors: The learning rate of each group, divided by the first group's.
        decays: The weight decay of each group.
        settings: The hyperparameters of the first group, as the plan contains them.
    """

    entry: str
    factors: tuple[float, ...]
    decays: tuple[float, ...]
    settings: tuple[tuple[str, Any], ...]


def updates_of(optimizer: Any) -> Updates:
    """Return the updates of an optimizer.

    Raises:
        MbcError: MBC332 for an optimizer that mbc does not have.
    """
    kind, optim = optimizer.__class__, torch.optim
    if kind not in (optim.SGD, optim.AdamW, optim.Adam):
        _refuse(f"the optimizer {kind.__name__} is not one that mbc has", f"use {_TAKEN}")
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    settings = ("momentum", "nesterov") if kind is optim.SGD else ("betas", "eps")
    for name, plain in _PLAIN.items():
        if any(group.get(name, plain) != plain for group in groups):
            _refuse(f"the optimizer {kind.__name__} has {name} set", f"leave {name} at {plain}")
    for name in settings:
        if any(group[name] != groups[0][name] for group in groups):
            _refuse(f"parameter groups have different {name}", "only lr and weight_decay may differ")
    decays = tuple(float(group["weight_decay"]) for group in groups)
    decoupled = kind is optim.AdamW or groups[0].get("decoupled_weight_decay", False)
    if kind is optim.Adam and any(decays) and not decoupled:
        _refuse("the optimizer Adam has weight_decay, which it adds to gradients", "use AdamW, which decouples it")
    first = groups[0]
    if kind is optim.SGD:
        nesterov = ", nesterov=true" if first["nesterov"] else ""
        entry = f"sgd(momentum={float(first['momentum'])!r}{nesterov}, weight_decay={decays[0]!r})"
    else:
        beta1, beta2 = (float(beta) for beta in first["betas"])
        entry = f"adamw(beta1={beta1!r}, beta2={beta2!r}, eps={float(first['eps'])!r}, weight_decay={decays[0]!r})"
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
    if min(rates) <= 0 and len(set(rates)) > 1:
        _refuse("a parameter group has a learning rate of 0", "set requires_grad=False for its parameters")
    factors = tuple(rate / rates[0] if rates[0] else 1.0 for rate in rates)
    return Updates(entry, factors, decays, tuple((name, first[name]) for name in settings))


def check_parameters(optimizer: Any, model: Any) -> set[int]:
    """Return the parameters that the optimizer has, by `id`.

    Raises:
        MbcError: MBC332 if the optimizer has no trained parameter of the model, a parameter that the model lacks, or
            hooks.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {id(p): p for p in model.parameters()}
    if not any(own[key].requires_grad for key in trained & own.keys()):
        reason = "the optimizer has no parameter of the model that is trained"
        _refuse(reason, "make it from model.parameters(), and set requires_grad=True for some of them")
    if foreign := len(trained - own.keys()):
        what = "a parameter" if foreign == 1 else f"{foreign} parameters"
        raise MbcError(
            "MBC332",
            f"the optimizer has {what} that the model lacks, which mbc would not train",
            "register them in the model and use them in forward, or train them with another optimizer",
        )
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if getattr(optimizer, hooks, None):
            _refuse("the optimizer has hooks on its step, which mbc would not call", "remove them")
    return trained


def entries_of(updates: Updates, optimizer: Any, states_of: Callable[[Any], Sequence[str]]) -> list[str]:
    """Return the lines of the `train` section; `states_of` returns the trained states that hold a parameter."""
    differing = [
        f'group("{state}", rate={factor!r}, weight_decay={decay!r})'
        for group, factor, decay in zip(optimizer.param_groups, updates.factors, updates.decays, strict=True)
        if (factor, decay) != (1.0, updates.decays[0])
        for parameter in group["params"]
        for state in states_of(parameter)
    ]
    comma = "," if len(differing) == 1 else ""
    return [f"optimizer = {updates.entry}", *([f"groups = ({', '.join(differing)}{comma})"] if differing else [])]


def settings_of_updates(clip_norm: float, accumulate: int, ema: float) -> list[str]:
    """Return the lines of the `train` section for settings of an update that PyTorch's optimizers do not have.

    Raises:
        MbcError: MBC332 for a number that is not allowed.
    """
    for name, given, allowed, form in (
        ("clip_norm", clip_norm, 0 <= clip_norm < math.inf, "a norm, or 0 for no clipping"),
        ("accumulate", accumulate, accumulate in range(1, MOST_ACCUMULATED + 1), "a number of mini-batches"),
        ("ema", ema, 0 <= ema < 1, "a decay below 1, or 0 for no averages"),
    ):
        if not allowed:
            _refuse(f"{name} is {given}", f"pass {form}")
    return [
        *([f"clip_norm = {float(clip_norm)!r}"] if clip_norm else []),
        *([f"accumulate = {int(accumulate)}"] if accumulate != 1 else []),
        *([f"ema = {float(ema)!r}"] if ema else []),
    ]


def rate_now(updates: Updates, optimizer: Any, given: float | None) -> float:
    """Return the learning rate of the first group: the rate that is `given`, or the optimizer's.

    Raises:
        MbcError: MBC335 if the rates of the groups are no longer proportional to the planned ones, or another
            hyperparameter has changed, as schedules of momentum do.
    """
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    if len(groups) != len(updates.factors):
        _refuse_change(f"{len(groups)} parameter groups", str(len(updates.factors)), "make a trainer with all groups")
    for group, decay in zip(groups, updates.decays, strict=True):
        for name, planned in (*updates.settings, ("weight_decay", decay)):
            if group[name] != planned:
                _refuse_change(
                    f"{name}={group[name]}", str(planned), "schedule only learning rates (cycle_momentum=False)"
                )
    rates = [float(group["lr"]) for group in groups]
    if given is not None:
        return given
    planned = [rates[0] * factor for factor in updates.factors]
    if not all(map(_close, rates, planned)):
        _refuse_change(
            f"the rates {rates}", str(planned), "let a schedule change the rates of all groups by one factor"
        )
    return rates[0]


def _close(rate: float, planned: float) -> bool:
    return math.isclose(rate, planned, rel_tol=1e-6, abs_tol=1e-30)


def _refuse_change(current: str, planned: str, remedy: str) -> NoReturn:
    raise MbcError("MBC335", f"the optimizer has {current}, but the plan has {planned}", remedy)


def _refuse(reason: str, remedy: str) -> NoReturn:
    raise MbcError("MBC332", reason, remedy)
