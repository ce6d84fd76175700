"""A step recorded by CUPTI on a real GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.plan.model import Copy
from mbc.record.recording import STEPS, record_package
from mbc.source import Source
from tests.gpu.packages import built, need_gpu
from tests.gpu.test_module import SOURCE, batch


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_launch_of_a_step_is_recorded(tmp_path: Path, precision: str):
    need_gpu()
    plan = compile_plan(Source("small.mbc", SOURCE), Options(settings=(("train.precision", precision),)))
    folder = built(plan, tmp_path / "package")
    image, target = batch()
    record = record_package(folder, "cuda", {"image": image, "target": target}, 0.01)
    assert record is not None and record.steps == STEPS and not record.left
    assert len(record.launches) == len(plan.train.launches)
    for launch, ran in zip(plan.train.launches, record.launches, strict=True):
        assert ran is not None and ran.kernels and 0.1 < ran.time_us < 1e5, launch.operations
        assert all(name.startswith("memcpy") for name in ran.kernels) == isinstance(launch.work, Copy)
    # On one stream launches do not overlap, and their order is the plan's.
    serial = [
        ran for launch, ran in zip(plan.train.launches, record.launches, strict=True) if launch.stream == "compute"
    ]
    ends = [ran.start_us + ran.time_us for ran in serial if ran is not None]
    assert all(ran.gap_us >= -0.5 for ran in serial if ran is not None) and ends == sorted(ends)
    assert ends[-1] <= record.step_us * 1.5
    assert np.isfinite(record.step_us)
