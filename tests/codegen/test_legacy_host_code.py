"""Generated host code of convolutions through cuDNN's legacy API, run against its recording fake."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.codegen.build import host_files
from mbc.codegen.render_sources import kernel_files, render
from mbc.codegen.view import view
from mbc.compiler import compile_plan
from mbc.ir.types import Precision
from mbc.kernels.cudnn_legacy import MATHS, admitted_maths
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.module import Module
from mbc.source import Source
from tests.codegen.fakes import Call, Wait, assert_as_planned, compile_against_fake, loaded, run_against_fake
from tests.codegen.plans import LEGACY_ALGORITHMS, providers, small_plan, with_legacy
from tests.runtime.nets import SMALL, batch

DEFAULT, TENSOR_OP, FMA = MATHS["DEFAULT"], MATHS["TENSOR_OP"], MATHS["FMA"]


def _legacy(precision: Precision, layout: str = "nchw") -> Plan:
    return with_legacy(small_plan(precision, layout), MATHS[admitted_maths(precision)[0]])


def _calls(plan: Plan, folder: Path) -> list[Call]:
    run = run_against_fake(plan, folder, providers())
    return [entry for entry in run.eager["train"] if isinstance(entry, Call) and entry.name == "cudnn_legacy"]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16])
def test_calls_are_the_plans(tmp_path: Path, precision: Precision, layout: str) -> None:
    plan = _legacy(precision, layout)
    assert_as_planned(run_against_fake(plan, tmp_path, providers()), plan)


def test_each_call_describes_the_operation(tmp_path: Path) -> None:
    first, second, filter_1, filter_2, data = _calls(_legacy(Precision.TF32, "nhwc"), tmp_path)
    assert [call.detail("pass") for call in (first, filter_1, data)] == ["forward", "backward_filter", "backward_data"]
    assert [call.detail("algorithm") for call in (first, filter_1, data)] == ["1", "0", "2"]
    assert {call.detail("math") for call in (first, filter_1, data)} == {str(DEFAULT)}
    assert (first.detail("image"), second.detail("image"), data.detail("image")) == ("5,3,6,6", "3,3,6,6", "8,3,6,6")
    assert (first.detail("filter"), first.detail("result")) == ("4,3,3,3", "5,4,6,4")
    assert (first.detail("strides"), first.detail("format")) == ("108,1,18,3", "1")
    assert (first.detail("pad"), first.detail("stride"), first.detail("dilation")) == ("1,0", "1,1", "1,1")
    assert (first.detail("groups"), first.detail("types")) == ("1", "0,0,0")
    assert [call.detail("beta") for call in (first, filter_1, filter_2, data)] == ["0", "0", "1", "0"]


def test_strict_fp32_and_channels_first(tmp_path: Path) -> None:
    calls = _calls(_legacy(Precision.FP32), tmp_path)
    assert {call.detail("math") for call in calls} == {str(FMA)}
    assert (calls[0].detail("strides"), calls[0].detail("format")) == ("108,36,6,1", "0")


@pytest.mark.parametrize(("precision", "code"), [(Precision.BF16, "9"), (Precision.FP16, "2")])
def test_filter_gradients_of_half_precision_are_widened(tmp_path: Path, precision: Precision, code: str) -> None:
    calls = [call for call in _calls(_legacy(precision), tmp_path) if call.detail("pass") == "backward_filter"]
    assert [call.detail("types") for call in calls] == [",".join(code * 3)] * 2
    assert [call.detail("math") for call in calls] == [str(TENSOR_OP)] * 2
    assert [call.detail("mbc_widen").split()[1][-2:] for call in calls] == [",0", ",1"]  # written, then added
    assert [call.detail("beta") for call in calls] == ["0", "0"]  # in the workspace nothing is added
    source, target = calls[0].detail("mbc_widen").split()[0].removeprefix("offsets=").split(",")
    assert calls[0].offsets[1] == int(source) != int(target)
    assert int(calls[0].detail("workspace")) == int(source) + 256
    assert int(calls[0].detail("workspace_bytes")) == 8192 - 256


def test_both_apis_share_one_handle_and_give_everything_back(tmp_path: Path) -> None:
    plan = with_legacy(small_plan(), FMA, {"convolution": 1})
    library = loaded(compile_against_fake(view(plan, providers()), tmp_path))
    for _ in range(2):  # a module leaves nothing behind
        with library as (lib, _):
            assert lib.fake_cudnn_handles() == 1
            # Image, filter, result and convolution of the slices of 5 and of 3 rows; inference runs the same.
            assert lib.fake_cudnn_descriptors() == 2 * 4
    assert (library.lib.fake_cudnn_handles(), library.lib.fake_cudnn_descriptors()) == (0, 0)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (7, "needs 3500 bytes of workspace here, the plan has 3072: compile the source again with this cuDNN"),
        (3, "cuDNN forward workspace: "),
        (9, "cuDNN forward workspace: "),
    ],
)
def test_mismatches_are_refused_before_anything_runs(tmp_path: Path, algorithm: int, message: str) -> None:
    plan = with_legacy(small_plan(workspace_bytes=3072), FMA, {"convolution": algorithm})
    library = loaded(compile_against_fake(view(plan, providers()), tmp_path))
    assert library.create() == 1
    text = library.lib.mbc_last_error(None).decode()
    start = f"launch 0, conv (cudnn_legacy convolution algorithm={algorithm} layout=0 math=3) rows 0..5: "
    assert text.startswith(start) and message in text
    assert library.lib.fake_cudnn_handles() == 0


def test_a_filter_gradient_must_fit_its_workspace(tmp_path: Path) -> None:
    plan = with_legacy(small_plan(Precision.BF16, workspace_bytes=128), TENSOR_OP, {"convolution_backward_filter": 0})
    library = loaded(compile_against_fake(view(plan, providers()), tmp_path))
    assert library.create() == 1
    assert "too small for the filter gradient" in library.lib.mbc_last_error(None).decode()


def test_sources_have_all_parts_for_either_api() -> None:
    rows = view(with_legacy(small_plan(), FMA), providers())
    assert host_files(rows) == ["module.cpp", "cudnn_calls.cpp", "legacy_convolution.cpp", "cublaslt.cpp"]
    assert "widen.cu" in kernel_files(rows)
    text = render(rows, "1.0")["program.cpp"]
    assert "    open_cudnn_legacy,\n    open_cublaslt,\n" in text and "    cudnn_version,\n" in text
    both = view(with_legacy(small_plan(), FMA, {"convolution": 1}), providers())
    assert host_files(both).count("cudnn_calls.cpp") == 1


def test_a_network_runs_through_it_here_and_there(tmp_path: Path) -> None:
    """A plan whose convolutions use the legacy API is verified, interpreted, and run by the fakes."""
    planned = compile_plan(Source("small.mbc", SMALL), Options(gpu="h200", micro_batch=2))
    plan = with_legacy(planned, FMA, dict.fromkeys(LEGACY_ALGORITHMS, 0))
    assert plan != planned
    verify_plan(plan)
    losses = [float(Module(p, seed=1, device="cpu").step(*batch(), lr=0.1)) for p in (planned, plan)]
    assert losses[0] == losses[1]
    run = run_against_fake(plan, tmp_path)
    assert_as_planned(run, plan)
    for log in run.captured.values():
        assert any(not isinstance(call, Wait) and call.name == "cudnn_legacy" for call in log)
