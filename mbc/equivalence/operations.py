"""Checks each divided operation alone: its slices against one call over the whole mini-batch, on the same operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mbc.equivalence.calls import Pair, SliceCall
from mbc.equivalence.run_step import distance
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.measure.gemm_trial import TOLERANCES
from mbc.measure.gpu import DoesNotFit, Gpu
from mbc.measure.kernel_library import KernelLibrary
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.plan.model import Rows
from mbc.runtime.formats import loaded, stored_bytes

Array = NDArray[Any]

SAME_ALGORITHM_FP32 = 1e-6  # sums of the same products, in another order if slices are added up
_POOL_ELEMENTS = (1 << 22) + 61  # odd, so that no two tensors cut from it are alike


@dataclass(frozen=True, slots=True)
class OperationComparison:
    """The difference of an operation's two ways; `distance` is None if the operands do not fit on the GPU."""

    pair: Pair
    distance: float | None
    tolerance: float

    @property
    def passed(self) -> bool:
        """True unless the distance exceeds the tolerance."""
        return self.distance is None or self.distance <= self.tolerance

    @property
    def badness(self) -> float:
        """The distance divided by the tolerance; -1 without a distance."""
        if self.distance is None:
            return -1.0
        return self.distance / self.tolerance if self.tolerance else math.inf if self.distance else 0.0


class Runner(Protocol):
    """Something that runs kernel calls."""

    def run(self, pair: Pair, calls: Sequence[SliceCall], operands: Sequence[Array]) -> list[Array]:
        """Return the outputs of all calls together, in canonical order; `operands` are the whole mini-batch's."""
        ...


def compare_operation(runner: Runner, pair: Pair, seed: int, tolerance: float | None = None) -> OperationComparison:
    """Return the difference of the divided and the undivided calls, on the same random operands.

    The operands are rounded as memory stores them.

    Args:
        runner: Runs the calls.
        pair: The calls.
        seed: The seed of the operands.
        tolerance: The largest distance; None for `allowed_distance`.
    """
    allowed = allowed_distance(pair) if tolerance is None else tolerance
    operands = random_operands(pair, seed)
    try:
        ours, theirs = (runner.run(pair, calls, operands) for calls in (pair.divided, pair.undivided))
    except DoesNotFit:
        return OperationComparison(pair, None, allowed)
    return OperationComparison(pair, max(map(distance, ours, theirs)), allowed)


def allowed_distance(pair: Pair) -> float:
    """Return the error that one call may have in its precision. In fp32 it is less if all calls use one algorithm."""
    if pair.request.precision is Precision.FP32 and pair.same_algorithm:
        return SAME_ALGORITHM_FP32
    return TOLERANCES[pair.request.precision]


def random_operands(pair: Pair, seed: int) -> tuple[Array, ...]:
    """Return standard normal numbers; integers are zero: a class number, or the control block of a first step."""
    pool = np.random.default_rng(seed).standard_normal(_POOL_ELEMENTS, np.float32)
    operands: list[Array] = []
    for index, tensor in enumerate(pair.request.inputs):
        if tensor.dtype in (DType.INT32, DType.UINT8):
            operands.append(np.zeros(tensor.shape, np.int32 if tensor.dtype is DType.INT32 else np.uint8))
            continue
        numbers = np.resize(np.roll(pool, -index * 1_000_003), tensor.elements).reshape(tensor.shape)
        data = stored_bytes(numbers, tensor.dtype, Layout.CHANNELS_FIRST)
        operands.append(loaded(data, tensor.shape, tensor.dtype, Layout.CHANNELS_FIRST))
    return tuple(operands)


class OnCpu:
    """Runs the interpreter's code slice by slice."""

    def run(self, pair: Pair, calls: Sequence[SliceCall], operands: Sequence[Array]) -> list[Array]:
        """Return the outputs of all calls together."""
        evaluate = KINDS[pair.request.kind].evaluate
        assert evaluate is not None, "every kind that runs as a kernel can be evaluated"
        inputs = len(pair.request.inputs)
        results = [np.full(t.shape, np.nan, _computed(t)) for t in pair.request.outputs]
        for call in calls:
            taken = [_rows(o, r, per) for o, r, per in zip(operands, call.rows, pair.per_sample, strict=False)]
            batch = max(t.shape[0] for t, per in zip(_types(pair), pair.per_sample, strict=True) if per)
            about = Call(call.request.outputs, call.first_row, batch, call.request.precision)
            outputs = evaluate(call.request.attributes, taken, about)
            for index, result in enumerate(outputs):
                part = _rows(results[index], call.rows[inputs + index], pair.per_sample[inputs + index])
                tensor = call.request.outputs[index]
                data = stored_bytes(part + result if call.accumulate else result, tensor.dtype, Layout.CHANNELS_FIRST)
                part[...] = loaded(data, tensor.shape, tensor.dtype, Layout.CHANNELS_FIRST)
        return results


class OnGpu:
    """Runs the kernels of the plan on the GPU, by the code from which a module is built."""

    def __init__(self, precision: Precision) -> None:
        """Open the GPU and the kernels of a precision."""
        self._gpu = Gpu()
        self._library = KernelLibrary.open(self._gpu, precision)

    def run(self, pair: Pair, calls: Sequence[SliceCall], operands: Sequence[Array]) -> list[Array]:
        """Return the outputs of all calls together; raise `DoesNotFit` if operands and workspace do not fit."""
        gpu = self._gpu
        gpu.reset()
        types, layouts = _types(pair), calls[0].candidate.layouts
        pointers = [gpu.take(tensor.size_bytes) for tensor in types]
        for pointer, tensor, layout, operand in zip(pointers, types, layouts, operands, strict=False):
            gpu.upload(pointer, stored_bytes(operand, tensor.dtype, layout))
        outputs = range(len(operands), len(types))
        for index in outputs:
            gpu.fill(pointers[index], 0xFF, types[index].size_bytes)
        workspace = gpu.take(max(call.candidate.workspace_bytes for call in calls))
        for call in calls:
            assert call.candidate.layouts == layouts, "all slices of an operation have the same layouts"
            addresses = [
                pointer + rows.start * (tensor.size_bytes // tensor.shape[0] if per else 0)
                for pointer, rows, tensor, per in zip(pointers, call.rows, types, pair.per_sample, strict=True)
            ]
            prepared = self._library.prepare(
                call.candidate, call.request, addresses, workspace, call.accumulate, call.first_row
            )
            prepared.enqueue()
        gpu.synchronize()
        self._library.clear()
        return [
            loaded(gpu.download(pointers[i], types[i].size_bytes), types[i].shape, types[i].dtype, layouts[i])
            for i in outputs
        ]

    def __enter__(self) -> OnGpu:
        """Return the runner itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the kernels and the GPU."""
        self._library.close()
        self._gpu.close()


def _types(pair: Pair) -> tuple[TensorType, ...]:
    return (*pair.request.inputs, *pair.request.outputs)


def _computed(tensor: TensorType) -> type[np.generic]:
    return np.float64 if tensor.dtype is DType.FP64 else np.float32


def _rows(array: Array, rows: Rows, per_sample: bool) -> Array:
    return array[rows.start : rows.stop] if per_sample else array
