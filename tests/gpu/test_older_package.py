"""A real GPU: the driver's figures of it, and packages for older GPUs, whose PTX its driver compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mbc.compiler import compile_plan
from mbc.hardware.datasheet import capability_of
from mbc.hardware.driver_card import driver_cards
from mbc.hardware.target import current_gpu, find_device
from mbc.options import Options
from mbc.plan.newer_gpu import binding_kernels
from mbc.source import Source
from tests.gpu.packages import need_gpu
from tests.gpu.test_part import DIGITS, losses


def test_the_driver_says_what_pycuda_says() -> None:
    need_gpu()
    driver: Any = pytest.importorskip("pycuda.driver")
    card, device = driver_cards()[0].sheet, driver.Device(0)
    asked = driver.device_attribute
    assert (card.name, card.memory_bytes) == (device.name(), device.total_memory())
    assert card.multiprocessors == device.get_attribute(asked.MULTIPROCESSOR_COUNT)
    assert card.boost_mhz == device.get_attribute(asked.CLOCK_RATE) * 1e-3
    assert card.l2_bytes == device.get_attribute(asked.L2_CACHE_SIZE)
    assert card.architecture == "sm_{}{}".format(*device.compute_capability())
    here = current_gpu()
    assert here is not None and here.card is not None and here.card.name == card.name
    assert find_device("auto").multiprocessors == card.multiprocessors


@pytest.mark.parametrize("older", ["t4", "a100-40", "rtx-3090"])
def test_a_package_for_an_older_gpu_runs(tmp_path: Path, older: str) -> None:
    need_gpu()
    source, here = Source("net.mbc", DIGITS.read_text()), find_device("auto").architecture
    plan = compile_plan(source, Options(gpu=older))
    if capability_of(plan.target.architecture) >= capability_of(here) or binding_kernels(plan, here):
        pytest.skip(f"{older} is not older than {here}, or its kernels bind it")
    with pytest.warns(RuntimeWarning, match="which runs its code"):
        of_older = losses(plan, tmp_path / "older")
    own = losses(compile_plan(source, Options()), tmp_path / "own")
    assert of_older[:5] == pytest.approx(own[:5], rel=1e-2), "other kernels round differently, and steps add that up"
