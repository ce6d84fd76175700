"""Stands on a simulated GPU in host memory: kernels by NumPy, and a clock that counts.

Faults of kernels (a wrong result, missing elements, writes beyond the workspace) are simulated here. Tests on a real
GPU (tests/gpu/test_measure.py) show that correct kernels pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import LAYOUT_CODES, Candidate, Request
from mbc.kernels.cuda import OWN
from mbc.kernels.providers import PROVIDERS
from mbc.measure import clock as clocks
from mbc.measure.clock import Clock, calls_per_graph
from mbc.measure.gemm_harness import checked_rows
from mbc.measure.gemm_trial import PRODUCT_KINDS, Operand, Trials
from mbc.measure.gpu import DoesNotFit, Gpu
from mbc.measure.harness import GUARD_BYTES
from mbc.measure.need import Need
from mbc.measure.offers import Offer
from mbc.measure.operand_buffers import Buffers, operand_types
from mbc.measure.workbench import Bench
from mbc.ops import KINDS
from mbc.ops.base import Array, Call
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.profile.signature import asked_kind
from mbc.runtime.formats import loaded, stored_bytes
from tests.kernels.cuda.cases import CASES, Case

PASSES = ("convolution", "convolution_backward_data", "convolution_backward_filter")
PRECISIONS = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)


class Memory(Gpu):
    """A simulated GPU memory: the block is an array, and an address is an index into it."""

    def __init__(self, size_bytes: int = 1 << 25) -> None:
        self.name, self.architecture, self.multiprocessors = "NVIDIA H200", "sm_90", 132
        self.l2_bytes, self.sm_clock_mhz, self.memory_clock_mhz = 1 << 16, 1980, 3201
        self.library = SimpleNamespace(version=91900)
        self.failures = ()
        self._base, self._used_bytes, self._block_bytes = 0, 0, size_bytes
        self.data = np.zeros(size_bytes, np.uint8)
        self.now_us = 0.0

    @property
    def driver_version(self) -> str:
        return "580.1"

    def upload(self, address: int, data: np.ndarray) -> None:
        self.data[address : address + data.size] = data

    def download(self, address: int, size_bytes: int) -> np.ndarray:
        return self.data[address : address + size_bytes].copy()

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        self.data[address : address + size_bytes] = byte

    def copy(self, target: int, source: int, size_bytes: int, stream: Any = None) -> None:
        self.data[target : target + size_bytes] = self.data[source : source + size_bytes].copy()

    def synchronize(self) -> None:
        pass

    def times_us(self, work: Callable[[], None], count: int) -> list[float]:
        times: list[float] = []
        for _ in range(count):
            before = self.now_us
            work()
            times.append(self.now_us - before)
        return times


Behaviour = Callable[[Memory, Array, int, Candidate], Array]


def right(gpu: Memory, result: Array, workspace: int, candidate: Candidate) -> Array:
    return result


@dataclass
class Kernels:
    """A library whose kernels compute their operations exactly; `behaviour` changes the results of cuDNN's kernels."""

    gpu: Memory
    behaviour: Behaviour = right
    adds: bool = True
    prepared: list[tuple[Candidate, Request, tuple[int, ...], bool]] = field(default_factory=list[Any])
    cleared: int = 0

    def prepare(
        self,
        candidate: Candidate,
        request: Request,
        pointers: Sequence[int],
        workspace: int,
        accumulate: bool = False,
        first_row: int = 0,
    ) -> Any:
        provider = next(p for p in PROVIDERS if p.name == candidate.provider)
        # Refuses what a module could not call either.
        provider.arguments(candidate.call(request, accumulate), 0)
        # mbc's own kernels need the alignment of elements only: rows in the middle are compared in place.
        assert workspace % 256 == 0
        assert candidate.provider == "mbc" or all(p % 256 == 0 for p in pointers)
        assert len(pointers) == len(candidate.layouts) == len(operand_types(request))
        self.prepared.append((candidate, request, tuple(pointers), accumulate))
        return SimpleNamespace(enqueue=lambda: self._run(candidate, request, pointers, workspace, accumulate))

    def _run(
        self, candidate: Candidate, request: Request, pointers: Sequence[int], workspace: int, accumulate: bool
    ) -> None:
        gpu, count = self.gpu, len(request.inputs)
        types = operand_types(request)
        arrays = [
            loaded(gpu.download(p, t.size_bytes), t.shape, t.dtype, layout)
            for p, t, layout in zip(pointers, types, candidate.layouts, strict=True)
        ]
        results = list(evaluated(request, arrays[:count]))
        if candidate.provider.startswith("cudnn"):
            results = [self.behaviour(gpu, r, workspace, candidate) for r in results]
        for place, result in enumerate(results, count):
            if accumulate and self.adds:
                result = result + arrays[place]
            gpu.upload(pointers[place], stored_bytes(result, types[place].dtype, candidate.layouts[place]))
        gpu.now_us += 2000.0

    def clear(self) -> None:
        self.cleared += 1

    def __enter__(self) -> Kernels:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def evaluated(request: Request, inputs: Sequence[Array]) -> Sequence[Array]:
    kind = asked_kind(request)
    if kind is None:
        return [inputs[0]]
    assert kind.evaluate is not None
    exact = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in inputs]
    with np.errstate(all="ignore"):
        return kind.evaluate(
            request.attributes, exact, Call(request.outputs, 0, request.inputs[0].shape[0], Precision.FP64)
        )


class OnCpu(Trials):
    def in_double(self, request: Request, operands: Sequence[Operand]) -> Array:
        return evaluated(request, [operand.values() for operand in operands])[0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(clocks, "Graph", lambda gpu, body: SimpleNamespace(launch=body, close=lambda: None))
    return Memory()


def bench_of(gpu: Memory, library: Kernels) -> Bench:
    bench = Bench(gpu, lambda gpu, precision: library)  # pyright: ignore[reportArgumentType]
    bench.trials = OnCpu(gpu)
    return bench


def product(kind: str, precision: Precision = Precision.FP32, rows: int = 6) -> Request:
    working = precision.working
    if kind.startswith("linear"):
        x, w, y = (TensorType(shape, working) for shape in ((rows, 4, 3, 5), (7, 60), (rows, 7)))
        operands = {"linear": (x, w, y), "linear_backward_data": (y, w, x), "linear_backward_filter": (x, y, w)}[kind]
        a: Any = Linear((4, 3, 5))
    else:
        x, w, y = (TensorType(shape, working) for shape in ((rows, 8, 6, 5), (16, 8, 3, 3), (rows, 16, 6, 5)))
        operands = ((x, w, y), (y, w, x), (x, y, w))[PASSES.index(kind)]
        a = Convolution((6, 5), (3, 3), (1, 1), (1, 1, 1, 1))
    result = TensorType(operands[2].shape, precision.master) if kind.endswith("filter") else operands[2]
    return Request(kind, a, operands[:2], (result,), precision)


def engine(request: Request, layout: Layout = Layout.CHANNELS_FIRST, workspace_bytes: int = 1 << 16) -> Offer:
    settings = (("deterministic", 1), ("engine", 7), ("layout", LAYOUT_CODES[layout]))
    adds = request.kind == "convolution_backward_filter"
    return Offer(
        Candidate("cudnn", request.kind, settings, (layout,) * 3, workspace_bytes, 0.0, False, accumulates=adds)
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", PASSES)
def test_every_size_of_a_right_convolution_is_right(gpu: Memory, kind: str, precision: Precision) -> None:
    library = Kernels(gpu)
    requests = tuple(product(kind, precision, rows) for rows in (11, 8, 5, 4, 2, 1))
    with bench_of(gpu, library).open(Need(requests, 1.0)) as harness:
        for request in requests:
            offers = [engine(request, layout) for layout in Layout]
            with harness.at(request, offers) as place:
                for offer in offers:
                    attempt = place.attempt(offer, math.inf)
                    assert attempt.refused == "" and 0 <= attempt.error < 5e-3
                    assert (attempt.once_us, attempt.hopeless) == (2000.0, False)
                    if kind == "convolution_backward_filter":
                        assert place.adds(attempt)
                        assert place.time(attempt, 1.0, accumulate=True).median_us == 2000.0
                    assert place.time(attempt, 1.0).median_us == 2000.0
    assert library.cleared == len(requests)
    assert gpu.mark() == 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["linear", "linear_backward_data", "linear_backward_filter"])
def test_linear_layers_are_compared_as_convolutions_of_one_pixel(gpu: Memory, kind: str, precision: Precision) -> None:
    requests = tuple(product(kind, precision, rows) for rows in (9, 2))
    bench = bench_of(gpu, Kernels(gpu))
    with bench.open(Need(requests, 1.0)) as harness:
        for request in requests:
            candidates = [c for p in PROVIDERS for c in p.candidates(request, bench.spec)]
            offers = [Offer(c) for c in candidates]
            assert {c.provider for c in candidates} == {"cublaslt", "mbc"}
            with harness.at(request, offers) as place:
                attempts = [place.attempt(offer, math.inf) for offer in offers]
                assert [a.refused for a in attempts] == [""] * len(offers)
                assert not kind.endswith("filter") or all(place.adds(a) for a in attempts)


def attempted(gpu: Memory, library: Kernels, request: Request, offer: Offer | None = None) -> Any:
    offer = offer or engine(request)
    with bench_of(gpu, library).open(Need((request,), 1.0)) as harness, harness.at(request, [offer]) as place:
        return place.attempt(offer, math.inf)


@pytest.mark.parametrize("kind", PASSES)
def test_a_wrong_result_is_refused(gpu: Memory, kind: str) -> None:
    attempt = attempted(gpu, Kernels(gpu, lambda gpu, r, *_: r * 1.0001), product(kind))
    assert attempt.refused == f"its result is {attempt.error:.2e} off, 5e-06 is allowed"
    assert attempt.error == pytest.approx(1e-4, rel=0.02)


@pytest.mark.parametrize("row", [0, 3, 5])
def test_one_wrong_row_is_refused(gpu: Memory, row: int) -> None:
    def behaviour(gpu: Memory, result: Array, *_: object) -> Array:
        result[row] *= 1.001
        return result

    assert "off" in attempted(gpu, Kernels(gpu, behaviour), product("convolution")).refused


def test_the_last_slice_alone_is_refused(gpu: Memory) -> None:
    attempt = attempted(gpu, Kernels(gpu, lambda gpu, r, *_: r / 2), product("convolution_backward_filter"))
    assert "off" in attempt.refused


def test_unwritten_elements_are_refused(gpu: Memory) -> None:
    def behaviour(gpu: Memory, result: Array, *_: object) -> Array:
        result[-1, -1, -1, -1] = np.nan
        return result

    attempt = attempted(gpu, Kernels(gpu, behaviour), product("convolution"))
    assert attempt.refused == "it leaves elements of its output unwritten"


def test_writing_beyond_the_workspace_is_refused(gpu: Memory) -> None:
    def behaviour(gpu: Memory, result: Array, workspace: int, candidate: Candidate) -> Array:
        gpu.fill(workspace + candidate.workspace_bytes + GUARD_BYTES - 1, 0, 1)
        return result

    attempt = attempted(gpu, Kernels(gpu, behaviour), product("convolution"))
    assert attempt.refused == "it writes beyond its workspace"


def test_a_library_that_refuses_is_recorded(gpu: Memory) -> None:
    class Refusing(Kernels):
        def prepare(self, *arguments: Any, **named: Any) -> Any:
            if arguments[0].provider == "cudnn":
                raise MbcError("MBC086", "cudnn convolution: the engine needs 512 bytes", "another")
            return super().prepare(*arguments, **named)

    attempt = attempted(gpu, Refusing(gpu), product("convolution"))
    assert "MBC086: cudnn convolution: the engine needs 512 bytes" in attempt.refused


def test_an_engine_that_overwrites_does_not_add(gpu: Memory) -> None:
    request = product("convolution_backward_filter")
    bench = bench_of(gpu, Kernels(gpu, adds=False))
    with bench.open(Need((request,), 1.0)) as harness, harness.at(request, [engine(request)]) as place:
        assert not place.adds(place.attempt(engine(request), math.inf))


def test_slow_candidates_do_not_run_in_a_graph(gpu: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    request = product("convolution")
    graphs: list[Any] = []
    waits_s = (0.0005, 0.0004, 0.0005, 0.0, 0.0005, 0.0)
    host_s = iter([at for wait_s in waits_s for at in (0.0, wait_s)])
    monkeypatch.setattr(clocks, "Graph", lambda gpu, body: SimpleNamespace(launch=body, close=lambda: graphs.append(1)))
    monkeypatch.setattr("mbc.measure.harness.time", SimpleNamespace(perf_counter=lambda: next(host_s)))
    bench = bench_of(gpu, Kernels(gpu))
    with bench.open(Need((request,), 1.0)) as harness, harness.at(request, [engine(request)]) as place:
        # Of 2000 us the GPU may have waited 500 for the host, which loads the kernel. What is slow is run twice.
        attempt = place.attempt(engine(request), 1499.0)
        assert attempt.hopeless and attempt.once_us == pytest.approx(1500.0) and graphs == []
        assert not place.attempt(engine(request), 1501.0).hopeless and graphs == [1]
        assert not place.attempt(engine(request), 1501.0).hopeless and graphs == [1, 1]
    # It is checked all the same.
    bench = bench_of(gpu, Kernels(gpu, lambda gpu, r, *_: r * 2))
    with bench.open(Need((request,), 1.0)) as harness, harness.at(request, [engine(request)]) as place:
        assert "off" in place.attempt(engine(request), 1.0).refused


def test_few_rows_show_which_kernel_is_far_too_slow(gpu: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mbc.measure.harness.time", SimpleNamespace(perf_counter=lambda: 0.0))
    request = product("convolution", rows=64)
    library = Kernels(gpu)
    with bench_of(gpu, library).open(Need((request,), 1.0)) as harness, harness.at(request, [engine(request)]) as place:
        attempt = place.attempt(engine(request), math.inf, 60000.0)
        assert attempt.skipped and attempt.once_us == 32 * 2000.0
        assert library.prepared[-1][1].inputs[0].shape[0] == 2
        assert not place.attempt(engine(request), math.inf, 65000.0).skipped


def test_a_probe_that_loads_its_kernel_is_run_again(gpu: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host accounts for 500 us of the 2,000 us of the first probe, and for 1,000 us of the second one."""
    waits_s = iter((0.0, 0.0005, 0.0, 0.001, 0.0, 0.0))
    monkeypatch.setattr("mbc.measure.harness.time", SimpleNamespace(perf_counter=lambda: next(waits_s)))
    request = product("convolution", rows=64)
    library = Kernels(gpu)
    with bench_of(gpu, library).open(Need((request,), 1.0)) as harness, harness.at(request, [engine(request)]) as place:
        assert not place.attempt(engine(request), math.inf, 32 * 1100.0).skipped


def test_what_does_not_fit_says_so(gpu: Memory) -> None:
    with pytest.raises(DoesNotFit, match="its workspace of 1073741824 bytes does not fit"):
        attempted(gpu, Kernels(gpu), product("convolution"), engine(product("convolution"), workspace_bytes=1 << 30))
    with pytest.raises(DoesNotFit):
        attempted(Memory(4096), Kernels(Memory(4096)), product("convolution"))


SMALL = [c for c in CASES if c.kind not in PRODUCT_KINDS and "wild" not in c.name and "nan" not in c.name]
BY_KIND = {case.kind: case for case in reversed(SMALL)}


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("case", BY_KIND.values(), ids=lambda case: case.kind)
def test_every_other_kind_has_operands_that_it_accepts(gpu: Memory, case: Case, precision: Precision) -> None:
    request = case.request(precision)
    bench = bench_of(gpu, Kernels(gpu))
    offers = [Offer(c) for c in OWN.candidates(request, bench.spec)]
    with bench.open(Need((request,), 1.0)) as harness, harness.at(request, offers) as place:
        for offer in offers:
            attempt = place.attempt(offer, math.inf)
            assert attempt.refused == ""
            assert not offer.candidate.accumulates or place.adds(attempt)
            assert place.time(attempt, 1.0).median_us == 2000.0
    for output, source in KINDS[case.kind].updates if case.kind in KINDS else ():
        if output < len(request.outputs) and source < len(request.inputs):
            inputs = len(request.inputs)
            assert all(at[inputs + output] == at[source] for _, r, at, _ in bench_calls(bench) if r == request)


def bench_calls(bench: Bench) -> list[Any]:
    return next(iter(bench._libraries.values())).prepared  # pyright: ignore[reportAttributeAccessIssue]


def test_a_wrong_kernel_of_ours_is_refused(gpu: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    request = BY_KIND["broadcast_mul"].request(Precision.FP32)
    library = Kernels(gpu)
    original = library._run

    def spoiled(candidate: Candidate, asked: Request, pointers: Sequence[int], workspace: int, add: bool) -> None:
        original(candidate, asked, pointers, workspace, add)
        gpu.fill(pointers[-1], 0, 4)

    monkeypatch.setattr(library, "_run", spoiled)
    offer = Offer(next(iter(OWN.candidates(request, bench_of(gpu, library).spec))))
    assert "output 0 is" in attempted(gpu, library, request, offer).refused


def test_slices_are_inside_the_operands_and_aligned(gpu: Memory) -> None:
    whole = product("convolution", rows=32)
    buffers = Buffers(gpu, whole, lambda index, layout, address: None, period=4)
    part = product("convolution", rows=4)
    layouts = (Layout.CHANNELS_FIRST,) * 3
    sets = buffers.sets(part, layouts)
    x, w, y = (t.size_bytes for t in operand_types(whole))
    first = sets[0].addresses
    steps = {s.addresses[0] - first[0] for s in sets}
    assert len(sets) > 1 and all(a % 256 == 0 for s in sets for a in s.addresses)
    # A row of 960 bytes keeps the alignment every fourth row.
    assert {s % (4 * 960) for s in steps} == {0}
    assert all(s.addresses[1] == first[1] for s in sets if s.addresses[0] - first[0] < x)
    same_copy = [s for s in sets if s.addresses[1] == first[1]]
    assert all((s.addresses[0] - first[0]) * y == (s.addresses[2] - first[2]) * x for s in same_copy)
    assert w == 16 * 8 * 9 * 4
    assert buffers.copies == len({s.addresses[1] for s in buffers.sets(whole, layouts)})


def test_rows_that_are_compared() -> None:
    assert checked_rows(64, 4) == [(0, 4), (32, 4), (60, 4)]
    assert checked_rows(11, 4) == [(0, 4), (4, 4), (8, 3)]
    assert checked_rows(2, 4) == [(0, 2)]


def test_calls_of_a_graph() -> None:
    assert calls_per_graph(1, 5000.0) == 1
    assert calls_per_graph(8, 5000.0) == 1  # for long calls the content of the cache does not matter
    assert calls_per_graph(8, 100.0) == 8
    assert calls_per_graph(8, 400.0) == 2
    assert calls_per_graph(1, 10.0) == 20
    assert calls_per_graph(1, 0.1) == 64


def test_median_and_quartiles(gpu: Memory) -> None:
    took = iter([9.0, *range(1, 100)])
    call = SimpleNamespace(enqueue=lambda: setattr(gpu, "now_us", gpu.now_us + 1000.0 * next(took)))
    times = Clock(gpu).times([call.enqueue], 1000.0, 7000.0)
    assert (times.median_us, times.spread_us) == (4000.0, 4000.0)  # of 9, 1, 2, 3, 4, 5, 6 ms


def test_the_gap_is_the_cost_of_one_more_node(gpu: Memory) -> None:
    def call() -> None:
        gpu.now_us += 1.5

    assert Clock(gpu).gap_us(call) == pytest.approx(1.5)


def test_a_bench_describes_itself_and_warms_up(gpu: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mbc.measure.workbench.WARM_SIDE", 8)
    monkeypatch.setattr("mbc.measure.workbench.WARM_S", 0.0)
    bench = bench_of(gpu, Kernels(gpu))
    assert bench.identity().gpu == "NVIDIA H200" and bench.identity().cudnn == 91900
    bench.warm(Precision.BF16)
    assert bench.graph_gap_us(Precision.BF16) == pytest.approx(2000.0)
    assert gpu.mark() == 0 and DType.BF16 in bench._libraries
