"""Entries of `train { … }` that name parameters by patterns and give them other settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.evaluate import Evaluator
from mbc.frontend.frame import Frame
from mbc.frontend.near import nearest, suggest
from mbc.frontend.settings import Given, check_names, match
from mbc.frontend.values import describe, is_number
from mbc.ir.graph import Network, ParameterGroup, Role
from mbc.ir.parameter_groups import NORM_AND_BIAS, matches
from mbc.source import Span

NONE = "none"
NO_DECAY = (NORM_AND_BIAS, NONE)
GROUP = "group"
_SETTINGS = ("rate", "weight_decay")
_EXAMPLE = 'group("head.*", rate=10)'


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of names of parameters, and its place in the source."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class Group:
    """A group of parameters, and the place of its pattern in the source."""

    pattern: Pattern
    group: ParameterGroup


def read_no_decay(value: ast.Expression) -> str:
    """Return which parameters have no weight decay: `norm_and_bias`, or empty.

    Raises:
        MbcError: MBC025 for another value.
    """
    if not isinstance(value, ast.Name) or value.text not in NO_DECAY:
        text = value.text if isinstance(value, ast.Name) else ""
        message = f"`no_decay` cannot be `{text}`" if text else "`no_decay` is a word"
        raise MbcError("MBC025", message, suggest(text, NO_DECAY, "words of `no_decay`"), value.span)
    return "" if value.text == NONE else value.text


def read_groups(value: ast.Expression, evaluator: Evaluator, frame: Frame) -> tuple[Group, ...]:
    """Return the groups of one `group(…)`, of several in parentheses, or an empty result for `none`."""
    if _is_none(value):
        return ()
    return tuple(_group(item, evaluator, frame) for item in _items(value))


def read_frozen(value: ast.Expression) -> tuple[Pattern, ...]:
    """Return the patterns of frozen parameters: one, several in parentheses, or `none`."""
    if _is_none(value):
        return ()
    return tuple(map(_pattern, _items(value)))


def _is_none(value: ast.Expression) -> bool:
    return isinstance(value, ast.Name) and value.text == NONE


def _items(value: ast.Expression) -> tuple[ast.Expression, ...]:
    return value.items if isinstance(value, ast.Tuple) else (value,)


def _group(value: ast.Expression, evaluator: Evaluator, frame: Frame) -> Group:
    if not isinstance(value, ast.Call) or value.name != GROUP:
        raise MbcError("MBC025", "a group of parameters is needed here", f"write {_EXAMPLE}", value.span)
    if not value.arguments or value.arguments[0].name is not None:
        raise MbcError("MBC008", f"`{GROUP}` begins with a pattern of names", f"write {_EXAMPLE}", value.span)
    first, *rest = value.arguments
    pattern = _pattern(first.value)
    check_names(GROUP, _SETTINGS, rest)
    given = [Given(a.name, evaluator.evaluate(a.value, frame), a.span) for a in rest]
    matched = match(GROUP, _SETTINGS, given)
    rate, weight_decay = (_number(matched.get(name), name) for name in _SETTINGS)
    if rate is None and weight_decay is None:
        message = "this group changes nothing: it gives neither `rate` nor `weight_decay`"
        raise MbcError("MBC041", message, f"give one, as in {_EXAMPLE}", value.span)
    return Group(pattern, ParameterGroup(pattern.text, rate, weight_decay))


def _pattern(value: ast.Expression) -> Pattern:
    if not isinstance(value, ast.String):
        remedy = 'write "head.*", or the whole name of a parameter'
        raise MbcError("MBC025", "a pattern of names is needed here, in quotes", remedy, value.span)
    return Pattern(value.text, value.span)


def _number(given: Given | None, name: str) -> float | None:
    if given is None:
        return None
    result = given.result
    if not is_number(result) or result < 0 or (name == "rate" and result == 0):
        allowed = "a positive number" if name == "rate" else "a number, at least 0"
        message = f"`{name}` of `{GROUP}` must be {allowed}, but is {describe(result)}"
        raise MbcError("MBC025", message, f"give {allowed}", given.span)
    return float(result)


def check_patterns(network: Network, patterns: Iterable[Pattern]) -> None:
    """Raise MBC040 for a pattern that matches no parameter of the network."""
    names = [s.value for s in network.states if network.values[s.value].role is Role.PARAMETER]
    for pattern in patterns:
        if not any(matches(name, pattern.text) for name in names):
            message = f'no parameter of `{network.name}` matches "{pattern.text}"'
            raise MbcError("MBC040", message, _similar(pattern.text, names), pattern.span)


def check_frozen(network: Network, patterns: Sequence[Pattern]) -> None:
    """Raise MBC042 if every parameter of the network is frozen."""
    names = [s.value for s in network.states if network.values[s.value].role is Role.PARAMETER]
    if patterns and all(any(matches(name, pattern.text) for pattern in patterns) for name in names):
        message = f"every parameter of `{network.name}` is frozen, so there is nothing to train"
        raise MbcError("MBC042", message, "remove the patterns of the parameters to train", patterns[-1].span)


def _similar(pattern: str, names: list[str]) -> str:
    """Return a remedy: the pattern that was probably meant, or the names of parameters."""
    of_layer = f"{pattern.removesuffix('.')}.*"
    if any(matches(name, of_layer) for name in names):
        return f'a pattern fits the whole name: write "{of_layer}"'
    near = nearest(pattern, {*names, *(f"{name.rpartition('.')[0]}.*" for name in names)})
    if near is not None:
        return f'did you mean "{near}"?'
    return f"the parameters are: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
