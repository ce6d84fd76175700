"""Every operation, planned and interpreted in float64, against PyTorch's autograd: needs torch, which mbc does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gradients import EXACT_LIMIT, compare
from modules import Job
from operations import CASES, source

from mbc.source import Source


def test_gradients_of_every_operation_in_float64() -> None:
    text = Source("operations", source("operations", CASES))
    job = Job("operations", text, (("train.precision", "fp64"),), gpu="h200")
    rows = compare("operation", job, "fp64", "cpu", job.plan(), "cpu")
    assert [row["name"] for row in rows] == [case.name for case in CASES]
    assert not [row for row in rows if max(row["worst"], row["loss_error"], row["statistics"]) > EXACT_LIMIT]
