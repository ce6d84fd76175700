"""Softmax and the largest element along axes, in any layout."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, type_code
from mbc.kernels.cuda.norm.reduce import Lanes, axes_of
from mbc.kernels.cuda.strided import Axis, trailing
from mbc.kernels.launch_struct import Struct
from mbc.ops.along import Largest, Softmax

FILE = "norm/along.cu"


@dataclass(frozen=True, slots=True)
class AlongArguments(Struct):
    """Integer arguments of a launch along axes."""

    type: int
    results: int
    terms: int
    lanes: int
    adjacent: int


def _axes(request: Request, layout: Layout) -> tuple[list[Axis], list[Axis]]:
    x, a = request.inputs[0], request.attributes
    assert isinstance(a, Softmax | Largest)
    if isinstance(a, Largest):
        left = request.outputs[0] if request.kind == "amax" else request.inputs[1]
    else:
        left = type(x)(tuple(1 if axis in a.axes else size for axis, size in enumerate(x.shape)), x.dtype)
    return axes_of(x, left, a.axes, layout)


def _arguments(at: Slice) -> AlongArguments:
    lanes = Lanes.of(*_axes(at.request, at.layout))
    return AlongArguments(type_code(at.request.inputs[0]), lanes.results, lanes.terms, lanes.lanes, int(lanes.adjacent))


def _trailing(at: Slice) -> tuple[int, ...]:
    left, reduced = _axes(at.request, at.layout)
    return (*trailing(left, 2), *trailing(reduced, 1))


KERNELS = tuple(
    OwnKernel(kind, FILE, AlongArguments, _arguments, trailing=_trailing)
    for kind in ("softmax", "softmax_backward", "log_softmax", "log_softmax_backward", "amax", "amax_backward")
)
