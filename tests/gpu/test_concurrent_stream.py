"""A GPU gives equal bits with and without a concurrent stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.hardware.streams import Stream
from mbc.options import Options
from mbc.runtime.module import Module
from mbc.source import Source
from tests.gpu.packages import built, need_gpu

ROOT = Path(__file__).parents[2]
STEPS = 5


def states(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all states of ResNet-18 at batch 8 after some steps on noise."""
    random = np.random.default_rng(0)
    net = Module(folder, seed=4, device="cuda", canaries=True)
    try:
        for _ in range(STEPS):
            net.step(random.standard_normal((8, 3, 224, 224)).astype(np.float32), random.integers(0, 1000, 8), lr=0.01)
        net.check_canaries()
        return {name: net.state(name).tobytes() for name in net.states}
    finally:
        net.close()


def test_the_same_bits(tmp_path: Path) -> None:
    need_gpu()
    source = Source("resnet.mbc", (ROOT / "examples" / "resnet.mbc").read_text())
    settings = (("depth", "18"), ("batch", "8"), ("train.precision", "bf16"), ("train.deterministic", "true"))
    final_states: list[dict[str, bytes]] = []
    for without in (frozenset[str](), frozenset({"concurrent_stream"})):
        plan = compile_plan(source, Options(settings=settings, without=without))
        if not without and all(launch.stream is Stream.COMPUTE for launch in plan.train.launches):
            pytest.skip("for this GPU nothing was put on a concurrent stream")
        final_states.append(states(built(plan, tmp_path / str(len(final_states)))))
    assert final_states[0] == final_states[1]
