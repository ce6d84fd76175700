"""What a convolution made, made again along with the sums over it: where that was measured, by the kernel that made it,
and the same bits."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mbc.device.spec import find_spec
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.ir.graph import TrainingGraph
from mbc.ir.training import differentiate
from mbc.kernels import PROVIDERS
from mbc.kernels.base import Candidate, Request
from mbc.ops.fused import gives_product
from mbc.optimize.along import all_alongs, along_runs, alongs_of
from mbc.optimize.candidates import CandidateTable, Rules
from mbc.optimize.choose import choose
from mbc.optimize.fuse import fuse
from mbc.optimize.ledger import Ledger
from mbc.optimize.needs import needs
from mbc.optimize.order import order
from mbc.optimize.residence import Decisions, Recompute, rewrite
from mbc.optimize.runs import runs_of
from mbc.optimize.search import Limits, search
from mbc.options import Policy
from mbc.plan.model import Kernel, Launch, Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.module import Module
from mbc.source import Source

H200 = find_spec("h200")
BATCH = 4
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
ALONG_SHARE = 1.05  # of the time of the sums by themselves
SLOWER = 1e4  # than what is to be planned


@functools.cache
def graph() -> TrainingGraph:
    lowered = lower(parse(Source("small.mbc", SOURCE)), (), None)
    return differentiate(lowered.network, lowered.optimizer, lowered.precision)


@dataclass(frozen=True)
class Measured:
    """A profile that has measured what would be estimated, all by its bytes, so that a convolution takes as long as on
    large images. `along`: whether products along with sums were measured; `forward`: what the kernel that they repeat
    takes, others 1."""

    along: bool = True
    forward: float = 0.9
    cudnn: int = 0
    origin: str = "made up"

    def candidates(self, request: Request) -> Iterable[Candidate]:
        if gives_product(request.attributes) and not self.along:
            return ()
        return tuple(
            replace(c, measured=True, time_us=self._time_us(request, c))
            for provider in PROVIDERS
            for c in provider.candidates(request, H200)
        )

    def _time_us(self, request: Request, c: Candidate) -> float:
        moved = sum(t.size_bytes for t in (*request.inputs, *request.outputs)) / 1e3
        if c.name.startswith("pointwise_"):
            operands = sum(t.size_bytes for t in request.inputs[:2]) / 1e3
            return ALONG_SHARE * (moved - operands)
        if c.name == "pointwise":
            return self.forward * moved
        last = all(lying == "nhwc" for t, lying in zip(request.inputs, c.layouts, strict=False) if t.ordered)
        small = "at_once" in c.name or ("statistics" in c.name and "convolution" in c.name)
        return moved * (SLOWER if small else 1.0 if last else 2.0)


def table(profile: Measured | None) -> CandidateTable:
    return CandidateTable(graph(), H200, PROVIDERS, profile, Rules())  # type: ignore[arg-type]


@functools.cache
def planned(profile: Measured | None, share: float = 0.0) -> Plan:
    """Within so much of what keeping everything takes beside the states; 0: without a limit."""
    budget_bytes = 10**12
    if share:
        all_bytes = planned(profile).predictions.arena_bytes
        states_bytes = sum(graph().values[state.value].type.size_bytes for state in graph().states)
        budget_bytes = int(states_bytes + share * (all_bytes - states_bytes)) + H200.overhead_bytes
    plan = search(table(profile), Limits(without=frozenset({"beside"})), budget_bytes)
    verify_plan(plan)
    return plan


def products_along(plan: Plan) -> list[Launch]:
    launches = (launch for launch in plan.train.launches if isinstance(launch.work, Kernel))
    return [launch for launch in launches if launch.work.name.startswith("pointwise_")]


def trained(plan: Plan) -> dict[str, bytes]:
    module = Module(plan, device="cpu")
    random = np.random.default_rng(0)
    for _ in range(2):
        image = random.standard_normal((BATCH, 3, 6, 6)).astype(np.float32)
        module.step(image, random.integers(0, 3, BATCH), lr=0.05)
    return {name: np.array(module.state(name)).tobytes() for name in module.states}


def test_what_was_dropped_is_made_again_with_the_same_bits():
    plan = planned(Measured(), 0.75)
    assert products_along(plan)
    assert plan.predictions.train_us < planned(Measured(along=False), 0.75).predictions.train_us
    assert trained(plan) == trained(planned(Measured()))


def test_only_what_the_same_kernel_made():
    """Another one may round otherwise."""
    plan = planned(Measured(forward=1.1), 0.75)
    assert not products_along(plan)
    assert "pointwise" not in {launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel)}


@pytest.mark.parametrize("profile", [None, Measured(along=False)], ids=["estimated", "never measured"])
def test_without_a_measurement_none_is_taken_but_all_are_asked_for(profile: Measured | None):
    known = table(profile)
    assert not [along for along in alongs_of(known) if gives_product(along.operation.attributes)]
    assert not products_along(planned(profile, 0.75))
    wanted = {a.operation.kind for a in all_alongs(known) if gives_product(a.operation.attributes)}
    assert wanted and wanted <= {need.undivided.kind for need in needs(graph(), H200, Policy.UNDIVIDED)}


def test_of_two_along_the_same_sums_the_one_made_last_is():
    """relu's output is made of what the convolution makes, which has a launch of its own then, before."""
    known = table(Measured())
    choices = choose(known, {}, programs=fuse(known))
    draft = order(known, choices)
    runs = runs_of(graph(), draft, draft.train)
    alongs = along_runs(known, draft, runs, choices.train)
    pairs = [(a, b) for a in alongs for b in alongs if alongs[a].sums == alongs[b].sums and a[0] < b[0]]
    assert pairs
    for first, last in pairs:
        both = [Recompute(alongs[key].target, key[1]) for key in sorted((first, last))]
        made = rewrite(draft, runs, Decisions(tuple(both)), H200.host_link, alongs).draft.train.launches
        (sums,) = (i for i, launch in enumerate(made) if launch.operations == alongs[last].launch.operations)
        again = runs[first[0]]
        alone = [
            i for i, launch in enumerate(made)
            if launch.operations == draft.train.launches[again.start].operations
        ]  # fmt: skip
        assert len(made) == len(draft.train.launches) + 1
        assert len(alone) == 2 and alone[1] < sums

        ledger = Ledger(draft, runs, 0, (), alongs)
        alone_us = runs[first[0]].time_us
        for one, other in ((first, last), (last, first)):
            for run, position in (one, other):
                ledger.repeat(alongs[run, position].target, position)
            assert ledger.again_us == pytest.approx(alone_us + alongs[last].more_us)
            ledger.drop(alongs[last].target, last[1])
            assert ledger.again_us == pytest.approx(alongs[first].more_us)
            assert ledger.displaced_us(*last) == pytest.approx(alone_us - alongs[first].more_us)
            ledger.drop(alongs[first].target, first[1])
            assert ledger.again_us == pytest.approx(0.0)
