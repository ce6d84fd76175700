"""A convolution with statistics in the epilogue is recomputed without them.

The kernel without statistics gives the same bits in less time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda import KERNELS, without_statistics
from mbc.kernels.providers import PROVIDERS
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.remat.apply_decisions import rewrite
from mbc.optimize.remat.live_bytes_ledger import Ledger
from mbc.optimize.remat.remat_without_statistics import remat_without_statistics
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.regions import regions_of
from mbc.optimize.selection.select import choose
from mbc.plan.model import Kernel, Plan
from tests.optimize.planned import H200, graph_of, planned_for, trained
from tests.optimize.remat.test_fused_remat_conv1x1 import FUSED_REMAT, SHARE, SLOWER, SOURCE, Measured

ALONE = ("concurrent_stream", "offload")


@dataclass(frozen=True)
class Summing(Measured):
    """A profile in which statistics in the epilogue are fast, and reductions recompute nothing.

    `alone`: time of the convolution without statistics as a share of its time with statistics.
    """

    alone: float = 0.9

    def _time_us(self, request: Request, c: Candidate) -> float:
        moved_us = sum(t.size_bytes for t in (*request.inputs, *request.outputs)) / 1e3
        if c.name in map(without_statistics, KERNELS):
            return self.alone * moved_us
        if c.name in FUSED_REMAT:
            return SLOWER * moved_us
        return moved_us if without_statistics(c.name) else super()._time_us(request, c)


def again(plan: Plan) -> list[tuple[str, str]]:
    """Return for each value that is computed with statistics and recomputed both kernels."""
    makers: dict[str, list[str]] = {}
    for launch in plan.train.launches:
        if isinstance(launch.work, Kernel) and launch.operations:
            makers.setdefault(launch.operations[0], []).append(launch.work.name)
    return [(first, name) for first, *others in makers.values() if without_statistics(first) for name in others]


@pytest.mark.parametrize("share", [SHARE, pytest.param(0.7, marks=pytest.mark.exhaustive), 0.55])
def test_recomputed_without_statistics_with_the_same_bits(share: float):
    """This holds also in a budget so small that recomputing with statistics would be possible, too."""
    plan = planned_for(Summing(), SOURCE, share, ALONE)
    assert again(plan) and all(name == without_statistics(first) for first, name in again(plan))
    assert plan.bounds.within_budget_us <= plan.predictions.train_us
    assert trained(plan) == trained(planned_for(Summing(), SOURCE, 0.0, ALONE))


def test_with_them_where_that_takes_no_longer():
    plan = planned_for(Summing(alone=1.1), SOURCE, SHARE, ALONE)
    assert again(plan) and all(name == first for first, name in again(plan))


def test_recomputations_take_the_time_of_the_ledger():
    tabulated = CandidateTable(graph_of(SOURCE), H200, PROVIDERS, Summing(), Rules())
    choices = choose(tabulated, {}, programs=Fusion.of(tabulated).programs())
    draft = emit_launches(tabulated, choices)
    regions = remat_without_statistics(tabulated, draft, regions_of(tabulated.graph, draft, draft.train), choices.train)
    ledger = Ledger(draft, regions, small_bytes=0)
    recomputed = [run for run in regions if run.remat_launch is not None]
    assert recomputed
    for run in recomputed:
        assert len(run.writes) == 3, "the product, its mean and its variance"
        (product,) = set(run.writes) & set(ledger.movable)
        ledger.recompute_value(product, ledger.reads[product][-1])
    rewritten = rewrite(draft, regions, ledger.decisions(), H200.links).draft
    assert _train_us(rewritten) - _train_us(draft) == pytest.approx(ledger.recompute_us)


def _train_us(draft: Draft) -> float:
    return sum(launch.work.time_us for launch in draft.train.launches)


@dataclass(frozen=True)
class Roomy(Summing):
    """A profile with a further, faster kernel of unknown bits, whose workspace does not fit while values are chosen.

    Two runs of it take longer than a run with statistics and one without.
    """

    def candidates(self, request: Request) -> Iterable[Candidate]:
        candidates = tuple(super().candidates(request))
        others = [c for c in candidates if without_statistics(c.name)]
        larger = [
            replace(
                c,
                provider="cudnn",
                name=WITH_STATISTICS,
                settings=(("engine", 3), ("layout", 1)),
                workspace_bytes=c.workspace_bytes + (1 << 17),
                time_us=0.98 * c.time_us,
            )
            for c in others
        ]
        return (*candidates, *larger)


def test_recomputations_keep_their_kernel_if_memory_allows_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mbc.optimize.effort.DEFERRED_SHARE", 2.0)  # operands are much of so small a step
    plan = planned_for(Roomy(), SOURCE, SHARE, ALONE)
    kernels: dict[str, list[str]] = {}
    for launch in plan.train.launches:
        if isinstance(launch.work, Kernel) and launch.operations and "wide" in launch.operations[0]:
            kernels.setdefault(launch.operations[0], []).append(launch.work.name)
    recomputed = {
        tuple(names[:2]) for names in kernels.values() if names[1:2] == [without_statistics("conv1x1_statistics")]
    }
    assert recomputed == {("conv1x1_statistics", "conv1x1")}
