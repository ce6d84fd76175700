"""Tensors regarded by the factors of their axes: what `view`, `permute` and `select` make of an image, in any order,
samples and windows in one axis included. Nothing is moved until a layer needs it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mbc.interchange.aten.operands import (
    CHANNELS_LAST,
    FACTORED,
    FLAT,
    GATE,
    PLAIN,
    Activation,
    Atom,
    Axes,
    Refused,
    as_setting,
)
from mbc.interchange.steps import Setting

Seen = tuple[Atom, ...]


class Layers(Protocol):
    """What layers are written into: `mbc.interchange.aten.base.Call`."""

    def layer(
        self,
        op: str,
        inputs: Activation | Sequence[Activation],
        shape: tuple[int, ...],
        settings: Mapping[str, Setting] | None = None,
    ) -> Activation: ...

    def operator(self, op: str, a: Activation | float, b: Activation | float, shape: tuple[int, ...]) -> Activation: ...


def factored(x: Activation) -> Activation | None:
    """An image or matrix by its factors; None where it is regarded in a way that has none."""
    if x.view == FACTORED:
        return x
    axes = axes_of(x)
    if x.view == FLAT:
        axes = (axes[0], sum(axes[1:], ()))
    elif x.view == CHANNELS_LAST:
        axes = (axes[0], *axes[2:], axes[1])
    elif x.view == GATE:
        axes = (*axes, (), ())
    elif x.view != PLAIN:
        return None
    return replace(x, view=FACTORED, axes=axes)


def axes_of(x: Activation) -> Axes:
    """Of the tensor as it is."""
    return tuple(_whole(axis, size) for axis, size in enumerate(x.shape))


def _whole(axis: int, size: int) -> Seen:
    return () if size == 1 else (Atom(axis, 1, size),)


def _joined(atoms: Seen) -> Seen:
    """Neighbours that are parts of one factor as that factor."""
    found: list[Atom] = []
    for atom in atoms:
        if found and found[-1].axis == atom.axis and found[-1].stride == atom.stride * atom.size:
            atom = Atom(atom.axis, atom.stride, atom.size * found.pop().size)
        found.append(atom)
    return tuple(found)


def regarded(x: Activation, axes: Axes) -> Activation:
    """With other axes; as an image, pixels first or not, where that is what they are."""
    x = replace(x, view=FACTORED, axes=tuple(map(_joined, axes)))
    if x.picks or x.factor != 1.0:
        return x
    for view in (PLAIN, CHANNELS_LAST):
        plain = factored(Activation(x.value, x.shape, view))
        if plain is not None and len(x.shape) == 4 and plain.axes == x.axes:
            return Activation(x.value, x.shape, view)
    return x


def reshaped(x: Activation, shape: tuple[int, ...]) -> Activation | None:
    """None where the sizes do not divide each other."""
    rest = list(sum(x.axes, ()))
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
    return None if rest else regarded(x, tuple(axes))


def permuted(x: Activation, dims: tuple[int, ...]) -> Activation:
    return regarded(x, tuple(x.axes[d] for d in dims))


def selected(x: Activation, dim: int, index: int) -> Activation | None:
    """One element along an axis of one factor, which is read where a layer takes it."""
    axis = x.axes[dim]
    if len(axis) != 1 or axis[0].axis == 0:
        return None
    others = (*x.axes[:dim], *x.axes[dim + 1 :])
    return replace(x, axes=others, picks=(*x.picks, (axis[0], index)))


def channels_behind(x: Activation) -> bool:
    """Whether the last axis is all channels of each pixel, as layers over channels need them."""
    return x.view == FACTORED and not x.picks and len(x.shape) == 4 and x.axes[-1] == _whole(1, x.shape[1])


def with_channels(x: Activation, made: Activation) -> Activation:
    """What a pointwise layer made of x, regarded as x was."""
    return regarded(replace(x, value=made.value, shape=made.shape), (*x.axes[:-1], _whole(1, made.shape[1])))


def windowed(call: Layers, x: Activation, groups: Seen, tokens: Seen) -> Activation:
    """[N, C, groups, tokens], of an image or what is so already. Raises Refused for what are no windows."""
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
    """Before a layer over channels: windows that are told apart by the samples' axis lie one after another."""
    pixels = sum(x.axes[:-1], ())
    if pixels[:1] != _whole(0, x.shape[0]) or pixels == tuple(sorted(pixels, key=lambda a: (a.axis, -a.stride))):
        return x
    if len(x.axes) != 3:
        return as_image(call, x)
    made = windowed(call, x, x.axes[0][1:], x.axes[1])
    axes = ((*_whole(0, made.shape[0]), *_whole(2, made.shape[2])), _whole(3, made.shape[3]), x.axes[-1])
    return regarded(made, axes)


def over_channels(call: Layers, x: Activation) -> Activation:
    """Before a layer over the last axis of [N, H, W, C]: channels that are factors of several axes become one."""
    if x.view == FACTORED and len(x.axes) == 4 and not channels_behind(x):
        return replace(settled(call, permuted(x, (0, 3, 1, 2))), view=CHANNELS_LAST)
    return in_order(call, x) if channels_behind(x) else x


def as_image(call: Layers, x: Activation) -> Activation:
    """Windows that are regarded as an image [N, H, W, C] joined; anything else as it is."""
    x = regarded(x, x.axes) if x.view == FACTORED else x
    if x.view != FACTORED or x.picks or len(x.axes) != 4 or x.axes[0] != _whole(0, x.shape[0]):
        return x
    if x.axes[3] != _whole(1, x.shape[1]):
        return x
    down, across = x.axes[1], x.axes[2]
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
    made = call.layer("join_windows", x, (x.shape[0], x.shape[1], height, width), settings)
    return replace(made, view=CHANNELS_LAST)


def picked(call: Layers, x: Activation) -> Activation:
    """With what was selected cut out. Raises Refused for parts that are no slice of an axis."""
    for atom, index in x.picks:
        size = x.shape[atom.axis]
        if atom.stride * atom.size != size:
            raise Refused("it takes a part that is no slice of an axis", "take slices along one axis")
        shape = (*x.shape[: atom.axis], atom.stride, *x.shape[atom.axis + 1 :])
        settings = {"axis": atom.axis, "start": index * atom.stride}
        if (index + 1) * atom.stride < size:
            settings["stop"] = (index + 1) * atom.stride
        x = replace(x, value=call.layer("slice", x, shape, settings).value, shape=shape)
    if x.factor != 1.0:
        x = replace(x, value=call.operator("*", x.factor, x, x.shape).value)
    return regarded(replace(x, picks=(), factor=1.0), x.axes)


def settled(call: Layers, x: Activation) -> Activation:
    """The tensor in the shape that the program sees, moved where it must be."""
    x = picked(call, as_image(call, x))
    if x.view == PLAIN:
        return x
    x = factored(x) or x
    if x.axes[0] != _whole(0, x.shape[0]):
        raise Refused(f"it mixes samples into {list(x.seen)}", "keep the samples of a mini-batch apart, in dimension 0")
    seen, wanted = sum(x.axes[1:], ()), x.seen
    lying = tuple(sorted(seen, key=lambda a: (a.axis, -a.stride)))
    made = Activation(x.value, x.shape)
    if lying != seen:
        sizes = tuple(a.size for a in lying)
        if sizes != x.shape[1:]:
            made = call.layer("reshape", made, (x.shape[0], *sizes), {"sizes": sizes})
        order = (0, *(lying.index(a) + 1 for a in seen))
        made = call.layer("permute", made, (x.shape[0], *(a.size for a in seen)), {"axes": order})
    return made if made.shape == wanted else call.layer("reshape", made, wanted, {"sizes": wanted[1:]})
