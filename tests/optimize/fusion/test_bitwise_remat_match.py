"""Bitwise rematerialization: when batch normalisation's backward pass may recompute a pointwise convolution.

It may if all kernels that compute the convolution give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda.conv import conv1x1_bn_backward
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.bounds.measured_floor import step_floor
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.bitwise_remat_match import with_bitwise_remat
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.search.profiling_requests import needs
from mbc.optimize.search.search import Limits, search
from mbc.options import Policy
from mbc.plan.model import Kernel, Plan
from tests.optimize.planned import H200, NoSizes, graph_of, is_inside, planned_for, trained

SOURCE = """
network small(batch = 4, classes = 3) {
  input image[batch, 3, 6, 6] : float
  input target[batch] : class
  x = image |> conv(16, 3, pad=1) |> bn |> relu
  y = x |> conv(64, 1) @expand |> bn |> relu |> conv(16, 3, pad=1) |> bn |> relu |> conv(64, 1) @wide |> bn
  s = x |> conv(64, 1) @down |> bn
  logits = y + s |> relu |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = bf16 }
"""
KINDS = frozenset(kernel.kind for kernel in conv1x1_bn_backward.KERNELS)
MAKERS = ("conv1x1", "conv1x1_statistics")
SLOWER = 1e4  # than the planned network
BYTES_PER_US = H200.copy_gb_s * 1e3


@dataclass(frozen=True)
class Measured(NoSizes):
    """A profile that has measured everything, with times in proportion to the bytes moved.

    `again`: whether launches that recompute a convolution's result were measured. `makers`: time of the kernels whose
    bits can be recomputed; infinite: they were not measured, and other kernels are slower than any estimate.
    """

    again: bool = True
    makers: float = 1.0
    cudnn: int = 0
    origin: str = "made up"

    def candidates(self, request: Request) -> Iterable[Candidate]:
        if is_inside(request) and not (self.again and request.kind in KINDS):
            return ()
        moved_us = sum(t.size_bytes for t in (*request.inputs, *request.outputs)) / BYTES_PER_US
        return tuple(
            replace(c, measured=True, time_us=self._times(request, c) * moved_us)
            for provider in PROVIDERS
            for c in provider.candidates(request, H200)
            if c.name not in MAKERS or self.makers < math.inf
        )

    def _times(self, request: Request, c: Candidate) -> float:
        if self.makers == math.inf and request.kind.startswith("convolution") and request.kind not in KINDS:
            return SLOWER
        last = all(lying == "nhwc" for t, lying in zip(request.inputs, c.layouts, strict=False) if t.ordered)
        slower = self.makers if c.name in MAKERS else SLOWER if "single_launch" in c.name else 1.0
        return slower * (1.0 if last else 2.0)


def table(profile: Measured | None) -> CandidateTable:
    return CandidateTable(graph_of(SOURCE), H200, PROVIDERS, profile, Rules())


def planned(profile: Measured | None, *without: str) -> Plan:
    return planned_for(profile, SOURCE, without=("concurrent_stream", *without))


def launches(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """Return the kernel and the last operation of each launch, by the name of its first operation."""
    by_first: dict[str, list[tuple[str, str]]] = {}
    for launch in plan.train.launches:
        if isinstance(launch.work, Kernel) and launch.operations:
            by_first.setdefault(launch.operations[0], []).append((launch.work.name, launch.operations[-1]))
    return by_first


@pytest.mark.parametrize("makers", [1.0, 2.0], ids=["made by the fastest", "made by slower ones"])
def test_recomputed_by_the_same_kernel(makers: float):
    """Kernels with recomputable bits are the fastest with statistics, or their loss of time is less than the gain."""
    plan, without = planned(Measured(makers=makers)), planned(Measured(again=False, makers=makers))
    launched = launches(plan)
    (maker, _), *again = launched["expand"]
    assert maker in MAKERS
    assert [name for name, _ in again] == ["conv1x1_unstored_bn_relu_bn_reduce", "conv1x1_unstored_bn_relu_backward"]
    for layer, sums in ("down", []), ("wide", ["conv1x1_unstored_bn_reduce"]):  # the former's make the gradient, too
        (maker, _), *again = launched[layer]
        assert maker in MAKERS
        assert [name for name, _ in again] == [*sums, "conv1x1_unstored_bn_backward"]
    assert {name for name, _ in launches(without)["expand"]}.isdisjoint(MAKERS) == (makers > 1)
    assert plan.predictions.train_us < without.predictions.train_us
    assert trained(plan) == trained(without)


def test_without_recomputation_nothing_is_recomputed():
    assert launches(planned(Measured(), "recompute")) == launches(planned(Measured(again=False)))


@pytest.mark.parametrize("layer", ["expand", "wide"])
def test_recomputed_values_are_not_kept(layer: str):
    plan = planned(Measured())
    result = next(o for o in graph_of(SOURCE).train if o.name == layer).outputs[0]
    numbers = [
        number
        for number, launch in enumerate(plan.train.launches)
        if any(plan.buffers[access.buffer].value == result for access in launch.accesses)
    ]
    first_backward = next(i for i, launch in enumerate(plan.train.launches) if "backward" in "".join(launch.operations))
    assert numbers and max(numbers) < first_backward


@pytest.mark.parametrize(
    "profile",
    [None, Measured(again=False), Measured(makers=SLOWER), Measured(makers=math.inf)],
    ids=["estimated", "never measured", "slowly made", "made by what was not measured"],
)
def test_elsewhere_it_is_read(profile: Measured | None):
    kernels = {name for pairs in launches(planned(profile)).values() for name, _ in pairs}
    assert kernels.isdisjoint(kernel.name for kernel in conv1x1_bn_backward.KERNELS)


def test_the_floor_takes_the_fastest_recomputation():
    slower = table(Measured(makers=2.0))
    fusion = Fusion.of(slower)
    assert with_bitwise_remat(fusion) is not fusion
    assert step_floor(with_bitwise_remat(fusion)).products_us <= step_floor(fusion).products_us


def test_the_price_of_determinism_compares_equal_groups():
    candidates = replace(table(Measured()), rules=Rules(deterministic=True))
    plan = search(candidates, Limits(10**12, without=frozenset({"concurrent_stream"})))
    assert launches(plan) == launches(planned(Measured()))
    assert 0 < plan.bounds.nondeterministic_us <= plan.predictions.train_us * (1 + 1e-9)


def test_all_are_asked_for():
    kinds = {need.undivided.kind for need in needs(graph_of(SOURCE), H200, Policy.UNDIVIDED)}
    assert kinds >= KINDS
