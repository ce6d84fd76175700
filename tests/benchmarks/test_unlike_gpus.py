"""A mini-batch shared by speed, beside the GPUs alone."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from unlike_gpus import Case, judged


def test_what_follows_from_the_times():
    """Alone they take 1 and 2 ms for 256 rows each: together 256 in 2/3 ms; an equal split waits for the slower one."""
    times = {"shared_2": 0.68, "whole_256": 1.0, "part_256": 2.0, "whole_128": 0.5, "part_128": 1.0}
    two = Case("resnet18", "h200", 64, 2)
    found = judged(two, times)
    assert found["of_summed_speeds"] == pytest.approx(1 / 0.68 / 1.5) and found["passed"]
    assert found["equal_ms"] == 1.0 and found["over_equal"] == pytest.approx(1 / 0.68)
    assert not judged(two, times | {"shared_2": 0.72})["passed"], "less than 95 %"
    four = Case("resnet18", "h200", 64, 4)
    assert judged(four, times | {"shared_4": 0.68})["of_summed_speeds"] == pytest.approx(found["of_summed_speeds"])


def test_half_of_the_gpus_are_parts():
    four = Case("resnet50", "h200", 64, 4)
    assert four.shared.gpus == ("h200", "h200", "h200@64", "h200@64") and four.shared.batch == 512
    assert {p.batch for p in four.alone} == {256, 128}
