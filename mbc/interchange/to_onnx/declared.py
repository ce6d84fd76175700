"""Operations whose declarations name their equivalent in ONNX (`mbc.ops.framework_calls`)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from mbc.interchange.to_onnx.nodes import Operator, Rule
from mbc.ops import KINDS
from mbc.ops.framework_calls import OPERANDS, function_of


def _appended(call: ast.Call, append: Callable[..., Any], op: Operator) -> Any:
    """Append the nodes of a call and of the calls in its arguments.

    Args:
        call: The call.
        append: Appends the last node.
        op: The operation that is exported.

    Returns:
        The result of `append`.
    """
    assert isinstance(call.func, ast.Name)
    attributes = {keyword.arg or "": _number(keyword.value, op) for keyword in call.keywords}
    return append(call.func.id, *(value for argument in call.args for value in _values(argument, op)), **attributes)


def _values(argument: ast.expr, op: Operator) -> list[str]:
    """Return the inputs of a node that an argument stands for: operands, results of nodes, or constants."""
    match argument:
        case ast.Name(name) if name in OPERANDS:
            return [op.inputs[OPERANDS.index(name)]]
        case ast.Starred(ast.Name("xs")):
            return list(op.inputs)
        case ast.Starred(numbers):
            return [op.floats(number) for number in _number(numbers, op)]
        case ast.Call():
            return [_appended(argument, op.step, op)]
        case _:
            return [op.floats(_number(argument, op))]


def _number(expression: ast.expr, op: Operator) -> Any:
    return function_of(ast.unparse(expression), {})(op.a)


def _rule(text: str) -> Rule:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call), text
    return lambda op: _appended(call, op.last, op)


RULES: Mapping[str, Rule] = {name: _rule(kind.calls.onnx) for name, kind in KINDS.items() if kind.calls.onnx}
