"""Sums over any axes, of a tensor or of the product of two, in any layout."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, THREADS, OwnKernel, Slice, Struct, type_code
from mbc.kernels.cuda.strided import Axis, memory_order, merged, strides, trailing
from mbc.ops.reduce import Reduce

FILE = "norm/reduce.cu"
LEAST_TERMS = 8  # of a thread, where a sum is split into parts
MOST_PARTS = 256
WARP = 32


@dataclass(frozen=True, slots=True)
class ReduceArguments(Struct):
    type: int
    result_type: int
    results: int
    terms: int
    lanes: int  # threads that share a sum
    adjacent: int  # whether these read what is adjacent in memory, rather than threads of different sums
    parts: int
    accumulate: int


def axes_of(x: TensorType, y: TensorType, reduced: Collection[int], layout: Layout) -> tuple[list[Axis], list[Axis]]:
    """Of what is left, with the strides in x and in y; and of what is reduced, with those in x."""
    steps = strides(x, layout)
    own = iter(step for step, size in zip(strides(y, layout), y.shape, strict=True) if size != 1)
    left = {axis: next(own) for axis, size in enumerate(x.shape) if axis not in reduced and size != 1}
    order = memory_order(x, layout)
    return (
        merged((x.shape[axis], steps[axis], left[axis]) for axis in order if axis in left),
        merged((x.shape[axis], steps[axis]) for axis in order if axis in reduced),
    )


def _axes(request: Request, layout: Layout) -> tuple[list[Axis], list[Axis]]:
    a = request.attributes
    assert isinstance(a, Reduce)
    reduced = (0, *a.axes) if request.kind.startswith("row_") else a.axes
    return axes_of(request.inputs[0], request.outputs[0], reduced, layout)


@dataclass(frozen=True, slots=True)
class Lanes:
    """How threads share reductions."""

    results: int
    terms: int
    lanes: int
    adjacent: bool

    @staticmethod
    def of(left: Sequence[Axis], reduced: Sequence[Axis]) -> Lanes:
        results, terms = (math.prod(axis[0] for axis in axes) for axes in (left, reduced))
        adjacent = bool(reduced) and reduced[-1][1] == 1
        if adjacent:
            lanes = min(THREADS, max(WARP, _power_of_two(terms // LEAST_TERMS)))
        else:
            # Adjacent results are of adjacent threads, a warp's at least where there are as many.
            lanes = THREADS // min(THREADS, max(WARP, _power_of_two(results // REDUCTION_BLOCKS)))
            lanes = min(lanes, _power_of_two(max(1, terms)))
        return Lanes(results, terms, lanes, adjacent)

    @property
    def parts(self) -> int:
        """Into how many a sum is split, so that there are enough blocks."""
        blocks = -(-self.results * self.lanes // THREADS)
        return max(1, min(MOST_PARTS, 2 * REDUCTION_BLOCKS // blocks, self.terms // (self.lanes * LEAST_TERMS)))


def _power_of_two(number: int) -> int:
    """The largest that is no more, 1 at least."""
    return 1 << max(0, number.bit_length() - 1)


def _reduce(at: Slice) -> ReduceArguments:
    x, y = at.request.inputs[0], at.request.outputs[0]
    shape = Lanes.of(*_axes(at.request, at.layout))
    return ReduceArguments(
        type_code(x),
        type_code(y),
        shape.results,
        shape.terms,
        shape.lanes,
        int(shape.adjacent),
        shape.parts,
        int(at.accumulate),
    )


def _factor(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Reduce)
    return (a.factor,)


def _trailing(at: Slice) -> tuple[int, ...]:
    left, summed = _axes(at.request, at.layout)
    return (*trailing(left, 2), *trailing(summed, 1))


def _workspace(request: Request, layout: Layout) -> int:
    shape = Lanes.of(*_axes(request, layout))
    return shape.parts * shape.results * 4 if shape.parts > 1 else 0


KERNELS = tuple(
    OwnKernel(
        f"{rows}{kind}",
        FILE,
        ReduceArguments,
        _reduce,
        _factor,
        trailing=_trailing,
        workspace=_workspace,
        launches=2,
        accumulates=bool(rows),
    )
    for rows in ("", "row_")
    for kind in ("reduce_sum", "reduce_dot")
)
