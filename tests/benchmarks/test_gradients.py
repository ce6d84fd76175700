"""Every operation, planned and interpreted in float64, against PyTorch's autograd: needs torch, which mbc does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gradients import EXACT_LIMIT, compare
from modules import Job
from operations import CASES, Case

from mbc.source import Source


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_every_operation_in_float64(case: Case) -> None:
    job = Job(case.name, Source(case.name, case.source), (("train.precision", "fp64"),), gpu="h200")
    row = compare("operation", job, "fp64", "cpu", job.plan(), "cpu")
    assert row["worst"] <= EXACT_LIMIT, row
    assert row["loss_error"] <= EXACT_LIMIT
    assert row["statistics"] <= EXACT_LIMIT
