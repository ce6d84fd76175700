"""The library that measuring calls, against recording fakes: a candidate makes the calls of a module's row."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mbc.codegen.build import build_kernel_library
from mbc.codegen.render_sources import every_kernel_file, render_kernel_library
from mbc.codegen.toolchain import Places, find_toolchain
from mbc.codegen.view import KERNEL_LIBRARIES, view
from mbc.errors import MbcError
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.cuda import KERNELS
from mbc.measure import kernel_library
from mbc.measure.kernel_library import KernelLibrary
from mbc.ops.base import NoAttributes
from mbc.plan.model import Kernel, Launch, Mode, Plan
from tests.codegen.fakes import ARENA, Call, compile_kernels_against_fake, parse_log, run_against_fake
from tests.codegen.plans import providers, small_plan

STREAM = 1  # the fake's name of the compute stream


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = (view(small_plan(precision), providers()) for precision in (Precision.FP32, Precision.BF16))
    symbols = tuple(symbol for row in rows for symbol in row.symbols)  # of relu in fp32 and in the working type
    return compile_kernels_against_fake(symbols, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def fake(built: Path) -> ctypes.CDLL:
    fake = ctypes.CDLL(str(built))
    fake.fake_log.restype = ctypes.c_char_p
    fake.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(1 << 60))
    return fake


@pytest.fixture
def library(built: Path) -> Iterator[KernelLibrary]:
    with KernelLibrary(built, STREAM, providers()) as library:
        yield library


def _calls(fake: ctypes.CDLL) -> list[Call]:
    return [entry for entry in parse_log(fake.fake_log().decode()) if isinstance(entry, Call)]


def _prepared(library: KernelLibrary, plan: Plan, launch: Launch) -> kernel_library.Call:
    """Prepare a launch of the plan as a measurement does, with types and addresses computed from the plan."""
    assert isinstance(launch.work, Kernel)
    operation = next(o for o in plan.graph.train if o.name == launch.operations[0])
    types: list[TensorType] = []
    pointers: list[int] = []
    layouts: list[Layout] = []
    workspace = workspace_bytes = 0
    for access in launch.accesses:
        buffer = plan.buffers[access.buffer]
        if buffer.value is None:
            workspace, workspace_bytes = ARENA + plan.offsets[access.buffer], buffer.size_bytes
            continue
        value = plan.graph.values[buffer.value]
        type_ = value.type.with_rows(access.rows.count) if value.per_sample else value.type
        row_bytes = value.type.with_rows(1).size_bytes if value.per_sample else 0
        types.append(type_)
        layouts.append(buffer.layout)
        pointers.append(ARENA + plan.offsets[access.buffer] + access.rows.start * row_bytes)
    count = len(operation.inputs)
    request = Request(
        operation.kind, operation.attributes, tuple(types[:count]), tuple(types[count:]), plan.graph.precision
    )
    work = launch.work
    candidate = Candidate(
        work.provider, work.name, work.settings, tuple(layouts), workspace_bytes, time_us=0.0, measured=True
    )
    accumulate = any(access.mode is Mode.ACCUMULATE for access in launch.accesses)
    first_row = max(access.rows.start for access in launch.accesses)
    return library.prepare(candidate, request, pointers, workspace, accumulate, first_row)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16])
def test_a_candidate_makes_the_calls_of_the_modules_row(
    precision: Precision, layout: str, library: KernelLibrary, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    plan = small_plan(precision, layout)
    run = run_against_fake(plan, tmp_path, providers())
    of_module = [e for e in run.eager["train"] if isinstance(e, Call) and e.name != "copy"]
    calls = [_prepared(library, plan, launch) for launch in plan.train.launches if isinstance(launch.work, Kernel)]
    assert _calls(fake) == []  # readied, not run
    for call in calls:
        call.enqueue()
    assert _calls(fake) == of_module
    assert {call.stream for call in of_module} == {STREAM - 1}
    fake.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(1 << 60))
    for call in calls:
        call.enqueue()  # as often as one likes
    assert _calls(fake) == of_module


def _relu() -> tuple[Candidate, Request]:
    tensor = TensorType((4, 8), DType.FP32)
    request = Request("relu", NoAttributes(), (tensor,), (tensor,), Precision.FP32)
    return Candidate("mbc", "relu", (), (Layout.CHANNELS_FIRST,) * 2, 0, 0.0, False), request


def test_the_workspace_comes_last_where_there_is_one(library: KernelLibrary, fake: ctypes.CDLL) -> None:
    candidate, request = _relu()
    library.prepare(candidate, request, (ARENA, ARENA + 256), ARENA + 512).enqueue()
    library.prepare(replace(candidate, workspace_bytes=64), request, (ARENA, ARENA + 256), ARENA + 512).enqueue()
    assert [call.offsets for call in _calls(fake)] == [(0, 256), (0, 256, 512)]


def test_a_launcher_that_fails(library: KernelLibrary, fake: ctypes.CDLL) -> None:
    call = library.prepare(*_relu(), (ARENA, ARENA + 256), 0)
    fake.fake_fail_at(0)
    with pytest.raises(MbcError) as caught:
        call.enqueue()
    assert caught.value.code == "MBC098"
    assert caught.value.message == "the launch of mbc relu failed: made to fail"


def test_a_library_that_refuses(library: KernelLibrary) -> None:
    plan = small_plan(engine=960)  # of the fake: needs more workspace than there is
    with pytest.raises(MbcError) as caught:
        _prepared(library, plan, plan.train.launches[0])
    assert caught.value.code == "MBC086"
    assert caught.value.message.startswith("cudnn convolution: cuDNN engine 960 needs ")


def test_a_kernel_that_does_not_exist(library: KernelLibrary) -> None:
    candidate, request = _relu()
    with pytest.raises(MbcError, match="no kernel called made_up") as caught:
        library.prepare(replace(candidate, name="made_up"), request, (ARENA, ARENA), 0)
    assert caught.value.code == "MBC086"


def test_prepared_calls_can_be_released(library: KernelLibrary, fake: ctypes.CDLL) -> None:
    plan = small_plan()
    for _ in range(2):
        _prepared(library, plan, plan.train.launches[0]).enqueue()
        library.clear()
    first, second = _calls(fake)
    assert first == second
    library.close()
    library.close()


def test_what_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "libkernels.so").write_bytes(b"text")
    with pytest.raises(MbcError, match="does not load") as caught:
        KernelLibrary(tmp_path / "libkernels.so", STREAM)
    assert caught.value.code == "MBC097"


def test_without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "find_toolchain", lambda: find_toolchain({"PATH": ""}, Places()))
    gpu: Any = SimpleNamespace(code_architecture="sm_90", stream_handle=ctypes.c_void_p(STREAM))
    with pytest.raises(MbcError) as caught:
        KernelLibrary.open(gpu, Precision.BF16)
    assert caught.value.code == "MBC096"
    assert caught.value.message.startswith("the kernels cannot be built: no nvcc (compiles kernels)")
    assert "put nvcc on PATH" in caught.value.remedy
    with pytest.raises(MbcError) as caught:
        KernelLibrary.open(gpu, Precision.FP64)
    assert caught.value.code == "MBC090"


def test_kernels_that_compare_results_are_always_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def build(*arguments: Any) -> None:
        asked.append(arguments[-1])
        raise MbcError("MBC095", "enough")

    monkeypatch.setattr(kernel_library, "build_kernel_library", build)
    gpu: Any = SimpleNamespace(code_architecture="sm_90")
    with pytest.raises(MbcError, match="enough"):
        KernelLibrary.open(gpu, Precision.BF16, ("conv1x1_mma",))
    assert asked == [("conv1x1_mma", "convert", "cast", "mse")]
    assert {KERNELS[name].kind for name in kernel_library.COMPARING} == {"convert", "cast", "mse"}


def test_every_library_of_plans_is_in_it() -> None:
    text = render_kernel_library()
    assert [name for name in KERNEL_LIBRARIES if f"    open_{name},\n" not in text] == []
    providers: dict[str, Provider] = dict(kernel_library.default_providers())
    assert set(KERNEL_LIBRARIES) <= providers.keys()
    assert "convert.cu" in every_kernel_file()


def test_builds_with_the_real_headers(tmp_path: Path) -> None:
    toolchain = find_toolchain()
    if toolchain.missing:
        pytest.skip("needs " + "; ".join(missing.name for missing in toolchain.missing))
    path = tmp_path / "libkernels.so"
    build_kernel_library("sm_90", Precision.BF16, path, toolchain)
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True).stdout
    for name in ("mbc_kernels_open", "mbc_kernels_prepare", "mbc_kernels_run", "mbc_convert", "mbc_widen"):
        assert f" T {name}\n" in symbols
