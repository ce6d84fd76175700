"""Divisions of one operation run on a GPU as a step runs them: micro-batches one after another in one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
from deepbench_layers import Operation

from mbc.ir.types import Layout, TensorType
from mbc.measure.clock import Clock
from mbc.measure.gpu import Gpu
from mbc.measure.kernel_library import Call, KernelLibrary
from mbc.optimize.candidates.pareto import MicroBatch
from mbc.runtime.formats import loaded, stored_bytes

POOL_ELEMENTS = 1 << 23  # random numbers for one operand; its rows repeat where it has more
MOST_SETS = 8  # of operands that a graph goes through in turn, so that they do not fit the L2 together
TIMED_US = 6000.0  # of replays of one division
COMPARED_BYTES = 64 << 20  # of an output: its first rows, its last and the middle ones


class Bench:
    """The operands of one operation in one combination of layouts. Values are the same in every layout."""

    def __init__(
        self, gpu: Gpu, library: KernelLibrary, operation: Operation, layouts: tuple[Layout, ...], most_sets: int
    ) -> None:
        self._gpu, self._library, self._operation = gpu, library, operation
        request = operation.request()
        self._clock = Clock(gpu)
        self._types = (*request.inputs, *request.outputs)
        self._layouts = layouts
        set_bytes = sum(t.size_bytes for t in self._types)
        enough = 1 if set_bytes > 2 * gpu.l2_bytes else math.ceil(2 * gpu.l2_bytes / set_bytes) + 1
        count = min(most_sets, MOST_SETS, enough)
        count = max(1, min(count, int(gpu.left_bytes * 0.5) // set_bytes))
        self._sets = [tuple(gpu.take(t.size_bytes) for t in self._types) for _ in range(count)]
        self._fill(len(request.inputs))

    def _fill(self, inputs: int) -> None:
        for index in range(inputs):
            tensor = self._types[index]
            block = tensor.with_rows(_period_rows(tensor))
            values = _pool(index)[: block.elements].reshape(block.shape)
            data = stored_bytes(values, tensor.dtype, self._layouts[index])
            first = self._sets[0][index]
            self._gpu.upload(first, data)
            self._gpu.repeat(first, data.size, tensor.size_bytes)
            for other in self._sets[1:]:
                self._gpu.copy(other[index], first, tensor.size_bytes)
        self._gpu.synchronize()

    def time_us(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Median time of the whole operation and the distance between the quartiles."""
        mark = self._gpu.mark()
        try:
            workspace = self._workspace(micro_batches)
            sets = [self._calls(micro_batches, pointers, workspace) for pointers in self._sets]
            for calls in sets:
                _enqueue(calls)  # outside of a capture first: kernels are loaded then
            self._gpu.synchronize()
            works = [partial(_enqueue, calls) for calls in sets]
            times = self._clock.times(works, self._clock.once_us(works[0]), TIMED_US)
            return times.median_us, times.spread_us
        finally:
            self._let_go(mark)

    def output(self, micro_batches: Sequence[MicroBatch]) -> np.ndarray:
        """The result on the first set of operands, canonical; of a large one some rows."""
        mark = self._gpu.mark()
        try:
            pointers, tensor = self._sets[0], self._types[-1]
            self._gpu.fill(pointers[-1], 0xFF, tensor.size_bytes)
            _enqueue(self._calls(micro_batches, pointers, self._workspace(micro_batches)))
            self._gpu.synchronize()
            if self._operation.sums:
                return self._read(pointers[-1], tensor)
            row = tensor.with_rows(1)
            return np.stack([self._read(pointers[-1] + r * row.size_bytes, row) for r in compared_rows(tensor)])
        finally:
            self._let_go(mark)

    def _workspace(self, micro_batches: Sequence[MicroBatch]) -> int:
        most = max(s.candidate.workspace_bytes for s in micro_batches)
        return self._gpu.take(most) if most else 0

    def _calls(self, micro_batches: Sequence[MicroBatch], pointers: tuple[int, ...], workspace: int) -> list[Call]:
        calls: list[Call] = []
        start = 0
        for part in micro_batches:
            request = self._operation.request(part.rows)
            moved = [
                pointer + start * (whole.size_bytes // whole.shape[0]) if per_sample else pointer
                for pointer, whole, per_sample in zip(pointers, self._types, self._operation.per_sample, strict=True)
            ]
            adds = self._operation.sums and start > 0
            calls.append(self._library.prepare(part.candidate, request, moved, workspace, adds, start))
            start += part.rows
        return calls

    def _let_go(self, mark: int) -> None:
        self._gpu.synchronize()
        self._library.clear()
        self._gpu.reset(mark)

    def _read(self, address: int, tensor: TensorType) -> np.ndarray:
        data = self._gpu.download(address, tensor.size_bytes)
        return np.asarray(loaded(data, tensor.shape, tensor.dtype, self._layouts[-1]))


@cache
def _pool(index: int) -> np.ndarray:
    return np.random.default_rng(index).standard_normal(POOL_ELEMENTS, np.float32)


def _period_rows(tensor: TensorType) -> int:
    rows = tensor.shape[0]
    return max(1, min(rows, POOL_ELEMENTS // (tensor.elements // rows)))


def compared_rows(tensor: TensorType) -> list[int]:
    """Rows spread evenly, the first and the last among them, of `COMPARED_BYTES` together but three at least."""
    rows = tensor.shape[0]
    count = min(rows, max(3, COMPARED_BYTES // (tensor.size_bytes // rows)))
    return sorted({round(i * (rows - 1) / max(1, count - 1)) for i in range(count)})


def _enqueue(calls: Sequence[Call]) -> None:
    for call in calls:
        call.enqueue()


def distance(found: np.ndarray, reference: np.ndarray) -> float:
    """Normalised L2 distance; NaN where something was left unwritten."""
    wide = reference.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - wide) / np.linalg.norm(wide))
