"""Measuring on a GPU made of host memory: cuDNN's own engine lists, convolutions by NumPy, a clock that is counted.

What a wrong engine does (a wrong result, elements left out, writing beyond its workspace) is played here; that right
engines are right is seen on a real GPU (tests/gpu/test_measure.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mbc.device import measure as measuring
from mbc.device.cudnn import Configuration, ConvolutionGraph, Device, engine_types
from mbc.device.cudnn_library import CudnnRefusal, Library
from mbc.device.gpu import Gpu
from mbc.device.measure import measure, requests_in_turn
from mbc.device.profile import Measurement, signature
from mbc.device.profile_file import read_profile
from mbc.errors import MbcError
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.ops.convolution import Convolution
from mbc.resources import data_text
from mbc.runtime.formats import loaded, stored_bytes

PASSES = ("convolution", "convolution_backward_data", "convolution_backward_filter")
Behaviour = Callable[["Engine", np.ndarray], np.ndarray]


class Memory(Gpu):
    """The block is an array, an address an index of it."""

    def __init__(self, library: Library) -> None:
        self.name, self.architecture, self.multiprocessors = "NVIDIA H200", "sm_90", 132
        self.l2_bytes, self.sm_clock_mhz, self.memory_clock_mhz = 1 << 16, 1980, 3201
        self.library = library
        self.device = Device.from_properties(library, data_text("h200_cudnn_device.json"))
        self._base, self._used_bytes, self._block_bytes = 0, 0, 1 << 24
        self.data = np.zeros(self._block_bytes, np.uint8)
        self.clock_us = 0.0

    @property
    def driver_version(self) -> str:
        return "580.1"

    def upload(self, address: int, data: np.ndarray) -> None:
        self.data[address : address + data.size] = data

    def download(self, address: int, size_bytes: int) -> np.ndarray:
        return self.data[address : address + size_bytes].copy()

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        self.data[address : address + size_bytes] = byte

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self.data[target : target + size_bytes] = self.data[source : source + size_bytes].copy()

    def synchronize(self) -> None:
        pass

    def time_us(self, work: Callable[[], None]) -> float:
        before = self.clock_us
        work()
        return self.clock_us - before


class Engine:
    """What stands for an execution plan; `behaviour` is what it does to a right result."""

    def __init__(
        self, gpu: Memory, request: Request, layouts: Sequence[Layout], beta: float, chosen: Configuration
    ) -> None:
        self.gpu, self.request, self.layouts, self.beta, self.chosen = gpu, request, layouts, beta, chosen
        self.types = engine_types(request)
        self.workspace_bytes = 512
        self.behaviour: Behaviour = lambda engine, result: result
        self.workspace = 0

    def bind(self, pointers: Sequence[int], workspace: int) -> tuple[int, ...]:
        return (*pointers, workspace)

    def execute(self, pack: tuple[int, ...]) -> None:
        *pointers, self.workspace = pack
        assert all(pointer % 256 == 0 for pointer in pack)
        operands = [
            loaded(self.gpu.download(p, t.size_bytes), t.shape, t.dtype, layout).astype(np.float64)
            for p, t, layout in zip(pointers[:2], self.types, self.layouts, strict=False)
        ]
        evaluate = KINDS[self.request.kind].evaluate
        assert evaluate is not None
        output = self.types[2]
        call = Call((TensorType(output.shape, DType.FP64),), 0, self.request.inputs[0].shape[0], Precision.FP64)
        result = evaluate(self.request.attributes, operands, call)[0]
        if self.request.precision is not Precision.FP64:  # the reference is right
            result = self.behaviour(self, result)
        if self.beta:
            result = result + self.beta * loaded(
                self.gpu.download(pointers[2], output.size_bytes), output.shape, output.dtype, self.layouts[2]
            )
        self.gpu.upload(pointers[2], stored_bytes(result, output.dtype, self.layouts[2]))
        self.gpu.clock_us += 2000.0 + self.chosen.engine


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Memory:
    try:
        memory = Memory(Library.load())
    except MbcError as error:
        pytest.skip(error.message)
    monkeypatch.setattr(measuring, "Graph", lambda gpu, body: SimpleNamespace(launch=body, close=lambda: None))
    play(monkeypatch, lambda engine, result: result)
    return memory


def play(monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour) -> None:
    """Let every engine behave so."""
    original = ConvolutionGraph.__init__

    def remember(self: Any, device: Device, request: Request, layouts: Sequence[Layout], beta: float = 0.0) -> None:
        original(self, device, request, layouts, beta)
        self.asked = (request, layouts, beta)

    def plan(self: Any, configuration: Configuration) -> Engine:
        current = memory_of(self)
        engine = Engine(current, *self.asked, configuration)
        engine.behaviour = behaviour
        return engine

    if ConvolutionGraph.__init__.__name__ != "remember":
        monkeypatch.setattr(ConvolutionGraph, "__init__", remember)
    monkeypatch.setattr(ConvolutionGraph, "plan", plan)


_MEMORIES: dict[int, Memory] = {}


def memory_of(graph: Any) -> Memory:
    return _MEMORIES[id(graph._device)]


@pytest.fixture(autouse=True)
def known_memories(gpu: Memory) -> None:
    _MEMORIES.clear()
    _MEMORIES[id(gpu.device)] = gpu


def request(kind: str, precision: Precision = Precision.FP32, rows: int = 6) -> Request:
    working = precision.working
    image = TensorType((rows, 8, 6, 5), working)
    weight = TensorType((16, 8, 3, 3), working)
    features = TensorType((rows, 16, 6, 5), working)
    attributes = Convolution((6, 5), (3, 3), (1, 1), (1, 1, 1, 1))
    if kind == "convolution":
        return Request(kind, attributes, (image, weight), (features,), precision)
    if kind == "convolution_backward_data":
        return Request(kind, attributes, (features, weight), (image,), precision)
    return Request(kind, attributes, (image, features), (TensorType(weight.shape, precision.master),), precision)


def run(gpu: Memory, asked: Request, path: Path) -> tuple[Measurement, ...]:
    summary = measure(gpu, [asked], path / "p.sqlite")
    assert summary.failures == ()
    assert summary.measured == 1
    return read_profile(path / "p.sqlite").measurements[signature(asked)]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("kind", PASSES)
def test_right_engines_are_measured(gpu: Memory, kind: str, precision: Precision, tmp_path: Path) -> None:
    found = run(gpu, request(kind, precision), tmp_path)
    assert {m.layouts for m in found} == {(layout,) * 3 for layout in Layout}
    assert not [m for m in found if m.refused]
    for m in found:
        settings = dict(m.settings)
        assert m.time_us == pytest.approx(2000.0 + settings["engine"])
        assert m.provider == "cudnn" and m.name == kind
        assert settings["layout"] == (m.layouts[0] is Layout.CHANNELS_LAST)
        assert m.accumulates == (kind == "convolution_backward_filter")
        assert 0 <= m.error < 5e-3
        # A filter gradient of 16-bit operands is staged, to be widened: 16 * 8 * 3 * 3 elements of 2 bytes.
        staged = kind == "convolution_backward_filter" and precision.working is not DType.FP32
        assert m.workspace_bytes == 512 + (2304 if staged else 0)


@pytest.mark.parametrize("kind", PASSES)
def test_a_wrong_result_is_refused(gpu: Memory, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, lambda engine, result: result * 1.0001)
    found = run(gpu, request(kind), tmp_path)
    assert found and all("its result is 1.00e-04 off, 5e-06 is allowed" in m.refused for m in found)
    assert read_profile(tmp_path / "p.sqlite").candidates(request(kind)) == ()


def test_the_last_slice_alone_is_refused(gpu: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, lambda engine, result: result / 2)
    assert all(m.refused for m in run(gpu, request("convolution_backward_filter"), tmp_path))


def test_unwritten_elements_are_refused(gpu: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def leave_out(engine: Engine, result: np.ndarray) -> np.ndarray:
        result[-1, -1, -1, -1] = np.nan
        return result

    play(monkeypatch, leave_out)
    found = run(gpu, request("convolution"), tmp_path)
    assert found and all(m.refused == "it leaves elements of its output unwritten" for m in found)


def test_writing_beyond_the_workspace_is_refused(gpu: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def trespass(engine: Engine, result: np.ndarray) -> np.ndarray:
        if engine.workspace:
            engine.gpu.fill(engine.workspace + engine.workspace_bytes, 0, 1)
        return result

    play(monkeypatch, trespass)
    found = run(gpu, request("convolution"), tmp_path)
    assert found and all(m.refused == "it writes beyond its workspace" for m in found)


def test_an_engine_that_fails_is_recorded(gpu: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(engine: Engine, result: np.ndarray) -> np.ndarray:
        raise CudnnRefusal("MBC079", "cudnnBackendExecute: CUDNN_STATUS_EXECUTION_FAILED")

    play(monkeypatch, fail)
    found = run(gpu, request("convolution"), tmp_path)
    assert found and all("CUDNN_STATUS_EXECUTION_FAILED" in m.refused for m in found)


def test_an_engine_that_cannot_add_says_so(gpu: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def overwrite(engine: Engine, result: np.ndarray) -> np.ndarray:
        engine.beta = 0.0
        return result

    play(monkeypatch, overwrite)
    found = run(gpu, request("convolution_backward_filter"), tmp_path)
    assert found and not any(m.accumulates or m.refused for m in found)


def test_what_does_not_fit_is_left_unmeasured(gpu: Memory, tmp_path: Path) -> None:
    gpu._block_bytes = 4096
    summary = measure(gpu, [request("convolution")], tmp_path / "p.sqlite")
    assert summary.measured == 1 and summary.candidates == 0
    assert "bytes are needed" in summary.failures[0]


def test_time_is_bounded_and_a_run_resumed(gpu: Memory, tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    asked = [request(kind) for kind in PASSES]
    assert measure(gpu, asked, path, measure_for_s=-1.0).left == 3
    assert measure(gpu, asked[:1], path).measured == 1
    again = measure(gpu, asked, path)
    assert (again.known, again.measured, again.left) == (1, 2, 0)


def test_networks_take_turns() -> None:
    one, two, three = (request("convolution", rows=rows) for rows in (1, 2, 3))
    assert list(requests_in_turn([[one, two], [three, one]])) == [one, three, two]
