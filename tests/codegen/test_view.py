"""Plans as flat rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.codegen.view import COPY, Launcher, view
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.plan.model import Kernel
from tests.codegen.plans import providers, small_plan, with_legacy


def test_rows_carry_everything() -> None:
    rows = view(small_plan(), providers())
    assert rows.libraries == ("cudnn", "cublaslt")
    (program,) = rows.generated
    assert rows.symbols == (program.symbol,)
    assert rows.launchers[0] == Launcher(COPY, COPY)
    assert [row.waits for row in rows.train[:5]] == [(), (), (1,), (), (2, 3)]
    assert [row.stream for row in rows.train[:5]] == [0, 0, 1, 0, 2]
    second = rows.train[1]
    plan = small_plan()
    assert second.offsets[0] == plan.offsets[0] + 5 * 3 * 6 * 6 * 4  # x, from row 5
    assert second.offsets[1] == plan.offsets[1]  # w is not per sample
    to_host, to_device = rows.train[2], rows.train[4]
    assert to_host.offsets == (plan.offsets[2], -1)
    assert to_host.integers == (8 * 4 * 6 * 4 * 4,)
    assert to_device.offsets[0] == -1 - 5 * 4 * 6 * 4 * 4
    assert to_device.integers == (3 * 4 * 6 * 4 * 4,)


def test_convolutions_of_either_api_may_stand_in_one_plan() -> None:
    mixed = view(with_legacy(small_plan(), 3, {"convolution": 1}), providers())
    assert mixed.libraries == ("cudnn", "cudnn_legacy", "cublaslt") and mixed.uses_cudnn
    assert mixed.train[0].comment == "conv (cudnn_legacy convolution algorithm=1 layout=0 math=3) rows 0..5"
    legacy_only = view(with_legacy(small_plan(), 3), providers())
    assert legacy_only.libraries == ("cudnn_legacy", "cublaslt") and legacy_only.uses_cudnn
    other = replace(legacy_only, libraries=("cublaslt",))
    assert not other.uses_cudnn


def test_comments_name_operation_kernel_and_rows() -> None:
    comments = [row.comment for row in view(small_plan(), providers()).train]
    assert comments[1] == "conv (cudnn convolution engine=-1) rows 5..8"
    assert comments[2] == "y (copy) rows 0..8"
    assert comments[3] == "relu (mbc relu) rows 0..8"


def test_arguments_come_from_the_provider() -> None:
    relu = view(small_plan(), providers()).train[3]
    assert relu.integers == (8 * 96, 0, 0, 0)
    assert relu.reals == (0.1, 1e-30)


def test_a_launch_starts_at_the_first_row_of_its_slice_though_parameters_start_at_row_0() -> None:
    plan = small_plan()
    kernel = Kernel("mbc", "convolution", (), 1.0, False)
    launches = tuple(replace(launch, work=kernel) for launch in plan.infer.launches)
    rows = view(replace(plan, infer=replace(plan.infer, launches=launches)), providers()).infer
    # EchoProvider gives the elements of the output, the first row, whether the launch adds, and bytes of workspace.
    assert [row.integers for row in rows] == [(5 * 4 * 6 * 4, 0, 0, 8192), (3 * 4 * 6 * 4, 5, 0, 8192)]


@pytest.mark.parametrize(
    ("precision", "type_"), [(Precision.FP32, 0), (Precision.TF32, 0), (Precision.BF16, 1), (Precision.FP16, 2)]
)
def test_kernels_are_compiled_for_the_type_of_the_precision(precision: Precision, type_: int) -> None:
    """elements.cuh takes 1 to be bf16 and 2 to be fp16."""
    assert view(small_plan(precision), providers()).working == type_


def test_fp64_is_not_for_gpus() -> None:
    plan = small_plan()
    plan = replace(plan, graph=replace(plan.graph, precision=Precision.FP64))
    with pytest.raises(MbcError) as caught:
        view(plan, providers())
    assert caught.value.code == "MBC090"
    assert "fp64 cannot become GPU code" in str(caught.value)
