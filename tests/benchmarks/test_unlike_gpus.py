"""A mini-batch shared by speed, beside the GPUs alone."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from unlike_gpus import judged


def test_what_follows_from_the_times():
    """Speeds of 1 and 1/2 a millisecond add up to a step of 2/3; an equal split waits for the slower one."""
    times = {"pair": 0.68, "whole": 1.0, "part": 2.0, "whole half": 0.5, "part half": 1.0}
    found = judged(times)
    assert found["of_summed_speeds"] == pytest.approx(1 / 0.68 / 1.5) and found["passed"]
    assert found["equal_ms"] == 1.0 and found["over_equal"] == pytest.approx(1 / 0.68)
    assert not judged(times | {"pair": 0.72})["passed"], "less than 95 %"
