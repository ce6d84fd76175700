"""A part of a real GPU: kernels stay on its multiprocessors, and a plan for it computes the same as on the whole."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.hardware.target import find_device
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.green_context import limited_streams
from mbc.runtime.module import Module
from mbc.source import Source
from tests.gpu.packages import built, need_gpu

DIGITS = Path(__file__).parents[2] / "examples" / "01_digits" / "net.mbc"
BLOCKS = 1024
KERNEL = """
extern "C" __global__ void where(unsigned* found) {
  unsigned number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  for (long long start = clock64(); clock64() - start < 100000;) {}
  if (threadIdx.x == 0) found[blockIdx.x] = number;
}
"""


def half() -> str:
    """Return the name of a part with about half of this machine's multiprocessors."""
    whole = find_device("auto").multiprocessors // 2
    try:
        return find_device(f"auto@{whole}").name
    except MbcError as error:
        near = re.search(r"choose (\d+)", error.remedy)
        assert near is not None
        return find_device(f"auto@{near[1]}").name


def test_kernels_stay_within_it(tmp_path: Path) -> None:
    need_gpu()
    importlib.import_module("pycuda.autoprimaryctx")
    driver: Any = importlib.import_module("pycuda.driver")
    compiler: Any = importlib.import_module("pycuda.compiler")
    where = compiler.SourceModule(KERNEL, no_extern_c=True).get_function("where")
    limit = int(half().rpartition("@")[2])

    def multiprocessors(stream: Any) -> int:
        ids, memory = np.zeros(BLOCKS, np.uint32), driver.mem_alloc(4 * BLOCKS)
        where(memory, block=(128, 1, 1), grid=(BLOCKS, 1), stream=stream)
        stream.synchronize()
        driver.memcpy_dtoh(ids, memory)
        return len(set(ids.tolist()))

    with limited_streams(limit):
        part = driver.Stream()
    assert multiprocessors(part) == limit < multiprocessors(driver.Stream())


def losses(plan: Plan, folder: Path) -> list[float]:
    random = np.random.default_rng(0)
    net = Module(built(plan, folder), seed=4, device="cuda", canaries=True)
    try:
        step_losses = [
            float(net.step(random.random((64, 1, 8, 8), np.float32), random.integers(0, 10, 64), lr=0.05))
            for _ in range(20)
        ]
        net.check_canaries()
        return step_losses
    finally:
        net.close()


def test_a_plan_for_it_computes_the_same(tmp_path: Path) -> None:
    need_gpu()
    settings = (("train.deterministic", "true"),)
    name = f"auto@{half().rpartition('@')[2]}"
    part = compile_plan(Source("net.mbc", DIGITS.read_text()), Options(gpu=name, settings=settings))
    whole = replace(part, target=replace(part.target, gpu=part.target.gpu.partition("@")[0]))
    assert losses(part, tmp_path / "part") == losses(whole, tmp_path / "whole")
