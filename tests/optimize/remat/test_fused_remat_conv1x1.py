"""Fused rematerialization of a convolution's result in the reductions over it, by itself and with ReLU's output.

It is used where it was measured, by the kernel that computed the result, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from mbc.kernels import PROVIDERS
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda.conv import conv1x1
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.ops.fused import gives_product
from mbc.optimize.bounds.budget_lp import budget_bound_us
from mbc.optimize.bounds.fused_remat_costs import fused_remat_costs
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.select_groups import fuse, groups_of
from mbc.optimize.remat.apply_decisions import Decisions, Recompute, rewrite
from mbc.optimize.remat.draft_state import AllowedTechniques
from mbc.optimize.remat.fused_remat import all_fused_remats, defer_readers, fused_remat_launches, fused_remats_of
from mbc.optimize.remat.live_bytes_ledger import Ledger
from mbc.optimize.schedule.emit_launches import emit_launches
from mbc.optimize.schedule.regions import regions_of
from mbc.optimize.search.profiling_requests import needs
from mbc.optimize.selection.select import choose
from mbc.options import Policy
from mbc.passes.relu_bit_masks import mask_relus, residual_relus
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


def is_joint(kind: str) -> bool:
    return kind.startswith("convolution+batch_normalize+add+relu+")


@dataclass(frozen=True)
class Measured(NoSizes):
    """A profile that has measured everything, with times in proportion to the bytes moved.

    So a convolution takes as long as on large images. Launches that do not write the recomputed value are not measured.
    `fused_remat`: whether GEMMs fused with reductions were measured; `useful`: whether they are fast; `joint`: whether
    those with ReLU's output were measured, too; `forward`: time of the kernel that they repeat, if others take 1;
    `both`: share of their time that joint launches take.
    """

    fused_remat: bool = True
    useful: bool = True
    joint: bool = True
    forward: float = 0.9
    both: float = 1.0
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
        if (gives_product(request.attributes) and not self.useful) or (is_joint(request.kind) and not self.joint):
            return SLOWER * moved
        if c.name in FUSED_REMAT:
            operands = sum(t.size_bytes for t in request.inputs[:2]) / 1e3
            return ALONG_SHARE * (moved - operands) * (self.both if is_joint(request.kind) else 1.0)
        if c.name == "conv1x1":
            return self.forward * moved
        last = all(lying == "nhwc" for t, lying in zip(request.inputs, c.layouts, strict=False) if t.ordered)
        other = "single_launch" in c.name or request.kind == WITH_STATISTICS
        return moved * (SLOWER if other else 1.0 if last else 2.0)


def table(profile: Measured | None, batch: int = 0) -> CandidateTable:
    return CandidateTable(graph_of(SOURCE, batch), H200, PROVIDERS, profile, Rules())


def planned(profile: Measured | None, share: float = 0.0) -> Plan:
    return planned_for(
        profile, SOURCE, share, ("concurrent_stream", "offload")
    )  # else the optimizer's states are offloaded


def fused_products(plan: Plan) -> list[Launch]:
    return [x for x in plan.train.launches if isinstance(x.work, Kernel) and x.work.name in FUSED_REMAT]


def jointly(plan: Plan) -> list[Launch]:
    return [
        launch
        for launch in fused_products(plan)
        if isinstance(launch.work, Kernel) and "_remat_bn_reduce" in launch.work.name
    ]


@pytest.mark.parametrize("profile", [Measured(joint=False), Measured()], ids=["by itself", "with relu's output"])
def test_dropped_values_are_recomputed_with_equal_bits(profile: Measured):
    plan, without = planned(profile, SHARE), planned(replace(profile, useful=False, joint=False), SHARE)
    assert fused_products(plan)
    assert bool(jointly(plan)) == profile.joint
    assert plan.bounds.within_budget_us <= plan.predictions.train_us < without.predictions.train_us
    assert trained(plan) == trained(planned(profile))


def test_both_in_one_launch_take_less_than_one_of_them_before():
    assert planned(Measured(), SHARE).predictions.train_us < planned(Measured(joint=False), SHARE).predictions.train_us


def test_only_values_of_the_same_kernel():
    """A value that another kernel computed is not recomputed, because the other kernel may round otherwise."""
    plan = planned(Measured(forward=1.1), SHARE)
    assert not fused_products(plan)
    assert "conv1x1" not in {launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel)}


@pytest.mark.parametrize("profile", [None, Measured(fused_remat=False)], ids=["estimated", "never measured"])
def test_without_a_measurement_none_is_taken_but_all_are_asked_for(profile: Measured | None):
    tabulated = table(profile)
    assert not [
        fused_remat for fused_remat in fused_remats_of(tabulated) if gives_product(fused_remat.operation.attributes)
    ]
    assert not fused_products(planned(profile, SHARE))
    wanted = {a.operation.kind for a in all_fused_remats(tabulated) if gives_product(a.operation.attributes)}
    assert any(map(is_joint, wanted)) and wanted <= {
        need.undivided.kind for need in needs(graph_of(SOURCE), H200, Policy.UNDIVIDED)
    }


class Pairs:
    """A step in which the same reductions can recompute two values: a convolution's output, and ReLU's output of it."""

    def __init__(self, profile: Measured, signs: bool = False) -> None:
        tabulated = table(profile)
        if signs:
            tabulated = tabulated.of(mask_relus(graph_of(SOURCE), residual_relus(graph_of(SOURCE))))
        self.table = tabulated
        choices = defer_readers(tabulated, choose(tabulated, {}, programs=fuse(tabulated)))
        self.draft = emit_launches(tabulated, choices)
        self.regions = regions_of(tabulated.graph, self.draft, self.draft.train)
        self.fused_remats = fused_remat_launches(tabulated, self.draft, self.regions, choices.train)
        sums = {key: fused_remat.reductions for key, fused_remat in self.fused_remats.items()}
        self.value_pairs = [(a, b) for a in sums for b in sums if sums[a] == sums[b] and a[0] < b[0]]

    def target(self, key: tuple[int, int]) -> int:
        return self.fused_remats[key].targets[0]

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
    pairs = Pairs(Measured(joint=False))
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


@pytest.mark.parametrize("signs", [False, True], ids=["by output", "by masks"])
def test_two_in_the_same_reductions_are_both_fused_where_that_was_measured(signs: bool):
    pairs = Pairs(Measured(), signs)
    joint = [(pair, run) for pair in pairs.value_pairs if (run := pairs.fused_remats[pair[0]].joint) is not None]
    assert joint
    for (first, last), run in joint:
        launches = pairs.launches(first, last)
        assert len(launches) == len(pairs.draft.train.launches)
        (sums,) = (launch for launch in launches if launch.operations == run.launch.operations)
        assert isinstance(sums.work, Kernel) and sums.work.name.endswith("_masked") == signs
        assert set(run.targets) == {pairs.target(first), pairs.target(last)}
        assert run.more_us == pytest.approx(sums.work.time_us - _time_us(pairs.fused_remats[last].launch))
        pairs.check_ledger(first, last, run.more_us)


def test_both_are_not_recomputed_jointly_if_one_is_read_before():
    """A recomputation before the reductions reads ReLU's output, so each value has a launch of its own."""
    pairs = Pairs(Measured())
    checked = 0
    for first, last in pairs.value_pairs:
        run = pairs.fused_remats[first].joint
        for reader, position in run.conflicts - pairs.fused_remats[first].conflicts if run else ():
            (output,) = (b for b in pairs.regions[reader].writes if b in Ledger(pairs.draft, pairs.regions, 0).movable)
            decisions = [Recompute(pairs.target(key), key[1]) for key in (first, last)]
            decisions.append(Recompute(output, position))
            written = rewrite(pairs.draft, pairs.regions, Decisions(tuple(decisions)), H200.links, pairs.fused_remats)
            assert len(written.draft.train.launches) == len(pairs.draft.train.launches) + 3
            ledger = Ledger(pairs.draft, pairs.regions, 0, (), pairs.fused_remats)
            for decision in decisions:
                ledger.recompute_value(decision.buffer, decision.before)
            alone_us = sum(pairs.regions[key[0]].time_us for key in (first, last))
            assert ledger.recompute_us == pytest.approx(alone_us + ledger.recompute_us_of(reader, position))
            checked += 1
    assert checked


def _time_us(launch: Launch) -> float:
    assert isinstance(launch.work, Kernel)
    return launch.work.time_us


@pytest.mark.parametrize("signs", [False, True], ids=["by output", "by masks"])
def test_the_bound_has_no_higher_prices_than_the_ledger(signs: bool):
    pairs = Pairs(Measured(), signs)
    tabulated, buffers = pairs.table, pairs.draft.buffers
    groups = (launch for group in groups_of(tabulated)[0] for launch in group.launches)
    extras = fused_remat_costs(tabulated, (*tabulated.graph.train, *groups))
    joint = [(pair, run) for pair in pairs.value_pairs if (run := pairs.fused_remats[pair[0]].joint) is not None]
    assert joint
    for pair, run in joint:
        values = tuple(buffers[pairs.target(key)].value for key in pair)
        first_us, last_us = (pairs.fused_remats[key].more_us for key in pair)
        (both,) = (both for both in extras.joint if (both.first, both.last) == values)
        assert 0 < extras.least_us(both.first) <= first_us * (1 + 1e-9)
        assert extras.least_us(both.last) <= last_us * (1 + 1e-9)
        assert both.more_us <= (run.more_us + last_us) * (1 + 1e-9)


def test_the_bound_shares_a_launch_only_if_both_values_are_away():
    """A tenth of the memory is lacking. If ReLU's output is recomputed, the convolution's result comes without cost."""
    bounds_us: list[float] = []
    for profile in (Measured(both=0.8), Measured(joint=False)):
        tabulated = table(profile, batch=256)
        forward = [op for op in tabulated.graph.train if op.kind in ("convolution", "relu")]
        kept_bytes = sum(tabulated.graph.values[op.outputs[0]].type.size_bytes for op in forward)
        fastest_us = choose(tabulated, {}, programs=fuse(tabulated)).train_us
        bounds_us.append(
            budget_bound_us(tabulated, AllowedTechniques(True, 0.0, 0), kept_bytes * 9 // 10, fastest_us) - fastest_us
        )
    assert 0 < bounds_us[0] < bounds_us[1]
