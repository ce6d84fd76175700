"""Activations and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

from mbc.interchange.aten.operands import Refused
from mbc.interchange.aten.renamings import RENAMINGS
from mbc.interchange.from_onnx import patterns
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.interchange.program import Argument, TensorName
from mbc.ops import LAYERS
from mbc.ops.framework_calls import one_call

_SELU = (1.6732632423543772, 1.0507009873554805)  # alpha, gamma


def _plain(name: str, op: Operator) -> None:
    op.emit(f"aten.{name}.default", self=op.tensor())


def _bent(x: Expression, slope: Expression | float) -> Expression:
    """Return x if it is positive, else x times a slope of any sign."""
    return x.apply("relu") - (-x).apply("relu") * slope


def _saturated(x: Expression) -> Expression:
    """Return exp(x) - 1 where x is negative, else 0."""
    return (-(-x).apply("relu")).apply("elu", alpha=1.0)


def _selu(op: Operator) -> None:
    alpha, gamma, x = op.real("alpha", _SELU[0]), op.real("gamma", _SELU[1]), Expression.of(op)
    if math.isclose(alpha, _SELU[0], rel_tol=1e-6) and math.isclose(gamma, _SELU[1], rel_tol=1e-6):
        op.emit("aten.selu.default", self=x.name)
    else:
        (x.apply("relu") * gamma + _saturated(x) * (alpha * gamma)).give()


def _celu(op: Operator) -> None:
    alpha = op.real("alpha", 1.0)
    if alpha <= 0:
        raise Refused("its alpha is not above 0", "use a positive alpha, or nn.ELU")
    op.emit("aten.celu.default", self=op.tensor(), alpha=alpha)


def _softsign(op: Operator) -> None:
    x = Expression.of(op)
    (x / (x.apply("abs") + 1.0)).give()


def _cosh(op: Operator) -> None:
    x = Expression.of(op)
    ((x.apply("exp") + (-x).apply("exp")) * 0.5).give()


def _swiglu(op: Operator) -> None:
    gate, alpha = Expression.of(op), op.real("alpha", 1.0)
    (gate * (gate * alpha).apply("sigmoid") * Expression.of(op, 1)).give()


def _gelu(op: Operator) -> None:
    op.emit("aten.gelu.default", self=op.tensor(), approximate=op.text("approximate", "none"))


def _swish(op: Operator) -> None:
    alpha = op.real("alpha", 1.0)
    if alpha != 1.0:
        x = Expression.of(op)
        (x * (x * alpha).apply("sigmoid")).give()
        return
    op.emit("aten.silu.default", self=op.tensor())


def _erf(op: Operator) -> None:
    if patterns.gelu_of(op) is None:
        raise Refused("it is no part of a GELU", "use nn.GELU")
    op.part()


def _prelu(op: Operator) -> None:
    """Emit PReLU, whose slope is broadcast from the last axis; the layer `prelu` takes one number for each channel.

    Raises:
        Refused: The slope differs between samples.
    """
    array, shape = op.graph.array(op.input(1)), op.sizes()
    if array is None:
        _bent(Expression.of(op), Expression.of(op, 1)).give()
        return
    slope, aligned = op.held(1, "weight"), (1,) * (len(shape) - array.ndim) + array.shape
    of_channels = aligned == tuple(n if axis == 1 else 1 for axis, n in enumerate(shape))
    if array.size == 1 or of_channels:
        slope = op.step("aten.view.default", (array.size,), self=slope)
        op.emit("aten.prelu.default", self=op.tensor(), weight=slope)
        return
    if len(aligned) > len(shape) or aligned[0] != 1:
        raise Refused(f"its slope {list(array.shape)} differs between the samples", "give it 1 in their dimension")
    assert slope is not None
    _bent(Expression.of(op), Expression(op, slope, aligned)).give()


def _operand(op: Operator, position: int) -> Argument:
    """Return a number for an operand that is one, otherwise its tensor."""
    number = op.number(position)
    return op.tensor(position) if number is None else number


def _binary(name: str, op: Operator) -> None:
    a, b = _operand(op, 0), _operand(op, 1)
    kind = "Tensor" if isinstance(b, TensorName) else "Scalar"
    if not isinstance(a, TensorName):
        if not isinstance(b, TensorName):
            raise Refused("none of its operands is a tensor of the network", "use it on the result of a layer")
        if name == "div":
            inverse = op.step("aten.reciprocal.default", op.sizes(1), self=b)
            op.emit("aten.mul.Scalar", self=inverse, other=a)
        elif name == "sub":
            op.emit("aten.rsub.Scalar", self=b, other=a)
        else:
            op.emit(f"aten.{name}.Scalar", self=b, other=a)
        return
    op.emit(f"aten.{name}.{kind}", self=a, other=b)


def _vector(op: Operator, held: TensorName | None) -> TensorName:
    """Return held numbers of each channel as a vector, whatever shape they have."""
    return op.step("aten.view.default", (op.result[1],), self=held)


def _biased(op: Operator) -> bool:
    """Emit the sum of scores and held numbers.

    A mask becomes a constant, which is not trained. A window bias that the exporter computed from its table becomes a
    table again.

    Returns:
        False if the node is no such sum; then nothing is emitted.
    """
    for position in (0, 1):
        value, beside = op.input(position), op.graph.maker(op.input(1 - position))
        array = op.graph.array(value) if op.graph.is_initializer(value) else None
        if array is None or beside is None:
            continue
        if patterns.is_mask(array):
            mask = op.graph.hold(f"{value} mask", array, "constant")
            op.emit("aten.add.Tensor", self=op.tensor(1 - position), other=mask)
            return True
        table_and_numbers = patterns.bias_by_offset(array) if patterns.is_scores(beside) else None
        if table_and_numbers is None:
            continue
        table = op.graph.hold(f"{value} table", table_and_numbers[0], "parameter")
        numbers = op.graph.hold(f"{value} offsets", table_and_numbers[1], "constant")
        tokens, heads = len(table_and_numbers[1]), table_and_numbers[0].shape[1]
        rows = op.step("aten.index.Tensor", (tokens, tokens, heads), self=table, indices=(numbers,))
        turned = op.step("aten.permute.default", (heads, tokens, tokens), self=rows, dims=(2, 0, 1))
        bias = op.step("aten.unsqueeze.default", (1, heads, tokens, tokens), self=turned, dim=0)
        op.emit("aten.add.Tensor", self=op.tensor(1 - position), other=bias)
        return True
    return False


def _add(op: Operator) -> None:
    groups = patterns.group_norm_of(op)
    if groups is not None:
        norm, scaled = groups
        before = op.graph.maker(norm.input(0))
        assert before is not None
        scale = next(n for n in (0, 1) if op.graph.array(scaled.input(n)) is not None)
        offset = next(n for n in (0, 1) if op.graph.array(op.input(n)) is not None)
        op.emit(
            "aten.group_norm.default",
            input=before.tensor(0), num_groups=norm.sizes(0)[1], eps=norm.real("epsilon", 1e-5),
            weight=_vector(op, scaled.held(scale, "weight")), bias=_vector(op, op.held(offset, "bias")),
        )  # fmt: skip
        return
    product = patterns.product_before(op)
    if product is None:
        if not _biased(op):
            _binary("add", op)
        return
    position = 1 if op.input(0) == product.outputs[0] else 0
    weight = product.held(1, "weight", (1, 0))
    op.emit("aten.linear.default", input=product.tensor(0), weight=weight, bias=op.held(position, "bias"))


def _mul(op: Operator) -> None:
    gated = patterns.gated(op)
    if gated is not None:
        op.emit(f"aten.{gated[1]}.default", self=op.graph.name(gated[0]))
        return
    x = patterns.ends_gelu(op)
    if x:
        op.emit("aten.gelu.default", self=op.graph.name(x))
    else:
        _binary("mul", op)


def _sum(share: bool, op: Operator) -> None:
    """Emit the sum of all operands (`Sum`), or their mean (`Mean`)."""
    total = Expression.of(op)
    for position in range(1, len(op.operands)):
        total = total + Expression.of(op, position)
    (total / float(len(op.operands)) if share else total).give()


def _pow(op: Operator) -> None:
    exponent = op.number(1)
    if exponent is None:
        raise Refused("its exponent is no constant number", "raise to a number")
    op.emit("aten.pow.Tensor_Scalar", self=op.tensor(), exponent=exponent)


def _random_uniform(op: Operator) -> None:
    """Emit random numbers, which must be part of stochastic depth; the nodes after them are checked later.

    Raises:
        Refused: The numbers are not between 0 and 1.
    """
    if (op.real("low", 0.0), op.real("high", 1.0)) != (0.0, 1.0):
        raise Refused("it draws random numbers", "use nn.Dropout, or stochastic depth of whole samples")
    op.ignore(0, "seed", "dtype")  # only the shape of the input matters
    op.emit("aten.empty.memory_format", size=op.result)


def _renamed(name: str, op: Operator) -> None:
    """Emit the ATen operation of the layer that names the operator as its equivalent."""
    target, operand, arguments = _DECLARED[name]
    op.emit(target, **{operand: op.tensor()}, **{to: op.declared_real(own) for own, to in arguments.items()})


def _declared() -> Iterator[tuple[str, tuple[str, str, Mapping[str, str]]]]:
    """Yield each operator that a layer names, with the ATen operation, its tensor, and its arguments by attribute."""
    for renamings in RENAMINGS.values():
        for renaming in renamings:
            call = one_call(LAYERS[renaming.layer].calls.onnx)
            if (
                call is not None
                and not call.constants
                and set(call.names.values()) <= {"x", *renaming.settings.values()}
            ):
                to = {setting: name for name, setting in renaming.settings.items()}
                arguments = {str(own): to[setting] for own, setting in call.names.items() if setting in to}
                yield call.function, (renaming.target, renaming.operand, arguments)


_DECLARED = dict(_declared())
RULES: Mapping[str, Rule] = {
    "RandomUniformLike": _random_uniform,
    **{name: partial(_renamed, name) for name in _DECLARED},
    "Neg": partial(_plain, "neg"),
    "Reciprocal": partial(_plain, "reciprocal"),
    "Selu": _selu,
    "Celu": _celu,
    "Softsign": _softsign,
    "Cosh": _cosh,
    "SwiGLU": _swiglu,
    "Gelu": _gelu,
    "Swish": _swish,
    "Erf": _erf,
    "PRelu": _prelu,
    "Add": _add,
    "Sub": partial(_binary, "sub"),
    "Mul": _mul,
    "Div": partial(_binary, "div"),
    "Sum": partial(_sum, False),
    "Mean": partial(_sum, True),
    "Pow": _pow,
}
NOT_TAKEN: Mapping[str, str] = {}
