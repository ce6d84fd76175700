"""The meaning of an operation on one element, as text in C, from which kernels are generated.

Beside NumPy's meaning (`OpKind.evaluate`), a pointwise operation declares its result as an expression over its operands
and the numbers among its attributes. All arithmetic is in fp32. An expression may call the functions of
templates/kernels/shared/activations.cuh, and has to pass NaN on where NumPy does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Expression:
    """The result of one element.

    Attributes:
        operands: Names of the inputs in the text.
        text: `name = expression` lines, which end with a semicolon, and the expression of the result; empty for sums.
        reals: Names in the text and values of numbers that are arguments of a launch.
        sums: For a reduction over everything but the channels: what is summed.
        finishes: The outputs of a reduction, with one element for each channel, in terms of `sum0`, `sum1` and inputs
            with one element for each channel.
        by_sample: Constants and outputs of reductions have one element for each channel of each sample, unless they
            have one for each channel.
        inside: The output of a reduction has the operands' element type, and a group may compute more values from it.
    """

    operands: tuple[str, ...]
    text: str
    reals: tuple[tuple[str, float], ...] = ()
    sums: tuple[str, ...] = ()
    finishes: tuple[str, ...] = ()
    by_sample: bool = False
    inside: bool = False


# Returns the expression of an operation for its attributes and its number of inputs.
Device = Callable[[Any, int], Expression]


def device(operands: str, text: str, *reals: str) -> Device:
    """Return the device expression of a kind of operation.

    Args:
        operands: Names of the inputs in the text, separated by commas.
        text: The text of the expression.
        reals: Names of attributes, or properties of these, that the text reads.
    """
    return chosen(operands, lambda attributes: text, *reals)


def dot(attributes: Any, inputs: int) -> Expression:
    """Return the device expression of a sum of products, the gradient of an operand that was repeated."""
    factor = float(getattr(attributes, "factor", 1.0))
    return Expression(("a", "b"), "", (("factor", factor),), ("a * b",), ("factor * sum0",), inside=True)


def by_operator(operands: str, texts: Mapping[str, str], *reals: str) -> Device:
    """Return the device expression of a kind whose attribute `operator` chooses one of the texts."""
    return chosen(operands, lambda attributes: texts[attributes.operator], *reals)


def chosen(operands: str, text: Callable[[Any], str], *reals: str) -> Device:
    """Return the device expression of a kind whose text depends on the attributes."""
    names = tuple(name.strip() for name in operands.split(","))

    def expression(attributes: Any, inputs: int) -> Expression:
        values = tuple((name, float(getattr(attributes, name))) for name in reals)
        return Expression(names[:inputs], text(attributes), values)

    return expression
