"""Attention: `scaled_dot_product_attention`, and the products and softmax that compute the same function."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.constants import constant_of
from mbc.interchange.aten.factors import Seen, factored, permuted, picked, regarded, selected, windowed
from mbc.interchange.aten.operands import (
    Activation,
    Atom,
    Factored,
    Known,
    Operand,
    Refused,
    Result,
    Scores,
    as_setting,
)
from mbc.interchange.program import Array
from mbc.interchange.steps import Setting
from mbc.ops.window_bias import MASKED, WindowBias

_NO_SHARE = -1e9  # a mask adds at most this number to a score that must not count
_HEADS = "give query, key and value the shape [N, heads, T, D], with the heads in the channels of a linear layer"


def _headed(x: Activation) -> tuple[int, Seen, Seen]:
    """Return the number of heads, the groups and the positions of a tensor [N * groups, heads, T, D].

    Raises:
        Refused: The heads are not factors of the channels.
    """
    view = x.view
    if not isinstance(view, Factored) or len(view.axes) != 4 or len(x.shape) != 4:
        raise Refused(f"its operand {list(x.seen)} has no heads that are channels", _HEADS)
    batch, heads, tokens, depth = view.axes
    (d,) = (atom.size for atom in depth) if len(depth) == 1 else (1,)
    count = math.prod(atom.size for atom in heads)
    rows = (Atom(0, 1, x.shape[0]),) if x.shape[0] > 1 else ()
    channels = tuple(atom for atom in (Atom(1, d, count), Atom(1, 1, d)) if atom.size > 1)
    if (
        batch[: len(rows)] != rows
        or (*heads, *depth) != channels
        or any(a.axis < 2 for a in (*batch[len(rows) :], *tokens))
    ):
        raise Refused(f"its operand {list(x.seen)} has no heads that are channels", _HEADS)
    return count, batch[len(rows) :], tokens


def _attention(call: Call) -> Result:
    query, key, value = (call.lazy(name) for name in ("query", "key", "value"))
    if call.real("dropout_p", 0.0):
        raise Refused("it drops scores", "build it without dropout of attention (attn_drop=0, dropout=0)")
    if call.flag("enable_gqa", False):
        raise Refused("its heads share keys", "give it as many heads of keys as of queries")
    mask = call.optional("attn_mask")
    added = () if mask is None else (_added(call, mask),)
    scale = None if call.argument("scale") is None else call.real("scale", 1.0)
    return attended(call, query, key, value, scale, added, call.flag("is_causal", False))


def _added(call: Call, operand: Operand) -> Known:
    numbers = constant_of(call, operand)
    if numbers is None:
        raise Refused("it adds a computed tensor to the scores", "add a table by constant index, or constants")
    return numbers


def attended(
    call: Call,
    query: Activation,
    key: Activation,
    value: Activation,
    scale: float | None,
    bias: tuple[Known, ...],
    causal: bool,
) -> Activation:
    """Return attention between tensors [N * groups, heads, T, D].

    Args:
        call: The node that is translated.
        query: The queries.
        key: The keys.
        value: The values.
        scale: The factor of the scores; None for 1 / sqrt(D). The factors of the views of `query` and `key` are
            included.
        bias: Numbers that are added to the scores: position bias tables and masks.
        causal: True if each position attends only to itself and earlier ones.

    Returns:
        A tensor [N * groups, heads, T, D].

    Raises:
        Refused: The language has no such attention.
    """
    heads, groups, tokens = _headed(query)
    for other in (key, value):
        if _headed(other) != (heads, groups, tokens):
            raise Refused(f"it attends from {list(query.seen)} to {list(other.seen)}", "attend within one sequence")
    factor = _factor(query) * _factor(key)
    if _factor(value) != 1.0:
        raise Refused("its values are scaled", "scale its result")
    depth = query.seen[-1]
    times = (1 / math.sqrt(depth) if scale is None else scale) * factor
    if (masked := [_is_causal(b, query.seen[-2]) for b in bias]) and any(masked):
        causal, bias = True, tuple(b for b, mask in zip(bias, masked, strict=True) if not mask)
    settings: dict[str, Setting] = {"heads": heads, "causal": causal}
    if not math.isclose(times, 1 / math.sqrt(depth), rel_tol=1e-6):
        settings["scale"] = times
    operands = _operands(call, (query, key, value), heads * depth)
    operands = [windowed(call, x, groups, tokens) for x in operands]
    rows, _, count, length = operands[0].shape
    if bias:
        operands.append(_bias(call, operands[0], heads, count, length, bias))
    result = call.layer("attention", operands, (rows, heads * depth, count, length), settings)
    parts = {a: Atom(a, 1, size) for a, size in enumerate(result.shape) if size > 1}
    axes = (
        tuple(parts[a] for a in (0, 2) if a in parts),
        (Atom(1, depth, heads),) if heads > 1 else (),
        tuple(parts[a] for a in (3,) if a in parts),
        (Atom(1, 1, depth),) if depth > 1 else (),
    )
    return regarded(result, Factored(axes))


def _factor(x: Activation) -> float:
    return x.view.factor if isinstance(x.view, Factored) else 1.0


def _is_causal(added: Known, tokens: int) -> bool:
    """Return whether numbers are a causal mask of all samples and heads: 0 up to each position, else at most -1e9."""
    array = added.array
    if added.weight is not None or array.shape[-2:] != (tokens, tokens) or array.size != tokens**2:
        return False
    past = np.tri(tokens, dtype=bool)
    square = array.reshape(tokens, tokens)
    return bool((square[past] == 0).all() and (square[~past] <= _NO_SHARE).all())


def _operands(call: Call, parts: tuple[Activation, ...], channels: int) -> list[Activation]:
    """Return query, key and value as layers take them. If they are the thirds of one tensor, return that tensor."""
    thirds = [((Atom(1, channels, 3), number),) for number in range(3)]
    first = parts[0]
    views = [x.view for x in parts if isinstance(x.view, Factored)]
    if [view.picks for view in views] == thirds and len({x.value for x in parts}) == 1:
        return [Activation(first.value, first.shape)]
    cut = [picked(call, replace(x, view=replace(view, factor=1.0))) for x, view in zip(parts, views, strict=True)]
    return [Activation(x.value, x.shape) for x in cut]


def _bias(call: Call, x: Activation, heads: int, count: int, length: int, bias: tuple[Known, ...]) -> Activation:
    """Return the relative position bias that is added to scores, with the mask of shifted windows.

    Raises:
        Refused: The numbers are anything else.
    """
    tables = [b for b in bias if b.weight is not None]
    masks = [b.array for b in bias if b.weight is None and b.array.any()]
    window_and_size = _window_of(call, x)
    if len(tables) != 1 or window_and_size is None:
        raise Refused(
            "it adds numbers to the scores that are no relative position bias of windows", "add nothing to the scores"
        )
    table, (window, size) = tables[0], window_and_size
    weight = table.weight
    assert weight is not None
    wanted = WindowBias(window).numbers()[None, None] * heads + np.arange(heads).reshape(1, heads, 1, 1)
    if weight.shape != (WindowBias(window).offsets, heads) or not np.array_equal(table.array, wanted):
        raise Refused(
            f"its bias is not that of offsets within windows of {window}", "number offsets as Swin Transformer does"
        )
    shift = _shift(masks, window, (size[0] // window[0], size[1] // window[1]))
    shape = (heads, 1, count if shift != (0, 0) else 1, length, length)
    settings: dict[str, Setting] = {"heads": heads, "window": as_setting(window)}
    if shift != (0, 0):
        settings |= {"size": as_setting(size), "shift": as_setting(shift)}
    return call.layer("window_bias", (), shape, settings, weight=weight)


def _window_of(call: Call, x: Activation) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the window and the image (height, width) whose positions a tensor has, before pointwise layers."""
    while (origin := call.maker(x)) is not None and origin[0].op == "conv":
        x = origin[1]
    if origin is None or origin[0].op != "windows":
        return None
    window, (_, _, height, width) = origin[0].settings["window"], origin[1].shape
    down, across = window if isinstance(window, tuple) else (window, window)
    return (int(down), int(across)), (height, width)


def _shift(masks: list[Array], window: tuple[int, int], grid: tuple[int, int]) -> tuple[int, int]:
    """Return the shift of the windowed image for which the masks are written; (0, 0) without a mask.

    Raises:
        Refused: The masks are not those of shifted windows.
    """
    if not masks:
        return 0, 0
    pixels = window[0] * window[1]
    if len(masks) == 1 and masks[0].size == grid[0] * grid[1] * pixels**2:
        given = masks[0].reshape(-1, pixels, pixels)
        for shift in itertools.product(range(window[0]), range(window[1])):
            if np.array_equal(MASKED * WindowBias(window, grid, shift).mask(), given):
                return shift
    raise Refused("its mask is not that of shifted windows", "mask by -100, as Swin Transformer does")


def scores(call: Call, query: Activation, key: Activation) -> Scores | None:
    """Return the product of [N, heads, T, D] and [N, heads, D, T] as scores; None if the tensors have no heads."""
    if not isinstance(query.view, Factored) or not isinstance(key.view, Factored) or len(key.view.axes) != 4:
        return None
    turned = permuted(key, key.view, (0, 1, 3, 2))
    _headed(query)
    _headed(turned)
    return Scores(query, turned, call.result_shape)


def with_scores(op: str, call: Call, a: Operand | float, b: Operand | float) -> Scores:
    """Return attention scores with a bias added, or multiplied by a number.

    Raises:
        Refused: The scores are combined in another way.
    """
    products, other = (a, b) if isinstance(a, Scores) else (b, a)
    assert isinstance(products, Scores)
    if (
        isinstance(other, int | float)
        and not products.shares
        and not products.bias
        and (op == "*" or (op == "/" and other is b))
    ):
        times = other if op == "*" else 1 / other
        return replace(products, query=scaled(products.query, times))
    if isinstance(other, int | float) or op != "+" or products.shares:
        raise Refused("it calculates with the scores of attention", "add a bias to them, and take their softmax")
    return replace(products, bias=(*products.bias, _added(call, other)))


def scaled(x: Activation, times: float) -> Activation:
    """Return a tensor, viewed by its factors, times a number that is applied when a layer needs the tensor."""
    assert isinstance(x.view, Factored)
    return replace(x, view=replace(x.view, factor=x.view.factor * times))


def of_shares(call: Call, shares: Scores, value: Activation) -> Activation:
    """Return the product of softmax scores and values, which is attention.

    Raises:
        Refused: No softmax of the scores was taken.
    """
    if not shares.shares:
        raise Refused("it multiplies scores that have no softmax", "take the softmax of the scores first")
    return attended(call, shares.query, shares.key, value, 1.0, shares.bias, causal=False)


def _unbind(call: Call) -> Result:
    x, dim = call.lazy("self"), call.integer("dim", 0) % len(call.lazy("self").seen)
    view = factored(x)
    parts = [] if view is None else [selected(x, view, dim, number) for number in range(x.seen[dim])]
    if not parts or any(part is None for part in parts):
        raise Refused("it takes a tensor apart along samples or several axes", "use torch.split")
    return tuple(part for part in parts if part is not None)


RULES: Mapping[str, Rule] = {"aten.scaled_dot_product_attention.default": _attention, "aten.unbind.int": _unbind}
NOT_TAKEN: Mapping[str, str] = {}
