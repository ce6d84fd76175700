"""The comparison of convolutions of volumes lists a step's convolutions, and sums up their times."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from mbc.hardware.spec import find_spec
from mbc.kernels.cuda.base import PROVIDER
from tests.profile.profiles import measurement

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import volume_convolutions
from modules import example


def test_a_step_takes_the_faster_kernel_of_each_convolution():
    counts = volume_convolutions.convolutions(example("nnunet", ("patch", "(32, 32, 32)"), ("train.precision", "fp16")))
    assert {request.kind for request in counts} == set(volume_convolutions.PASSES)
    device, own, library = find_spec("h200"), replace(measurement(1, 50.0), provider=PROVIDER), measurement(2, 80.0)
    slower, refused = replace(library, time_us=90.0), replace(own, time_us=0.0, refused="it failed")
    rows = [
        volume_convolutions.row_of(r, count, (slower, library, own, refused), device) for r, count in counts.items()
    ]
    assert {(row["own_us"], row["library_us"], row["best_us"]) for row in rows} == {(50.0, 80.0, 50.0)}
    assert len({row["name"] for row in rows}) == len(rows)
    step = volume_convolutions.step_of(rows)
    assert step["best_us"] == 50.0 * counts.total() and step["library_us"] == 80.0 * counts.total()
    (unmeasured, *_) = [volume_convolutions.row_of(r, count, (), device) for r, count in counts.items()]
    assert "best_us" not in unmeasured and "best_us" not in volume_convolutions.step_of([unmeasured])
