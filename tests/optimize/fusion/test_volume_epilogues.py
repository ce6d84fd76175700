"""Norms of volumes in convolutions before and after them, and transposed convolutions inside concatenations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from mbc.kernels.base import Candidate, Request
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.search.profiling_requests import needs
from mbc.options import Policy
from mbc.plan.model import Kernel, Plan
from tests.optimize.planned import H200, NoSizes, graph_of, planned_for, stepped

NEW = frozenset({
    "instance_norm_leaky_relu_conv1x1_narrow",
    "instance_norm_leaky_relu_conv1x1_narrow_backward",
    "instance_norm_leaky_relu_conv1x1_narrow_sums",
    "instance_norm_leaky_relu_plane_sweep_conv_backward_filter",
    "instance_norm_leaky_relu_plane_sweep_conv_statistics",
    "plane_sweep_conv_instance_statistics",
    "plane_sweep_conv_instance_norm_leaky_relu_sums",
    "conv_transpose_bias_add_concat_volume",
    "plane_sweep_conv_halves",
    "stem_volume_instance_statistics",
    "stem_volume_backward_filter",
})  # fmt: skip
SOURCE = """
block same(stride) on x {
  return x |> conv(32, 3, stride=stride, pad=1) |> instance_norm |> leaky_relu(0.1)
}
network small(batch = 2, classes = 3) {
  input image[batch, 2, 4, 6, 6] : float
  input target[batch, 4, 6, 6] : class
  skip = image |> same(1) |> same(1)
  x = skip |> conv(64, 3, stride=2, pad=1) |> instance_norm |> leaky_relu(0.1)
  up = x |> conv_transpose(32, 2, stride=2, bias=true) @up
  logits = (up, skip) |> concat |> same(1) |> same(1) |> conv(classes, 1, bias=true) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = fp16 }
"""


@dataclass(frozen=True)
class Measured(NoSizes):
    """A profile in which launches take as long as their bytes move, and those of new kernels `share` times that."""

    share: float
    origin: str = "made up"

    def candidates(self, request: Request) -> Iterable[Candidate]:
        moved_us = sum(t.size_bytes for t in (*request.inputs, *request.outputs)) / 1e3
        for provider in PROVIDERS:
            for c in provider.candidates(request, H200):
                yield replace(c, measured=True, time_us=moved_us * (self.share if c.name in NEW else 1.0))


def kernels(plan: Plan) -> list[str]:
    return [launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel)]


def planned(share: float) -> Plan:
    return planned_for(Measured(share), SOURCE, 0.0, ("concurrent_stream",))


def test_they_are_used_where_they_were_measured_to_be_fast():
    fast = planned(0.5)
    used = kernels(fast)
    assert used.count("plane_sweep_conv_instance_statistics") == 1
    assert used.count("instance_norm_leaky_relu_plane_sweep_conv_statistics") == 2
    assert used.count("instance_norm_leaky_relu_plane_sweep_conv_backward_filter") == 2
    assert used.count("plane_sweep_conv_instance_norm_leaky_relu_sums") == 2
    assert used.count("conv_transpose_bias_add_concat_volume") == 1
    assert used.count("plane_sweep_conv_halves") == 1
    assert used.count("stem_volume_instance_statistics") == used.count("stem_volume_backward_filter") == 1
    assert sorted(kernel for kernel in used if "narrow" in kernel) == sorted(
        kernel for kernel in NEW if "narrow" in kernel
    )
    slow = planned(100.0)
    assert NEW.isdisjoint(kernels(slow))
    activations = {o.outputs[0] for o in fast.graph.train if o.kind == "leaky_relu"}
    stored = [activations & {buffer.value for buffer in plan.buffers} for plan in (fast, slow)]
    assert len(stored[0]) == 2 and len(stored[1]) == 5, "a convolution that sweeps planes or the last layer reads three"
    assert stepped(fast)["losses"] == pytest.approx(stepped(slow)["losses"], rel=1e-3)


@pytest.mark.parametrize("name", sorted(NEW))
def test_no_estimate_chooses_them(name: str):
    plan = planned_for(None, SOURCE, 0.0, ("concurrent_stream",))
    assert name not in kernels(plan)


def test_a_profile_asks_for_all_of_them():
    """No other kernel runs these groups, so that without a request they would never be measured."""
    asked = [need.undivided for need in needs(graph_of(SOURCE), H200, Policy.UNDIVIDED)]
    offered = {c.name for request in asked for provider in PROVIDERS for c in provider.candidates(request, H200)}
    assert offered >= NEW
