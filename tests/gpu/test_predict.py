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
from tests.runtime.test_volume_network import SIZES, SOURCES


@pytest.mark.parametrize("name", SOURCES)
def test_windows_on_a_gpu(name: str, tmp_path: Path) -> None:
    need_gpu()
    package = built(compile_plan(Source(f"{name}.mbc", SOURCES[name]), Options()), tmp_path / name)
    size = [n + 5 if axis else n - 2 for axis, n in enumerate(SIZES[name])]
    channels = 1 if name == "volume" else 2
    images = np.random.default_rng(0).standard_normal((2, channels, *size)).astype(np.float32)
    with Module(package, seed=3, device="cuda") as gpu, Module(package, seed=3, device="cpu", shadow=False) as cpu:
        for windows in (Windows(mirror=(0,)), Windows(0.25, "constant", average="logits")):
            got, expected = gpu.predict(images, windows), cpu.predict(images, windows)
            assert got.shape == expected.shape == (2, 3 if name == "volume" else 4, *size)
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
