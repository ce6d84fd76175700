"""Networks of attention: planned, verified, within budgets, divided by rows, recomputed, and trained on the CPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.ir.types import Precision
from mbc.options import Options
from mbc.plan.model import Kernel, Plan
from mbc.runtime.module import Module
from mbc.source import Source

# A sequence with a token of its own, as ViT; and windows that are shifted, as Swin.
ATTENTION = """
block feed_forward(channels) on x {
  return x + (x |> layer_norm |> conv(channels, 1, bias=true) |> gelu |> conv(x.shape[1], 1, bias=true))
}
block of_sequence(heads) on x {
  y = x |> layer_norm |> conv(3 * x.shape[1], 1, bias=true) |> attention(heads) |> conv(x.shape[1], 1, bias=true)
  return x + y |> feed_forward(32)
}
block of_windows(heads, shift) on x {
  qkv = x |> layer_norm |> roll(-shift) |> windows(4) |> conv(3 * x.shape[1], 1, bias=true)
  y = (qkv, window_bias(heads, 4, size=8, shift=shift) @bias) |> attention(heads) |> conv(x.shape[1], 1, bias=true)
  return x + (y |> join_windows(8, 4) |> roll(shift)) |> feed_forward(32)
}
network sequence(batch = 8) {
  input image[batch, 3, 16, 16] : float
  input target[batch] : class
  x = image |> conv(16, 2, stride=2) @patches
  x = x |> of_windows(2, 0) |> of_windows(2, 2)
  x = x |> conv(24, 2, stride=2) @merge |> windows(4) |> padding((0, 0, 1, 0))
  x = x + parameter((1, 24, 1, 17), std=0.02) @position |> of_sequence(2) |> of_sequence(3) |> layer_norm
  logits = x |> slice(axis=3, stop=1) |> flatten |> linear(5)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = adamw(weight_decay=0.01) }
"""


@functools.cache
def planned(share: float = 0.0, precision: str = "fp32", micro_batch: int = 0) -> Plan:
    """Return the plan within a share of the arena of the plan without a limit; 0: no limit."""
    settings: tuple[tuple[str, str], ...] = (("train.precision", precision),)
    if share:
        free = planned(precision=precision).predictions
        settings += (("memory.device", f"{free.overhead_bytes + int(share * free.arena_bytes)} B"),)
    options = Options(gpu="h200", settings=settings, micro_batch=micro_batch)
    return compile_plan(Source("attention.mbc", ATTENTION), options)


def losses(plan: Plan, steps: int = 6) -> list[float]:
    rng = np.random.default_rng(0)
    image, target = rng.standard_normal((8, 3, 16, 16)).astype(np.float32), rng.integers(0, 5, 8)
    with Module(plan, seed=1, device="cpu") as net:
        return [float(net.step(image, target, lr=0.005)) for _ in range(steps)]


def kernels(plan: Plan) -> set[str]:
    return {launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel)}


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_it_trains(precision: Precision):
    history = losses(planned(precision=precision))
    assert history[-1] < 0.7 * history[0]


def test_tensor_cores_run_attention_in_16_bits():
    """The network is so large that a change of layout pays."""
    text = (
        ATTENTION.replace("batch = 8", "batch = 64")
        .replace("conv(16, 2", "conv(64, 2")
        .replace("conv(24, 2", "conv(96, 2")
    )
    text = text.replace("1, 24, 1, 17", "1, 96, 1, 17")
    large = compile_plan(Source("attention.mbc", text), Options(gpu="h200", settings=(("train.precision", "bf16"),)))
    assert {"attention_resident", "attention_resident_backward", "attention_mma_backward_bias"} <= kernels(large)
    assert {"attention", "attention_backward", "attention_backward_bias"} <= kernels(planned())


def test_within_a_budget_it_computes_the_same():
    plan = planned(0.6)
    assert plan.predictions.arena_bytes <= 0.6 * planned().predictions.arena_bytes
    np.testing.assert_allclose(losses(plan, 2), losses(planned(), 2), rtol=1e-5)


def test_in_micro_batches_it_computes_the_same():
    np.testing.assert_allclose(losses(planned(micro_batch=4), 2), losses(planned(), 2), rtol=1e-5)


def test_a_checkpoint_has_the_tables_of_windows():
    with Module(planned(), seed=1, device="cpu") as net:
        shapes = {name: np.shape(value) for name, value in net.state_dict().items()}
    assert shapes["of_windows0.bias.weight"] == shapes["of_windows1.bias.weight"] == (49, 2)
