"""Convolutions and linear layers by cuDNN and cuBLASLt on a GPU, compared with the operations in float64.

Convolutions use both APIs of cuDNN, and cuBLASLt. Every candidate of each request runs as generated host code runs it:
undivided, in slices, and accumulating.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mbc.codegen.build import LIBRARY, build, write_sources
from mbc.codegen.toolchain import find_toolchain
from mbc.codegen.view import STREAMS, view
from mbc.hardware.spec import find_spec
from mbc.hardware.streams import Stream
from mbc.ir.graph import Attributes, Operation, Optimizer, Role, TrainingGraph, Value
from mbc.ir.types import DType, Layout, Precision, TensorType, layout_matters
from mbc.kernels.base import Candidate, Request
from mbc.kernels.convolution_shapes import PASSES
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION
from mbc.measure.cudnn_library import Library
from mbc.measure.legacy_algorithms import legacy_candidates
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.plan.model import Access, Bounds, Buffer, Kernel, Launch, Mode, Plan, Predictions, Program, Rows, Target
from mbc.runtime.formats import loaded, stored_bytes
from tests.gpu.driver import Gpu

# Worst relative L2 error admitted of a result. tf32 keeps 10 bits of each operand, bf16 8 and fp16 11 of each result.
TOLERANCES = {Precision.FP32: 1e-5, Precision.TF32: 1e-3, Precision.BF16: 6e-3, Precision.FP16: 1e-3}
ROWS, SPLIT = 7, 3

CONVOLUTIONS = {  # channels, size, filters, kernel, stride, pad, dilation, groups
    "square": (32, (9, 9), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "conv1x1": (64, (7, 5), 32, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "stem": (3, (23, 21), 16, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1),
    "odd": (5, (9, 8), 7, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "asymmetric": (16, (10, 10), 24, (3, 3), (2, 2), (0, 1, 0, 1), (1, 1), 1),
    "wide": (16, (8, 12), 16, (1, 7), (1, 1), (0, 0, 3, 3), (1, 1), 1),
    "dilated": (16, (12, 12), 32, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2), 1),
    "depthwise": (24, (9, 9), 24, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 24),
    "grouped": (32, (8, 8), 64, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 4),
    "one pixel": (32, (1, 1), 16, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "signal": (16, (37,), 24, (5,), (2,), (2, 1), (1,), 1),
    "volume": (16, (6, 9, 8), 32, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1),
    "anisotropic": (16, (5, 12, 12), 16, (1, 3, 3), (1, 2, 2), (0, 0, 1, 1, 1, 1), (1, 1, 1), 1),
    "volume asymmetric": (8, (6, 7, 5), 8, (3, 2, 3), (2, 1, 1), (0, 1, 1, 0, 2, 1), (1, 1, 2), 1),
    "volume grouped": (16, (5, 6, 7), 32, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 4),
    "conv1x1x1": (64, (4, 6, 5), 32, (1, 1, 1), (1, 1, 1), (0, 0, 0, 0, 0, 0), (1, 1, 1), 1),
}
LINEARS = {"head": (96, 10), "wide": (64, 128), "odd": (33, 7)}


@dataclass(frozen=True)
class Case:
    """One operation with one candidate. `slices`: row at which the second call begins; 0: one call."""

    name: str
    request: Request
    candidate: Candidate
    split: int


def _requests(precision: Precision) -> Iterator[tuple[str, Request]]:
    working = precision.working

    def of(kind: str, attributes: Attributes, *shapes: tuple[int, ...]) -> Request:
        inputs = tuple(TensorType(shape, working) for shape in shapes)
        return Request(kind, attributes, inputs, KINDS[kind].shape(attributes, inputs), precision)

    for name, (channels, size, filters, kernel, stride, pad, dilation, groups) in CONVOLUTIONS.items():
        attributes = Convolution(size, kernel, stride, pad, dilation, groups)
        x, w = (ROWS, channels, *size), (filters, channels // groups, *kernel)
        y = (ROWS, filters, *attributes.output_size)
        yield f"{name} forward", of("convolution", attributes, x, w)
        yield f"{name} data", of("convolution_backward_data", attributes, y, w)
        yield f"{name} filter", of("convolution_backward_filter", attributes, x, y)
    for name, (inputs, outputs) in LINEARS.items():
        attributes = Linear((inputs,))
        x, w, y = (ROWS, inputs), (outputs, inputs), (ROWS, outputs)
        yield f"linear {name} forward", of("linear", attributes, x, w)
        yield f"linear {name} data", of("linear_backward_data", attributes, y, w)
        yield f"linear {name} filter", of("linear_backward_filter", attributes, x, y)


def _cases(precision: Precision) -> list[Case]:
    device = find_spec("h200")
    return [
        Case(
            f"{name} {candidate.provider} {candidate.layouts[0]} {candidate.workspace_bytes} B split {split}",
            request,
            candidate,
            split,
        )
        for name, request in _requests(precision)
        for provider in (CUDNN_CONVOLUTION, CUBLASLT)
        for candidate in provider.candidates(request, device)
        if candidate.provider != "cublaslt" or candidate.settings == (("algorithm", 0),)  # the only one always there
        for split in (0, SPLIT)
    ]  # fmt: skip


def _legacy_cases(precision: Precision, library: Library, handle: int) -> list[Case]:
    """Return the cases that the legacy API supports.

    A case in slices needs support for both slices. Its workspace is the larger one of the two.
    """

    def offered(request: Request) -> dict[tuple[tuple[str, int], ...], Candidate]:
        return {candidate.settings: candidate for candidate, _ in legacy_candidates(library, handle, request)}

    cases: list[Case] = []
    for name, request in _requests(precision):
        whole, first, second = (offered(_with_rows(request, rows)) for rows in (ROWS, SPLIT, ROWS - SPLIT))
        for settings, candidate in whole.items():
            words = " ".join(f"{key}={value}" for key, value in settings)
            cases.append(Case(f"{name} {words} split 0", request, candidate, 0))
            if settings in first and settings in second:
                workspace_bytes = max(first[settings].workspace_bytes, second[settings].workspace_bytes)
                candidate = replace(candidate, workspace_bytes=workspace_bytes)
                cases.append(Case(f"{name} {words} split {SPLIT}", request, candidate, SPLIT))
    return cases


def _with_rows(request: Request, rows: int) -> Request:
    filter_at = 2 if request.kind.endswith("filter") else 1
    types = [t if i == filter_at else t.with_rows(rows) for i, t in enumerate((*request.inputs, *request.outputs))]
    return replace(request, inputs=tuple(types[:2]), outputs=tuple(types[2:]))


@dataclass(frozen=True)
class Placed:
    """A case in the plan: its buffers in the order of operands, and the launches that work on them."""

    case: Case
    buffers: tuple[int, ...]


def _plan(cases: list[Case], precision: Precision, architecture: str) -> tuple[Plan, list[Placed]]:
    values: dict[str, Value] = {}
    buffers: list[Buffer] = []
    offsets: list[int] = []
    operations: list[Operation] = []
    launches: list[Launch] = []
    placed: list[Placed] = []
    end = 0

    def buffer(described: Buffer) -> int:
        nonlocal end
        buffers.append(described)
        offsets.append(end)
        end += math.ceil(described.size_bytes / 256) * 256
        return len(buffers) - 1

    for number, case in enumerate(cases):
        request, candidate = case.request, case.candidate
        names = [f"c{number}.{i}" for i in range(3)]
        filter_at = 2 if request.kind.endswith("filter") else 1
        mine: list[int] = []
        types = (*request.inputs, *request.outputs)
        for i, (name, type_, layout) in enumerate(zip(names, types, candidate.layouts, strict=True)):
            per_sample = i != filter_at
            values[name] = Value(name, type_, Role.INTERMEDIATE, per_sample)
            rows = Rows(0, type_.shape[0]) if per_sample else Rows(0, 1)
            plain = layout if layout_matters(type_.shape) else Layout.CHANNELS_FIRST
            mine.append(buffer(Buffer(name, rows, plain, type_.dtype, type_.size_bytes)))
        workspace = ()
        if candidate.workspace_bytes:
            buffers.append(Buffer(None, Rows(0, 1), Layout.CHANNELS_FIRST, DType.UINT8, candidate.workspace_bytes))
            offsets.append(-1)  # after everything, at one place for all, because they run one after another
            workspace = (len(buffers) - 1,)
        operation = Operation(f"op{number}", request.kind, tuple(names[:2]), (names[2],), request.attributes)
        operations.append(operation)
        parts = (Rows(0, ROWS),) if case.split == 0 else (Rows(0, case.split), Rows(case.split, ROWS))
        for rows, i in zip(parts, itertools.count(), strict=False):
            accesses = [
                Access(at, rows if j != filter_at else Rows(0, 1), Mode.READ if j < 2 else Mode.WRITE)
                for j, at in enumerate(mine)
            ]
            if i and filter_at == 2:
                accesses[2] = Access(mine[2], Rows(0, 1), Mode.ACCUMULATE)
            accesses += [Access(at, Rows(0, 1), Mode.WRITE) for at in workspace]
            kernel = Kernel(candidate.provider, candidate.name, candidate.settings, 0.0, False)
            launches.append(Launch(kernel, (operation.name,), Stream.COMPUTE, tuple(accesses)))
        placed.append(Placed(case, tuple(mine)))
    offsets = [end if offset < 0 else offset for offset in offsets]
    end += max((b.size_bytes for b in buffers if b.value is None), default=0)
    graph = TrainingGraph(
        "libraries", ROWS, precision, Optimizer(), values, tuple(operations), (), (), (), (), (), (), "c0.0", (), ()
    )
    plan = Plan(
        "test", graph, Target("test", architecture, 1, 0, 0), 0, tuple(buffers), tuple(offsets),
        Program(tuple(launches), (), (), ()), Program((), (), (), ()),
        Predictions(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, end, 0, False, 0), Bounds(0, "", 0, 0.0),
    )  # fmt: skip
    return plan, placed


def _inputs(case: Case, generator: np.random.Generator) -> list[NDArray[Any]]:
    return [generator.standard_normal(type_.shape) for type_ in case.request.inputs]


def _expected(case: Case, inputs: list[NDArray[Any]]) -> NDArray[Any]:
    kind = KINDS[case.request.kind]
    assert kind.evaluate is not None
    exact = [np.asarray(array, np.float64) for array in inputs]
    return kind.evaluate(case.request.attributes, exact, Call(case.request.outputs, 0, ROWS, Precision.FP64))[0]


@pytest.mark.parametrize("precision", TOLERANCES)
def test_every_candidate_computes_its_operation(precision: Precision, tmp_path: Path) -> None:
    _check(Gpu(), _cases(precision), precision, tmp_path)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_every_legacy_algorithm_computes_its_operation(precision: Precision, tmp_path: Path) -> None:
    gpu = Gpu()
    library = Library.load()
    handle = library.create_handle()
    cases = _legacy_cases(precision, library, handle)
    library.destroy_handle(handle)
    assert {case.request.kind for case in cases} == set(PASSES)
    _check(gpu, cases, precision, tmp_path)


def _check(gpu: Gpu, cases: list[Case], precision: Precision, tmp_path: Path) -> None:
    toolchain = find_toolchain()
    if toolchain.missing:
        pytest.skip("needs " + "; ".join(map(str, toolchain.missing)))
    plan, placed = _plan(cases, precision, gpu.architecture)
    rows = view(plan)
    write_sources(rows, "test", tmp_path / "source")
    build(rows, tmp_path / "source", tmp_path / LIBRARY, toolchain)
    library = ctypes.CDLL(str(tmp_path / LIBRARY))
    library.mbc_last_error.restype = ctypes.c_char_p
    library.mbc_last_error.argtypes = [ctypes.c_void_p]

    size = plan.predictions.arena_bytes
    arena = gpu.allocate(size)
    streams = (ctypes.c_void_p * len(STREAMS))(*(gpu.stream() for _ in STREAMS))
    module = ctypes.c_void_p()
    status = library.mbc_create(
        ctypes.c_void_p(arena),
        ctypes.c_uint64(size),
        None,
        ctypes.c_uint64(0),
        None,
        ctypes.c_uint64(0),
        streams,
        None,
        ctypes.byref(module),
    )
    assert status == 0, library.mbc_last_error(None).decode()
    generator = np.random.default_rng(1)
    inputs = [_inputs(p.case, generator) for p in placed]

    def fill() -> None:
        gpu.write(arena, np.full(size, 0xFF, np.uint8))  # NaN in every format, so that unwritten elements show
        for p, arrays in zip(placed, inputs, strict=True):
            for i, at in enumerate(p.buffers[:2]):
                buffer = plan.buffers[at]
                gpu.write(arena + plan.offsets[at], stored_bytes(arrays[i], buffer.dtype, buffer.layout))

    def errors() -> dict[str, float]:
        data = gpu.read(arena, size)
        error_of: dict[str, float] = {}
        for p in placed:
            operands: list[NDArray[Any]] = []
            for at in p.buffers:
                buffer, offset = plan.buffers[at], plan.offsets[at]
                assert buffer.value is not None
                shape = plan.graph.values[buffer.value].type.shape
                operands.append(loaded(data[offset : offset + buffer.size_bytes], shape, buffer.dtype, buffer.layout))
            expected = _expected(p.case, operands[:2])
            difference = np.linalg.norm(np.asarray(operands[2], np.float64) - expected)
            error_of[p.case.name] = float(difference / np.linalg.norm(expected))
        return error_of

    fill()
    assert library.mbc_run_eager(module, 0) == 0, library.mbc_last_error(module).decode()
    eager = errors()
    assert library.mbc_capture(module) == 0, library.mbc_last_error(module).decode()
    fill()
    assert library.mbc_run(module, 0) == 0, library.mbc_last_error(module).decode()
    gpu.synchronize()
    replayed = errors()
    library.mbc_destroy(module)
    gpu.close()

    worst = sorted(eager.items(), key=lambda item: -item[1])[:5]
    print(f"{precision}: {len(eager)} launches, worst " + "; ".join(f"{name}: {error:.1e}" for name, error in worst))
    tolerance = TOLERANCES[precision]
    bad = {name: error for name, error in (*eager.items(), *replayed.items()) if not error <= tolerance}
    assert not bad, f"{len(bad)} of {len(eager)}: " + "; ".join(f"{n}: {e:.1e}" for n, e in list(bad.items())[:20])
