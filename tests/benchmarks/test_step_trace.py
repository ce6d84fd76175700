"""The step of a plan that lies on the shelf, recorded on a GPU that is not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import record
import step_trace
from shelf import pack

from mbc.record.recorder import Event
from mbc.record.step import RecordedStep, recorded_step
from mbc.report.measured import measured_step
from tests.record.test_step import replay
from tests.runtime.nets import small_plan


def test_a_record_of_a_packed_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    plan = small_plan()
    (tmp_path / "x.capped.json.gz").write_bytes(pack(plan))
    events: list[Event] = list(replay(plan, 1))

    def recorded(folder: Path, device: str, inputs: Mapping[str, Any], rate: float) -> RecordedStep:
        assert folder.name == "package" and device == "cuda"
        assert {name: array.shape for name, array in inputs.items()} == {"image": (6, 2, 6, 6), "target": (6,)}
        return recorded_step(plan, events, 0)

    monkeypatch.setattr(step_trace, "need_gpu", lambda instead: None)
    monkeypatch.setattr(step_trace, "build", lambda plan, folder: "")
    monkeypatch.setattr(step_trace, "record_package", recorded)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["step_trace.py", str(tmp_path / "x.capped.json.gz")])
    step_trace.main()
    found = json.loads((tmp_path / "step_trace_x_capped.json").read_text())
    assert found["left"] == {} and found["steps"] == 1 and "code" in found
    measured = measured_step(plan, found, "step_trace_x_capped.json")
    assert measured.step_us == pytest.approx(recorded_step(plan, events, 0).step_us)
    assert "launches recorded" in capsys.readouterr().out
