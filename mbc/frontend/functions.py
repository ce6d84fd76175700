"""Functions of the language: they calculate with numbers while a network is expanded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mbc.errors import MbcError
from mbc.frontend.values import Result, describe, is_number
from mbc.source import Span

LONGEST_RANGE = 100_000


def _range(results: tuple[Result, ...], span: Span) -> Result:
    numbers = [_integer("range", w, span) for w in _count("range", results, 1, 3, span)]
    if len(numbers) == 3 and numbers[2] == 0:
        raise MbcError("MBC016", "the step of this range is 0", "make it 1 or -1", span)
    numbers_of_range = range(*numbers)
    try:
        length = len(numbers_of_range)
    except OverflowError:
        length = 2**63
    if length > LONGEST_RANGE:
        message = f"this range has {length} numbers; at most {LONGEST_RANGE} are allowed"
        raise MbcError("MBC017", message, "make the loop shorter", span)
    return tuple(numbers_of_range)


def _least(results: tuple[Result, ...], span: Span) -> Result:
    return min(_numbers("min", results, span))


def _most(results: tuple[Result, ...], span: Span) -> Result:
    return max(_numbers("max", results, span))


def _int(results: tuple[Result, ...], span: Span) -> Result:
    (result,) = _count("int", results, 1, 1, span)
    number = _number("int", result, span)
    if math.isinf(number):
        raise MbcError("MBC016", "`int` of an infinite number is not a whole number", "give it a finite one", span)
    return int(number)


def _len(results: tuple[Result, ...], span: Span) -> Result:
    (result,) = _count("len", results, 1, 1, span)
    if not isinstance(result, tuple):
        raise MbcError("MBC029", f"`len` does not take {describe(result)}", "give it a tuple", span)
    return len(result)


FUNCTIONS: Mapping[str, Callable[[tuple[Result, ...], Span], Result]] = MappingProxyType(
    {"range": _range, "min": _least, "max": _most, "int": _int, "len": _len}
)
FUNCTION_HELP: Mapping[str, str] = MappingProxyType(
    {
        "range": "range(end), range(start, end), range(start, end, step): a tuple of whole numbers, without the end",
        "min": "the smallest of two or more numbers, or of a tuple",
        "max": "the largest of two or more numbers, or of a tuple",
        "int": "the whole part of a number",
        "len": "the number of items of a tuple",
    }
)


def _count(name: str, results: tuple[Result, ...], least: int, most: int, span: Span) -> tuple[Result, ...]:
    if not least <= len(results) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        message = f"`{name}` takes {wanted} value{'s' if most > 1 else ''}, but got {len(results)}"
        raise MbcError("MBC009", message, FUNCTION_HELP[name], span)
    return results


def _numbers(name: str, results: tuple[Result, ...], span: Span) -> list[int | float]:
    items = results[0] if len(results) == 1 and isinstance(results[0], tuple) else results
    if not items:
        raise MbcError("MBC009", f"`{name}` got no numbers", FUNCTION_HELP[name], span)
    return [_number(name, item, span) for item in items]


def _number(name: str, result: Result, span: Span) -> int | float:
    if not is_number(result):
        raise MbcError("MBC029", f"`{name}` does not take {describe(result)}", "give it numbers", span)
    return result


def _integer(name: str, result: Result, span: Span) -> int:
    number = _number(name, result, span)
    if math.isinf(number) or number != int(number):
        raise MbcError("MBC029", f"`{name}` needs whole numbers, but got {number}", "use `//` or `int(…)`", span)
    return int(number)
