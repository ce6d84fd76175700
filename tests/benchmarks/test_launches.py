"""The plans that benchmarks/launches.py checks, and its verdict on them."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

from mbc.plan.file import PLAN_FILE, dump_plan, load_plan
from tests.runtime.nets import small_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import launches
from shelf import Shelf


def test_every_plan_that_is_timed_is_checked_once():
    rows = launches.rows("h200")
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    assert {"resnet50 256 bf16", "resnet50 256 bf16 9gb", "vgg16 64 fp32", "capuchin resnet50"} <= set(names)
    assert "resnet50 256 bf16 max autotune" not in names  # the same plan beside other peers
    assert {row.what for row in rows if row.make is None} == {launches.CAPPED}


def test_plans_are_made_with_the_settings_that_were_timed():
    row = next(row for row in launches.rows("h200") if row.name == "resnet18 8 bf16")
    assert row.make is not None
    plan = load_plan(gzip.decompress(row.make()).decode(), "plan.json")
    assert (plan.graph.name, plan.graph.batch, plan.graph.precision) == ("resnet", 8, "bf16")


def test_a_row_sums_up_all_launches(tmp_path: Path):
    plan = small_plan("bf16")
    (tmp_path / PLAN_FILE).write_text(dump_plan(plan))
    row = launches.check(tmp_path, 2, 0, "cpu")
    assert row["passed"] and row["failing"] == row["wrong"] == 0
    assert row["launches"] == len(plan.train.launches) + len(plan.infer.launches)
    assert sum(kind["launches"] for kind in row["kinds"].values()) == row["launches"]
    assert 0 < row["roundoffs"] == max(kind["roundoffs"] for kind in row["kinds"].values()) < 2
    assert len(row["worst"]) == launches.WORST
    assert (row["network"], row["batch"], row["precision"]) == ("small", 6, "bf16")


def test_infinite_or_wrong_results_come_first():
    def launch(kind: str, passed: bool, **output: object) -> dict[str, object]:
        measures = {"roundoffs": 0.5, "worst_element": 1.0, "wrong": 0, "elements": 8, **output}
        return {"kind": kind, "passed": passed, "outputs": [measures]}

    listed = [launch("add", True)] * 6 + [launch("mul", False, wrong=2), launch("scale", False, roundoffs=None)]
    about = {"network": "n", "batch": 1, "precision": "fp32", "reference": "NumPy", "passed": False}
    row = launches.summary({**about, "launches": listed})
    assert [one["kind"] for one in row["worst"][:3]] == ["mul", "scale", "add"]
    assert (row["failing"], row["wrong"], row["roundoffs"]) == (2, 2, None)
    assert row["kinds"]["scale"]["roundoffs"] is None and row["kinds"]["mul"]["wrong"] == 2


def test_an_impossible_check_has_a_reason(tmp_path: Path):
    with pytest.raises(RuntimeError, match="MBC184"):
        launches.check(tmp_path, 2, 0, "cpu")


def test_plans_that_others_make_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = next(row for row in launches.rows("h200") if row.make is None)
    launches.prepare([row], Shelf(tmp_path), 1)
    assert f"{row.name}: no plan in {tmp_path}, capped.py --plan-only makes it" in capsys.readouterr().err
