"""Pooling, reductions and resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.convolution import sides
from mbc.interchange.aten.operands import (
    CHANNELS_LAST,
    FLAT,
    PLAIN,
    Activation,
    Padded,
    Refused,
    Result,
    Untaken,
    as_setting,
)
from mbc.interchange.steps import Setting
from mbc.ops.window import by_side


def _window(call: Call) -> dict[str, Setting]:
    kernel, around = call.per_axis("kernel_size", 1), call.ints("padding")
    stride = call.per_axis("stride", 1) if call.ints("stride") else kernel
    # ONNX pads the sides of an axis differently: it has two numbers for each.
    pads = around if len(around) == 2 * call.rank else tuple(n for n in call.per_axis("padding", 0) for _ in range(2))
    settings: dict[str, Setting] = {"kernel": as_setting(kernel), "stride": as_setting(stride)}
    if settings["stride"] == settings["kernel"]:
        del settings["stride"]  # the language's default
    return settings | {"pad": sides(pads), "ceil": call.flag("ceil_mode", False)}


def _images(call: Call) -> Activation:
    """Return the images that are pooled; a tensor without channels becomes images of one channel.

    Raises:
        Refused: The tensor has another number of dimensions.
    """
    x = call.plain("self")
    if len(x.shape) == 1 + call.rank:
        x = call.layer("reshape", x, (x.shape[0], 1, *x.shape[1:]), {"sizes": (1, *x.shape[1:])})
    if len(x.shape) != 2 + call.rank:
        raise Refused(f"its tensor has the shape {list(x.shape)}", "pool images, [N, C, H, W]")
    return x


def _pool(call: Call, op: str, x: Activation, settings: Mapping[str, Setting]) -> Activation:
    """Return the result of a layer of images, in the program's shape."""
    shape = call.result_shape
    result = call.layer(op, x, (shape[0], x.shape[1], *shape[-call.rank :]), settings)
    return result if result.shape == shape else call.layer("reshape", result, shape, {"sizes": shape[1:]})


def _max_pool(call: Call) -> Result:
    x, window, dilation = call.lazy("self"), _window(call), call.per_axis("dilation", 1)
    if set(dilation) != {1}:
        window["dilation"] = as_setting(dilation)
    elif isinstance(x.view, Padded) and x.view.value == -math.inf:  # `maxpool` pads with the same number
        pads = tuple(map(sum, zip(by_side(window["pad"], call.rank), x.view.pad, strict=True)))
        most = map(max, pads[::2], pads[1::2])
        if all(pad < k for pad, k in zip(most, call.per_axis("kernel_size", 1), strict=True)):
            window["pad"] = sides(pads)
            return call.layer("maxpool", Activation(x.value, x.shape), call.result_shape, window)
    return _pool(call, "maxpool", _images(call), window)


def _avg_pool(call: Call) -> Result:
    window, x = _window(call), _images(call)
    divisor = call.argument("divisor_override")
    if divisor is None:
        counted = call.flag("count_include_pad", True)
        return _pool(call, "avgpool", x, window | {"count_pad": counted})
    call.ignore("count_include_pad")  # the divisor is given
    if window["ceil"] or not isinstance(divisor, int):
        raise Refused("its divisor is given, and its last windows may be cut", "use ceil_mode=False")
    result = _pool(call, "avgpool", x, window)
    return call.operator("*", result, math.prod(call.per_axis("kernel_size", 1)) / divisor, result.shape)


def _global_average(call: Call, x: Activation) -> Activation:
    result = call.layer("global_avgpool", x, (*x.shape[:2], *(1,) * (len(x.shape) - 2)))
    return Activation(result.value, result.shape, x.view)


def _adaptive_avg_pool(call: Call) -> Result:
    size = call.per_axis("output_size", 1)
    if size == call.lazy("self").seen[-call.rank :]:
        return call.lazy("self")
    x = _images(call)
    if set(size) == {1} and len(call.result_shape) == 2 + call.rank:
        return _global_average(call, x)
    kernel = _divided(x, size)
    if kernel is None:
        return _pool(call, "adaptive_avgpool", x, {"size": as_setting(size)})
    return _pool(call, "avgpool", x, {"kernel": kernel})


def _adaptive_max_pool(call: Call) -> Result:
    size = call.per_axis("output_size", 1)
    x = _images(call)
    kernel = _divided(x, size)
    if size == call.lazy("self").seen[-call.rank :]:
        result = call.lazy("self")
    elif set(size) == {1}:
        result = _pool(call, "global_maxpool", x, {})
    elif kernel is None:
        result = _pool(call, "adaptive_maxpool", x, {"size": as_setting(size)})
    else:
        result = _pool(call, "maxpool", x, {"kernel": kernel})
    return result, Untaken("it takes the positions of maxima", "use the maxima alone (return_indices=False)")


def _divided(x: Activation, size: tuple[int, ...]) -> int | tuple[int, ...] | None:
    """Return the kernel of equal windows that cover the image without overlap; None if the sizes do not divide it."""
    if any(n % count for n, count in zip(x.shape[2:], size, strict=True)):
        return None
    return as_setting(tuple(n // count for n, count in zip(x.shape[2:], size, strict=True)))


def _reduced(op: str, call: Call) -> Result:
    """Return a reduction over axes; the mean over all pixels is `global_avgpool`.

    Raises:
        Refused: The axes include the samples.
    """
    x = call.activation("self")
    rank = len(x.seen)
    dims = tuple(sorted(d % rank for d in call.ints("dim") or tuple(range(rank))))
    keep = call.flag("keepdim", False)
    pixels = tuple(range(1, rank - 1)) if x.view == CHANNELS_LAST else tuple(range(2, rank))
    if op == "mean" and rank > 3 and dims == pixels and x.view in (PLAIN, CHANNELS_LAST):
        result = _global_average(call, x)
        return result if keep else Activation(result.value, result.shape, FLAT)
    if 0 in dims:
        raise Refused(f"it is over dimension 0 of {list(x.seen)}, the samples", "keep the samples apart")
    return call.layer(
        op, call.settle(x), call.result_shape, {"axes": dims[0] if len(dims) == 1 else dims, "keep": keep}
    )


def _vector_norm(call: Call) -> Result:
    order = call.real("ord", 2.0)
    call.ignore("dtype")  # of the result, which is checked
    x = call.settle(call.activation("self"))
    axes = _axes(call, x)
    if order == 2.0:
        squares = call.layer("pow", x, x.shape, {"exponent": 2.0})
        return square_root(call, call.layer("sum", squares, call.result_shape, axes))
    if order not in (1.0, math.inf):
        raise Refused("it is a norm other than L1, L2 and the maximum", "use torch.linalg.vector_norm(x, 2)")
    sizes = call.layer("abs", x, x.shape)
    return call.layer("sum" if order == 1.0 else "amax", sizes, call.result_shape, axes)


def _axes(call: Call, x: Activation) -> dict[str, Setting]:
    """Return the settings of a reduction over the dimensions `dim`.

    Raises:
        Refused: The dimensions include the samples.
    """
    dims = tuple(sorted(d % len(x.shape) for d in call.ints("dim") or tuple(range(len(x.shape)))))
    if 0 in dims:
        raise Refused(f"it is over dimension 0 of {list(x.shape)}, the samples", "keep the samples apart")
    return {"axes": dims[0] if len(dims) == 1 else dims, "keep": call.flag("keepdim", False)}


def square_root(call: Call, x: Activation) -> Activation:
    """Return the square root, with the gradient 0 at 0, as norms and standard deviations need it."""
    zero = call.elementwise("indicator", x, {"operator": "eq", "value": 0.0})
    ones = call.layer("masked_fill", (x, zero), x.shape, {"value": 1.0})
    return call.layer("masked_fill", (call.elementwise("sqrt", ones), zero), x.shape, {"value": 0.0})


def _upsample(mode: str, call: Call) -> Result:
    """Return an image in another size.

    Raises:
        Refused: The factors give another size, or PyTorch's result and its gradient differ.
    """
    x = call.plain("input") if call.is_tensor("input") else call.plain("self")
    corners, size, before = call.flag("align_corners", False), call.shape_said_by("output_size")[2:], x.shape[2:]
    factors = call.argument("scale_factors")
    if not isinstance(factors, tuple):
        names = ("scales",) if call.rank == 1 else ("scales_d", "scales_h", "scales_w")[-call.rank :]
        factors = tuple(map(call.argument, names))
    given = tuple(f for f in factors if isinstance(f, float | int))
    settings: dict[str, Setting] = {"mode": mode, "align_corners": corners}
    if given and not corners and any(n * f != after for n, f, after in zip(before, given, size, strict=True)):
        if tuple(math.floor(n * f) for n, f in zip(before, given, strict=True)) != size:
            raise Refused("its factor does not give its size", "give interpolate a size")
        kept = any(after in (n, 2 * n) and after != n * f for n, f, after in zip(before, given, size, strict=True))
        if (mode == "nearest" and kept and call.rank != 2) or (mode == "bicubic" and size == before):
            raise Refused("PyTorch's gradient is not that of its result", "give interpolate a size")
        settings["factor"] = as_setting(given)
    elif size == before:
        return x
    elif all(after % n == 0 for n, after in zip(before, size, strict=True)):
        settings["factor"] = as_setting(tuple(after // n for n, after in zip(before, size, strict=True)))
    else:
        settings["size"] = as_setting(size)
    return call.layer("upsample", x, call.result_shape, settings)


RULES: Mapping[str, Rule] = {
    **{
        f"aten.{name}{rank}d.default": rule
        for rank in (1, 2, 3)
        for name, rule in (
            ("max_pool", _max_pool),
            ("avg_pool", _avg_pool),
            ("adaptive_avg_pool", _adaptive_avg_pool),
            ("adaptive_max_pool", _adaptive_max_pool),
        )
    },
    "aten.mean.dim": partial(_reduced, "mean"),
    "aten.sum.dim_IntList": partial(_reduced, "sum"),
    "aten.linalg_vector_norm.default": _vector_norm,
    "aten.amax.default": partial(_reduced, "amax"),
    **{
        f"aten.{name}{rank}d.{kind}": partial(_upsample, mode)
        for kind in ("vec", "default")
        for rank, *smooth in ((1, "linear", "linear"), (2, "bilinear", "bilinear"), (3, "trilinear", "linear"))
        for name, mode in (
            ("upsample_nearest", "nearest"),
            ("_upsample_nearest_exact", "nearest_exact"),
            (f"upsample_{smooth[0]}", smooth[1]),
        )
    },
    **{f"aten.upsample_bicubic2d.{kind}": partial(_upsample, "bicubic") for kind in ("vec", "default")},
}
NOT_TAKEN: Mapping[str, str] = {
    **{f"aten._upsample_{mode}2d_aa.vec": "use antialias=False" for mode in ("bilinear", "bicubic")},
    "aten.lp_pool2d.default": "use nn.AvgPool2d",
    "aten.grid_sampler.default": "use nn.Upsample",
}
