"""Running a division, on a GPU of bytes in NumPy whose kernels are the meaning of operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import divided_run
from deepbench_layers import BATCH, Layer, Operation
from divided_run import Bench, distance

from mbc.ir.types import Layout, Precision
from mbc.kernels.base import Candidate, Request
from mbc.measure.clock import Times
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.optimize.candidates.pareto import MicroBatch
from mbc.runtime.formats import loaded, stored_bytes

SMALL = Layer("deepbench", "small", 6, 5, 4, 8, 3, 1, 1)


class Gpu:
    """What a bench uses of `mbc.measure.gpu.Gpu`."""

    l2_bytes = 1 << 20

    def __init__(self) -> None:
        self.memory = np.zeros(8 << 20, np.uint8)
        self.used = 0

    @property
    def left_bytes(self) -> int:
        return self.memory.size - self.used

    def take(self, size_bytes: int) -> int:
        address = self.used
        self.used += -(-size_bytes // 256) * 256
        assert self.used <= self.memory.size
        return address

    def mark(self) -> int:
        return self.used

    def reset(self, mark: int = 0) -> None:
        self.used = mark

    def upload(self, address: int, data: np.ndarray) -> None:
        self.memory[address : address + data.size] = data

    def download(self, address: int, size_bytes: int) -> np.ndarray:
        return self.memory[address : address + size_bytes].copy()

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        self.memory[address : address + size_bytes] = byte

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self.memory[target : target + size_bytes] = self.memory[source : source + size_bytes]

    def repeat(self, address: int, period_bytes: int, size_bytes: int) -> None:
        self.memory[address : address + size_bytes] = np.resize(self.download(address, period_bytes), size_bytes)

    def synchronize(self) -> None:
        pass


class Launch:
    def __init__(self, work: Callable[[], None]) -> None:
        self.enqueue = work


class Library:
    """What a bench uses of a kernel library, and what was asked of it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.log: list[tuple[int, int, int, bool]] = []

    def prepare(
        self,
        candidate: Candidate,
        request: Request,
        pointers: Sequence[int],
        workspace: int,
        accumulate: bool,
        first: int,
    ) -> Launch:
        def run() -> None:
            self.log.append((request.inputs[0].shape[0], first, workspace, accumulate))
            types = (*request.inputs, *request.outputs)
            arrays = [
                loaded(self.gpu.download(pointer, t.size_bytes), t.shape, t.dtype, layout)
                for pointer, t, layout in zip(pointers, types, candidate.layouts, strict=True)
            ]
            evaluate = KINDS[request.kind].evaluate
            assert evaluate is not None
            (made,) = evaluate(request.attributes, arrays[:2], Call(request.outputs, first, BATCH, request.precision))
            result = made + arrays[2] if accumulate else made
            data = stored_bytes(np.asarray(result, np.float32), types[2].dtype, candidate.layouts[2])
            self.gpu.upload(pointers[2], data)

        return Launch(run)

    def clear(self) -> None:
        pass


class OnceClock:
    def __init__(self, gpu: Gpu) -> None:
        pass

    def once_us(self, call: Callable[[], None]) -> float:
        call()
        return 7.0

    def times(self, calls: Sequence[Callable[[], None]], once_us: float, budget_us: float) -> Times:
        for call in calls:
            call()
        return Times(once_us, float(len(calls)))


def micro_batches(rows: Sequence[int], layout: Layout, workspace: int = 0) -> list[MicroBatch]:
    return [MicroBatch(n, Candidate("mbc", "x", (), (layout,) * 3, workspace, 1.0, True)) for n in rows]


def bench(which: str, layout: Layout, sets: int = 1) -> tuple[Bench, Library]:
    gpu = Gpu()
    library = Library(gpu)
    made: Any = Bench(gpu, library, Operation(SMALL, which, Precision.FP32), (layout,) * 3, sets)  # pyright: ignore[reportArgumentType]
    return made, library


@pytest.mark.parametrize("which", "FDW")
def test_a_division_gives_what_the_undivided_operation_gives(which: str) -> None:
    first, last = Layout
    divided, library = bench(which, last)
    result = divided.output(micro_batches((128, 64, 64), last, workspace=512))
    assert [entry[:2] for entry in library.log] == [(128, 0), (64, 128), (64, 192)]
    assert [entry[3] for entry in library.log] == [False, which == "W", which == "W"]
    whole, _ = bench(which, first)
    reference = whole.output(micro_batches((BATCH,), first))
    assert reference.shape == result.shape and np.isfinite(reference).all()
    assert distance(result, reference) < 1e-6


def test_rows_that_no_slice_writes_are_seen() -> None:
    made, _ = bench("F", Layout.CHANNELS_FIRST)
    result = made.output(micro_batches((128,), Layout.CHANNELS_FIRST))
    assert np.isnan(result[-1]).all() and np.isfinite(result[0]).all()


def test_a_time_is_of_all_micro_batches_on_all_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_run, "Clock", OnceClock)
    made, library = bench("F", Layout.CHANNELS_FIRST, sets=2)
    used = made._gpu.mark()
    assert made.time_us(micro_batches((128, 128), Layout.CHANNELS_FIRST, workspace=256)) == (7.0, 2.0)
    # Once before capturing and once timed on each of two sets, and once for a first guess.
    assert len(library.log) == 2 * (2 + 1 + 2)
    assert len({entry[2] for entry in library.log}) == 1  # one workspace for all micro-batches
    assert made._gpu.mark() == used
