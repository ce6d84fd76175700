"""Random networks with one tested operation, whose operands are parameters and whose result goes into an mse loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from mbc.ir.graph import Network
from mbc.ops import POINTWISE
from mbc.ops.activation import Scale
from mbc.ops.pointwise import Pointwise
from tests.ir.networks import Writer
from tests.ops.pointwise_inputs import examples, needs_positive

Draw = Callable[[st.SearchStrategy[Any]], Any]
PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))


def _finish(w: Writer, y: str) -> Network:
    target = w.input("wanted", *w.type(y).shape[1:])
    return w.finish((y,), ((w("mse", y, target, path="loss"), 1.0),))


def _axes(draw: Draw, rank: int, least: int, most: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    return tuple(draw(st.integers(least, most)) for _ in range(rank))


def _image(draw: Draw, w: Writer, channels: int, least: int = 1, most: int = 7) -> tuple[str, int]:
    """An image of one to three spatial axes, and their number; the more axes, the fewer pixels along each of them."""
    rank = draw(st.sampled_from((1, 2, 2, 3)))
    size = _axes(draw, rank, least, max(least, (most + 2, most, most - 3)[rank - 1]))
    return w.parameter("x", w.batch, channels, *size), rank


def conv(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    groups = draw(st.integers(1, 3))
    x, rank = _image(draw, w, groups * draw(st.integers(1, 2)), 5)
    settings = {
        "kernel": _axes(draw, rank, 1, 3),
        "dilation": _axes(draw, rank, 1, 2),
        "stride": _axes(draw, rank, 1, 3),
        "pad": _axes(draw, 2 * rank, 0, 2),
        "bias": draw(st.booleans()),
    }
    return _finish(w, w("conv", x, channels=groups * draw(st.integers(1, 2)), groups=groups, **settings))


def standardized(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    groups = draw(st.integers(1, 2))
    x, rank = _image(draw, w, groups * draw(st.integers(1, 3)), 5)
    kernel = (2, *_axes(draw, rank - 1, 1, 3))
    settings = {"standardize": draw(st.sampled_from((1e-2, 0.5))), "gain": draw(st.sampled_from((0.0, 1.7)))}
    return _finish(w, w("conv", x, channels=groups * draw(st.integers(1, 3)), kernel=kernel, groups=groups, **settings))


def conv_transpose(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    groups = draw(st.integers(1, 2))
    x, rank = _image(draw, w, groups * draw(st.integers(1, 2)), 3)
    stride = _axes(draw, rank, 1, 3)
    settings = {
        "kernel": _axes(draw, rank, 3, 4),
        "pad": _axes(draw, 2 * rank, 0, 1),
        "output_pad": tuple(draw(st.integers(0, step - 1)) for step in stride),
        "dilation": _axes(draw, rank, 1, 2),
        "bias": draw(st.booleans()),
    }
    channels = groups * draw(st.integers(1, 2))
    return _finish(w, w("conv_transpose", x, channels=channels, stride=stride, groups=groups, **settings))


def linear(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    return _finish(w, w("linear", x, features=draw(st.integers(1, 5)), bias=draw(st.booleans())))


def bn(draw: Draw) -> Network:
    w = Writer(draw(st.integers(2, 4)))
    x, _ = _image(draw, w, draw(st.integers(1, 3)))
    settings = {"eps": draw(st.sampled_from((1e-5, 1e-2))), "momentum": draw(st.sampled_from((0.1, 0.5)))}
    settings |= draw(st.sampled_from(({}, {"frozen": True}, {"track": False})))
    return _finish(w, w("bn", x, affine=draw(st.booleans()), **settings))


def group_norm(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    groups = draw(st.integers(1, 3))
    x = w.parameter("x", w.batch, groups * draw(st.integers(2, 3)), *draw(st.lists(st.integers(1, 4), max_size=3)))
    settings = {"eps": draw(st.sampled_from((1e-3, 1e-2))), "affine": draw(st.booleans())}
    return _finish(w, w("group_norm", w("tanh", x), groups=groups, **settings))


def layer_norm(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, draw(st.integers(2, 5)), *draw(st.lists(st.integers(1, 4), max_size=3)))
    settings = {"eps": draw(st.sampled_from((1e-3, 1e-2))), "affine": draw(st.booleans())}
    return _finish(w, w("layer_norm", w("tanh", x), **settings))


def lrn(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x, _ = _image(draw, w, draw(st.integers(1, 7)))
    settings = {"size": draw(st.integers(1, 6)), "alpha": draw(st.sampled_from((1e-4, 0.5)))}
    return _finish(
        w, w("lrn", x, beta=draw(st.sampled_from((0.75, 0.5))), k=draw(st.sampled_from((1.0, 2.0))), **settings)
    )


def _pool(draw: Draw, layer: str, **settings: Any) -> Network:
    w = Writer(draw(st.integers(1, 2)))
    x, rank = _image(draw, w, draw(st.integers(1, 2)), 4)
    kernel = _axes(draw, rank, 1, 3)
    pad = tuple(draw(st.integers(0, k - 1)) for k in kernel for _ in range(2))
    stride = draw(st.sampled_from((0, _axes(draw, rank, 1, 3))))
    return _finish(w, w(layer, x, kernel=kernel, stride=stride, pad=pad, ceil=draw(st.booleans()), **settings))


def maxpool(draw: Draw) -> Network:
    return _pool(draw, "maxpool")


def maxpool_dilated(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 2)))
    x, rank = _image(draw, w, draw(st.integers(1, 2)), 5)
    kernel, dilation = _axes(draw, rank, 1, 2), _axes(draw, rank, 1, 2)
    pad = tuple(draw(st.integers(0, k - 1)) for k in kernel for _ in range(2))
    stride = draw(st.sampled_from((0, 1, 2)))
    return _finish(w, w("maxpool", x, kernel=kernel, stride=stride, pad=pad, dilation=dilation))


def avgpool(draw: Draw) -> Network:
    return _pool(draw, "avgpool", count_pad=draw(st.booleans()))


def global_avgpool(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    return _finish(w, w("global_avgpool", _image(draw, w, 2)[0]))


def adaptive_pool(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 2)))
    x, rank = _image(draw, w, 2)
    layer = draw(st.sampled_from(("adaptive_avgpool", "adaptive_maxpool")))
    return _finish(w, w(layer, x, size=_axes(draw, rank, 1, 7 if rank < 3 else 4)))


def adaptive_pool_small(draw: Draw) -> Network:
    """Return a network of adaptive pools whose windows share pixels."""
    w = Writer(draw(st.integers(1, 2)))
    x = w.parameter("x", w.batch, 2, 5, 7)
    return _finish(w, w("add", *(w(f"adaptive_{kind}pool", x, size=(3, 2)) for kind in ("avg", "max"))))


def global_maxpool(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 2)))
    size = draw(st.sampled_from(((3, 3), (17, 17), (257,), (4,), (2, 3, 3), (7, 7, 6))))
    return _finish(w, w("global_maxpool", w.parameter("x", w.batch, 2, *size)))


def upsample(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 2)))
    x, rank = _image(draw, w, 2)
    return _finish(w, w("upsample", x, factor=_axes(draw, rank, 1, 3)))


def resize(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 2)))
    x, rank = _image(draw, w, 2)
    modes = ("nearest", "nearest_exact", "linear", "linear", *("bilinear", "bicubic", "bicubic") * (rank == 2))
    mode = draw(st.sampled_from(modes))
    settings: dict[str, Any] = {"mode": mode, "align_corners": not mode.startswith("nearest") and draw(st.booleans())}
    if draw(st.booleans()):
        return _finish(w, w("upsample", x, size=_axes(draw, rank, 1, 9 if rank < 3 else 5), **settings))
    factors = st.sampled_from((0.7, 0.5, 1.3, 1.5, 1.75, 2, math.pi))
    factor = tuple(max(draw(factors), 1 / size) for size in w.type(x).shape[2:])
    return _finish(w, w("upsample", x, factor=factor, **settings))


def concat(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    size = draw(st.lists(st.integers(1, 3), max_size=2))
    parts = [w.parameter(f"x{i}", w.batch, draw(st.integers(1, 3)), *size) for i in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        parts.append(parts[0])
    return _finish(w, w("concat", *parts))


def joined_statistics(draw: Draw) -> Network:
    """Return a network that concatenates normalised values."""
    w = Writer(draw(st.integers(2, 4)))
    x, y = (w("tanh", w.parameter(f"x{i}", w.batch, draw(st.integers(1, 3)), 2)) for i in range(2))
    return _finish(w, w("concat", w("bn", x), w("bn", w("concat", *draw(st.permutations((x, y)))))))


def _elementwise(draw: Draw, layer: str, operands: int, **settings: Any) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    xs = [w.parameter(f"x{i}", w.batch, *shape) for i in range(operands)]
    if operands > 1 and draw(st.booleans()):
        xs[1] = xs[0]
    return _finish(w, w(layer, *xs, **settings))


def _pointwise(function: Pointwise, draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    a = draw(st.sampled_from(examples(function)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    # The parameter's numbers are multiples of a fraction within 1.5: no kink may be one of the function's inputs.
    x = w("softplus", x) if needs_positive(function, a) else w.graph.emit("scale", Scale(5.03, 0.0137), (x,), "wide")[0]
    return _finish(w, w.graph.emit(function.name, a, (x,), function.name)[0])


def gated(draw: Draw) -> Network:
    """Return a network with a gate for each channel of each image, in either shape, as either operand."""
    w = Writer(draw(st.integers(1, 3)))
    channels = draw(st.integers(1, 3))
    x, rank = _image(draw, w, channels)
    for i in range(2):
        gate = w.parameter(f"gate{i}", w.batch, channels, *draw(st.sampled_from(((), (1,) * rank))))
        x = w(draw(st.sampled_from(("add", "mul"))), *draw(st.permutations((x, gate))))
    return _finish(w, x)


def broadcasting(draw: Draw) -> Network:
    """Return a network of arithmetic whose operands broadcast, on either side."""
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    for i, layer in enumerate(("add", "sub", "mul", "div")):
        shape = w.type(x).shape
        axis = draw(st.integers(1, len(shape) - 1))
        small = tuple(size if draw(st.booleans()) else 1 for size in shape)
        own = draw(st.sampled_from((small, small[1:] or (1,), shape[axis : axis + 1], shape)))
        y = w.parameter(f"y{i}", *own)
        order = draw(st.permutations((x, y)))
        if layer == "div":
            order[1] = w("softplus", order[1])
        x = w(layer, *order, axis=axis)
    return _finish(w, x)


def chosen(draw: Draw) -> Network:
    """Return a network of comparisons and choices whose operands broadcast, on either side."""
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    for i, layer in enumerate(draw(st.permutations(("maximum", "minimum", "masked_fill", "where")))):
        shape = w.type(x).shape
        axis = draw(st.integers(1, len(shape) - 1))
        small = tuple(size if draw(st.booleans()) else 1 for size in shape)
        own = draw(st.sampled_from((small, small[1:] or (1,), shape[axis : axis + 1], shape)))
        y = w(("tanh", "sigmoid", "silu", "mish")[i], w.parameter(f"y{i}", *own))  # no two operands have equal elements
        operator = draw(st.sampled_from(("gt", "ge", "lt", "le", "eq", "ne")))
        if layer in ("maximum", "minimum"):
            x = w(layer, *draw(st.permutations((x, y))), axis=axis)
            continue
        indicates = draw(st.booleans())
        mask = w("indicator", y, operator=operator) if indicates else w("compare", x, y, operator=operator, axis=axis)
        if layer == "masked_fill":
            x = w(layer, x, mask, value=0.5, axis=axis)
        else:
            x = w(layer, mask, *draw(st.permutations((x, y))), axis=axis)
    return _finish(w, x)


def detached(draw: Draw) -> Network:
    """Return a network with a gate that depends on no parameter.

    `test_no_gradient_flows_through_a_detached_tensor` tests gates that depend on parameters.
    """
    w = Writer(draw(st.integers(1, 3)))
    x = w("linear", w.input("image", 2), features=draw(st.integers(1, 4)))
    y = w("detach", w("tanh", w.input("gate", *w.type(x).shape[1:])))
    return _finish(w, w("mul", w("add", x, y), y))


def free_parameter(draw: Draw) -> Network:
    """Return a network with a parameter that all rows share."""
    w = Writer(draw(st.integers(1, 3)))
    x = w.input("image", 3, 2)
    gamma, shift = w("parameter", path="gamma", shape=(3,), value=0.5), w("constant", path="shift", shape=(1, 3, 2))
    return _finish(w, w("add", w("mul", x, gamma), shift))


def reduced(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    rank = len(w.type(x).shape)
    axes = tuple(draw(st.sets(st.integers(1, rank - 1), min_size=1)))
    return _finish(w, w(draw(st.sampled_from(("sum", "mean"))), x, axes=axes, keep=draw(st.booleans())))


def spatial_gate(draw: Draw) -> Network:
    """Return a network with a gate for each pixel and one for each channel, on either side."""
    w = Writer(draw(st.integers(1, 3)))
    x, rank = _image(draw, w, draw(st.integers(2, 3)), 2)
    shape = w.type(x).shape
    for i, own in enumerate(((shape[0], 1, *shape[2:]), (1, shape[1], *(1,) * rank))):
        x = w("mul", *draw(st.permutations((x, w.parameter(f"gate{i}", *own)))))
    return _finish(w, x)


def permuted(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    axes = draw(st.permutations(range(1, len(w.type(x).shape))))
    x = w("permute", x, axes=(0, *axes))
    return _finish(w, w("reshape", x, sizes=draw(st.sampled_from(((-1,), (1, -1), (-1, 1, 1))))))


def shuffled(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    rank = draw(st.sampled_from((1, 2, 2, 3)))
    factor = _axes(draw, rank, 1, 3 if rank < 3 else 2)
    x = w.parameter("x", w.batch, math.prod(factor) * draw(st.integers(1, 2)), *_axes(draw, rank, 1, 3))
    x = w("channel_shuffle", w("pixel_shuffle", x, factor=factor), groups=1)
    return _finish(w, w("channel_shuffle", w("pixel_unshuffle", x, factor=factor), groups=factor[0]))


def sliced(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(2, 5), min_size=1, max_size=3)))
    axis = draw(st.integers(1, len(w.type(x).shape) - 1))
    start = draw(st.integers(-2, 1))
    return _finish(w, w("slice", x, axis=axis, start=start, step=draw(st.integers(1, 3))))


def parted(draw: Draw) -> Network:
    """Return a network that splits a value along an axis; some parts may be unused."""
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, 4, 4, 2)
    axis = draw(st.integers(1, 2))
    layer, settings = draw(
        st.sampled_from((("chunk", {"count": 2}), ("split", {"sizes": (1, 2, 1)}), ("split", {"sizes": (2,)})))
    )
    parts = [w("tanh", part) for part in w(layer, x, axis=axis, **settings)]
    used = draw(st.sampled_from((parts, parts[1:], parts[:1], parts[::2])))
    return _finish(w, w("concat", *used, axis=axis))


def stacked(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    parts = [w.parameter(f"x{i}", w.batch, *shape) for i in range(draw(st.integers(1, 3)))]
    return _finish(w, w("stack", *parts, axis=draw(st.integers(1, len(shape) + 1))))


def padded(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 2)))
    x, rank = _image(draw, w, draw(st.integers(1, 2)), 3)
    pad = _axes(draw, 2 * rank, 0, 2)
    mode = draw(st.sampled_from(("zero", "zero", "replicate", "reflect", "circular")))
    value = draw(st.sampled_from((0.0, -1.5))) if mode == "zero" else 0.0
    return _finish(w, w("padding", x, pad=pad, mode=mode, value=value))


def prelu(draw: Draw) -> Network:
    return _elementwise(draw, "prelu", 1, channels=draw(st.booleans()))


def instance_norm(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x, _ = _image(draw, w, draw(st.integers(1, 3)), 2, 5)
    return _finish(w, w("instance_norm", w("tanh", x), eps=1e-2, affine=draw(st.booleans())))


def softmax(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    return _finish(
        w, w(draw(st.sampled_from(("softmax", "log_softmax"))), x, axis=draw(st.integers(1, len(w.type(x).shape) - 1)))
    )


def amax(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    axes = tuple(draw(st.sets(st.integers(1, len(w.type(x).shape) - 1), min_size=1)))
    return _finish(w, w("amax", x, axes=axes, keep=draw(st.booleans())))


def matmul(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    outer = draw(st.lists(st.integers(1, 3), max_size=2))
    m, n, k = (draw(st.integers(1, 4)) for _ in range(3))
    turned = {name: draw(st.booleans()) for name in ("transpose_a", "transpose_b")}
    x = w.parameter("x", w.batch, *outer, *((k, m) if turned["transpose_a"] else (m, k)))
    y = w.parameter("y", w.batch, *outer, *((n, k) if turned["transpose_b"] else (k, n)))
    return _finish(w, w("matmul", x, y, **turned))


def attention(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    heads, depth, queries, keys = (draw(st.integers(1, 3)) for _ in range(4))
    groups = draw(st.lists(st.integers(1, 3), max_size=2))
    packed = draw(st.booleans())
    if packed:
        keys = queries
        operands = [w.parameter("x", w.batch, 3 * heads * depth, *groups, queries)]
    else:
        lengths = {"q": queries, "k": keys, "v": keys}
        operands = [w.parameter(name, w.batch, heads * depth, *groups, size) for name, size in lengths.items()]
    if draw(st.booleans()):
        shape = (draw(st.sampled_from((1, heads))), 1, draw(st.sampled_from((1, math.prod(groups)))), queries, keys)
        operands.append(w.parameter("bias", *shape))
    settings = {"causal": draw(st.booleans()), "scale": draw(st.sampled_from((0.0, 0.7)))}
    return _finish(w, w("attention", *operands, heads=heads, **settings))


def window_attention(draw: Draw) -> Network:
    """Return a network like Swin's blocks, shifted or not."""
    w = Writer(draw(st.integers(1, 2)))
    h, v = draw(PAIR)
    size, heads = (h * draw(st.integers(1, 2)), v * draw(st.integers(1, 2))), draw(st.integers(1, 2))
    shift = (draw(st.integers(0, h - 1)), draw(st.integers(0, v - 1)))
    x = w("roll", w.parameter("x", w.batch, 3 * heads, *size), shift=(-shift[0], -shift[1]))
    bias = w("window_bias", heads=heads, window=(h, v), size=size, shift=shift)
    y = w("attention", w("windows", x, window=(h, v)), bias, heads=heads)
    return _finish(w, w("roll", w("join_windows", y, size=size, window=(h, v)), shift=shift))


def scale(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, 3)
    return _finish(w, w.graph.emit("scale", Scale(-0.5, 2.0), (x,), "scale")[0])


def dropout(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    return _finish(w, w("dropout", x, p=draw(st.sampled_from((0.0, 0.2, 0.5))), channels=draw(st.booleans())))


def drop_path(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 5)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 5), max_size=3)))
    return _finish(w, w("drop_path", x, p=draw(st.sampled_from((0.2, 0.5)))))


def augment(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    channels, height, width = draw(st.sampled_from((1, 3, 4))), draw(st.integers(3, 7)), draw(st.integers(3, 7))
    last = draw(st.booleans())
    photo = w.input("photo", *((height, width, channels) if last else (channels, height, width)), pixels=True)
    scale = draw(st.sampled_from(((), (0.3, 0.9))))
    jitter = draw(st.sampled_from((0.0, 0.4)))
    settings = {
        "crop": (draw(st.integers(1, height)), draw(st.integers(1, width))),
        "pad": 0 if scale else draw(st.integers(0, 2)),
        "flip": draw(st.booleans()),
        "scale": scale,
        "brightness": jitter,
        "contrast": jitter,
        "saturation": jitter if channels == 3 else 0.0,
        "mean": (0.4,) if draw(st.booleans()) else tuple(0.1 * c for c in range(channels)),
        "std": (0.25,),
        "order": "hwc" if last else "chw",
    }
    x = w("augment", photo, **settings)
    return _finish(w, w("conv", x, channels=2, kernel=1))


def centre_crop(draw: Draw) -> Network:
    """Return a network whose augmentation has nothing random, because there is nothing to choose."""
    w = Writer(draw(st.integers(1, 3)))
    photo = w.input("photo", 3, 4, 5, pixels=True)
    return _finish(w, w("conv", w("augment", photo, mean=(0.5,), std=(0.2,)), channels=2, kernel=1))


def flatten(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 3)))
    x = w.parameter("x", w.batch, *draw(st.lists(st.integers(1, 4), max_size=3)))
    return _finish(w, w("flatten", x))


def softmax_cross_entropy(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    places = draw(st.lists(st.integers(1, 3), max_size=3))
    x, target = w.parameter("x", w.batch, 3, *places), w.input("target", *places, classes=True)
    loss = w("softmax_cross_entropy", x, target, smoothing=draw(st.sampled_from((0.0, 0.1))))
    return w.finish((x,), ((loss, draw(st.sampled_from((1.0, 0.3)))),))


def soft_target_cross_entropy(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    shape = (w.batch, 3, *draw(st.lists(st.integers(1, 3), max_size=2)))
    x, target = w.parameter("x", *shape), w.parameter("t", *shape)
    loss = w("softmax_cross_entropy", x, target, smoothing=draw(st.sampled_from((0.0, 0.1))))
    return w.finish((x,), ((loss, draw(st.sampled_from((1.0, 0.3)))),))


def kl_divergence(draw: Draw) -> Network:
    """Return a network whose probabilities are positive and have a gradient, too."""
    w = Writer(draw(st.integers(1, 4)))
    shape = (w.batch, 3, *draw(st.lists(st.integers(1, 3), max_size=2)))
    x, t = w.parameter("x", *shape), w("sigmoid", w.parameter("t", *shape))
    return w.finish((x,), ((w("kl_divergence", x, t), draw(st.sampled_from((1.0, 0.3)))),))


def weighted_cross_entropy(draw: Draw) -> Network:
    w = Writer(draw(st.integers(4, 6)))  # so that not all are left out
    places = draw(st.lists(st.integers(1, 3), max_size=3))
    x, target = w.parameter("x", w.batch, 3, *places), w.input("target", *places, classes=True)
    settings = {
        "smoothing": draw(st.sampled_from((0.0, 0.1, 1.0))),
        "class_weights": draw(st.sampled_from(((), (0.5, 2.0, 1.0)))),
        "ignore_index": draw(st.sampled_from((1, 255))),
    }
    loss = w("softmax_cross_entropy", x, target, **settings)
    return w.finish((x,), ((loss, draw(st.sampled_from((1.0, 0.3)))),))


OVERLAPS: tuple[dict[str, Any], ...] = (
    {"layer": "dice", "smooth": 0.01, "ignore_index": 1},
    {"layer": "dice", "batch": True, "background": False, "cross_entropy": 0.7},
    {"layer": "dice", "squared": True, "smooth_below": 0.2, "cross_entropy": 0.7},
    {"layer": "tversky", "alpha": 0.3, "beta": 0.6, "gamma": 0.75, "batch": True},
    {"layer": "focal", "gamma": 2.5, "alpha": 0.25},
    {"layer": "focal", "gamma": 1.0},
)


def dice(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    places, settings = draw(st.lists(st.integers(1, 3), max_size=3)), dict(draw(st.sampled_from(OVERLAPS)))
    settings["sigmoid"] = "ignore_index" not in settings and draw(st.booleans())
    target = w.input("regions", 3, *places) if settings["sigmoid"] else w.input("target", *places, classes=True)
    loss = w(settings.pop("layer"), w.parameter("x", w.batch, 3, *places), target, **settings)
    return w.finish(("x",), ((loss, draw(st.sampled_from((1.0, 0.3)))),))


def mse(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    loss = w("mse", w.parameter("x", w.batch, *shape), w.parameter("y", w.batch, *shape))
    return w.finish((), ((loss, draw(st.sampled_from((1.0, -2.0)))),))


def _compared(draw: Draw, layer: str, **settings: Any) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    loss = w(layer, w.parameter("x", w.batch, *shape), w.parameter("y", w.batch, *shape), **settings)
    return w.finish((), ((loss, draw(st.sampled_from((1.0, -2.0)))),))


def l1(draw: Draw) -> Network:
    return _compared(draw, "l1")


def inner_product(draw: Draw) -> Network:
    return _compared(draw, "inner_product")


def smooth_l1(draw: Draw) -> Network:
    return _compared(draw, "smooth_l1", beta=draw(st.sampled_from((0.55, 1.3, 2.9))))


def binary_cross_entropy(draw: Draw) -> Network:
    return _compared(draw, "binary_cross_entropy", pos_weight=draw(st.sampled_from((0.3, 1.0, 3.0))))


def probability_cross_entropy(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    x, y = (w("sigmoid", w.parameter(name, w.batch, *shape)) for name in "xy")
    loss = w("binary_cross_entropy", x, y, logits=False)
    return w.finish((), ((loss, draw(st.sampled_from((1.0, -2.0)))),))


def nll(draw: Draw) -> Network:
    w = Writer(draw(st.integers(4, 6)))  # so that not all are left out
    places = draw(st.lists(st.integers(1, 3), max_size=3))
    x = w("log_softmax", w.parameter("x", w.batch, 3, *places))
    settings = draw(st.sampled_from(({}, {"ignore_index": 1}, {"class_weights": (1.0, 0.5, 2.0)})))
    return w.finish((x,), ((w("nll", x, w.input("target", *places, classes=True), **settings), 1.0),))


def squeezed(draw: Draw) -> Network:
    """Return a network with one number for each row, like the heads of critics."""
    w = Writer(draw(st.integers(1, 4)))
    x = w("squeeze", w("linear", w.input("image", 3), features=1))
    y = w("mul", w("tanh", x), w("add", x, w.parameter("shift", 1)))
    return w.finish(
        (x,), ((w(draw(st.sampled_from(("mse", "binary_cross_entropy", "l1"))), y, w.input("wanted")), 1.0),)
    )


def two_losses(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    x, target = w.parameter("x", w.batch, 3), w.input("target", classes=True)
    first, second = w("softmax_cross_entropy", x, target), w("mse", x, w.input("wanted", 3))
    return w.finish((x,), ((first, 0.7), (second, 0.3)))


def top_k(draw: Draw) -> Network:
    w = Writer(draw(st.integers(1, 4)))
    places = draw(st.lists(st.integers(1, 3), max_size=3))
    x, target = w.parameter("x", w.batch, 4, *places), w.input("target", *places, classes=True)
    loss, share = w("softmax_cross_entropy", x, target), w("top_k", x, target, k=draw(st.integers(1, 4)))
    network = w.finish((x,), ((loss, 1.0),))
    return replace(network, metrics=(("top", ((share, 1.0),)), ("both", ((loss, 0.5), (share, 2.0)))))


def counted(draw: Draw) -> Network:
    """Return a network with metrics that leave out ignored positions."""
    w = Writer(draw(st.integers(4, 6)))  # so that not all are left out
    places = draw(st.lists(st.integers(1, 3), max_size=3))
    x, target = w.parameter("x", w.batch, 4, *places), w.input("target", *places, classes=True)
    ignored = draw(st.sampled_from(("none", 1, 255)))
    loss = w("softmax_cross_entropy", x, target)
    share = w("top_k", x, target, k=draw(st.integers(1, 4)), ignore_index=ignored)
    iou = w("mean_iou", x, target, ignore_index=ignored)
    network = w.finish((x,), ((loss, 1.0),))
    return replace(network, metrics=(("top", ((share, 1.0),)), ("iou", ((iou, 1.0), (loss, -0.5)))))


CASES: dict[str, Callable[[Draw], Network]] = {
    f.__name__: f
    for f in (
        matmul, attention, window_attention,
        conv, standardized, conv_transpose, linear, bn, group_norm, layer_norm, lrn, maxpool, maxpool_dilated,
        avgpool, global_avgpool,
        adaptive_pool, adaptive_pool_small, global_maxpool, upsample, resize, concat, joined_statistics, gated,
        broadcasting, chosen, detached,
        spatial_gate, free_parameter, reduced, permuted, shuffled, sliced, parted, stacked, padded,
        prelu, instance_norm, softmax, amax, scale, dropout, drop_path, augment,
        centre_crop, flatten,
        softmax_cross_entropy, soft_target_cross_entropy, kl_divergence, weighted_cross_entropy, mse, l1, smooth_l1,
        inner_product,
        binary_cross_entropy, probability_cross_entropy, nll, squeezed, dice, two_losses, top_k, counted,
    )
}  # fmt: skip
CASES |= {name: partial(_pointwise, function) for name, function in POINTWISE.items()}
CASES |= {"add": lambda draw: _elementwise(draw, "add", 3), "mul": lambda draw: _elementwise(draw, "mul", 3)}
