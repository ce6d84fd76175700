"""Settings in parentheses -> values by name, checked against the settings of a layer, a block or an optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.near import suggest
from mbc.frontend.pytorch import Place, answer
from mbc.frontend.values import Result, WordValue, describe, is_number
from mbc.ops.base import Parameter, Setting
from mbc.source import Span

LARGEST_SETTING = 2**31 - 1  # settings become C ints


@dataclass(frozen=True, slots=True)
class Given:
    """One evaluated argument of a call; `name` None: positional."""

    name: str | None
    result: Result
    span: Span


def match(what: str, names: Sequence[str], given: Sequence[Given]) -> dict[str, Given]:
    """Return the argument for each of `names` that was given; messages quote `what`.

    Raises:
        MbcError: MBC007 or MBC009 for arguments that do not match.
    """
    matched: dict[str, Given] = {}
    position = 0
    for argument in given:
        if argument.name is None:
            if len(matched) > position:
                message = f"a setting without a name follows one with a name in `{what}`"
                raise MbcError("MBC009", message, "put the settings without names first", argument.span)
            if position >= len(names):
                takes = f"at most {len(names)} settings: {', '.join(names)}" if names else "no settings"
                remedy = "tensors come in by `|>`; parentheses hold only settings"
                raise MbcError("MBC009", f"`{what}` takes {takes}", remedy, argument.span)
            name, position = names[position], position + 1
        else:
            name = argument.name
            if name not in names:
                raise _no_setting(what, names, name, argument.span)
        if name in matched:
            message = f"`{name}` is given twice in `{what}`"
            raise MbcError("MBC009", message, "give it once", argument.span)
        matched[name] = argument
    return matched


def check_names(what: str, names: Sequence[str], arguments: Sequence[ast.Argument]) -> None:
    """Raise MBC007 for a name that is none of `names`, before the arguments are evaluated."""
    for argument in arguments:
        if argument.name is not None and argument.name not in names:
            raise _no_setting(what, names, argument.name, argument.span)


def _no_setting(what: str, names: Sequence[str], name: str, span: Span) -> MbcError:
    equivalent = answer(name, Place.SETTING)
    here = equivalent is not None and (not equivalent.equivalent or equivalent.equivalent in names)
    remedy = suggest(name, names, f"settings of `{what}`", *((Place.SETTING,) if here else ()))
    if name in ("lr", "learning_rate") and "rate" in names:
        remedy = "write `rate`, a factor of the learning rate of each step"
    elif name in ("lr", "learning_rate"):
        remedy = "a source holds no learning rate: give it to each step, or as --lr of mbc train"
    return MbcError("MBC007", f"`{what}` has no setting `{name}`", remedy, span)


def check(what: str, parameters: Sequence[Parameter], given: Sequence[Given], span: Span) -> dict[str, Setting]:
    """Return the settings of a layer or optimizer by name, with defaults filled in.

    Raises:
        MbcError: MBC007 to MBC010 for settings that do not match.
    """
    matched = match(what, [p.name for p in parameters], given)
    settings: dict[str, Setting] = {}
    for parameter in parameters:
        argument = matched.get(parameter.name)
        if argument is not None:
            settings[parameter.name] = _convert(what, parameter, argument)
        elif parameter.default is not None:
            settings[parameter.name] = parameter.default
        else:
            remedy = f"write `{what}({parameter.name}=…)`"
            raise MbcError("MBC008", f"`{what}` needs `{parameter.name}`", remedy, span)
    return settings


_FORMS = {
    "int": "a whole number",
    "float": "a number",
    "real": "a number, inf or -inf",
    "bool": "true or false",
    "spatial": "a whole number, or one for each spatial axis",
    "factors": "a number, or one for each spatial axis",
    "sides": "a whole number, one for each spatial axis, or one before and one after each axis",
    "index": "a whole number or none",
    "sizes": "a whole number or a tuple of whole numbers",
    "axes": "a whole number or a tuple of whole numbers",
    "numbers": "a tuple of numbers, such as (1, 2.5)",
}


def _convert(what: str, parameter: Parameter, given: Given) -> Setting:
    setting = _setting(parameter, given.result)
    if setting is None:
        form = _FORMS.get(parameter.kind) or f"one of {', '.join(parameter.words)}"
        message = f"`{parameter.name}` of `{what}` must be {form}, but is {describe(given.result)}"
        raise MbcError("MBC010", message, f"give {form}", given.span)
    for number in setting if isinstance(setting, tuple) else (setting,):
        if parameter.kind != "real" and isinstance(number, int | float) and abs(number) > LARGEST_SETTING:
            message = f"`{parameter.name}` of `{what}` is {number}; at most {LARGEST_SETTING} is possible"
            raise MbcError("MBC014", message, "write a smaller number", given.span)
    return setting


def _setting(parameter: Parameter, result: Result) -> Setting | None:
    """Return the value as a setting of the parameter's kind; None if it is of another kind."""
    if isinstance(result, WordValue):
        return result.text if result.text in parameter.words else None
    if parameter.kind == "word":
        return None
    if parameter.kind == "numbers":
        items = tuple(float(item) for item in result if is_number(item)) if isinstance(result, tuple) else ()
        return items if isinstance(result, tuple) and len(items) == len(result) > 0 else None
    if parameter.kind == "bool":
        return result if isinstance(result, bool) else None
    if parameter.kind in ("float", "real"):
        return float(result) if is_number(result) else None
    if parameter.kind in ("sizes", "axes"):
        wholes = tuple(whole(item) for item in (result if isinstance(result, tuple) else (result,)))
        sizes = tuple(i for i in wholes if i is not None)
        return sizes if len(sizes) == len(wholes) > 0 else None
    read = _finite if parameter.kind == "factors" else whole
    if isinstance(result, tuple):
        lengths = {"spatial": (1, 2, 3), "factors": (1, 2, 3), "sides": (1, 2, 3, 4, 6)}.get(parameter.kind, ())
        items = tuple(read(item) for item in result)
        numbers = tuple(i for i in items if i is not None)
        return numbers if len(result) in lengths and len(numbers) == len(result) else None
    return read(result)


def _finite(result: Result) -> float | None:
    """Return a value as a number, whole where it has no fraction; None for other values."""
    number = whole(result)
    return number if number is not None or not is_number(result) or math.isinf(result) else float(result)


def whole(result: Result) -> int | None:
    """Return a value as a whole number, also a float without a fraction; None for other values."""
    if not is_number(result) or math.isinf(result):
        return None
    return int(result) if result == int(result) else None
