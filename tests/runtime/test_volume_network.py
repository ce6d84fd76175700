"""Networks of volumes and of signals: planned, verified, within a budget, divided by rows, and trained on the CPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.ir.types import Precision
from mbc.kernels.convolution_shapes import PASSES
from mbc.options import Options
from mbc.plan.model import Kernel, Plan
from mbc.runtime.module import Module
from mbc.source import Source

SIZES = {"volume": (8, 12, 12), "signal": (96,)}
SOURCES = {
    # A small U-Net, whose first and last axes differ.
    "volume": """
block two(channels) on x {
  y = x |> conv(channels, (1, 3, 3), pad=(0, 1, 1)) |> instance_norm |> leaky_relu(0.01)
  return y |> conv(channels, 3, pad=(0, 2, 1, 1, 1, 1)) |> group_norm(2) |> relu
}
network volume(batch = 4, classes = 3) {
  input image[batch, 1, 8, 12, 12] : float
  input target[batch, 8, 12, 12] : class
  a = image |> two(8)
  b = a |> conv(16, 3, stride=(2, 2, 1), pad=1, groups=2) |> bn |> relu |> two(16)
  c = b |> maxpool(3, stride=2, pad=2, dilation=2) |> conv(16, 1)
        |> upsample(size=(4, 6, 12), mode=linear, align_corners=true)
  d = b |> avgpool((1, 2, 2)) |> adaptive_maxpool((3, 2, 5)) |> upsample((1, 3, 1)) |> adaptive_avgpool((4, 6, 12))
  u = (b, c, d, b + (b |> global_avgpool)) |> concat |> conv_transpose(8, (2, 2, 1), stride=(2, 2, 1))
  v = u |> padding(1, mode=circular) |> padding(1, value=-inf) |> maxpool(3, stride=2) |> upsample(1.7)
  w = v |> upsample(size=(8, 12, 12), mode=nearest_exact)
  y = (a, u, w) |> concat |> two(8) |> dropout(0.1) |> conv(classes, 1, bias=true)
  output y
  loss (y, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
""",
    "signal": """
network signal(batch = 8, classes = 4) {
  input image[batch, 2, 96] : float
  input target[batch, 96] : class
  a = image |> conv(8, 5, pad=(4, 0)) |> bn |> relu
  b = a |> maxpool(3, stride=2, pad=1) |> conv(16, 3, pad=2, dilation=2, groups=2) |> group_norm(4) |> silu
  c = b |> avgpool(2) |> upsample(2.02, mode=linear) |> conv_transpose(8, 4, stride=2, pad=1) |> relu
  d = a |> adaptive_avgpool(7) |> upsample(size=96) |> lrn(3)
  y = (a, c, d) |> concat |> conv(classes, 1, bias=true)
  output y
  loss (y, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
""",
}


@functools.cache
def planned(name: str, share: float = 0.0, precision: str = "fp32", micro_batch: int = 0) -> Plan:
    """Return the plan within a share of the arena of the plan without a limit; 0: no limit."""
    settings: tuple[tuple[str, str], ...] = (("train.precision", precision),)
    if share:
        free = planned(name, precision=precision).predictions
        settings += (("memory.device", f"{free.overhead_bytes + int(share * free.arena_bytes)} B"),)
    options = Options(gpu="h200", settings=settings, micro_batch=micro_batch)
    return compile_plan(Source(f"{name}.mbc", SOURCES[name]), options)


def losses(plan: Plan, steps: int = 5) -> list[float]:
    rng = np.random.default_rng(0)
    size, batch = SIZES[plan.graph.name], plan.graph.batch
    channels = 1 if len(size) == 3 else 2
    image = rng.standard_normal((batch, channels, *size)).astype(np.float32)
    target = (image[:, 0] > 0).astype(np.int32) + (image[:, 0] > 1)
    with Module(plan, seed=1, device="cpu") as net:
        return [float(net.step(image, target, lr=0.1)) for _ in range(steps)]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_it_trains(name: str, precision: Precision) -> None:
    history = losses(planned(name, precision=precision), 8)
    assert history[-1] < 0.8 * history[0]


def test_no_kernel_of_images_runs_a_volume() -> None:
    kernels = [launch.work for launch in planned("volume").train.launches if isinstance(launch.work, Kernel)]
    convolutions = {(kernel.provider, kernel.name) for kernel in kernels if "convolution" in kernel.name}
    assert convolutions and {name for provider, name in convolutions if provider == "mbc"} <= PASSES.keys()


def test_within_a_budget_it_computes_the_same() -> None:
    plan = planned("volume", 0.6)
    assert plan.predictions.arena_bytes <= 0.6 * planned("volume").predictions.arena_bytes
    np.testing.assert_allclose(losses(plan, 2), losses(planned("volume"), 2), rtol=1e-5)


def test_in_micro_batches_it_computes_the_same() -> None:
    np.testing.assert_allclose(losses(planned("signal", micro_batch=4), 2), losses(planned("signal"), 2), rtol=1e-5)
