"""Activations, arithmetic, reductions, resampling and products, from which random programs are drawn."""

from __future__ import annotations

import re

from operations import ACTIVATIONS
from program_draft import Draft, Draw, operation

from mbc.ops import LAYERS

# ---- activations ----


def _simple(family: str, *calls: str) -> list[Draw]:
    """Return an operation for each call of a function of `x`."""

    def of(call: str) -> Draw:
        def draw(d: Draft) -> str:
            return re.sub(r"\bx\b", d.pick(), call)

        return operation(family)(draw)

    return [of(call) for call in calls]


_USUAL = [LAYERS[name].calls.torch for name in ACTIVATIONS if not LAYERS[name].parameters]
_RARE = [LAYERS[name].calls.torch for name in ("softsign", "selu", "tanhshrink")]
_RARE += [f"{name}(x)" for name in ("F.logsigmoid", "torch.erf", "torch.sin", "torch.cos", "torch.expm1")]
SIMPLE = _simple("activation", *_USUAL, "torch.square(x)") + _simple("rare", *_RARE)


@operation("activation")
def with_slope(d: Draft) -> str:
    """Draw an activation with a slope."""
    x = d.pick()
    kind = d.one_of("leaky", "elu", "prelu")
    if kind == "leaky":
        return f"F.leaky_relu({x}, {d.one_of(d.number(0, 0.9), d.number(-0.9, 0), 0.0)})"
    if kind == "elu":
        return f"F.elu({x}, {d.number(0.2, 2)})"
    count = d.one_of(1, d.shape(x)[1] if len(d.shape(x)) > 1 else 1)
    return d.layer(f"nn.PReLU({count})") + f"({x})"


@operation("rare")
def rare_activation(d: Draft) -> str:
    """Draw a rare activation."""
    x = d.pick()
    kind = d.one_of("celu", "threshold", "softshrink", "hardshrink", "rrelu")
    if kind == "celu":
        return f"F.celu({x}, {d.exact(0.2, 2)})"  # PyTorch's gradient divides by alpha in fp32
    if kind == "threshold":
        return f"F.threshold({x}, {d.number(-0.5, 0.5)}, {d.number(-1, 1)})"
    if kind == "rrelu":
        slope = d.number(0.1, 0.4)
        return f"F.rrelu({x}, {slope}, {slope}, training=False)"
    return f"F.{kind}({x}, {d.number(0.1, 0.9)})"


@operation("activation")
def softplus(d: Draft) -> str:
    """Draw a softplus."""
    return f"F.softplus({d.pick()}{d.one_of('', ', beta=2.0', ', threshold=1.0', ', beta=0.5, threshold=3.0')})"


@operation("activation")
def hardtanh(d: Draft) -> str:
    """Draw a hardtanh."""
    return f"F.hardtanh({d.pick()}, {d.one_of(-1, 0, d.number(-2, -0.3))}, {d.one_of(1, 6, d.number(0.3, 2))})"


@operation("activation")
def clamp(d: Draft) -> str:
    """Draw a clamp."""
    x, low, high = d.pick(), d.number(-1, 0), d.number(0.2, 2)
    return d.one_of(
        f"{x}.clamp({low}, {high})", f"{x}.clamp(min={low})", f"{x}.clamp(max={high})", f"torch.clamp_min({x}, {low})",
        f"torch.clamp_max({x}, {high})", f"{x}.clamp(0, 6)",
    )  # fmt: skip


@operation("activation")
def softmax(d: Draft) -> str:
    """Draw a softmax or a log-softmax."""
    x = d.pick(2)
    return f"F.{d.one_of('softmax', 'softmax', 'log_softmax', 'softmin')}({x}, {d.axis(x)})"


@operation("activation")
def glu(d: Draft) -> str:
    """Draw a gated linear unit."""
    x = d.pick(2)
    even = [n for n, size in enumerate(d.shape(x)) if n and size % 2 == 0]
    return f"F.glu({x}, {d.one_of(*even)})"


@operation("activation")
def positive(d: Draft) -> str:
    """Draw a function of positive values."""
    x = d.pick()
    return d.one_of(
        f"({x}.abs() + 0.5).log()", f"({x} ** 2 + 0.1).sqrt()", f"({x} * 0.3).exp()", f"({x}.abs() + 1).rsqrt()",
        f"({x}.square() + 1).reciprocal()", f"(F.softplus({x}) + 0.1).pow({d.number(-1.5, 2.5)})", f"{x}.pow(2)",
        f"{x} ** {d.one_of(2, 3, 1)}", f"torch.log1p({x}.abs())",
    )  # fmt: skip


# ---- arithmetic ----


@operation("arithmetic")
def with_number(d: Draft) -> str:
    """Draw an operation with a number."""
    x, number = d.pick(), d.number(-2, 2)
    return d.one_of(
        f"{x} + {number}", f"{number} - {x}", f"{x} * {number}", f"{x} / {d.number(0.5, 3)}", f"{x} - {number}",
        f"torch.add({x}, 1.0, alpha={number})", f"torch.rsub({x}, {number})",
    )  # fmt: skip


@operation("arithmetic")
def with_other(d: Draft) -> str:
    """Draw an operation of two values."""
    x = d.pick()
    y = d.pick(shape=d.shape(x), besides=x if d.chance(0.8) else "")
    return d.one_of(
        f"{x} + {y}", f"{x} - {y}", f"{x} * {y}", f"{x} / ({y}.abs() + 1)",
        f"torch.add({x}, {y}, alpha={d.number(-1, 2)})",
        f"torch.sub({x}, {y}, alpha={d.number(-1, 2)})", f"torch.maximum({x}, {y})", f"torch.minimum({x}, {y})",
        f"torch.where({x} > {d.number(-0.5, 0.5)}, {x}, {y})", f"torch.lerp({x}, {y}, {d.number(0, 1)})",
        f"torch.addcmul({x}, {y}, {x}, value={d.number(-1, 1)})",
    )  # fmt: skip


@operation("arithmetic")
def with_mean(d: Draft) -> str:
    """Draw arithmetic that broadcasts a gate or a mean of the value itself."""
    x = d.pick(3)
    axes = tuple(range(2, len(d.shape(x))))
    gate = d.one_of(f"{x}.mean({axes}, keepdim=True)", f"torch.sigmoid({x}.mean({d.axis(x, 0)}, keepdim=True))")
    return f"{x} {d.one_of('*', '+', '-')} {gate}"


@operation("arithmetic")
def with_parameter(d: Draft) -> str:
    """Draw an operation with a parameter."""
    x = d.pick(2)
    shape = d.shape(x)
    start = d.random.randrange(1, len(shape))
    sizes = [size if d.chance(0.6) else 1 for size in shape[start:]]
    sizes = [1, *sizes] if start == 1 and d.chance(0.5) else sizes
    trained = d.chance(0.6)
    held = d.parameter(*sizes) if trained else d.buffer(*sizes)
    # What a program computes of a buffer alone is a number in fp32: only exact operations compare in fp64.
    held = d.one_of(held, held, held, f"{held}.tanh()" if trained else held, f"({held} * 0.5)", f"{held}.unsqueeze(0)")
    return f"{x} {d.one_of('*', '+', '-')} {held}"


@operation("arithmetic")
def with_constant(d: Draft) -> str:
    """Draw an operation with a constant."""
    x = d.pick(2)
    last = d.shape(x)[-1]
    return d.one_of(
        f"{x} * torch.tensor({d.exact(0.3, 2)})", f"{x} + torch.ones_like({x})", f"{x} + torch.arange({last}) * 0.125",
        f"{x} * torch.full(({last},), {d.exact(0.5, 2)})", f"{x} - torch.zeros({last})",
        f"{x} * {x}.new_tensor([{d.exact(0.5, 2)}])", f"{x}.type_as({x})", f"{x}.to({x}.dtype)",
    )  # fmt: skip


# ---- reductions ----


@operation("reduction")
def reduced(d: Draft) -> str:
    """Draw a reduction."""
    x = d.pick(3)
    rank = len(d.shape(x))
    axes: int | tuple[int, ...] = d.axis(x)
    if d.chance(0.4):
        axes = tuple(sorted(d.random.sample(range(1, rank), d.random.randrange(1, rank))))
    keep = d.one_of("", ", keepdim=True")
    kind = d.one_of("mean", "mean", "sum", "sum", "amax", "norm", "max")
    if kind == "max":
        return f"{x}.max({d.axis(x, 0)}{keep})[0]"
    if kind == "norm":
        return f"{x}.norm(2, {axes}{keep})"
    return f"{x}.{kind}({axes}{keep})"


@operation("rare")
def rare_reduction(d: Draft) -> str:
    """Draw a rare reduction."""
    x = d.pick(3)
    axis, keep = d.axis(x, 0), d.one_of("", ", keepdim=True")
    kind = d.one_of("var", "std", "amin", "min", "logsumexp", "prod", "norm")
    if kind in ("var", "std"):
        keep += d.one_of("", ", correction=0", ", unbiased=False")
    if kind == "norm":
        return f"{x}.norm(1, {axis}{keep})"
    return f"{x}.{kind}({axis}{keep})" + ("[0]" if kind == "min" else "")


# ---- resampling ----


@operation("resample")
def interpolate(d: Draft) -> str:
    """Draw an interpolation."""
    x = d.pick(3, 4)
    dims = len(d.shape(x)) - 2
    smooth = "bilinear" if dims == 2 else "linear"
    mode = d.one_of("nearest", smooth)
    size = d.one_of("size=7", "size=5", "scale_factor=2", "scale_factor=1.7", "scale_factor=0.6", "scale_factor=3")
    if dims == 2:
        size = d.one_of(size, "size=(6, 11)", "scale_factor=(2, 1)", "scale_factor=(1.5, 2.0)")
    more = d.one_of("", "", ", align_corners=True") if mode == smooth else ""
    more += ", recompute_scale_factor=True" if "scale" in size and d.chance(0.2) else ""
    return f"F.interpolate({x}, {size}, mode='{mode}'{more})"


@operation("resample")
def shuffled(d: Draft) -> str:
    """Draw a shuffle of pixels or channels."""
    x = d.pick(4, 4)
    channels = d.shape(x)[1]
    kind = d.one_of("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
    if kind == "channel_shuffle":
        return f"F.channel_shuffle({x}, {d.one_of(*[n for n in range(1, channels + 1) if channels % n == 0])})"
    return f"F.{kind}({x}, 2)" if d.chance(0.8) else f"F.{kind}({x}, 1)"


# ---- matrices ----


@operation("matrix")
def product(d: Draft) -> str:
    """Draw a matrix product."""
    x = d.pick(3, 4)
    kind = d.one_of("gram", "gram", "attention", "parameter", "scores")
    if kind == "gram":
        return f"{x} @ {x}.transpose(-1, -2)"
    if kind == "parameter":
        return f"{x} @ {d.parameter(d.shape(x)[-1], d.one_of(3, 4))}"
    if kind == "scores":
        return f"({x} @ {x}.transpose(-2, -1) * 0.3).softmax(-1) @ {x}"
    return f"F.scaled_dot_product_attention({x}, {x}, {x})"
