"""Fusion groups with a concatenation: where they match, their results, and the values that they do not write."""

from __future__ import annotations

import functools

import pytest

from mbc.optimize.fusion import match_patterns
from mbc.optimize.fusion.catalogue import PATTERNS
from mbc.plan.model import Kernel
from tests.graphs import training_graph
from tests.optimize.fusion import test_fused_pooling as pools
from tests.optimize.fusion.test_fused_pooling import launched, planned
from tests.optimize.planned import H200, assert_equal_but_for_rounding, trained

SOURCE = """
network joined(batch = 6, classes = 5) {
  input image[batch, 2, 8, 8] : float
  input target[batch] : class
  x = image |> conv(8, 3, pad=1)
  for i in range(3) @dense { x = (x, x |> bn(affine = AFFINE) |> relu |> conv(8, 3, pad=1)) |> concat }
  y = x |> conv(8, 3, pad=1) |> bn |> relu
  z = (
    y |> conv(8, 1) |> bn(affine = AFFINE) |> relu,
    y |> conv(16, 3, pad=1) |> bn |> relu,
    y |> conv(8, 5, pad=2) |> relu,
    y |> maxpool(3, stride=1, pad=1)
  ) |> concat
  v = (y |> conv(8, 1) |> bn |> relu, y |> conv(16, 1) |> bn |> relu) |> concat
  skip = (z, v) |> concat |> conv(8, 3, pad=1) |> bn(affine = AFFINE) |> relu
  up = skip |> maxpool(2) |> conv(16, 3, pad=1) |> relu |> conv_transpose(8, 2, stride=2, bias=true)
  logits = (skip, up) |> concat |> conv(8, 3, pad=1) |> relu |> flatten |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = PRECISION }
"""


graph = functools.partial(pools.graph, source=SOURCE)


def test_every_kernel_finds_its_place():
    kernels = launched(planned(graph()))
    assert any(name.startswith("map_") for name in kernels), "the sum of the gradients of many readers"
    assert kernels >= {
        "batch_statistics_concat",
        "batch_normalize_relu_backward_add_slice",
        "batch_normalize_relu_backward_add_slice_and_part",
        "batch_normalize_relu_bn_reduce_of_slice",
        "batch_normalize_relu_backward_of_slice",
        "bias_add_concat",
        "batch_normalize_relu_concat",
        "concat_batch_normalize_relu",
        "channel_slice_sum",
        "max_pool_backward_add_slice_bn_reduce",
        "max_pool_backward_add_slice_bn_backward",
    }


def test_a_new_part_may_come_first():
    old = "(x, x |> bn(affine = AFFINE) |> relu |> conv(8, 3, pad=1))"
    assert old in SOURCE
    text = SOURCE.replace(old, "(x |> bn |> relu |> conv(4, 3, pad=1), x)").replace("PRECISION", "bf16")
    kernels = launched(planned(training_graph(text.replace("AFFINE", "true"))))
    assert kernels >= {
        "batch_statistics_concat",
        "concat_batch_normalize_relu",
        "batch_normalize_relu_backward_add_slice",
        "batch_normalize_relu_backward_add_slice_and_part",
    }


def test_slices_that_are_read_in_place_exist_nowhere():
    plan = planned(graph())
    kept = {buffer.value for buffer in plan.buffers}
    slices = {op.outputs[0] for op in plan.graph.train if op.kind == "channel_slice"}
    assert len(slices - kept) >= 4


def test_relus_output_is_written_if_its_gradient_reads_it(monkeypatch: pytest.MonkeyPatch):
    """Normalisation is fused into a concatenation only if fused operations recompute ReLU's output for gradients."""
    again = [p for p in PATTERNS if len(p.launches) < 2]
    monkeypatch.setattr(match_patterns, "PATTERNS", tuple(again))
    plan = planned(graph())
    assert "batch_normalize_relu_concat" not in launched(plan)
    inference = {launch.work.name for launch in plan.infer.launches if isinstance(launch.work, Kernel)}
    assert "batch_normalize_relu_concat" in inference


@pytest.mark.parametrize("affine", ["true", "false"])
def test_groups_compute_their_operations(affine: str):
    steps = graph("fp64", affine)
    fused = planned(steps)
    assert sum(len(launch.operations) > 1 for launch in fused.train.launches) >= 8
    assert_equal_but_for_rounding(fused, planned(steps, fused=False))


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_groups_within_a_budget_give_the_same_bits(share: float):
    roomy = planned(graph())
    arena_bytes = int(roomy.predictions.arena_bytes * share)
    plan = planned(graph(), budget_bytes=arena_bytes + H200.overhead_bytes)
    assert plan.predictions.arena_bytes <= arena_bytes
    assert "batch_statistics_concat" in launched(plan)
    assert trained(plan) == trained(roomy)


UP = """
network up(batch = 2, classes = 5) {
  input image[batch, 3, 12, 12] : float
  input target[batch, 12, 12] : class
  skip = image |> conv(64, 3, pad=1) |> relu
  up = skip |> maxpool(2) |> conv(64, 3, pad=1) |> relu |> conv_transpose(64, KERNEL, stride=2, pad=PAD, bias=true)
  logits = PARTS |> concat |> conv(classes, 3, pad=1)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = PRECISION }
"""


@pytest.mark.parametrize("parts", ["(skip, up)", "(up, skip)"])
@pytest.mark.parametrize("kernel, pad, fits", [(2, 0, True), (4, 1, False)])
def test_a_transposed_convolution_writes_a_part_of_a_concatenation(parts: str, kernel: int, pad: int, fits: bool):
    """The filters of the transposed convolution do not overlap."""
    source = UP.replace("PARTS", parts).replace("KERNEL", str(kernel)).replace("PAD", str(pad))
    steps = pools.graph(source=source)
    plan = planned(steps)
    assert ("conv_transpose_bias_add_concat" in launched(plan)) == fits
    assert ("bias_add_concat" in launched(plan)) != fits
    outputs = {op.outputs[0] for op in steps.train if op.kind == "bias_add" or op.name == "conv_transpose0"}
    assert outputs.isdisjoint(buffer.value for buffer in plan.buffers) == fits
