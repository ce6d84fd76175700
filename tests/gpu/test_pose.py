"""A real GPU that poses as older architectures: packages for them run on it, and compute what its own package does."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.compiler import compile_plan
from mbc.hardware.datasheet import capability_of
from mbc.hardware.target import find_device
from mbc.options import Options
from mbc.source import Source
from tests.gpu.packages import need_gpu
from tests.gpu.test_part import DIGITS, losses


@pytest.mark.parametrize("providers", [(), ("mbc",)])
@pytest.mark.parametrize("pose", ["sm_75", "sm_80", "sm_86", "sm_89"])
def test_a_posed_step_computes_the_same(tmp_path: Path, pose: str, providers: tuple[str, ...]) -> None:
    need_gpu()
    if capability_of(pose) >= capability_of(find_device("auto").architecture):
        pytest.skip("the GPU is not newer")
    source = Source("net.mbc", DIGITS.read_text())
    posed = losses(compile_plan(source, Options(gpu=f"auto@{pose}", providers=providers)), tmp_path / "posed")
    own = losses(compile_plan(source, Options()), tmp_path / "own")
    assert posed[:5] == pytest.approx(own[:5], rel=1e-2), "other kernels round differently, and steps add that up"
