"""Predictions in windows on a GPU beside the interpreter, of volumes and signals larger or smaller than the input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.runtime.module import Module
from mbc.runtime.sliding_window import Windows
from mbc.source import Source
from tests.gpu.packages import built, need_gpu
from tests.runtime.nets import SIGNAL, VOLUME


@pytest.mark.parametrize(("source", "classes"), [(VOLUME, 3), (SIGNAL, 4)])
def test_windows_on_a_gpu(source: str, classes: int, tmp_path: Path) -> None:
    need_gpu()
    plan = compile_plan(Source("net.mbc", source), Options())
    package = built(plan, tmp_path / "net")
    _, channels, *patch = plan.graph.values["image"].type.shape
    size = [n + 5 if axis else n - 2 for axis, n in enumerate(patch)]
    images = np.random.default_rng(0).standard_normal((2, channels, *size)).astype(np.float32)
    with Module(package, seed=3, device="cuda") as gpu, Module(package, seed=3, device="cpu", shadow=False) as cpu:
        for windows in (Windows(mirror=(0,)), Windows(0.25, "constant", average="logits")):
            got, expected = gpu.predict(images, windows), cpu.predict(images, windows)
            assert got.shape == expected.shape == (2, classes, *size)
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
