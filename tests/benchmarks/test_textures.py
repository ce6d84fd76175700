"""The benchmark of accuracies in pairs: its verdict, its page, its crops, and the equality of both recipes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import textures_task
from accuracy_pages import accuracy_pages
from record import Results
from textures import judged, pairs_left
from textures_task import CROP, PATCH, PICTURES, TEST, TRAIN, Crops, Task, centre
from textures_training import by_mbc, by_torch

from mbc.compiler import compile_plan
from mbc.options import Options


def pairs(*accuracies: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"seed": seed, "mbc": {"accuracy": ours}, "torch": {"accuracy": theirs}}
        for seed, (ours, theirs) in enumerate(accuracies)
    ]


@pytest.mark.parametrize(
    ("below", "passed"),
    # Standard deviation of the differences 0.02, of their mean over four pairs 0.01.
    [(-0.10, True), (0.0, True), (0.0199, True), (0.0201, False), (0.1, False)],
)
def test_a_difference_of_two_standard_errors_passes(below: float, passed: bool) -> None:
    spread = 0.02 * 3**0.5 / 2
    verdict = judged(pairs(*((0.8 + sign * spread - below, 0.8) for sign in (-1, 1, -1, 1))), 4)
    assert verdict["standard_error"] == pytest.approx(0.01) and verdict["difference"] == pytest.approx(-below)
    assert verdict["passed"] is passed and verdict["pairs"] == 4


def test_differences_are_of_pairs() -> None:
    """A difference that both trainings of a seed share does not count as noise."""
    verdict = judged(pairs((0.70, 0.71), (0.90, 0.911), (0.80, 0.809)), 3)
    assert verdict["standard_error"] < 0.001 and verdict["passed"] is False


def test_there_is_no_verdict_before_all_pairs() -> None:
    assert judged(pairs((0.8, 0.8)), 1)["passed"] is None
    assert judged(pairs((0.8, 0.8), (0.7, 0.7)), 3)["passed"] is None


def test_a_later_call_takes_the_pairs_that_are_missing() -> None:
    task = Task(True)
    held = Results("textures", {}, {task.name: {"name": task.name, "each": [{"seed": 2}, {"seed": 0}]}})
    assert pairs_left(task, 4, held) == [1, 3] and pairs_left(Task(False), 2, held) == [0, 1]


def test_the_page_agrees_with_the_file(tmp_path: Path) -> None:
    assert accuracy_pages(tmp_path) == ({}, [])
    row = {"name": "net, own crops", **judged(pairs((0.9, 0.88), (0.8, 0.81)), 2)}
    about = {"gpu": "A GPU", "driver": "1", "date": "2026-01-02T03:04", "command": "python textures.py"}
    (tmp_path / "textures.json").write_text(json.dumps({**about, "rows": [row, {"name": "of other code"}]}))
    _, page = accuracy_pages(tmp_path)
    assert [line for line in page if line.startswith("| net")] == [
        "| net, own crops | 2 | 85.0% | 84.5% | +0.50 | 1.50 | +0.3 | yes |"
    ]
    assert not any("of other code" in line for line in page)


def test_crops_take_every_offset_and_side_alike() -> None:
    places = np.stack(np.meshgrid(np.arange(PATCH), np.arange(PATCH), indexing="ij"), -1).astype(np.uint8)
    photos = np.repeat(places[None], 4000, 0)
    crops = Crops(0)(photos)
    assert crops.shape == (4000, CROP, CROP, 2)
    top, left, right = crops[:, 0, 0, 0], crops[:, 0, 0, 1], crops[:, 0, -1, 1]
    mirrored = left > right
    shifts = PATCH - CROP + 1
    expected = 4000 / shifts
    for offsets in (top, np.minimum(left, right)):
        assert np.abs(np.bincount(offsets, minlength=shifts) - expected).max() < 5 * expected**0.5
    assert abs(mirrored.mean() - 0.5) < 5 * 0.5 / 4000**0.5
    assert np.array_equal(Crops(0)(photos), crops) and not np.array_equal(Crops(1)(photos), crops)
    assert (centre(photos)[:, 0, 0] == (PATCH - CROP) // 2).all()


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0)
    arrays = {}
    for name, count in (("", TRAIN), ("test_", TEST)):
        rows = len(PICTURES) * count
        arrays[f"{name}photo"] = draws.integers(0, 256, (rows, PATCH, PATCH, 3), np.uint8)
        arrays[f"{name}target"] = np.repeat(np.arange(len(PICTURES), dtype=np.int32), count)
    np.savez(tmp_path / "textures.npz", **arrays)
    monkeypatch.setattr(textures_task, "DATA", tmp_path / "textures.npz")


@pytest.mark.usefixtures("patches")
def test_both_trainings_are_one_recipe() -> None:
    """Parameters, statistics and moving averages agree in float64, within the rounding of mbc's float32 rate."""
    pytest.importorskip("torch")
    task = Task(True, "fp64", epochs=2, batch=16, width=4, train=4, test=2)
    data = task.data()
    assert len(data["photo"]) == 48 and np.array_equal(np.bincount(data["test_target"]), [2] * len(PICTURES))
    plan = compile_plan(task.source(), Options(gpu="h200", settings=task.settings))
    ours, theirs = by_mbc(plan, task, data, 3, "cpu"), by_torch(task, data, 3, "cpu")
    assert ours.states.keys() == theirs.states.keys() and any(name.endswith(".ema") for name in ours.states)
    for name, value in theirs.states.items():
        assert np.linalg.norm(ours.states[name] - value) <= 1e-6 * np.linalg.norm(value), name
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert (ours.accuracy, ours.last_accuracy) == (theirs.accuracy, theirs.last_accuracy)
