"""The optimizer's settings of each parameter: groups, given by patterns of names, have other settings or are frozen."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from mbc.ir.graph import Optimizer, Role, Value

NORM_AND_BIAS = "norm_and_bias"


@dataclass(frozen=True, slots=True)
class ParameterSettings:
    """Settings of one parameter. `rate` is a factor of the learning rate of each step."""

    rate: float
    weight_decay: float


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches the whole name: `*` stands for any characters, dots included, `?` for one."""
    return fnmatchcase(name, pattern)


def is_trained(optimizer: Optimizer, value: Value) -> bool:
    """Return whether a value is a parameter that is not frozen."""
    return value.role is Role.PARAMETER and not any(matches(value.name, pattern) for pattern in optimizer.frozen)


def settings_of(optimizer: Optimizer, parameter: Value) -> ParameterSettings:
    """Return the settings of one parameter. Each setting comes from the last matching group that has it."""
    decays = optimizer.no_decay != NORM_AND_BIAS or len(parameter.type.shape) > 1
    rate, weight_decay = 1.0, optimizer.weight_decay if decays else 0.0
    for group in optimizer.groups:
        if matches(parameter.name, group.pattern):
            rate = rate if group.rate is None else group.rate
            weight_decay = weight_decay if group.weight_decay is None else group.weight_decay
    return ParameterSettings(rate, weight_decay)
