"""Tensors viewed by the factors of their axes.

Any sequence of `view`, `permute` and `select` of an image gives such a view, even with samples and windows in one axis.
Nothing is moved until a layer needs the elements in the order of the view.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mbc.interchange.aten.operands import (
    CHANNELS_LAST,
    FLAT,
    GATE,
    PLAIN,
    Activation,
    Atom,
    Axes,
    Factored,
    Refused,
    as_setting,
)
from mbc.interchange.aten.written_layers import Layers

Seen = tuple[Atom, ...]


def factored(x: Activation) -> Factored | None:
    """Return the view of a tensor by its factors; None if the tensor is padded or repeated."""
    if isinstance(x.view, Factored):
        return x.view
    axes = axes_of(x)
    if x.view is FLAT:
        return Factored((axes[0], sum(axes[1:], ())))
    if x.view is CHANNELS_LAST:
        return Factored((axes[0], *axes[2:], axes[1]))
    if x.view is GATE:
        return Factored((*axes, (), ()))
    return Factored(axes) if x.view is PLAIN else None


def axes_of(x: Activation) -> Axes:
    """Return the factors of the axes of a tensor as it is stored."""
    return tuple(_whole(axis, size) for axis, size in enumerate(x.shape))


def _whole(axis: int, size: int) -> Seen:
    return () if size == 1 else (Atom(axis, 1, size),)


def _joined(atoms: Seen) -> Seen:
    """Return factors in which each run of neighbouring parts of one factor is replaced by that factor."""
    joined: list[Atom] = []
    for atom in atoms:
        if joined and joined[-1].axis == atom.axis and joined[-1].stride == atom.stride * atom.size:
            atom = Atom(atom.axis, atom.stride, atom.size * joined.pop().size)
        joined.append(atom)
    return tuple(joined)


def regarded(x: Activation, view: Factored) -> Activation:
    """Return a tensor under another view by factors; the view of an image is `PLAIN` or `CHANNELS_LAST`."""
    view = replace(view, axes=tuple(map(_joined, view.axes)))
    if len(x.shape) == 4:
        for image in (PLAIN, CHANNELS_LAST):
            if factored(replace(x, view=image)) == view:
                return replace(x, view=image)
    return replace(x, view=view)


def reshaped(x: Activation, view: Factored, shape: tuple[int, ...]) -> Activation | None:
    """Return a tensor, viewed by `view`, in the shape `shape`; None if the sizes do not divide each other."""
    rest = list(sum(view.axes, ()))
    axes: list[Seen] = []
    for size in shape:
        taken: list[Atom] = []
        while size > 1 and rest:
            atom = rest.pop(0)
            if size % atom.size == 0:
                size //= atom.size
            elif atom.size % size == 0:
                inner = atom.size // size
                rest.insert(0, Atom(atom.axis, atom.stride, inner))
                atom, size = Atom(atom.axis, atom.stride * inner, size), 1
            else:
                return None
            taken.append(atom)
        if size > 1:
            return None
        axes.append(tuple(taken))
    return None if rest else regarded(x, replace(view, axes=tuple(axes)))


def permuted(x: Activation, view: Factored, dims: tuple[int, ...]) -> Activation:
    """Return a tensor, viewed by `view`, with the dimensions `dims` in this order."""
    return regarded(x, replace(view, axes=tuple(view.axes[d] for d in dims)))


def selected(x: Activation, view: Factored, dim: int, index: int) -> Activation | None:
    """Return one index along a dimension as a view, or None if the dimension is not one factor.

    The elements are selected when a later layer reads the view.
    """
    axis = view.axes[dim]
    if len(axis) != 1 or axis[0].axis == 0:
        return None
    others = (*view.axes[:dim], *view.axes[dim + 1 :])
    return replace(x, view=replace(view, axes=others, picks=(*view.picks, (axis[0], index))))


def channels_behind(x: Activation) -> Factored | None:
    """Return the view of a tensor whose last axis is all channels of each pixel; None for other tensors.

    Layers over the channels take such tensors.
    """
    view = x.view
    if not isinstance(view, Factored) or x.is_pending or len(x.shape) != 4:
        return None
    return view if view.axes and view.axes[-1] == _whole(1, x.shape[1]) else None


def with_channels(view: Factored, result: Activation) -> Activation:
    """Return the result of a pointwise layer under the view `view` of the layer's input."""
    return regarded(result, replace(view, axes=(*view.axes[:-1], _whole(1, result.shape[1]))))


def windowed(call: Layers, x: Activation, groups: Seen, tokens: Seen) -> Activation:
    """Return an image as [N, C, groups, tokens], one group for each window.

    Raises:
        Refused: The groups are no windows.
    """
    n, channels, height, width = x.shape
    if (groups, tokens) == (_whole(2, height), _whole(3, width)):
        return Activation(x.value, x.shape)
    h = next((a.size for a in tokens if a.axis == 2), 1)
    w = next((a.size for a in tokens if a.axis == 3), 1)
    inner = tuple(a for a in (Atom(2, 1, h), Atom(3, 1, w)) if a.size > 1)
    outer = tuple(a for a in (Atom(2, h, height // h), Atom(3, w, width // w)) if a.size > 1)
    if (groups, tokens) != (outer, inner) or height % h or width % w:
        raise Refused("it attends to positions that are no windows of an image", "attend along one axis, or in windows")
    shape = (n, channels, height * width // (h * w), h * w)
    return call.layer("windows", x, shape, {"window": as_setting((h, w))})


def in_order(call: Layers, x: Activation) -> Activation:
    """Return a tensor whose last axis is its channels, with the pixels of each window one after another."""
    view = channels_behind(x)
    if view is None:
        return x
    pixels = sum(view.axes[:-1], ())
    if pixels[:1] != _whole(0, x.shape[0]) or pixels == tuple(sorted(pixels, key=lambda a: (a.axis, -a.stride))):
        return x
    if len(view.axes) != 3:
        return as_image(call, x)
    result = windowed(call, x, view.axes[0][1:], view.axes[1])
    axes = ((*_whole(0, result.shape[0]), *_whole(2, result.shape[2])), _whole(3, result.shape[3]), view.axes[-1])
    return regarded(result, replace(view, axes=axes))


def over_channels(call: Layers, x: Activation) -> Activation:
    """Return a tensor for a layer over its last axis; channels that are factors of several axes become one axis."""
    if isinstance(x.view, Factored) and len(x.view.axes) == 4 and channels_behind(x) is None:
        return replace(settled(call, permuted(x, x.view, (0, 3, 1, 2))), view=CHANNELS_LAST)
    return in_order(call, x)


def as_image(call: Layers, x: Activation) -> Activation:
    """Return a tensor with its windows joined if they are viewed as an image [N, H, W, C]; else the tensor as it is."""
    x = regarded(x, x.view) if isinstance(x.view, Factored) else x
    view = channels_behind(x)
    if view is None or len(view.axes) != 4 or view.axes[0] != _whole(0, x.shape[0]):
        return x
    down, across = view.axes[1], view.axes[2]
    h = next((a.size for a in down if a.axis == 3), 1)
    w = next((a.size for a in across if a.axis == 3), 1)
    height, width = (math.prod(a.size for a in axis) for axis in (down, across))
    if height % h or width % w:
        return x
    rows, columns = height // h, width // w
    wanted = (
        tuple(a for a in (Atom(2, columns, rows), Atom(3, w, h)) if a.size > 1),
        tuple(a for a in (Atom(2, 1, columns), Atom(3, 1, w)) if a.size > 1),
    )
    if (down, across) != wanted:
        return x
    settings = {"size": as_setting((height, width)), "window": as_setting((h, w))}
    result = call.layer("join_windows", x, (x.shape[0], x.shape[1], height, width), settings)
    return replace(result, view=CHANNELS_LAST)


def picked(call: Layers, x: Activation) -> Activation:
    """Return a tensor whose picks are sliced out and whose factor is multiplied in.

    Raises:
        Refused: A pick is no slice of an axis.
    """
    view = x.view
    if not isinstance(view, Factored):
        return x
    for atom, index in sorted(view.picks, key=lambda pick: (pick[0].axis, -pick[0].stride)):
        size = x.shape[atom.axis]
        if atom.stride * atom.size != size:
            raise Refused("it takes a part that is no slice of an axis", "take slices along one axis")
        shape = (*x.shape[: atom.axis], atom.stride, *x.shape[atom.axis + 1 :])
        settings = {"axis": atom.axis, "start": index * atom.stride}
        if (index + 1) * atom.stride < size:
            settings["stop"] = (index + 1) * atom.stride
        x = call.layer("slice", x, shape, settings)
    if view.factor != 1.0:
        x = call.operator("*", view.factor, x, x.shape)
    return regarded(x, Factored(view.axes))


def settled(call: Layers, x: Activation) -> Activation:
    """Return the tensor in the shape that the program sees; elements are moved if necessary.

    Raises:
        Refused: The first dimension is not the samples.
    """
    x = picked(call, as_image(call, x))
    view = factored(x)
    if x.view is PLAIN or view is None:
        return x
    if not view.axes or view.axes[0] != _whole(0, x.shape[0]):
        raise Refused(f"it mixes samples into {list(x.seen)}", "keep the samples of a mini-batch apart, in dimension 0")
    seen, wanted = sum(view.axes[1:], ()), x.seen
    stored = tuple(sorted(seen, key=lambda a: (a.axis, -a.stride)))
    result = Activation(x.value, x.shape)
    if stored != seen:
        sizes = tuple(a.size for a in stored)
        if sizes != x.shape[1:]:
            result = call.layer("reshape", result, (x.shape[0], *sizes), {"sizes": sizes})
        order = (0, *(stored.index(a) + 1 for a in seen))
        result = call.layer("permute", result, (x.shape[0], *(a.size for a in seen)), {"axes": order})
    return result if result.shape == wanted else call.layer("reshape", result, wanted, {"sizes": wanted[1:]})
