"""The meaning of image operations on PyTorch's tensors: gates, resizing, normalisation of single images, and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mbc.equivalence.torch_convolutions import Tensor, functional, torch
from mbc.ops.adaptive_pool import AdaptiveMaxPool
from mbc.ops.along import Largest
from mbc.ops.base import Call
from mbc.ops.group_norm import Normalisation
from mbc.ops.rearrange import Pad, StridedSlice
from mbc.ops.reduce import Expand, Reduce
from mbc.ops.rms_norm import RmsNorm
from mbc.ops.standardize import Standardize

Form = Callable[[Any, Sequence[Tensor], Call], Sequence[Tensor]]


def _pixel_sum(x: Tensor) -> Tensor:
    return x.sum(dim=tuple(range(2, x.ndim)), keepdim=True)


def _grouped(a: Normalisation, x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], a.groups, x.shape[1] // a.groups, *x.shape[2:])


def _of_channels(a: Normalisation, vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(1, a.groups, -1, *(1,) * (x.ndim - 2))


def _normalize(a: Normalisation, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, *affine = inputs
    grouped, axes = _grouped(a, x), a.axes(x.ndim)
    mean = grouped.mean(dim=axes, keepdim=True)
    scale = (((grouped - mean) ** 2).mean(dim=axes, keepdim=True) + a.eps).rsqrt()
    y = (grouped - mean) * scale
    if affine:
        y = y * _of_channels(a, affine[0], x) + _of_channels(a, affine[1], x)
    return y.reshape(x.shape), mean.squeeze(2), scale.squeeze(2)


def _normalize_backward(a: Normalisation, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, dy, mean, inverse, *gamma = inputs
    normal = (_grouped(a, x) - mean.unsqueeze(2)) * inverse.unsqueeze(2)
    dnormal, axes = _grouped(a, dy), a.axes(x.ndim)
    if gamma:
        dnormal = dnormal * _of_channels(a, gamma[0], x)
    shift, slope = (p.mean(dim=axes, keepdim=True) for p in (dnormal, dnormal * normal))
    return (((dnormal - shift - normal * slope) * inverse.unsqueeze(2)).reshape(x.shape),)


def _normalize_reduce(a: Normalisation, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, dy, mean, inverse = inputs
    normal, grouped = (_grouped(a, x) - mean.unsqueeze(2)) * inverse.unsqueeze(2), _grouped(a, dy)
    axes = (0, *range(3, grouped.ndim))
    return tuple(p.sum(dim=axes).reshape(-1) for p in (grouped * normal, grouped))


def _rms_norm(a: RmsNorm, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, gamma = inputs
    inverse = ((x**2).mean(1, keepdim=True) + a.eps).rsqrt()
    return x * inverse * gamma.reshape(-1, *(1,) * (x.ndim - 2)), inverse


def _rms_norm_backward(a: RmsNorm, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, dy, inverse, gamma = inputs
    normal, dnormal = x * inverse, dy * gamma.reshape(-1, *(1,) * (x.ndim - 2))
    return ((dnormal - normal * (dnormal * normal).mean(1, keepdim=True)) * inverse,)


def _rms_norm_reduce(a: RmsNorm, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, dy, inverse = inputs
    return ((dy * x * inverse).sum((0, *range(2, x.ndim))),)


def _reduce(rows: str) -> Form:
    def form(a: Reduce, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
        product = inputs[0] if len(inputs) == 1 else inputs[0] * inputs[1]
        total = product.sum(dim=(0, *a.axes) if rows else a.axes) * a.factor
        return (total.reshape(call.outputs[0].shape),)

    return form


def _expand(a: Expand, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    (dy,) = inputs
    shape = (dy.shape[0], *a.sample_shape)
    ones = tuple(1 if axis in a.axes else size for axis, size in enumerate(shape))
    return ((dy.reshape(ones) * a.factor).expand(shape).contiguous(),)


def _adaptive_max(a: AdaptiveMaxPool, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    pool = getattr(functional, f"adaptive_max_pool{len(a.size)}d")
    y, index = pool(inputs[0], a.output_size, return_indices=True)
    return (y, index.to(torch.int32)) if a.index else (y,)


def _adaptive_max_backward(a: AdaptiveMaxPool, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    index, dy = inputs
    dx, axes = dy.new_zeros((*dy.shape[:2], *a.size)), (..., *(None,) * len(a.size))
    numbers = torch.as_tensor(a.pixels, device=dy.device)
    for at, pixels in a.windows():
        dx[pixels] += (index[at][axes] == numbers[pixels[2:]]) * dy[at][axes]
    return (dx,)


def _amax_backward(a: Largest, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    x, y, dy = inputs
    ones = tuple(1 if axis in a.axes else size for axis, size in enumerate(x.shape))
    here = x == y.reshape(ones)
    return (here * dy.reshape(ones) / here.sum(dim=a.axes, keepdim=True).clamp(min=1),)


def _strided_slice(a: StridedSlice, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    (x,) = inputs
    for axis, (start, step, spread, count) in enumerate(zip(a.start, a.step, a.spread, a.count, strict=True), 1):
        place = start + step * torch.arange(count, device=x.device)
        at = place.div(spread, rounding_mode="floor")
        inside = (at * spread == place) & (at >= 0) & (at < x.shape[axis])
        taken = x.index_select(axis, torch.where(inside, at, 0))
        x = torch.where(inside.reshape(-1, *(1,) * (x.ndim - 1 - axis)), taken, torch.full_like(taken, a.outside))
    return (x,)


def _pad(a: Pad, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    (x,) = inputs
    for axis in range(len(a.size)):
        x = x.index_select(axis + 1, torch.as_tensor(a.sources(axis), device=x.device))
    return (x,)


def _pad_backward(a: Pad, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    (dy,) = inputs
    for axis, size in enumerate(a.size):
        dx = dy.new_zeros((*dy.shape[: axis + 1], size, *dy.shape[axis + 2 :]))
        dy = dx.index_add(axis + 1, torch.as_tensor(a.sources(axis), device=dy.device), dy)
    return (dy,)


def _of_filters(vector: Tensor, w: Tensor) -> Tensor:
    return vector.reshape(-1, *(1,) * (w.ndim - 1))


def _standardize(a: Standardize, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    w, *gain = inputs
    variance, mean = torch.var_mean(w.flatten(1), 1, correction=0)
    inverse = torch.rsqrt(variance + a.eps)
    scale = _of_filters(inverse * gain[0] if gain else inverse, w) * a.factor
    return (w - _of_filters(mean, w)) * scale, mean, inverse


def _standardize_backward(a: Standardize, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
    w, dy, mean, inverse, *gain = inputs
    normal = (w - _of_filters(mean, w)) * _of_filters(inverse, w)
    shift, slope = (_of_filters(p.flatten(1).mean(1), w) for p in (dy, dy * normal))
    scale = _of_filters(inverse * gain[0] if gain else inverse, w) * a.factor
    return (dy - shift - normal * slope) * scale, *((dy * normal).flatten(1).sum(1) * a.factor for _ in gain)


IMAGE_FORMS: Mapping[str, Form] = MappingProxyType(
    {
        **{
            f"{kind}{suffix}": form
            for kind in ("group_norm", "layer_norm")
            for suffix, form in (
                ("", _normalize),
                ("_backward", _normalize_backward),
                ("_backward_reduce", _normalize_reduce),
            )
        },
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm_backward,
        "rms_norm_backward_reduce": _rms_norm_reduce,
        "standardize_filters": _standardize,
        "standardize_filters_backward": _standardize_backward,
        "pixel_sum": lambda a, inputs, call: (_pixel_sum(inputs[0]),),
        **{f"{rows}reduce_{what}": _reduce(rows) for rows in ("", "row_") for what in ("sum", "dot")},
        "expand": _expand,
        "softmax_backward": lambda a, inputs, call: (
            inputs[0] * (inputs[1] - (inputs[0] * inputs[1]).sum(a.axis, keepdim=True)),
        ),
        "log_softmax_backward": lambda a, inputs, call: (
            inputs[1] - inputs[0].exp() * inputs[1].sum(a.axis, keepdim=True),
        ),
        "amax_backward": _amax_backward,
        "adaptive_max_pool": _adaptive_max,
        "adaptive_max_pool_backward": _adaptive_max_backward,
        "strided_slice": _strided_slice,
        "pad": _pad,
        "pad_backward": _pad_backward,
        "pixel_dot": lambda a, inputs, call: (_pixel_sum(inputs[0] * inputs[1]),),
    }
)
