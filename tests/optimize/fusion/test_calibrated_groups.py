"""Groups with products: where nothing was measured, only kernels that were calibrated in posing are predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mbc.compiler import compile_plan
from mbc.kernels import cuda
from mbc.kernels.calibration import calibration
from mbc.options import Options
from mbc.plan.model import Kernel, Plan
from mbc.source import Source

RESNET = Path(__file__).parents[3] / "examples" / "resnet.mbc"
SETTINGS = (("depth", "50"), ("batch", "16"), ("train.precision", "bf16"))


def fused_products(plan: Plan) -> set[str]:
    """Return the kernels of a plan by mma.sync with reductions of batch normalization's gradient."""
    works = {launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel)}
    return {name for name in works if name.endswith("_mma") and "bn_" in name}


@pytest.mark.parametrize(("gpu", "fuses"), [("a10", True), ("h100", False)])
def test_calibrated_kernels_are_fused_without_a_profile(monkeypatch: pytest.MonkeyPatch, gpu: str, fuses: bool) -> None:
    source, options = Source("resnet.mbc", RESNET.read_text(encoding="utf-8")), Options(gpu, SETTINGS)
    names = {f"mbc {kernel.name}" for kernel in cuda.KERNELS.values() if kernel.arithmetic_us is not None}
    uncalibrated = {name: shares for name, shares in calibration().shares.items() if name not in names}
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "calibration", lambda: replace(calibration(), shares=uncalibrated))
        before = compile_plan(source, options)
    assert not fused_products(before)
    plan = compile_plan(source, options)
    assert bool(fused_products(plan)) is fuses
    if fuses:
        assert plan.predictions.train_us < before.predictions.train_us
