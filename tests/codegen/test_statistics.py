"""Convolutions with statistics in the epilogue, in host code: two operations for cuDNN, then a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.codegen.view import view
from tests.codegen.fakes import Call, assert_as_planned, compile_against_fake, loaded, run_against_fake
from tests.codegen.plans import providers, small_plan, statistics_plan

SUMS_BYTES = 256  # 2 x 24 channels of fp32, as workspaces are aligned


def test_calls_are_the_plans(tmp_path: Path) -> None:
    plan = statistics_plan()
    assert_as_planned(run_against_fake(plan, tmp_path, providers()), plan)


def test_sums_are_at_the_start_of_the_workspace(tmp_path: Path) -> None:
    plan = statistics_plan()
    (call,) = run_against_fake(plan, tmp_path, providers()).eager["train"]
    assert isinstance(call, Call)
    start = plan.offsets[-1]
    assert call.detail("sums") == f"{start},{start + 24 * 4}"
    assert int(call.detail("workspace")) == start + SUMS_BYTES
    mean, variance = plan.offsets[3:5]
    # Channels, and elements of each.
    assert call.detail("mbc_moments") == f"offsets={start},{mean},{variance} integers=24,{8 * 6 * 6}"
    # Of the heuristics' engines the first that is admitted: nothing else is known of these than of other convolutions.
    assert (call.detail("pass"), call.detail("engine"), call.detail("types")) == ("forward", "965", "2,2,2")
    assert (call.detail("image"), call.detail("result"), call.detail("beta")) == ("8,8,6,6", "8,24,6,6", "0")


@pytest.mark.parametrize(
    ("workspace_bytes", "text"),
    [
        (SUMS_BYTES - 1, "the planned workspace is too small for the sums"),
        (
            SUMS_BYTES + 127,
            "needs 128 bytes of workspace here, the plan has 127: compile the source again with this cuDNN",
        ),
    ],
)
def test_the_engine_has_the_workspace_beyond_the_sums(workspace_bytes: int, text: str, tmp_path: Path) -> None:
    small = loaded(compile_against_fake(view(statistics_plan(965, workspace_bytes), providers()), tmp_path / "small"))
    assert small.create() == 1
    assert small.lib.mbc_last_error(None).decode().endswith(text)
    enough = loaded(
        compile_against_fake(view(statistics_plan(965, SUMS_BYTES + 128), providers()), tmp_path / "enough")
    )
    with enough as (lib, module):
        assert lib.mbc_run_eager(module, 0) == 0


def test_other_convolutions_have_one_operation(tmp_path: Path) -> None:
    run = run_against_fake(small_plan(), tmp_path, providers())
    calls = [entry for entry in run.eager["train"] if isinstance(entry, Call) and entry.name == "cudnn"]
    assert calls and not any({"sums", "mbc_moments"} & dict(call.details).keys() for call in calls)
