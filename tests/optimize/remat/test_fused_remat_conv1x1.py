"""Fused rematerialization of a convolution's result in the reductions over it.

It is used where it was measured, by the kernel that computed the result, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda.conv import conv1x1
from mbc.kernels.providers import PROVIDERS
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.ops.fused import gives_product
from mbc.optimize.bounds.fused_remat_costs import fused_remat_costs
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.fused_remat_match import all_fused_remats
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.remat.apply_decisions import Decisions, Recompute, rewrite
from mbc.optimize.remat.fused_remat import defer_readers, fused_remat_launches
from mbc.optimize.remat.live_bytes_ledger import Ledger
from mbc.optimize.schedule.emit_launches import emit_launches
from mbc.optimize.schedule.regions import regions_of
from mbc.optimize.search.profiling_requests import needs
from mbc.optimize.selection.select import choose
from mbc.options import UNLIMITED_BYTES, Policy
from mbc.plan.model import Kernel, Launch, Plan
from tests.optimize.planned import H200, NoSizes, graph_of, is_inside, planned_for, trained

SOURCE = """
block bottleneck() on x {
  y = x |> conv(64, 3, pad=1) |> bn |> relu |> conv(256, 1) @wide |> bn
  s = x if y.shape == x.shape else x |> conv(256, 1) @down |> bn
  return y + s |> relu
}
network small(batch = 4, classes = 3) {
  input image[batch, 3, 6, 6] : float
  input target[batch] : class
  x = image |> conv(64, 3, pad=1) |> bn |> relu |> bottleneck() |> bottleneck() |> bottleneck() |> bottleneck()
  logits = x |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = bf16 }
"""
SHARE = 0.65  # of the arena without a limit
ALONG_SHARE = 1.05  # of the time of the sums by themselves
SLOWER = 1e4  # than the planned network
FUSED_REMAT = frozenset(kernel.name for kernel in conv1x1.FUSED_REMAT)


@dataclass(frozen=True)
class Measured(NoSizes):
    """A profile that has measured everything, with times in proportion to the bytes moved.

    So a convolution takes as long as on large images. Launches that do not write the recomputed value are not measured.
    `fused_remat`: whether GEMMs fused with reductions were measured; `useful`: whether they are fast; `forward`: time
    of the kernel that they repeat, if others take 1.
    """

    fused_remat: bool = True
    useful: bool = True
    forward: float = 0.9
    cudnn: int = 0
    origin: str = "made up"

    def candidates(self, request: Request) -> Iterable[Candidate]:
        if (gives_product(request.attributes) and not self.fused_remat) or is_inside(request):
            return ()
        return tuple(
            replace(c, measured=True, time_us=self._time_us(request, c))
            for provider in PROVIDERS
            for c in provider.candidates(request, H200)
        )

    def _time_us(self, request: Request, c: Candidate) -> float:
        moved = sum(t.size_bytes for t in (*request.inputs, *request.outputs)) / 1e3
        if gives_product(request.attributes) and not self.useful:
            return SLOWER * moved
        if c.name in FUSED_REMAT:
            operands = sum(t.size_bytes for t in request.inputs[:2]) / 1e3
            return ALONG_SHARE * (moved - operands)
        if c.name == "conv1x1":
            return self.forward * moved
        last = all(lying == "nhwc" for t, lying in zip(request.inputs, c.layouts, strict=False) if t.ordered)
        other = "single_launch" in c.name or request.kind == WITH_STATISTICS
        return moved * (SLOWER if other else 1.0 if last else 2.0)


def table(profile: Measured | None) -> CandidateTable:
    return CandidateTable(graph_of(SOURCE), H200, PROVIDERS, profile, Rules())


def planned(profile: Measured | None, share: float = 0.0) -> Plan:
    return planned_for(
        profile, SOURCE, share, ("concurrent_stream", "offload")
    )  # else the optimizer's states are offloaded


def fused_products(plan: Plan) -> list[Launch]:
    return [x for x in plan.train.launches if isinstance(x.work, Kernel) and x.work.name in FUSED_REMAT]


def test_dropped_values_are_recomputed_with_equal_bits():
    plan, without = planned(Measured(), SHARE), planned(Measured(useful=False), SHARE)
    assert fused_products(plan)
    assert plan.bounds.within_budget_us <= plan.predictions.train_us < without.predictions.train_us
    assert trained(plan) == trained(planned(Measured()))


def test_only_values_of_the_same_kernel():
    """A value that another kernel computed is not recomputed, because the other kernel may round otherwise."""
    plan = planned(Measured(forward=1.1), SHARE)
    assert not fused_products(plan)
    assert "conv1x1" not in {launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel)}


@pytest.mark.parametrize("profile", [None, Measured(fused_remat=False)], ids=["estimated", "never measured"])
def test_without_a_measurement_none_is_taken_but_all_are_asked_for(profile: Measured | None):
    tabulated = table(profile)
    assert not [
        fused_remat
        for fused_remat in Fusion.of(tabulated).fused_remats
        if gives_product(fused_remat.operation.attributes)
    ]
    assert not fused_products(planned(profile, SHARE))
    wanted = {a.operation.kind for a in all_fused_remats(tabulated) if gives_product(a.operation.attributes)}
    assert wanted and wanted <= {need.undivided.kind for need in needs(graph_of(SOURCE), H200, Policy.UNDIVIDED)}


class Pairs:
    """A step in which the same reductions can recompute two values: a convolution's output, and ReLU's output of it."""

    def __init__(self, profile: Measured) -> None:
        tabulated = self.table = table(profile)
        programs = Fusion.of(tabulated).programs()
        choices = defer_readers(Fusion.of(tabulated), choose(tabulated, {}, programs=programs), UNLIMITED_BYTES)
        self.draft = emit_launches(tabulated, choices)
        self.regions = regions_of(tabulated.graph, self.draft, self.draft.train)
        self.fused_remats = fused_remat_launches(Fusion.of(tabulated), self.draft, self.regions, choices.train)
        sums = {key: fused_remat.reductions for key, fused_remat in self.fused_remats.items()}
        self.value_pairs = [(a, b) for a in sums for b in sums if sums[a] == sums[b] and a[0] < b[0]]

    def target(self, key: tuple[int, int]) -> int:
        return self.fused_remats[key].target

    def launches(self, *keys: tuple[int, int]) -> tuple[Launch, ...]:
        """Return the launches of the step that recomputes these values."""
        both = tuple(Recompute(self.target(key), key[1]) for key in sorted(keys))
        return rewrite(self.draft, self.regions, Decisions(both), H200.links, self.fused_remats).draft.train.launches

    def check_ledger(self, first: tuple[int, int], last: tuple[int, int], beside_us: float) -> None:
        """Check the ledger's times. Together with the last value, the first value takes `beside_us`."""
        ledger = Ledger(self.draft, self.regions, 0, (), self.fused_remats)
        first_us, last_us = self.fused_remats[first].more_us, self.fused_remats[last].more_us
        for one, other in ((first, last), (last, first)):
            for key in (one, other):
                ledger.recompute_value(self.target(key), key[1])
            assert ledger.recompute_us == pytest.approx(beside_us + last_us)
            ledger.drop_recompute(self.target(last), last[1])
            assert ledger.recompute_us == pytest.approx(first_us)
            assert ledger.displaced_us(*last) == pytest.approx(beside_us - first_us)
            ledger.drop_recompute(self.target(first), first[1])
            assert ledger.recompute_us == pytest.approx(0.0)


def test_the_last_of_two_values_in_one_reduction_is_fused():
    """ReLU's output is computed from the convolution's result, which then gets an earlier launch of its own."""
    pairs = Pairs(Measured())
    assert pairs.value_pairs
    for first, last in pairs.value_pairs:
        launches = pairs.launches(first, last)
        (sums,) = (
            i for i, launch in enumerate(launches) if launch.operations == pairs.fused_remats[last].launch.operations
        )
        again = pairs.regions[first[0]]
        operations = pairs.draft.train.launches[again.start].operations
        alone = [i for i, launch in enumerate(launches) if launch.operations == operations]
        assert len(launches) == len(pairs.draft.train.launches) + 1
        assert len(alone) == 2 and alone[1] < sums
        pairs.check_ledger(first, last, again.time_us)


def test_the_bound_has_no_higher_prices_than_the_ledger():
    pairs = Pairs(Measured())
    groups = (launch for group in Fusion.of(pairs.table).groups[0] for launch in group.launches)
    costs_us = fused_remat_costs(Fusion.of(pairs.table), (*pairs.table.graph.train, *groups))
    assert pairs.value_pairs
    for key, launch in pairs.fused_remats.items():
        value = pairs.draft.buffers[pairs.target(key)].value
        assert value is not None and 0 <= costs_us[value] <= launch.more_us * (1 + 1e-9)
