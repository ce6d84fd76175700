"""Calls of other frameworks as text: the declaration of an operation names its equivalent in each of them.

A text is a Python expression such as `F.leaky_relu(x, negative_slope=slope)`. Its names are the operands in order (`x`,
`y`, `z`, or `*xs` for all), the attributes of the operation, and modules of the framework.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OPERANDS = ("x", "y", "z")
_ALL = "xs"


@dataclass(frozen=True, slots=True)
class Calls:
    """The equivalent of an operation in other frameworks.

    A text is empty if there is none, or if separate code computes it.

    Attributes:
        torch: PyTorch's call. A call `F.name(x, argument=attribute)` also tells an import how to read `aten.name`.
        exact: PyTorch's expression for float64, if the call computes a part in float32.
        jax: JAX's expression.
        onnx: ONNX's operators, whose arguments by name are their attributes. A call `Name(x, argument=attribute)` also
            tells an import how to read the operator.
    """

    torch: str = ""
    exact: str = ""
    jax: str = ""
    onnx: str = ""


NO_CALLS = Calls()


@dataclass(frozen=True, slots=True)
class OneCall:
    """A text that is one call of a function.

    Attributes:
        function: Name of the function, without modules.
        names: By position or name of the argument, the operand or the attribute that it takes.
        constants: By position or name of the argument, the constant that it takes.
    """

    function: str
    names: Mapping[int | str, str]
    constants: Mapping[int | str, int | float | str]


def one_call(text: str) -> OneCall | None:
    """Return a text as a call of one function; None for an empty text and other expressions."""
    call = ast.parse(text or "0", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute | ast.Name):
        return None
    arguments = [*enumerate(call.args), *((keyword.arg or "", keyword.value) for keyword in call.keywords)]
    if not all(isinstance(value, ast.Name | ast.Constant) for _, value in arguments):
        return None
    names = {key: value.id for key, value in arguments if isinstance(value, ast.Name)}
    constants: dict[int | str, Any] = {key: value.value for key, value in arguments if isinstance(value, ast.Constant)}
    return OneCall(call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id, names, constants)


class _Attributes(ast.NodeTransformer):
    """Turns each name that is neither operand nor module into an attribute of `a`."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._modules = modules

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in (*OPERANDS, _ALL) or node.id in self._modules:
            return node
        return ast.Attribute(ast.Name("a", ast.Load()), node.id, ast.Load())


def function_of(text: str, modules: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of attributes and operands that a text describes.

    Args:
        text: An expression.
        modules: Modules and functions by the names that texts have for them.
    """
    tree = ast.parse(text, mode="eval")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    operands = OPERANDS[: max((OPERANDS.index(name) + 1 for name in names & set(OPERANDS)), default=0)]
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in ("a", *operands)], defaults=[], kwonlyargs=[], kw_defaults=[],
        vararg=ast.arg(_ALL) if _ALL in names else None,
    )  # fmt: skip
    body = ast.Lambda(arguments, _Attributes(modules).visit(tree.body))
    # A real function, so that compilers of frameworks can trace it.
    return eval(compile(ast.fix_missing_locations(ast.Expression(body)), text, "eval"), dict(modules))
