"""Windows of images: their positions, and pooling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.interchange.program import Argument
from mbc.ops.pooling import MaxPool
from mbc.ops.window import MOST_AXES

_MOST_POSITIONS = 256  # most pixels of a window of max pooling


def per_axis(op: Operator, name: str, rank: int, default: int) -> tuple[int, ...]:
    """Return an attribute that has one number for each of `rank` axes.

    Raises:
        Refused: The attribute has another number of items.
    """
    numbers = op.ints(name)
    if numbers is not None and len(numbers) != rank:
        raise Refused(f"its '{name}' has {len(numbers)} numbers for {rank} dimensions", "export the model again")
    return numbers if numbers is not None else (default,) * rank


def pads_of(
    op: Operator, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the zeros before all axes, then the zeros after them, which is ONNX's order."""
    rank = len(kernel)
    auto = op.text("auto_pad", "NOTSET")
    if auto == "NOTSET":
        return per_axis(op, "pads", 2 * rank, 0)
    if auto == "VALID":
        return (0,) * (2 * rank)
    before: list[int] = []
    after: list[int] = []
    for size, k, s, d in zip(op.sizes(0)[2:], kernel, stride, dilation, strict=True):
        around = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        less, more = around // 2, around - around // 2
        before.append(less if auto == "SAME_UPPER" else more)
        after.append(more if auto == "SAME_UPPER" else less)
    return (*before, *after)


def _pooled(kind: str, op: Operator, x: Expression) -> tuple[Expression, tuple[int, ...]]:
    """Return the pooled tensor and the window.

    Raises:
        Refused: The images do not have one to three dimensions, or means are of dilated windows.
    """
    kernel = op.ints("kernel_shape")
    rank = 0 if kernel is None else len(kernel)
    if kernel is None or not 1 <= rank <= MOST_AXES:
        raise Refused("its images do not have one to three dimensions", "pool images, [N, C, H, W]")
    stride, dilation = per_axis(op, "strides", rank, 1), per_axis(op, "dilations", rank, 1)
    if kind == "avg" and set(dilation) != {1}:
        raise Refused("its windows are dilated", "use dilation=1")
    op.ignore("storage_order")  # the order of the positions of maxima, which must be unused
    pads = pads_of(op, kernel, stride, dilation)
    sides = tuple(side for pair in zip(pads[:rank], pads[rank:], strict=True) for side in pair)
    ceil = bool(op.integer("ceil_mode", 0))
    pool = MaxPool(x.shape[2:], kernel, stride, sides, ceil, dilation=dilation if set(dilation) != {1} else ())
    _check_windows(kind, op, pool)
    arguments: dict[str, Argument] = {"kernel_size": kernel, "stride": stride, "padding": sides, "ceil_mode": ceil}
    if kind == "avg":
        arguments["count_include_pad"] = op.op == "LpPool" or bool(op.integer("count_include_pad", 0))
    elif pool.dilation:
        arguments["dilation"] = dilation
    pooled = op.step(f"aten.{kind}_pool{rank}d.default", op.result, self=x.name, **arguments)
    return Expression(op, pooled, op.result), kernel


def _check_windows(kind: str, op: Operator, pool: MaxPool) -> None:
    """Raise Refused for windows that the language does not have, or counts differently.

    Raises:
        Refused: The windows differ.
    """
    most = map(max, pool.before, pool.after)
    if min(pool.pad) < 0:
        raise Refused("its padding is negative", "slice the images before they are pooled")
    if any(pad >= span for pad, span in zip(most, pool.span, strict=True)):
        raise Refused("its padding leaves windows without any pixel", "pad less than the kernel")
    if kind == "max" and math.prod(pool.kernel) > _MOST_POSITIONS:
        raise Refused(f"its windows have more than {_MOST_POSITIONS} pixels", "use smaller windows")
    if pool.output_size != op.result[2:]:
        raise Refused("the last of its windows begins in the padding, and is dropped by PyTorch", "use ceil_mode=0")
    if op.op == "LpPool" and pool.ceil and replace(pool, ceil=False).output_size != op.result[2:]:
        raise Refused("the last of its windows reaches over the edge", "use ceil_mode=0")


def _pool(kind: str, op: Operator) -> None:
    _pooled(kind, op, Expression.of(op))[0].give()


def _lp_pool(op: Operator) -> None:
    """Emit the norm of each window: the root of the mean of powers times the number of pixels.

    Raises:
        Refused: The power is less than 1.
    """
    power = op.integer("p", 2)
    if power < 1:
        raise Refused(f"its p is {power}", "use a p of at least 1")
    result, kernel = _pooled("avg", op, Expression.of(op).apply("abs") ** power)
    ((result * math.prod(kernel)) ** (1.0 / power)).give()


def _global(kind: str, op: Operator) -> None:
    x = Expression.of(op)
    rank = len(x.shape) - 2
    if 2 <= rank <= MOST_AXES:
        op.emit(f"aten.adaptive_{kind}_pool{rank}d.default", self=x.name, output_size=(1,) * rank)
    else:
        x.reduce("mean" if kind == "avg" else "amax", range(2, len(x.shape))).give()


def _global_lp(op: Operator) -> None:
    x, power = Expression.of(op), op.integer("p", 2)
    if power < 1:
        raise Refused(f"its p is {power}", "use a p of at least 1")
    ((x.apply("abs") ** power).reduce("sum", range(2, len(x.shape))) ** (1.0 / power)).give()


RULES: Mapping[str, Rule] = {
    "MaxPool": partial(_pool, "max"),
    "AveragePool": partial(_pool, "avg"),
    "LpPool": _lp_pool,
    "GlobalAveragePool": partial(_global, "avg"),
    "GlobalMaxPool": partial(_global, "max"),
    "GlobalLpPool": _global_lp,
}
NOT_TAKEN: Mapping[str, str] = {}
