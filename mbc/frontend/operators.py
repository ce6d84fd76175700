"""Operators on numbers, on tensors and on losses."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from mbc.errors import MbcError
from mbc.frontend.building import Building, misfit
from mbc.frontend.names import Scope
from mbc.frontend.values import Losses, Result, Tensor, WordValue, describe, is_number
from mbc.ir.graph import Attributes
from mbc.ops.activation import Scale
from mbc.ops.arithmetic import Emit, combine
from mbc.ops.base import NoAttributes, ShapeError
from mbc.ops.elementary import Power
from mbc.source import Span

LARGEST_NUMBER = 2**63

Figure = int | float

_NUMERIC: dict[str, Callable[[Figure, Figure], Figure]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": operator.mod,
}
ARITHMETIC = frozenset({*_NUMERIC, "**"})
_ORDERED: dict[str, Callable[[Figure, Figure], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def calculate(symbol: str, a: Figure, b: Figure, span: Span) -> Figure:
    """Return `a symbol b` for numbers.

    Raises:
        MbcError: MBC016 if the result is too large or undefined.
    """
    shown = f"({a}) {symbol} {b}" if a < 0 else f"{a} {symbol} {b}"
    try:
        value = _power(a, b) if symbol == "**" else _NUMERIC[symbol](a, b)
    except ZeroDivisionError:
        raise MbcError("MBC016", f"{shown} divides by zero", "make the divisor nonzero", span) from None
    except OverflowError:
        value = math.inf
    if isinstance(value, complex) or value != value:
        raise MbcError("MBC016", f"{shown} is not a number", "use other operands", span)
    if abs(value) >= LARGEST_NUMBER and (isinstance(value, int) or math.isinf(value)):
        message = f"{shown} is too large: whole numbers are less than 2^63"
        raise MbcError("MBC016", message, "use smaller numbers", span)
    return value


def _power(a: Figure, b: Figure) -> Figure:
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and b > 64:
        return math.inf  # avoids computing its digits
    value: Figure = a**b
    return value


def compare(symbol: str, a: Result, b: Result, span: Span) -> bool:
    """Return the result of a comparison: of numbers; for equality also of tuples of numbers, words, true and false.

    Raises:
        MbcError: MBC029 for other operands.
    """
    if symbol in _ORDERED and is_number(a) and is_number(b):
        return _ORDERED[symbol](a, b)
    if symbol in ("==", "!=") and _comparable(a) and _comparable(b):
        return (a == b) == (symbol == "==")
    kinds = "numbers, tuples of numbers, words, true and false" if symbol in ("==", "!=") else "numbers"
    remedy = "compare the shapes of tensors: `a.shape == b.shape`" if isinstance(a, Tensor) else f"compare {kinds}"
    raise MbcError("MBC029", f"`{symbol}` cannot compare {describe(a)} with {describe(b)}", remedy, span)


def _comparable(result: Result) -> bool:
    if isinstance(result, tuple):
        return all(isinstance(item, int | float) for item in result)
    return isinstance(result, int | float | WordValue)


class Arithmetic:
    """Operators that may append operations to the network."""

    def __init__(self, building: Building) -> None:
        """Take the network under construction."""
        self._building = building

    def operate(self, symbol: str, a: Result, b: Result, span: Span, scope: Scope) -> Result:
        """Return `a symbol b`.

        Raises:
            MbcError: MBC016 (numbers), MBC011 (shapes), MBC029 (operands of another kind).
        """
        if is_number(a) and is_number(b):
            return calculate(symbol, a, b, span)
        if isinstance(a, Losses) or isinstance(b, Losses):
            combined = _combine(symbol, a, b, span)
            if combined is not None:
                return combined
        elif isinstance(a, Tensor) or isinstance(b, Tensor):
            result = self._tensors(symbol, a, b, span, scope)
            if result is not None:
                return result
        message = f"`{symbol}` does not take {describe(a)} and {describe(b)}"
        raise MbcError("MBC029", message, _remedy(a, b), span)

    def negate(self, a: Result, span: Span, scope: Scope) -> Result:
        """Return `-a`."""
        if is_number(a):
            return -a
        return self.operate("*", a, -1, span, scope)

    def _tensors(self, symbol: str, a: Result, b: Result, span: Span, scope: Scope) -> Tensor | None:
        for number in (a, b):
            if is_number(number) and math.isinf(number):
                raise MbcError("MBC016", f"`{symbol}` does not take a tensor and {number}", "use a finite number", span)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            kind = {"+": "add", "-": "sub", "*": "mul", "/": "div"}.get(symbol)
            return None if kind is None else self._combine(kind, a, b, span, scope)
        if isinstance(a, Tensor) and is_number(b):
            if symbol == "/" and b == 0:
                raise MbcError("MBC016", "a tensor is divided by zero", "make the divisor nonzero", span)
            if symbol == "**":
                base = a if b != 0 else self._map("detach", a, NoAttributes(), span, scope)
                return self._map("pow", base, Power(float(b)), span, scope)
            scale = {
                "+": lambda: Scale(1.0, float(b)),
                "-": lambda: Scale(1.0, -float(b)),
                "*": lambda: Scale(float(b)),
                "/": lambda: Scale(1.0 / b),
            }.get(symbol)
            return None if scale is None else self._map("scale", a, scale(), span, scope)
        if isinstance(b, Tensor) and is_number(a):
            if symbol == "/":
                inverse = self._map("pow", b, Power(-1.0), span, scope)
                return inverse if a == 1 else self._map("scale", inverse, Scale(float(a)), span, scope)
            forms = {"+": Scale(1.0, float(a)), "-": Scale(-1.0, float(a)), "*": Scale(float(a))}
            return self._map("scale", b, forms[symbol], span, scope) if symbol in forms else None
        return None

    def _map(self, kind: str, x: Tensor, attributes: Attributes, span: Span, scope: Scope) -> Tensor:
        def build(emit: Emit) -> str:
            return emit(kind, attributes, (x.value,), "")

        return self._emit(kind, (x,), span, scope, build)

    def _combine(self, kind: str, a: Tensor, b: Tensor, span: Span, scope: Scope) -> Tensor:
        def build(emit: Emit) -> str:
            return combine(kind, a.value, b.value, self._building, emit)

        return self._emit(kind, (a, b), span, scope, build)

    def _emit(
        self, kind: str, inputs: tuple[Tensor, ...], span: Span, scope: Scope, build: Callable[[Emit], str]
    ) -> Tensor:
        path = scope.count(kind, span, yields=True)

        def emit(kind: str, attributes: Attributes, operands: tuple[str, ...], suffix: str) -> str:
            name = f"{path}.{suffix}" if suffix else path
            return self._building.emit(kind, attributes, operands, name, span)[0]

        for x in inputs:
            if x.type.dtype.value == "int32":
                message = f"there is no arithmetic on class numbers ({x.type}, input `{x.path}`)"
                raise MbcError("MBC029", message, "declare the input as float to calculate with it", span)
            if x.type.dtype.value == "uint8":
                message = f"there is no arithmetic on bytes ({x.type}, input `{x.path}`)"
                raise MbcError("MBC029", message, "pipe it into `augment` first, which converts it to numbers", span)
        try:
            value = build(emit)
        except ShapeError as error:
            raise misfit(f"`{kind}`", error, inputs, span) from None
        return Tensor(value, self._building.type(value), span, path)


def _combine(symbol: str, a: Result, b: Result, span: Span) -> Losses | None:
    """Return the sum or difference of losses, or a loss times a number; None for other operands."""
    if isinstance(a, Losses) and isinstance(b, Losses) and symbol in ("+", "-"):
        return _merge((*a.terms, *_times(b, 1.0 if symbol == "+" else -1.0, span).terms))
    if isinstance(a, Losses) and is_number(b) and symbol in ("*", "/"):
        return _times(a, float(calculate(symbol, 1.0, b, span)), span)
    if isinstance(b, Losses) and is_number(a) and symbol == "*":
        return _times(b, float(a), span)
    return None


def _times(losses: Losses, factor: float, span: Span) -> Losses:
    return Losses(tuple((value, float(calculate("*", weight, factor, span))) for value, weight in losses.terms))


def _merge(terms: tuple[tuple[str, float], ...]) -> Losses:
    weights: dict[str, float] = {}
    for value, weight in terms:
        weights[value] = weights.get(value, 0.0) + weight
    return Losses(tuple(weights.items()))


def merge(*losses: Losses) -> Losses:
    """Return the sum of losses."""
    return _merge(tuple(term for loss in losses for term in loss.terms))


def _remedy(a: Result, b: Result) -> str:
    if isinstance(a, Losses) or isinstance(b, Losses):
        return "losses can be added to each other and multiplied by numbers"
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return "tensors have + - * / with tensors and with numbers, and ** with a number"
    return "operators calculate with numbers and tensors"
