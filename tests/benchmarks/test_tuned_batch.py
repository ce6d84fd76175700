"""The benchmark of proposed mini-batches: what it compares, which it runs, and how PyTorch's largest are looked for."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import tuned_batch

STEP = {"step_ms": 500.0, "spread_ms": 1.0, "arena_predicted": 7, "arena_taken": 7}


def planned(batch: int) -> dict[str, Any]:
    return {"name": f"batch {batch}", "batch": batch, "predicted_ms": 450.0}


def peer(batch: int, images_s: float) -> dict[str, Any]:
    return {"batch": batch, "images_s": images_s}


def test_a_row_compares_with_the_larger_and_with_the_faster_of_pytorchs() -> None:
    peers = {"eager": peer(48, 380.0), "compiled": peer(40, 400.0)}
    row = tuned_batch.measured(planned(480), {"step": STEP}, peers)
    assert row["images_s"] == 960.0 and row["predicted_over_measured"] == 0.9 and row["arena_equal"]
    assert (row["torch_batch"], row["torch_images_s"]) == (48, 400.0)
    assert row["times_batch"] == 10.0 and row["times_speed"] == pytest.approx(2.4) and row["passed"]


@pytest.mark.parametrize(
    ("batch", "images_s", "passed"),
    [(60, 960.0, True), (64, 960.0, False), (60, 961.0, False)],  # 8 times as many rows, at no lower images/s
)
def test_a_row_passes_by_both(batch: int, images_s: float, passed: bool) -> None:
    row = tuned_batch.measured(planned(480), {"step": STEP}, {"eager": peer(batch, images_s)})
    assert row["passed"] is passed


def test_a_row_that_failed_or_has_no_peers_is_not_compared() -> None:
    failed = tuned_batch.measured(planned(480), {"step": {"failed": "no"}}, {"eager": peer(48, 380.0)})
    assert failed == planned(480) | {"failed": "no"}
    alone = tuned_batch.measured(planned(480), {"step": STEP}, {})
    assert alone["images_s"] == 960.0 and "passed" not in alone and "torch_batch" not in alone


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder without results; `mbc tune` proposes 64 and 128 on one GPU and 256 on two."""
    rows = [
        {"gpus": 1, "batch": 64, "fits": True},
        {"gpus": 1, "batch": 512, "fits": False},
        {"gpus": 1, "batch": 128, "fits": True},
        {"gpus": 2, "batch": 256, "fits": True},
        {"gpus": 2, "batch": 1024, "fits": False},
    ]
    monkeypatch.setattr(tuned_batch, "RESULTS", tmp_path)
    monkeypatch.setattr(tuned_batch, "tuned", lambda gpu: {"rows": rows})
    return tmp_path


def asked(plan_only: bool) -> argparse.Namespace:
    return argparse.Namespace(plan_only=plan_only, gpu="h200")


def test_the_ladder_is_what_fits_largest_first(results: Path) -> None:
    on_two = {"gpus": 2, "batch": 256, "fits": True}
    assert tuned_batch.ladder(asked(plan_only=False)) == ([128, 64], [on_two])


def test_steps_run_on_the_ladder_that_was_planned(results: Path) -> None:
    found = {"on_several": [{"gpus": 2, "batch": 96}], "rows": [planned(48), {"name": "batch 40", "failed": "no"}]}
    (results / "tuned_batch_planned.json").write_text(json.dumps(found))
    assert tuned_batch.ladder(asked(plan_only=False)) == ([48], [{"gpus": 2, "batch": 96}])
    assert tuned_batch.ladder(asked(plan_only=True))[0] == [128, 64]  # planned anew


@pytest.mark.parametrize(
    ("fits", "largest", "tried"),
    [
        (72, 72, [48, 56, 64, 72, 80]),
        (96, 96, [48, 56, 64, 72, 80, 88, 96, 104, 112, 120]),
        (80, 80, [48, 56, 64, 72, 80, 88, 96, 104, 112, 120]),  # all of the first five, none of the next
        (44, 40, [48, 56, 64, 72, 80]),  # none that is larger than the eager one's
    ],
)
def test_the_largest_compiled_batch_is_looked_for_above_the_eager_one(
    monkeypatch: pytest.MonkeyPatch, fits: int, largest: int, tried: list[int]
) -> None:
    looked: list[int] = []

    def child(asked: Mapping[str, Any]) -> dict[str, Any]:
        if not asked["compiled"]:
            assert asked["batches"] == "climb" and asked["steps"] == 20
            return {"batch": 40, "images_s": 380.0, "limit": 11}
        assert asked["limit"] == 11  # the memory that the eager one was left
        (batch,) = asked["batches"]
        if not asked["steps"]:
            looked.append(batch)
        return {"batch": batch if batch <= fits else 0, "images_s": 400.0}

    monkeypatch.setattr(tuned_batch, "child", child)
    found = tuned_batch.peers(20)
    assert sorted(looked) == tried
    assert found["eager"]["batch"] == 40 and found["compiled"]["batch"] == largest


def test_a_compiled_network_that_fits_in_no_batch_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(asked: Mapping[str, Any]) -> dict[str, Any]:
        return {"batch": 0 if asked["compiled"] else 40, "images_s": 380.0, "limit": 11}

    monkeypatch.setattr(tuned_batch, "child", child)
    assert list(tuned_batch.peers(20)) == ["eager"]
