"""The operands of `loss` and `metric`: numbers that a training minimises, or reports by name."""

from __future__ import annotations

from collections.abc import Collection

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.building import Building
from mbc.frontend.values import Losses, Result, describe
from mbc.ir.metrics import is_reserved
from mbc.ops import KINDS, LAYERS
from mbc.source import Span


def losses_of(result: Result, building: Building, span: Span) -> Losses:
    """Return the losses that a value is.

    Raises:
        MbcError: MBC033 for a value that is not a loss, MBC046 for a metric, which has no gradient.
    """
    if not isinstance(result, Losses):
        losses = ", ".join(name for name, layer in LAYERS.items() if layer.loss)
        message = f"a loss is needed here, but this is {describe(result)}"
        raise MbcError("MBC033", message, f"pipe a prediction and a target into one of: {losses}", span)
    for kind in (building.kind_of(value) for value, _ in result.terms):
        if not KINDS[kind].loss:
            message = f"`{kind}` is a metric, which has no gradient, so it cannot be a loss"
            raise MbcError("MBC046", message, "report it: metric NAME = …", span)
    return result


def check_metric_name(name: ast.Word, taken: Collection[str]) -> None:
    """Check the name of a metric.

    Raises:
        MbcError: MBC012 for one of `taken`, MBC047 for a figure that every training reports.
    """
    if name.text in taken:
        raise MbcError("MBC012", f"there are two metrics `{name.text}`", "rename one of them", name.span)
    if is_reserved(name.text):
        message = f"`{name.text}` is a figure that every training reports, or begins like one"
        raise MbcError("MBC047", message, "choose another name for the metric", name.span)


def metric_of(result: Result, span: Span) -> Losses:
    """Return the metric that corresponds to a value.

    Raises:
        MbcError: MBC045 for a value that is not one number.
    """
    if not isinstance(result, Losses):
        scalars = ", ".join(layer.name for layer in LAYERS.values() if layer.scalar)
        message = f"a metric is one number, but this is {describe(result)}"
        raise MbcError("MBC045", message, f"pipe tensors into one of: {scalars}", span)
    return result
