"""The data gradient of a pointwise convolution, computed in the prologue of the reductions over it.

It is used where that was measured, with the same numbers, and within a budget with fused rematerialization of ReLU's
output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda.conv import conv1x1_backward_data
from mbc.kernels.providers import PROVIDERS
from mbc.optimize import effort
from mbc.optimize.bounds.measured_floor import BANDWIDTH_SHARE, step_floor
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.search.profiling_requests import needs
from mbc.options import Policy
from mbc.plan.model import Kernel, Plan
from tests.optimize.planned import H200, NoSizes, graph_of, is_inside, planned_for, trained

SOURCE = """
block bottleneck(stride = 1) on x {
  y = x |> conv(64, 1) @narrow |> bn |> relu |> conv(64, 3, stride, pad=1) |> bn |> relu |> conv(256, 1) @wide |> bn
  s = x if y.shape == x.shape else x |> conv(256, 1, stride) @down |> bn
  return y + s |> relu
}
network small(batch = 4, classes = 3) {
  input image[batch, 3, 6, 6] : float
  input target[batch] : class
  x = image |> conv(64, 3, pad=1) |> bn |> relu |> bottleneck() |> bottleneck() |> bottleneck() |> bottleneck(2)
  logits = x |> conv(64, 1) @last |> bn |> relu |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = bf16 }
"""
DENSE = """
network dense(batch = 4, classes = 3) {
  input image[batch, 3, 6, 6] : float
  input target[batch] : class
  x = image |> conv(16, 3, pad=1)
  for i in range(3) @layer {
    y = x |> bn |> relu |> conv(32, 1) @narrow |> bn |> relu |> conv(8, 3, pad=1)
    x = (x, y) |> concat
  }
  logits = x |> bn |> relu |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = bf16 }
"""
SHARE = 0.7  # of the arena without a limit
BYTES_PER_US = BANDWIDTH_SHARE * H200.copy_gb_s * 1e3
SLOWER = 1e4  # than the planned network
KERNELS = frozenset(kernel.name for kernel in conv1x1_backward_data.KERNELS[1:])
IN_GROUPS = "convolution_backward_data+"


@dataclass(frozen=True)
class Measured(NoSizes):
    """A profile that has measured everything, with times in proportion to the bytes moved.

    `data`: whether data gradients with sums were measured; `inside`: whether launches that recompute a convolution's
    result without writing it were; `signs`: whether ReLU's bit masks were; `slow`: part of the kinds of launches that
    are far slower.
    """

    data: bool = True
    inside: bool = False
    signs: bool = False
    slow: str = " "
    cudnn: int = 0
    origin: str = "made up"

    def candidates(self, request: Request) -> Iterable[Candidate]:
        with_data, inside, signs = request.kind.startswith(IN_GROUPS), is_inside(request), "mask" in request.kind
        if (with_data and not self.data) or (inside and not self.inside) or (signs and not self.signs):
            return ()
        moved_us = sum(t.size_bytes for t in (*request.inputs, *request.outputs)) / BYTES_PER_US
        times = 5.0 if self.slow in request.kind else 1.0
        return tuple(
            replace(c, measured=True, time_us=times * moved_us * _times(request, c))
            for provider in PROVIDERS
            for c in provider.candidates(request, H200)
        )


def _times(request: Request, c: Candidate) -> float:
    last = all(lying == "nhwc" for t, lying in zip(request.inputs, c.layouts, strict=False) if t.ordered)
    return SLOWER if "single_launch" in c.name else 1.0 if last else 2.0


def planned(profile: Measured | None, share: float = 0.0, source: str = SOURCE) -> Plan:
    return planned_for(profile, source, share)


def launches(plan: Plan) -> dict[str, list[str]]:
    """Return the first operations of the launches of these kernels."""
    by_kernel: dict[str, list[str]] = {}
    for launch in plan.train.launches:
        if isinstance(launch.work, Kernel) and launch.work.name in KERNELS:
            by_kernel.setdefault(launch.work.name, []).append(launch.operations[0])
    return by_kernel


@pytest.mark.parametrize("signs", [False, True], ids=["by output", "by masks"])
def test_gradients_that_only_sums_read_are_not_written(signs: bool):
    """One of two added gradients is computed inside the launch; the other one, of `down`, has its own launch.

    Nothing is added to the gradient of `last`. No kernel computes it with bit masks, so this ReLU has none.
    """
    plan, without = planned(Measured(signs=signs)), planned(Measured(data=False, signs=signs))
    launched = launches(plan)
    added = f"conv1x1_backward_data_add_relu_bn_reduce{'_masked' if signs else ''}"
    assert launched.keys() >= {added, "conv1x1_backward_data_relu_bn_reduce"}
    assert len(launched.pop("conv1x1_backward_data_bn_relu_bn_reduce")) == 4
    assert sum(map(len, launched.values())) == 5
    assert any("bottleneck3.narrow.backward_data" in operations for operations in launched.values())
    assert plan.predictions.train_us < without.predictions.train_us and not launches(without)
    assert trained(plan) == trained(without)


def test_so_are_those_of_parts_of_concatenations():
    plan, without = planned(Measured(), source=DENSE), planned(Measured(data=False), source=DENSE)
    assert [first.split(".")[-2] for first in launches(plan)["conv1x1_backward_data_bn_relu_bn_reduce"]] == [
        "narrow"
    ] * 3
    assert plan.predictions.train_us < without.predictions.train_us and not launches(without)
    assert trained(plan) == trained(without)


def test_fused_rematerialization_of_relus_output(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(effort, "SLOW_STEP_WORK", 0)  # otherwise a step without fusion groups is faster
    plan = planned(Measured(), SHARE)
    launched = launches(plan)
    assert "conv1x1_backward_data_add_relu_remat_bn_reduce_two_grads" in launched
    assert plan.bounds.within_budget_us <= plan.predictions.train_us
    assert plan.predictions.train_us < planned(Measured(data=False), SHARE).predictions.train_us
    assert trained(plan) == trained(planned(Measured()))


def test_bit_masks_are_read_where_only_that_gains():
    """The gradient with masks is fast only inside the group; alone it would need a launch that reads ReLU's output."""
    launched = launches(planned(Measured(signs=True, slow=f"{IN_GROUPS}add+relu_backward+")))
    assert (
        len(launched["conv1x1_backward_data_add_relu_bn_reduce_masked"]) == 3
        and "conv1x1_backward_data_add_relu_bn_reduce" not in launched
    )


@pytest.mark.parametrize(
    "profile", [None, Measured(data=False), Measured(slow=IN_GROUPS)], ids=["estimated", "never measured", "slow"]
)
def test_elsewhere_operations_run_by_themselves(profile: Measured | None):
    assert not launches(planned(profile))


def test_the_floor_leaves_out_bytes_that_are_not_moved():
    """A gradient that passes through ReLU inside a launch is neither written nor read."""
    with_data, without = (
        step_floor(Fusion.of(CandidateTable(graph_of(SOURCE), H200, PROVIDERS, profile, Rules())))
        for profile in (Measured(), Measured(data=False))
    )
    layers = [f"bottleneck{i}.{name}" for i in range(4) for name in ("narrow", "wide")]
    names = {f"{layer}.backward_data" for layer in (*layers, "bottleneck0.down", "last")}
    results = [value for operation in graph_of(SOURCE).train if operation.name in names for value in operation.outputs]
    # The gradient of windows at a stride of one is written, but not read for sums.
    windows = sum(graph_of(SOURCE).values[f"d.bottleneck{i}.relu0"].type.size_bytes for i in range(3))
    saved_us = (2 * sum(graph_of(SOURCE).values[value].type.size_bytes for value in results) + windows) / BYTES_PER_US
    assert len(results) == len(names) and with_data.other_us == without.other_us
    assert without.products_us - with_data.products_us == pytest.approx(saved_us)


def test_all_are_asked_for():
    kinds = {need.undivided.kind for need in needs(graph_of(SOURCE), H200, Policy.UNDIVIDED)}
    assert {kernel.kind for kernel in conv1x1_backward_data.KERNELS} - kinds == set()
