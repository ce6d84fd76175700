"""Steps predicted without a profile: jobs, rows and what was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import posed
import unprofiled_steps as steps
from plans import Planned

from mbc.hardware.target import find_device


def test_twelve_networks_are_predicted_as_three_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> Path:
        raise SystemExit(f"{name} needs torchvision")

    monkeypatch.setattr(posed, "written", refuse)
    assert len(steps.cases()) == 12
    wanted = steps.jobs("h200", ["resnet50", "vgg16 64 as 64", "vit"])
    poses = ("sm_80", "64@sm_80", "sm_86")
    assert list(wanted) == [*(f"resnet50 128 as {pose}" for pose in poses), "vgg16 64 as 64@sm_80"]
    assert [find_device(job.gpu).multiprocessors for job in wanted.values()] == [132, 64, 132, 64]
    assert capsys.readouterr().out == "vit_b_16 64 is left out: torchvision/vit_b_16 needs torchvision\n"


@pytest.mark.parametrize(("step_ms", "within"), [(10.0, True), (12.0, False), (8.1, True)])
def test_a_row_has_the_error_of_its_prediction(step_ms: float, within: bool) -> None:
    planned = Planned("s", 9.0, (), interval_ms=(8.0, 11.0), library_launches=3)
    row = steps.row_of("unet as sm_80", planned, {"step_ms": step_ms})
    assert row["error"] == pytest.approx(abs(9.0 / step_ms - 1)) and row["within"] is within
    assert not row["fitted"] and steps.row_of("vgg16 64 as sm_80", planned, {})["fitted"]
    assert steps.row_of("unet as sm_80", Planned("", 0.0, (), "no kernel"), {})["failed"] == "no kernel"


def test_the_median_and_the_worst_error_are_asked_for() -> None:
    rows = [{"error": error, "within": True} for error in (0.1, 0.12, 0.3)]
    assert steps.summary([*rows, {"failed": "no kernel"}])["passed"] and not steps.summary([])
    assert not steps.summary([*rows, {"error": 0.4, "within": False}])["passed"]
    assert steps.summary([*rows, {"error": 0.4, "within": False}])["within"] == 3
