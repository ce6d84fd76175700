"""Windows of images and of tensors [N, C, L]: their positions, and pooling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from mbc.interchange.aten.base import Refused
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.interchange.program import Argument
from mbc.ops.pooling import Pool

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
    """Return the pooled tensor and the window; tensors [N, C, L] are images of height 1.

    Raises:
        Refused: The images are not of one or two dimensions, or the windows are dilated.
    """
    kernel = op.ints("kernel_shape")
    rank = 0 if kernel is None else len(kernel)
    if kernel is None or rank not in (1, 2):
        raise Refused("its images are not of one or two dimensions", "pool images, [N, C, H, W]")
    stride, dilation = per_axis(op, "strides", rank, 1), per_axis(op, "dilations", rank, 1)
    if dilation != (1,) * rank:
        raise Refused("its windows are dilated", "use dilation=1")
    op.ignore("storage_order")  # the order of the positions of maxima, which must be unused
    pads = pads_of(op, kernel, stride, dilation)
    if rank == 1:
        x = x.reshape((*x.shape[:2], 1, x.shape[2]))
        kernel, stride, pads = (1, *kernel), (1, *stride), (0, pads[0], 0, pads[1])
    top, left, bottom, right = pads
    ceil = bool(op.integer("ceil_mode", 0))
    result = op.result if rank == 2 else (*op.result[:2], 1, op.result[2])
    _check_windows(kind, op, x, (kernel, stride, (top, bottom, left, right)), result)
    arguments: dict[str, Argument] = {
        "kernel_size": kernel, "stride": stride, "padding": (top, bottom, left, right), "ceil_mode": ceil,
    }  # fmt: skip
    if kind == "avg":
        arguments["count_include_pad"] = op.op == "LpPool" or bool(op.integer("count_include_pad", 0))
    pooled = op.step(f"aten.{kind}_pool2d.default", result, self=x.name, **arguments)
    return Expression(op, pooled, result).reshape(op.result), kernel


def _check_windows(
    kind: str,
    op: Operator,
    x: Expression,
    window: tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int, int]],
    result: tuple[int, ...],
) -> None:
    """Raise Refused for windows that the language does not have, or counts differently.

    Raises:
        Refused: The windows differ.
    """
    (down, across), (by, beside), pad = window
    if max(pad[:2]) >= down or max(pad[2:]) >= across or min(pad) < 0:
        raise Refused("its padding leaves windows without any pixel", "pad less than the kernel")
    if kind == "max" and down * across > _MOST_POSITIONS:
        raise Refused(f"its windows have more than {_MOST_POSITIONS} pixels", "use smaller windows")
    ceil = bool(op.integer("ceil_mode", 0))
    pool = Pool(x.shape[2:], (down, across), (by, beside), pad, ceil)
    if pool.output_size != result[2:]:
        raise Refused("the last of its windows begins in the padding, and is dropped by PyTorch", "use ceil_mode=0")
    if op.op == "LpPool" and ceil and replace(pool, ceil=False).output_size != result[2:]:
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
    if len(x.shape) == 4:
        op.emit(f"aten.adaptive_{kind}_pool2d.default", self=x.name, output_size=(1, 1))
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
