"""Generated host code against recording fakes of CUDA, cuDNN and cuBLASLt: its calls are those of the plan."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from mbc.codegen.view import view
from mbc.ir.types import Precision
from mbc.ops.convolution import Convolution
from mbc.runtime.library import ABI_VERSION
from tests.codegen.fakes import (
    ARENA,
    HOST,
    PROGRAMS,
    Call,
    as_planned,
    assert_as_planned,
    compile_against_fake,
    expected_log,
    loaded,
    parse_log,
    run_against_fake,
)
from tests.codegen.plans import VOLUME, pointwise_plan, providers, small_plan


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16])
def test_calls_are_the_plans(tmp_path: Path, precision: Precision, layout: str) -> None:
    plan = small_plan(precision, layout)
    run = run_against_fake(plan, tmp_path, providers())
    assert_as_planned(run, plan)
    assert run.replayed == ("replay stream=0", "replay stream=0")


def _cudnn_calls(tmp_path: Path, precision: Precision, layout: str = "nchw", engine: int = -1) -> list[Call]:
    run = run_against_fake(small_plan(precision, layout, engine), tmp_path, providers())
    return [entry for entry in run.eager["train"] if isinstance(entry, Call) and entry.name == "cudnn"]


def test_convolutions_describe_the_operation(tmp_path: Path) -> None:
    first, second, filter_1, filter_2, data = _cudnn_calls(tmp_path, Precision.FP32, "nhwc")
    assert [call.detail("pass") for call in (first, filter_1, data)] == ["forward", "backward_filter", "backward_data"]
    assert (first.detail("image"), second.detail("image"), data.detail("image")) == ("5,3,6,6", "3,3,6,6", "8,3,6,6")
    assert (first.detail("filter"), first.detail("result")) == ("4,3,3,3", "5,4,6,4")
    assert first.detail("strides") == "108,1,18,3"
    assert (first.detail("before"), first.detail("after")) == ("1,0", "1,0")
    assert [call.detail("beta") for call in (first, filter_1, filter_2, data)] == ["0", "0", "1", "0"]


def test_heuristics_admit_by_precision_and_workspace(tmp_path: Path) -> None:
    """Only the fake's engine that precision and workspace admit is used. Determinism is not asked for.

    The fake offers: tensor cores with a workspace that no plan has, down-conversion, FFT, Winograd, non-deterministic,
    tensor cores, plain.
    """
    assert {call.detail("engine") for call in _cudnn_calls(tmp_path / "a", Precision.FP32)} == {"964"}
    named = _cudnn_calls(tmp_path / "b", Precision.TF32, engine=965)
    assert {call.detail("engine") for call in named} == {"965"}


def test_volumes_have_an_axis_more_and_keep_to_the_planned_workspace(tmp_path: Path) -> None:
    run = run_against_fake(small_plan(Precision.TF32, "nhwc", a=VOLUME), tmp_path / "a", providers())
    calls = [entry for entry in run.eager["train"] if isinstance(entry, Call) and entry.name == "cudnn"]
    assert {call.detail("engine") for call in calls} == {"964"}  # the first that is offered, 960, needs more
    sizes = {"image": "5,3,5,6,7", "filter": "4,3,2,3,3", "result": "5,4,2,6,5", "strides": "630,1,126,21,3"}
    expected = sizes | {"before": "1,1,0", "stride": "2,1,1", "dilation": "3,1,1"}
    assert {name: calls[0].detail(name) for name in expected} == expected
    library = loaded(compile_against_fake(view(small_plan(engine=960, a=VOLUME), providers()), tmp_path / "b"))
    assert library.create() == 1
    assert ": cuDNN engine 960 needs " in library.lib.mbc_last_error(None).decode()


def test_tensors_of_2_to_the_31_elements_need_cudnn_9_3(tmp_path: Path) -> None:
    large = small_plan(a=Convolution((1 << 9, 1 << 10, 1 << 9), (1, 1, 1)))
    library = loaded(compile_against_fake(view(large, providers()), tmp_path))
    version = ctypes.c_size_t.in_dll(library.lib, "fake_cudnn_version")
    version.value = 90200
    assert library.create() == 1
    text = library.lib.mbc_last_error(None).decode()
    assert text.startswith("launch 0, conv (cudnn convolution engine=-1) rows 0..5: a tensor has 4026531840 elements")
    assert text.endswith("fewer than 2^31: install cuDNN 9.3 or later")
    version.value = 90300
    assert library.create() == 0


def test_filter_gradients_of_half_precision_are_widened(tmp_path: Path) -> None:
    calls = [call for call in _cudnn_calls(tmp_path, Precision.BF16) if call.detail("pass") == "backward_filter"]
    assert [call.detail("types") for call in calls] == ["9,9,9", "9,9,9"]
    assert [call.detail("mbc_widen").split()[1] for call in calls] == ["integers=1,108,0", "integers=1,108,1"]
    assert [call.detail("beta") for call in calls] == ["0", "0"]
    source = int(calls[0].detail("mbc_widen").split()[0].removeprefix("offsets=").split(",")[0])
    assert int(calls[0].detail("workspace")) == source + 256


def test_products_are_row_major(tmp_path: Path) -> None:
    run = run_against_fake(small_plan(Precision.TF32), tmp_path, providers())
    calls = [entry for entry in run.eager["train"] if isinstance(entry, Call) and entry.name == "cublaslt"]
    forward, filter_1, filter_2, data = calls
    # Columns of cuBLASLt are our rows: y^T [10 x 8] = w [96 x 10]^T x [96 x 8].
    assert (forward.detail("a"), forward.detail("b"), forward.detail("d")) == ("96,10", "96,8", "10,8")
    assert (filter_1.detail("a"), filter_1.detail("b"), filter_1.detail("d")) == ("96,5", "10,5", "96,10")
    assert (data.detail("a"), data.detail("b"), data.detail("d")) == ("96,10", "10,8", "96,8")
    assert [call.detail("transposed") for call in calls] == ["1,0", "0,1", "0,1", "0,0"]
    assert [call.detail("beta") for call in calls] == ["0", "0", "1", "0"]
    assert forward.detail("types") == "0,0,0,77"
    assert (forward.detail("workspace_bytes"), filter_2.detail("workspace_bytes")) == ("8192", "0")


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_one_by_one_convolutions_are_products_over_pixels(tmp_path: Path, precision: Precision) -> None:
    plan = pointwise_plan(precision, algorithm=2)
    run = run_against_fake(plan, tmp_path, providers())
    assert as_planned(run.captured["train"]) == expected_log(plan, "train")
    calls = [entry for entry in run.eager["train"] if isinstance(entry, Call)]
    shapes = [(call.detail("a"), call.detail("b"), call.detail("d")) for call in calls]
    assert shapes[:2] == [("4,7", "4,30", "7,30"), ("4,7", "4,18", "7,18")]
    assert shapes[2:4] == [("4,30", "7,30", "4,7"), ("4,18", "7,18", "4,7")]
    assert shapes[4:] == [("4,7", "7,30", "4,30"), ("4,7", "7,18", "4,18")]
    assert [call.detail("beta") for call in calls] == ["0", "0", "0", "1", "0", "0"]
    # Filter gradients are fp32 (0), whatever the operands are; strict fp32 stays without TF32 (68).
    operand = "0" if precision is Precision.FP32 else "14"
    assert [call.detail("types").split(",")[2] for call in calls] == [operand] * 2 + ["0"] * 2 + [operand] * 2
    assert {call.detail("types").split(",")[3] for call in calls} == {"68"}
    assert {call.detail("algorithm") for call in calls} == {"2"}


def test_an_algorithm_that_is_not_there_is_refused(tmp_path: Path) -> None:
    other = loaded(compile_against_fake(view(pointwise_plan(Precision.FP32, algorithm=3), providers()), tmp_path))
    assert other.create() == 1
    text = other.lib.mbc_last_error(None).decode()
    assert text.startswith("launch 0, convolution (cublaslt convolution algorithm=3) rows 0..5: cuBLASLt has 3 algo")
    assert text.endswith("the plan needs number 3 counted from 0: compile the source again with this cuBLASLt")


def test_kernels_get_their_arguments(tmp_path: Path) -> None:
    run = run_against_fake(small_plan(), tmp_path, providers())
    kernels = [entry for entry in run.eager["train"] if isinstance(entry, Call) and "mbc_map" in entry.name]
    assert [call.integers for call in kernels] == [(8 * 96, 0, 0, 0), (3 * 10, 5, 0, 0)]


def test_failures_name_the_operation(tmp_path: Path) -> None:
    library = compile_against_fake(view(small_plan(), providers()), tmp_path)
    with loaded(library) as (lib, module):
        assert lib.mbc_abi_version() == ABI_VERSION
        assert lib.mbc_cudnn_version() == 91900
        assert lib.mbc_run(module, 0) == 1
        assert "mbc_capture" in lib.mbc_last_error(module).decode()
        assert lib.mbc_run_eager(module, 2) == 1
        assert "no program 2" in lib.mbc_last_error(module).decode()
        lib.fake_fail_at(3)
        assert lib.mbc_run_eager(module, 0) == 1
        assert lib.mbc_last_error(module).decode() == "launch 3, relu (mbc relu) rows 0..8: made to fail"
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(0))
        lib.fake_fail_at(3)
        assert lib.mbc_capture(module) == 1  # the capture is ended, and can be tried again
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(0))
        assert lib.mbc_capture(module) == 0
        assert lib.mbc_last_error(module) == b""


def test_launches_run_one_by_one(tmp_path: Path) -> None:
    """Each launch alone makes the calls that it makes in the whole program."""
    plan = small_plan()
    with loaded(compile_against_fake(view(plan, providers()), tmp_path)) as (lib, module):
        for number, name in enumerate(PROGRAMS):
            launches = getattr(plan, name).launches
            whole = [entry for entry in expected_log(plan, name) if isinstance(entry, Call)]
            lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
            calls: list[Call] = []
            for index in range(len(launches)):
                assert lib.mbc_run_launch(module, number, ctypes.c_int64(index)) == 0, lib.mbc_last_error(module)
                calls = [entry for entry in as_planned(parse_log(lib.fake_log().decode())) if isinstance(entry, Call)]
                assert calls == whole[: index + 1]
            for index in (-1, len(launches)):
                assert lib.mbc_run_launch(module, number, ctypes.c_int64(index)) == 1
                assert lib.mbc_last_error(module).decode() == f"there is no launch {index}"
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
        lib.fake_fail_at(0)
        assert lib.mbc_run_launch(module, 0, ctypes.c_int64(3)) == 1
        assert lib.mbc_last_error(module).decode() == "launch 3, relu (mbc relu) rows 0..8: made to fail"
        assert lib.mbc_run_launch(module, 2, ctypes.c_int64(0)) == 1
        assert lib.mbc_last_error(module).decode() == "there is no program 2"


def test_creation_refuses_mismatches(tmp_path: Path) -> None:
    plan = small_plan()
    library = loaded(compile_against_fake(view(plan, providers()), tmp_path / "a"))
    assert library.create(arena_bytes=4096) == 1
    needed = plan.predictions.arena_bytes
    assert library.lib.mbc_last_error(None).decode() == f"the arena has 4096 bytes, the plan needs {needed}"
    assert library.create(arena=ARENA + 16) == 1
    assert "not aligned to 256" in library.lib.mbc_last_error(None).decode()

    wrong_engine = loaded(compile_against_fake(view(small_plan(engine=960), providers()), tmp_path / "b"))
    assert wrong_engine.create() == 1
    text = wrong_engine.lib.mbc_last_error(None).decode()
    assert text.startswith("launch 0, conv (cudnn convolution engine=960 knob2=7) rows 0..5: cuDNN engine 960 needs ")
    assert text.endswith("bytes of workspace here, the plan has 8192: compile the source again with this cuDNN")
