"""Convolutions with statistics in the epilogue, on a real GPU: measured, captured, and in a step beside the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mbc import constraints
from mbc.compiler import compile_plan
from mbc.hardware.spec import find_spec
from mbc.ir.types import Precision
from mbc.kernels.base import Request
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.providers import PROVIDERS
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.measure.gpu import Gpu, Graph
from mbc.measure.kernel_library import KernelLibrary
from mbc.measure.measure import measure
from mbc.measure.need import Need
from mbc.measure.statistics_harness import distances
from mbc.ops.base import Call
from mbc.options import Options
from mbc.plan.model import Kernel
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import asked_kind, signature
from mbc.runtime.formats import loaded, stored_bytes
from mbc.runtime.module import Module
from mbc.source import Source
from tests.gpu.packages import built, need_gpu
from tests.gpu.test_module import TOLERANCES, distance
from tests.kernels.statistics import with_statistics
from tests.optimize.planned import Only

SOURCE = """
network small(batch = 16, classes = 10) {
  input image[batch, 8, 16, 16] : float
  input target[batch] : class
  x = image |> conv(16, 3, pad=1) |> bn |> relu
  y = x |> conv(32, 3, stride=2, pad=1) |> bn
  s = x |> conv(32, 1, stride=2) @down |> bn
  logits = y + s |> relu |> global_avgpool |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = fp16 }
"""
REQUESTS = (
    with_statistics((18, 64, 28, 28), 128, 1),
    with_statistics((18, 32, 14, 14), 64, 3),
    with_statistics((18, 32, 14, 14), 64, 3, stride=2),
    with_statistics((5, 8, 9, 9), 24, 3),  # no whole tile of anything
)
IDS = ("conv1x1", "square", "strided", "small")


@pytest.mark.parametrize("asked", REQUESTS, ids=IDS)
def test_engines_are_measured_and_admitted(gpu: Gpu, asked: Request, tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    assert measure(gpu, [Need((asked,), 1.0)], path).failures == ()
    profile = read_profile(path)
    rows = profile.measurements[signature(asked)]
    print([(m.settings, round(m.time_us, 1), m.workspace_bytes, m.error, m.refused) for m in rows])
    assert [m.refused for m in rows if m.refused] == []
    assert profile.candidates(asked) and all(c.measured and c.time_us > 0 for c in profile.candidates(asked))


@pytest.mark.parametrize("center", [0.0, 3.0])
@pytest.mark.parametrize("asked", REQUESTS, ids=IDS)
def test_engines_of_heuristics_are_captured_and_correct(gpu: Gpu, asked: Request, center: float) -> None:
    """In one case the mean is far from zero, so that the variance is a difference of large sums."""
    (candidate,) = CUDNN.candidates(asked, find_spec("h200"))
    types = (*asked.inputs, *asked.outputs)
    kind = asked_kind(asked)
    assert kind is not None and kind.evaluate is not None
    random = np.random.default_rng(7)
    gpu.reset()
    with KernelLibrary.open(gpu, Precision.FP16) as library:
        pointers = [gpu.take(t.size_bytes) for t in types]
        call = library.prepare(candidate, asked, pointers, gpu.take(candidate.workspace_bytes))
        call.enqueue()  # loads kernels, which a capture does not allow
        gpu.synchronize()
        graph = Graph(gpu, call.enqueue)
        for _ in range(2):  # a replayed graph reads the current data
            drawn = (
                center + random.standard_normal(asked.inputs[0].shape),
                0.05 * random.standard_normal(types[1].shape),
            )
            stored = [
                stored_bytes(a, t.dtype, layout) for a, t, layout in zip(drawn, types, candidate.layouts, strict=False)
            ]
            for pointer, data in zip(pointers, stored, strict=False):
                gpu.upload(pointer, data)
            for pointer, output in zip(pointers[2:], asked.outputs, strict=True):
                gpu.fill(pointer, 0xFF, output.size_bytes)
            graph.launch()
            gpu.synchronize()
            given = [
                np.asarray(loaded(d, t.shape, t.dtype, layout), np.float64)
                for d, t, layout in zip(stored, types, candidate.layouts, strict=False)
            ]
            wanted = kind.evaluate(asked.attributes, given, Call(asked.outputs, 0, types[0].shape[0], Precision.FP64))
            x, mean, variance = (
                np.asarray(loaded(gpu.download(p, t.size_bytes), t.shape, t.dtype, layout), np.float64)
                for p, t, layout in zip(pointers[2:], asked.outputs, candidate.layouts[2:], strict=True)
            )
            assert np.linalg.norm(x - wanted[0]) / np.linalg.norm(wanted[0]) < 1e-3
            off = distances(mean, variance, np.asarray(wanted[1]), np.asarray(wanted[2]))
            print(f"mean {off[0]:.1e}, variance {off[1]:.1e}")
            assert max(off) < 1e-4
        graph.close()


def test_a_step_is_that_of_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need_gpu()
    monkeypatch.setattr(constraints, "PROVIDERS", tuple(Only(provider, WITH_STATISTICS, 0.1) for provider in PROVIDERS))
    plan = compile_plan(Source("small.mbc", SOURCE), Options())
    kernels = [launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel)]
    assert kernels.count(WITH_STATISTICS) == 3
    folder = built(plan, tmp_path / "net")
    random = np.random.default_rng(0)
    nets = [Module(folder, seed=4, device=device, canaries=device == "cuda") for device in ("cuda", "cpu")]
    gpu_net, cpu_net = nets
    try:
        for _ in range(3):
            image, target = random.standard_normal((16, 8, 16, 16)).astype(np.float32), random.integers(0, 10, 16)
            losses = [float(net.step(image, target, lr=0.05)) for net in nets]
            assert losses[0] == pytest.approx(losses[1], rel=TOLERANCES["fp16"])
        distances_ = {name: distance(gpu_net.state(name), cpu_net.state(name)) for name in cpu_net.states}
        assert {name: d for name, d in distances_.items() if d > 3 * TOLERANCES["fp16"]} == {}
        gpu_net.check_canaries()
    finally:
        for net in nets:
            net.close()
