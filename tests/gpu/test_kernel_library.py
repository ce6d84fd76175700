"""Candidates of every provider on a real GPU, captured and replayed, against the operations in float64."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.hardware.spec import find_spec
from mbc.ir.graph import Attributes
from mbc.ir.types import Layout, Precision, TensorType
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cuda import OWN
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION
from mbc.measure.gpu import Gpu, Graph
from mbc.measure.kernel_library import KernelLibrary
from mbc.ops import KINDS
from mbc.ops.base import Call, NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.runtime.formats import loaded, stored_bytes

# As tests/gpu/test_libraries.py, of which these are single cases.
TOLERANCES = {Precision.FP32: 1e-5, Precision.BF16: 6e-3}
ROWS = 6


@pytest.fixture(scope="module", params=TOLERANCES)
def opened(gpu: Gpu, request: pytest.FixtureRequest) -> Iterator[tuple[Precision, KernelLibrary]]:
    started = time.monotonic()
    with KernelLibrary.open(gpu, request.param) as library:
        built = time.monotonic()
        KernelLibrary.open(gpu, request.param).close()
        again = time.monotonic() - built
        print(f"\n{request.param}: opened in {built - started:.2f} s, a second time in {again:.2f} s")
        yield request.param, library


def _request(precision: Precision, kind: str, attributes: Attributes, *shapes: tuple[int, ...]) -> Request:
    inputs = tuple(TensorType(shape, precision.working) for shape in shapes)
    return Request(kind, attributes, inputs, KINDS[kind].shape(attributes, inputs), precision)


def _candidates(precision: Precision) -> Iterator[tuple[Candidate, Request]]:
    device = find_spec("h200")
    convolution = Convolution((14, 14), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    x, w, y = (ROWS, 32, 14, 14), (16, 32, 3, 3), (ROWS, 16, 14, 14)
    asked = (
        (OWN, _request(precision, "relu", NoAttributes(), x)),
        (CUDNN_CONVOLUTION, _request(precision, "convolution", convolution, x, w)),
        (CUDNN_CONVOLUTION, _request(precision, "convolution_backward_filter", convolution, x, y)),
        (CUBLASLT, _request(precision, "linear", Linear((96,)), (ROWS, 96), (24, 96))),
    )
    for provider, request in asked:
        candidates = list(provider.candidates(request, device))
        assert candidates
        for candidate in candidates:
            yield candidate, request
    tensor = TensorType(x, precision.working)
    request = Request("convert", NoAttributes(), (tensor,), (tensor,), precision)
    for candidate in OWN.candidates(request, device):
        yield candidate, request


def _expected(request: Request, inputs: list[np.ndarray]) -> np.ndarray:
    if request.kind == "convert":
        return inputs[0]
    evaluate = KINDS[request.kind].evaluate
    assert evaluate is not None
    exact = [array.astype(np.float64) for array in inputs]
    return evaluate(request.attributes, exact, Call(request.outputs, 0, ROWS, Precision.FP64))[0]


def what(candidate: Candidate) -> str:
    return f"{candidate.provider} {candidate.name} {candidate.layouts[0]} {candidate.workspace_bytes} B"


def test_candidates_are_captured_and_replayed(gpu: Gpu, opened: tuple[Precision, KernelLibrary]) -> None:
    precision, library = opened
    generator = np.random.default_rng(1)
    tried: set[str] = set()
    for candidate, request in _candidates(precision):
        gpu.reset()
        types = (*request.inputs, *request.outputs)
        layouts = candidate.layouts
        pointers = [gpu.take(type_.size_bytes) for type_ in types]
        workspace = gpu.take(candidate.workspace_bytes)
        try:
            call = library.prepare(candidate, request, pointers, workspace)
        except MbcError as error:
            # How many algorithms cuBLASLt has for a product is known on the GPU only: candidates name more.
            assert dict(candidate.settings).get("algorithm", 0) > 0 and "algorithms" in error.message, what(candidate)
            continue
        call.enqueue()  # loads kernels, which a capture does not allow
        gpu.synchronize()
        graph = Graph(gpu, call.enqueue)
        errors: list[float] = []
        for _ in range(2):  # other data every time: a replayed graph reads the current data
            given = [generator.standard_normal(type_.shape) for type_ in request.inputs]
            stored = [
                stored_bytes(a, t.dtype, layout) for a, t, layout in zip(given, types, candidate.layouts, strict=False)
            ]
            for pointer, data in zip(pointers, stored, strict=False):
                gpu.upload(pointer, data)
            gpu.fill(pointers[-1], 0xFF, types[-1].size_bytes)
            graph.launch()
            gpu.synchronize()
            read = [
                loaded(d, t.shape, t.dtype, layout)
                for d, t, layout in zip(stored, types, candidate.layouts, strict=False)
            ]
            wanted = _expected(request, [np.asarray(array) for array in read])
            data = gpu.download(pointers[-1], types[-1].size_bytes)
            result = np.asarray(loaded(data, types[-1].shape, types[-1].dtype, layouts[-1]), np.float64)
            errors.append(float(np.linalg.norm(result - wanted) / np.linalg.norm(wanted)))
        graph.close()
        print(f"{what(candidate)}: {max(errors):.1e}")
        assert max(errors) <= TOLERANCES[precision], what(candidate)
        tried.add(candidate.provider)
    assert tried == {"mbc", "cudnn", "cublaslt"}


def test_refusals_do_no_harm(gpu: Gpu, opened: tuple[Precision, KernelLibrary]) -> None:
    precision, library = opened
    gpu.reset()
    candidate, request = next(pair for pair in _candidates(precision) if pair[0].provider == "cudnn")
    pointers = [gpu.take(type_.size_bytes) for type_ in (*request.inputs, *request.outputs)]
    unknown = Candidate("cudnn", candidate.name, (("engine", 9999),), (Layout.CHANNELS_FIRST,) * 3, 0, 0.0, False)
    with pytest.raises(MbcError) as caught:
        library.prepare(unknown, request, pointers, 0)
    assert caught.value.code == "MBC086"
    for _ in range(2):
        library.prepare(candidate, request, pointers, gpu.take(candidate.workspace_bytes)).enqueue()
        gpu.synchronize()
        library.clear()


def test_several_calls_in_one_graph(gpu: Gpu, opened: tuple[Precision, KernelLibrary]) -> None:
    """Each call reads the output of the call before it."""
    precision, library = opened
    gpu.reset()
    candidate, request = next(_candidates(precision))
    pointers = [gpu.take(type_.size_bytes) for type_ in (*request.inputs, *request.outputs)]
    chained = [*pointers, gpu.take(request.outputs[0].size_bytes)]
    calls = [library.prepare(candidate, request, pair, 0) for pair in pairwise(chained)]
    gpu.fill(chained[0], 0, request.inputs[0].size_bytes)
    gpu.fill(chained[-1], 0xFF, request.inputs[0].size_bytes)
    for call in calls:
        call.enqueue()
    gpu.synchronize()

    def body() -> None:
        for call in calls:
            call.enqueue()

    graph = Graph(gpu, body)
    gpu.fill(chained[-1], 0xFF, request.inputs[0].size_bytes)
    graph.launch()
    gpu.synchronize()
    graph.close()
    assert not gpu.download(chained[-1], request.inputs[0].size_bytes).any()
