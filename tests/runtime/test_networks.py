"""Networks of every kind of layer: planned, within budgets, divided by rows, recomputed, and trained on the CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.hardware.streams import Space
from mbc.ir.types import Precision
from mbc.kernels.convolution_shapes import PASSES
from mbc.options import Options
from mbc.plan.model import Kernel, Plan
from mbc.runtime.module import Module
from mbc.source import Source
from tests.runtime.nets import ATTENTION, MOBILE, SHAPES, SIGNAL, VOLUME


@dataclass(frozen=True)
class Network:
    """A source, the rate at which it is trained, and the share of its first loss that is left after eight steps."""

    source: str
    lr: float
    falls_to: float


NETWORKS = {
    "attention": Network(ATTENTION, 0.005, 0.7),
    "mobile": Network(MOBILE, 0.05, 0.5),
    "shapes": Network(SHAPES, 0.02, 0.5),
    "volume": Network(VOLUME, 0.1, 0.8),
    "signal": Network(SIGNAL, 0.1, 0.8),
}


@functools.cache
def planned(name: str, share: float = 0.0, precision: str = "fp32", micro_batch: int = 0, offload: bool = True) -> Plan:
    """Return the plan within a share of the arena of the plan without a limit; 0: no limit."""
    settings: tuple[tuple[str, str], ...] = (("train.precision", precision),)
    if share:
        free = planned(name, precision=precision).predictions
        settings += (("memory.device", f"{free.overhead_bytes + int(share * free.arena_bytes)} B"),)
    without = frozenset(() if offload else ("offload",))
    options = Options(gpu="h200", settings=settings, micro_batch=micro_batch, without=without)
    return compile_plan(Source(f"{name}.mbc", NETWORKS[name].source), options)


def losses(plan: Plan, steps: int = 2) -> list[float]:
    """Return the losses of some steps on one mini-batch: of classes at random, or of what each pixel shows."""
    rng = np.random.default_rng(0)
    image = rng.standard_normal(plan.graph.values["image"].type.shape).astype(np.float32)
    target = rng.integers(0, 5, len(image))
    if len(plan.graph.values["target"].type.shape) > 1:
        target = (image[:, 0] > 0).astype(np.int32) + (image[:, 0] > 1)
    with Module(plan, seed=1, device="cpu") as net:
        return [float(net.step(image, target, lr=NETWORKS[plan.graph.name].lr)) for _ in range(steps)]


def kernels(plan: Plan) -> list[Kernel]:
    return [launch.work for launch in plan.train.launches if isinstance(launch.work, Kernel)]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_it_trains(name: str, precision: Precision) -> None:
    history = losses(planned(name, precision=precision), 8)
    assert history[-1] < NETWORKS[name].falls_to * history[0]


@pytest.mark.parametrize(
    ("name", "share", "offload"),
    [
        ("attention", 0.6, True),
        ("mobile", 0.8, False),
        ("mobile", 0.6, False),
        ("shapes", 0.7, False),
        ("shapes", 0.7, True),
        ("volume", 0.6, True),
    ],
)
def test_within_a_budget_it_computes_the_same(name: str, share: float, offload: bool) -> None:
    plan = planned(name, share, offload=offload)
    assert plan.predictions.arena_bytes <= share * planned(name).predictions.arena_bytes
    assert offload or all(buffer.space is Space.ARENA for buffer in plan.buffers)
    np.testing.assert_allclose(losses(plan), losses(planned(name)), rtol=1e-5)


@pytest.mark.parametrize("name", ["attention", "shapes", "signal"])
def test_in_micro_batches_it_computes_the_same(name: str) -> None:
    np.testing.assert_allclose(losses(planned(name, micro_batch=4)), losses(planned(name)), rtol=1e-5)


def test_a_checkpoint_has_the_names_of_free_parameters_and_the_tables_of_windows() -> None:
    with Module(planned("shapes"), seed=1, device="cpu") as net:
        assert {"position", "layer_scaled0.gamma"} <= {*net.state_dict()}
    with Module(planned("attention"), seed=1, device="cpu") as net:
        shapes = {name: np.shape(value) for name, value in net.state_dict().items()}
    assert shapes["of_windows0.bias.weight"] == shapes["of_windows1.bias.weight"] == (49, 2)


def test_tensor_cores_run_attention_in_16_bits() -> None:
    """The network is so large that a change of layout pays."""
    text = ATTENTION.replace("batch = 8", "batch = 512").replace("1, 24, 1, 17", "1, 96, 1, 17")
    text = text.replace("conv(16, 2", "conv(64, 2").replace("conv(24, 2", "conv(96, 2")
    large = compile_plan(Source("attention.mbc", text), Options(gpu="h200", settings=(("train.precision", "bf16"),)))
    of_large, of_small = ({kernel.name for kernel in kernels(plan)} for plan in (large, planned("attention")))
    assert {"attention_resident", "attention_resident_backward", "attention_mma_backward_bias"} <= of_large
    assert {"attention", "attention_backward", "attention_backward_bias"} <= of_small


def test_no_kernel_of_images_runs_a_volume() -> None:
    convolutions = [kernel for kernel in kernels(planned("volume")) if "convolution" in kernel.name]
    assert convolutions and {kernel.name for kernel in convolutions if kernel.provider == "mbc"} <= PASSES.keys()
