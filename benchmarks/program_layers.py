"""Layers with parameters, norms and pools, from which random programs are drawn."""

from __future__ import annotations

from program_draft import Draft, operation

# ---- layers ----


@operation("layer")
def conv2d(d: Draft) -> str:
    """Draw a 2-D convolution."""
    x = d.pick(4, 4)
    channels = d.shape(x)[1]
    groups = d.one_of(1, 1, 1, channels)
    kernel = (d.one_of(1, 2, 3, 3, 5), d.one_of(1, 3, 3))
    padding = d.one_of("0", "1", "(1, 2)", "(0, 1)", "'same'")
    stride = "1" if "same" in padding else d.one_of("1", "1", "2", "(2, 1)", "(1, 3)")
    modes = (f", padding_mode='{mode}'" for mode in ("reflect", "replicate", "circular"))
    outputs = groups * d.one_of(1, 2) if groups > 1 else d.one_of(1, 3, 4, 5, 6)
    own = d.layer(
        f"nn.Conv2d({channels}, {outputs}, {kernel}, stride={stride}, padding={padding}, "
        f"dilation={d.one_of(1, 1, 2, '(1, 2)')}, groups={groups}, bias={d.chance(0.6)}{d.one_of('', '', '', *modes)})"
    )
    return f"{own}({x})"


@operation("layer")
def conv1d(d: Draft) -> str:
    """Draw a 1-D convolution."""
    x = d.pick(3, 3)
    channels = d.shape(x)[1]
    kernel = d.one_of(1, 2, 3)
    own = d.layer(
        f"nn.Conv1d({channels}, {d.one_of(1, 3, 4)}, {kernel}, stride={d.one_of(1, 2)}, padding={d.one_of(0, 1)}, "
        f"bias={d.chance(0.6)})"
    )
    return f"{own}({x})"


@operation("layer")
def conv_transpose2d(d: Draft) -> str:
    """Draw a transposed convolution."""
    x = d.pick(4, 4)
    channels, stride = d.shape(x)[1], d.one_of(1, 2, 3)
    own = d.layer(
        f"nn.ConvTranspose2d({channels}, {d.one_of(1, 3, 4)}, {d.one_of(2, 3, '(3, 2)')}, stride={stride}, "
        f"padding={d.one_of(0, 1)}, output_padding={d.random.randrange(stride)}, bias={d.chance(0.6)})"
    )
    return f"{own}({x})"


@operation("layer")
def linear(d: Draft) -> str:
    """Draw a linear layer."""
    x = d.pick(2)
    return d.layer(f"nn.Linear({d.shape(x)[-1]}, {d.one_of(1, 3, 5, 6)}, bias={d.chance(0.7)})") + f"({x})"


@operation("layer")
def norm(d: Draft) -> str:
    """Draw a normalization."""
    x = d.pick(3, 4)
    shape = d.shape(x)
    channels, dims = shape[1], len(shape) - 2
    kind = d.one_of("batch", "batch", "group", "instance", "layer", "layer of channels", "normalize")
    if kind == "batch":
        more = d.one_of("", "", "", ", affine=False", ", momentum=0.3", ", eps=0.01", ", track_running_stats=False")
        return d.layer(f"nn.BatchNorm{dims}d({channels}{more})") + f"({x})"
    if kind == "group":
        groups = d.random.choice([n for n in range(1, channels + 1) if channels % n == 0])
        return d.layer(f"nn.GroupNorm({groups}, {channels}{d.one_of('', ', affine=False', ', eps=0.001')})") + f"({x})"
    if kind == "instance":
        return d.layer(f"nn.InstanceNorm{dims}d({channels}{d.one_of('', ', affine=True')})") + f"({x})"
    if kind == "layer":
        at = d.random.randrange(1, len(shape))
        more = d.one_of("", "", ", elementwise_affine=False", ", bias=False")
        return d.layer(f"nn.LayerNorm({tuple(shape[at:])}{more})") + f"({x})"
    if kind == "normalize":
        return f"F.normalize({x}, dim={d.axis(x, 0)}{d.one_of('', ', p=1.0', ', eps=0.01')})"
    order = (0, *range(2, len(shape)), 1)
    back = (0, len(shape) - 1, *range(1, len(shape) - 1))
    layer = d.layer(f"nn.LayerNorm({channels})") + f"({x}.permute({order}))"
    return layer + (f".permute({back})" if d.chance(0.7) else "")


@operation("layer")
def max_pool(d: Draft) -> str:
    """Draw a maximum pooling."""
    x = d.pick(3, 4)
    dims = len(d.shape(x)) - 2
    kernel = d.one_of(2, 3, "(2, 3)", "(1, 2)") if dims == 2 else d.one_of(2, 3)
    more = d.one_of("", ", stride=1", ", stride=2") + d.one_of("", ", padding=1" if kernel != "(1, 2)" else "")
    more += d.one_of("", "", ", ceil_mode=True") + d.one_of("", "", "", ", dilation=2")
    return f"F.max_pool{dims}d({x}, {kernel}{more})"


@operation("layer")
def average_pool(d: Draft) -> str:
    """Draw an average pooling."""
    x = d.pick(3, 4)
    dims = len(d.shape(x)) - 2
    kernel = d.one_of(2, 3, "(2, 3)") if dims == 2 else d.one_of(2, 3)
    more = d.one_of("", ", stride=1", ", stride=2") + d.one_of("", ", ceil_mode=True")
    more += d.one_of("", ", padding=1", ", padding=1, count_include_pad=False")
    more += ", divisor_override=5" if dims == 2 and d.chance(0.1) else ""
    return f"F.avg_pool{dims}d({x}, {kernel}{more})"


@operation("layer")
def adaptive_pool(d: Draft) -> str:
    """Draw an adaptive pooling."""
    x = d.pick(3, 4)
    dims = len(d.shape(x)) - 2
    size = d.one_of("1", "2", "3", "(3, 2)", "(1, 4)") if dims == 2 else d.one_of("1", "2", "3")
    return f"F.adaptive_{d.one_of('avg', 'max')}_pool{dims}d({x}, {size})"


@operation("layer")
def shared_layer(d: Draft) -> None:
    """Draw a layer that is called twice, or a layer with the parameters of another one."""
    x = d.pick(3, 4)
    channels, dims = d.shape(x)[1], len(d.shape(x)) - 2
    kind = d.one_of("conv", "norm", "prelu", "tied", "linear")
    if kind == "linear":
        size = d.shape(x)[-1]
        own = d.layer(f"nn.Linear({size}, {size})")
    else:
        text = {"norm": f"nn.BatchNorm{dims}d({channels})", "prelu": f"nn.PReLU({channels})"}
        own = d.layer(text.get(kind, f"nn.Conv{dims}d({channels}, {channels}, 3, padding=1)"))
    first = d.let(f"{own}({x})")
    if kind == "tied":
        own2 = d.layer(f"nn.Conv{dims}d({channels}, {channels}, 3, padding=1)")
        tie = f"{own2}.weight = {own}.weight"
        d._run(tie)  # pyright: ignore[reportPrivateUsage]
        d.text.held.append(tie)
        own = own2
    d.let(f"{own}({first}.tanh())")
