"""Views, writes in place, joins and regions without gradients, from which random programs are drawn."""

from __future__ import annotations

from program_draft import Draft, operation

# ---- views ----


def part(d: Draft, x: str) -> str:
    """Return the text of a view of a part of `x`."""
    axis = d.axis(x)
    size = d.shape(x)[axis]
    start = d.random.randrange(size)
    stop = d.random.randrange(start + 1, size + 1)
    kind = d.one_of("select", "narrow", "slice", "slice", "step", "index")
    if kind == "select":
        return f"{x}.select({axis}, {d.one_of(start, start - size)})"
    if kind == "narrow":
        return f"{x}.narrow({axis}, {start}, {stop - start})"
    commas = ":, " * (axis % len(d.shape(x)))
    if kind == "index":
        return f"{x}[{commas}{start}]"
    step = f":{d.one_of(2, 3)}" if kind == "step" else ""
    return f"{x}[{commas}{d.one_of('', start)}:{d.one_of('', stop, stop - size or '')}{step}]"


def whole_view(d: Draft, x: str) -> str:
    """Return the text of a view of all elements of `x`."""
    shape = d.shape(x)
    rank = len(shape)
    kind = d.one_of(
        "flatten", "flatten", "reshape", "view", "unsqueeze", "squeeze", "transpose", "permute", "unflatten"
    )
    if kind == "flatten":
        start = d.one_of(1, 1, 2, -2)
        return f"{x}.flatten({start})" if d.chance(0.5) else f"torch.flatten({x}, {start})"
    if kind in ("reshape", "view"):
        flat = 1
        for size in shape[1:]:
            flat *= size
        divisors = [n for n in range(1, flat + 1) if flat % n == 0]
        first = d.random.choice(divisors)
        return f"{x}.{kind}({shape[0]}, {d.one_of(first, -1)}, {flat // first})"
    if kind == "unsqueeze":
        return f"{x}.unsqueeze({d.random.randrange(1, rank + 1)})"
    if kind == "squeeze":
        return f"{x}.squeeze({d.axis(x)})"
    if kind == "unflatten":
        axis = d.axis(x, 0)
        size = d.shape(x)[axis]
        inner = d.random.choice([n for n in range(1, size + 1) if size % n == 0])
        return f"{x}.unflatten({axis}, ({size // inner}, {inner}))"
    if kind == "transpose":
        return f"{x}.transpose({d.axis(x)}, {d.axis(x)})"
    order = list(range(1, rank))
    d.random.shuffle(order)
    return f"{x}.permute({', '.join(map(str, (0, *order)))})"


@operation("view")
def partial_view(d: Draft) -> str:
    """Draw a view of a part of a value."""
    return part(d, d.pick(2))


@operation("view")
def other_shape(d: Draft) -> str:
    """Draw a view of a value in another shape."""
    return whole_view(d, d.pick(2))


@operation("view")
def reordered(d: Draft) -> str:
    """Draw a view of a value with other axes or another order of axes."""
    x = d.pick(3)
    return d.one_of(f"{x}.transpose({d.axis(x, 0)}, {d.axis(x, 0)})", f"{x}.movedim({d.axis(x, 0)}, {d.axis(x, 0)})")


@operation("view")
def parts(d: Draft) -> None:
    """Draw parts of a value."""
    x = d.pick(2)
    axis = d.axis(x, 0.01)
    size = d.shape(x)[axis]
    kind = d.one_of("split", "chunk", "split_with_sizes", "unbind")
    if kind == "split":
        step = d.random.randrange(1, size + 1)
        count, text = -(-size // step), f"{x}.split({step}, {axis})"
    elif kind == "chunk":
        step = -(-size // d.random.randrange(1, size + 1))
        count, text = -(-size // step), f"{x}.chunk({-(-size // step)}, {axis})"
    elif kind == "unbind":
        count, text = size, f"{x}.unbind({axis})"
    else:
        first = d.random.randrange(1, max(size, 2))
        count, text = 2, f"{x}.split(({first}, {size - first}), {axis})"
    if not 1 < count <= 6:
        raise ValueError("too many parts")
    names = [d.name() for _ in range(count)]
    d.write(f"{', '.join(names)} = {text}", *names)


@operation("view")
def expanded(d: Draft) -> str:
    """Draw an expanded value."""
    x = d.pick(2)
    shape = d.shape(x)
    wanted = [size if size > 1 or n == 0 else d.one_of(1, 3, 5) for n, size in enumerate(shape)]
    if wanted == list(shape):
        x = f"{x}.unsqueeze({len(shape)})"
        wanted.append(d.one_of(2, 3))
    return f"{x}.expand({', '.join(map(str, wanted))})"


@operation("view")
def same_view(d: Draft) -> str:
    """Draw a view of the whole value."""
    x = d.pick()
    return x + d.one_of(".contiguous()", ".clone()", f".view_as({x})")


# ---- in place ----


def change(d: Draft, view: str) -> str:
    """Return a statement that changes a view, or a whole value, in place."""
    kind = d.one_of(
        "mul", "mul", "add", "sub", "div", "relu", "tanh", "sigmoid", "copy", "fill", "zero", "clamp", "leaky_relu",
        "other", "parameter", "mish", "square", "neg",
    )  # fmt: skip
    number = d.number(-1.5, 2)
    if kind in ("mul", "add", "sub"):
        return f"{view}.{kind}_({number})"
    if kind == "div":
        return f"{view}.div_({d.number(0.5, 3)})"
    if kind in ("relu", "tanh", "sigmoid", "zero", "square", "neg"):
        return f"{view}.{kind}_()"
    if kind == "fill":
        return f"{view}.fill_({d.exact(-1.5, 2)})"
    if kind == "clamp":
        low = d.number(-2, 0)
        high = d.number(0.5, 3)
        return f"{view}.clamp_({d.one_of(f'{low}, {high}', f'0, {high}', f'min={low}', f'max={high}', '0, 6')})"
    if kind == "leaky_relu":
        return f"F.leaky_relu({view}, {d.number(-0.5, 0.9)}, inplace=True)"
    if kind == "mish":
        return f"F.mish({view}, inplace=True)"
    if kind == "parameter":
        return f"{view}.{d.one_of('mul', 'add')}_({d.parameter(1)})"
    other = d.pick()
    if kind == "copy":
        return f"{view}.copy_({other}{d.one_of('', '', '', '[:, :1]')})"
    return f"{view}.{d.one_of('add', 'mul')}_({other})"


@operation("in place")
def whole_changed(d: Draft) -> None:
    """Draw a write in place to a whole value."""
    x = fresh(d)
    d.write(change(d, x), x)


@operation("in place")
def part_changed(d: Draft) -> None:
    """Draw a write in place to a part of a value."""
    x = fresh(d)
    d.write(change(d, part(d, x)), x)


@operation("in place")
def view_changed(d: Draft) -> None:
    """Draw a write in place through a view."""
    x = fresh(d)
    d.write(change(d, whole_view(d, x)), x)


@operation("in place")
def named_view_changed(d: Draft) -> None:
    """Draw a view and a change through it. Then the view and its base are read again."""
    x = fresh(d)
    view = d.let(part(d, x) if d.chance(0.6) else whole_view(d, x))
    d.write(change(d, view if d.chance(0.6) else x), view, x)


@operation("in place")
def view_of_view_changed(d: Draft) -> None:
    """Draw a write in place through a view of a view."""
    x = fresh(d)
    view = d.let(whole_view(d, x))
    d.write(change(d, part(d, view)), view, x)


@operation("in place")
def slice_assigned(d: Draft) -> None:
    """Draw an assignment to a slice."""
    x = fresh(d)
    shape = d.shape(x)
    axis = d.random.randrange(1, len(shape))
    start = d.random.randrange(shape[axis])
    stop = d.random.randrange(start + 1, shape[axis] + 1)
    at = f"{x}[{':, ' * axis}{start}:{stop}]"
    value = d.one_of(str(d.exact(-1, 1)), f"{at} * {d.number(-2, 2)}", f"{at}.tanh()", d.pick())
    d.write(f"{at} = {value}" if d.chance(0.7) else f"{at} {d.one_of('+=', '*=')} {value}", x)


def fresh(d: Draft) -> str:
    """Draw a value that may be changed, most often one without a gradient, as PyTorch requires for writes in place."""
    x = d.pick(2)
    if x == "x" or d.chance(0.6):
        return d.let(d.one_of(f"{x} * {d.number(0.5, 2)}", f"{x} + {d.number(-1, 1)}", f"{x}.clone()", f"-{x}"))
    return x


# ---- joins ----


@operation("join")
def cat(d: Draft) -> str:
    """Draw a concatenation."""
    x = d.pick(2)
    axis = d.axis(x, 0.02) % len(d.shape(x))
    alike = [
        name
        for name in d.values
        if len(d.shape(name)) == len(d.shape(x))
        and all(a == b for n, (a, b) in enumerate(zip(d.shape(name), d.shape(x), strict=True)) if n != axis)
    ]
    joined = [x, *d.random.choices(alike, k=d.one_of(1, 1, 2))]
    return f"torch.cat(({', '.join(joined)}), {axis})"


@operation("join")
def stack(d: Draft) -> str:
    """Draw a stack."""
    x = d.pick(1, 4)
    y = d.pick(shape=d.shape(x))
    stacked = f"torch.stack(({x}, {y}), {d.random.randrange(1, len(d.shape(x)) + 1)})"
    return d.one_of(stacked, stacked, f"{stacked}.sum(1)")


@operation("join")
def pad(d: Draft) -> str:
    """Draw a padding."""
    x = d.pick(3, 4)
    dims = len(d.shape(x)) - 2
    mode = d.one_of("zero", "zero", "zero", "constant", "reflect", "replicate")
    low = -1 if mode in ("zero", "replicate") and d.chance(0.3) else 0
    pads = tuple(d.random.randrange(low, 3) for _ in range(2 * dims))
    if mode == "zero":
        pads = pads[: d.one_of(2, 2 * dims)] if d.chance(0.9) else (*pads, 1, 0)
        return f"F.pad({x}, {pads})"
    return f"F.pad({x}, {pads}, value={d.exact(-1, 1)})" if mode == "constant" else f"F.pad({x}, {pads}, mode='{mode}')"


@operation("join")
def roll(d: Draft) -> str:
    """Draw a roll."""
    x = d.pick(2)
    if len(d.shape(x)) == 4 and d.chance(0.4):
        return f"torch.roll({x}, ({d.one_of(-1, 1, 2)}, {d.one_of(-2, 1, 5)}), (2, 3))"
    return f"{x}.roll({d.random.randrange(-3, 4)}, {d.axis(x)})"


@operation("rare")
def rare_resampling(d: Draft) -> str:
    """Draw a rare resampling."""
    x = d.pick(4, 4)
    mode = d.one_of("bicubic", "nearest-exact")
    if d.chance(0.3):
        return d.one_of(f"F.local_response_norm({x}, 3)", f"F.pad({x}, (1, 2, 0, 1), mode='circular')")
    return f"F.interpolate({x}, {d.one_of('size=(6, 8)', 'scale_factor=1.6')}, mode='{mode}')"


@operation("rare")
def repeated(d: Draft) -> str:
    """Draw a repetition."""
    x = d.pick(2, 4)
    axis = d.axis(x, 0)
    times = [1] * len(d.shape(x))
    times[axis] = 2
    return d.one_of(f"{x}.flip({axis})", f"{x}.repeat({tuple(times)})", f"{x}.repeat_interleave(2, {axis})")


# ---- regions ----


@operation("region")
def without_gradient(d: Draft) -> None:
    """Draw a region without gradients."""
    x, name = d.pick(2), d.name()
    inner = d.one_of(f"{x}.tanh()", f"{x} * 2 + 1", f"{x}.mean(1, keepdim=True)", f"F.relu({x})")
    d.write(f"with torch.no_grad():\n    {name} = {inner}", name)
    if d.chance(0.7):
        d.let(f"{x} {d.one_of('+', '*', '-')} {name}")


@operation("region")
def detached(d: Draft) -> str:
    """Draw a detached value."""
    x = d.pick(2)
    return d.one_of(f"{x} * {x}.detach()", f"{x} - {x}.detach().mean(1, keepdim=True)", f"{x} + {x}.detach().relu()")


@operation("region")
def branches(d: Draft) -> str:
    """Draw branches."""
    x = d.pick(2)
    return f"{d.let(f'{x}.tanh()')} {d.one_of('+', '*')} {d.let(f'F.relu({x})')}"


@operation("region")
def no_dropout(d: Draft) -> str:
    """Draw a dropout that drops nothing."""
    return d.one_of(f"F.dropout({d.pick()}, 0.4, training=False)", f"F.dropout({d.pick()}, 0.0)")
