"""Sums of a tensor, or of the product of two tensors, over any axes, in any layout."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, THREADS, VECTOR_BYTES, OwnKernel, Slice, attributes_of, type_code
from mbc.kernels.cuda.strided import Axis, memory_order, merged, strides, trailing
from mbc.kernels.launch_struct import Struct
from mbc.ops.reduce import Reduce

FILE = "norm/reduce.cu"
LEAST_TERMS = 8  # fewest terms of a thread if a sum is split into parts
LEAST_SHARED_TERMS = 4  # fewest terms of a thread if threads of a block share a sum
SUM_BLOCKS = 4 * REDUCTION_BLOCKS  # blocks that run at a time
LEAST_PARTS = 4  # fewer parts do not pay for a second launch
WARP = 32


@dataclass(frozen=True, slots=True)
class ReduceArguments(Struct):
    """Integer arguments of a launch that sums over axes.

    Attributes:
        vector: Results, or terms, that a thread reads together if operands are aligned.
        lanes: Threads of a block that share a sum.
        tile: Vectors of results of a block; 0: the summed terms are adjacent in memory, and vectors hold terms.
    """

    type: int
    result_type: int
    results: int
    terms: int
    vector: int
    lanes: int
    tile: int
    parts: int
    accumulate: int


def axes_of(x: TensorType, y: TensorType, reduced: Collection[int], layout: Layout) -> tuple[list[Axis], list[Axis]]:
    """Return the remaining axes with the strides in x and in y, and the reduced axes with the strides in x."""
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
    """How the threads of a block share reductions.

    Attributes:
        results: Number of results.
        terms: Elements that are reduced to one result.
        lanes: Threads that share a result.
        adjacent: Whether the reduced elements are adjacent in memory.
    """

    results: int
    terms: int
    lanes: int
    adjacent: bool

    @staticmethod
    def of(left: Sequence[Axis], reduced: Sequence[Axis]) -> Lanes:
        """Return how threads share the reduction of these axes."""
        results, terms = (math.prod(axis[0] for axis in axes) for axes in (left, reduced))
        adjacent = bool(reduced) and reduced[-1][1] == 1
        if adjacent:
            lanes = min(THREADS, max(WARP, _power_of_two(terms // LEAST_TERMS)))
        else:
            # Adjacent threads have adjacent results, at least a warp of them if there are enough.
            lanes = THREADS // min(THREADS, max(WARP, _power_of_two(results // REDUCTION_BLOCKS)))
            lanes = min(lanes, _power_of_two(max(1, terms)))
        return Lanes(results, terms, lanes, adjacent)


@dataclass(frozen=True, slots=True)
class Sums:
    """How threads and blocks share sums: see `ReduceArguments`."""

    results: int
    terms: int
    vector: int
    lanes: int
    tile: int
    parts: int

    @staticmethod
    def of(request: Request, layout: Layout) -> Sums:
        """Return how threads and blocks share the sums of a request."""
        left, summed = _axes(request, layout)
        results, terms = (math.prod(axis[0] for axis in axes) for axes in (left, summed))
        adjacent = bool(summed) and summed[-1][1] == 1
        size_bytes = request.inputs[0].dtype.size_bytes
        vector = _vector(*((summed, left) if adjacent else (left, summed)), VECTOR_BYTES // size_bytes)
        if adjacent:
            vectors, tile = terms // vector, 0
            lanes = min(THREADS, max(min(WARP, _power_of_two(2 * vectors - 1)), _power_of_two(vectors // LEAST_TERMS)))
            blocks = -(-results * lanes // THREADS)
        else:
            vectors, columns = terms, results // vector
            lanes = max(1, terms // LEAST_SHARED_TERMS)
            # An even division, with at least a warp of columns if there are enough, leaves few threads idle.
            tile = -(-columns // -(-columns // max(WARP, THREADS // lanes)))
            lanes = min(THREADS // tile, lanes)
            blocks = -(-columns // tile)
        parts = min(SUM_BLOCKS // blocks, vectors // (lanes * LEAST_TERMS))
        return Sums(results, terms, vector, lanes, tile, parts if parts >= LEAST_PARTS else 1)


def _vector(inner: Sequence[Axis], outer: Sequence[Axis], most: int) -> int:
    """Return `most` if the operands can be read by aligned vectors of that number of elements along `inner`, else 1."""
    if not inner or inner[-1][1] != 1 or inner[-1][0] % most != 0:
        return 1
    return most if all(axis[1] % most == 0 for axis in (*inner[:-1], *outer)) else 1


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`, and at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def _reduce(at: Slice) -> ReduceArguments:
    x, y = at.request.inputs[0], at.request.outputs[0]
    sums = Sums.of(at.request, at.layout)
    return ReduceArguments(
        type_code(x),
        type_code(y),
        sums.results,
        sums.terms,
        sums.vector,
        sums.lanes,
        sums.tile,
        sums.parts,
        int(at.accumulate),
    )


def _trailing(at: Slice) -> tuple[int, ...]:
    left, summed = _axes(at.request, at.layout)
    return (*trailing(left, 2), *trailing(summed, 1))


def _workspace(request: Request, layout: Layout) -> int:
    sums = Sums.of(request, layout)
    return sums.parts * sums.results * 4 if sums.parts > 1 else 0


KERNELS = tuple(
    OwnKernel(
        f"{rows}{kind}",
        FILE,
        ReduceArguments,
        _reduce,
        attributes_of("factor"),
        trailing=_trailing,
        workspace=_workspace,
        launches=2,
        accumulates=bool(rows),
        operands="x y workspace?" if kind == "reduce_sum" else "x z y workspace?",
        launcher=kind,
        named=f"{rows}{kind}",
        version=2,
    )
    for rows in ("", "row_")
    for kind in ("reduce_sum", "reduce_dot")
)
