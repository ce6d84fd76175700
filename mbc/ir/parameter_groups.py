"""What an optimizer does with each parameter: groups, by patterns over names, have settings of their own,
and frozen ones none."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from mbc.ir.graph import Optimizer, Role, Value

NORM_AND_BIAS = "norm_and_bias"


@dataclass(frozen=True, slots=True)
class ParameterSettings:
    """`rate`: a factor of the learning rate of each step."""

    rate: float
    weight_decay: float


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern fits the whole name: `*` stands for any letters, dots included, `?` for one."""
    return fnmatchcase(name, pattern)


def is_trained(optimizer: Optimizer, value: Value) -> bool:
    """Whether it is a parameter, and not a frozen one."""
    return value.role is Role.PARAMETER and not any(matches(value.name, pattern) for pattern in optimizer.frozen)


def settings_of(optimizer: Optimizer, parameter: Value) -> ParameterSettings:
    """Of one parameter. Each setting is that of the last group that matches and gives it."""
    decays = optimizer.no_decay != NORM_AND_BIAS or len(parameter.type.shape) > 1
    rate, weight_decay = 1.0, optimizer.weight_decay if decays else 0.0
    for group in optimizer.groups:
        if matches(parameter.name, group.pattern):
            rate = rate if group.rate is None else group.rate
            weight_decay = weight_decay if group.weight_decay is None else group.weight_decay
    return ParameterSettings(rate, weight_decay)
