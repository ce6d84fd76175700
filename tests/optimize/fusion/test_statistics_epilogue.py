"""Convolutions with statistics in the epilogue: where they match, and that only measured ones are used."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from mbc.analysis.roofline import Ceilings, Limit, limits
from mbc.hardware.spec import find_spec
from mbc.ir.graph import TrainingGraph
from mbc.kernels.base import Candidate, Request
from mbc.kernels.interpreter import INTERPRETER
from mbc.kernels.providers import PROVIDERS
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.ops.fused import names_of
from mbc.optimize.bounds.measured_floor import step_floor
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.fusion_group import Group
from mbc.optimize.fusion.match_patterns import live_out, pattern_groups
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.search.profiling_requests import needs
from mbc.optimize.search.search import Limits, search
from mbc.options import Policy
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Kernel, Launch, Plan
from mbc.plan.summary import summarise
from mbc.plan.verify import verify_plan
from mbc.profile.model import Identity, Measurement, Profile
from mbc.profile.signature import signature
from mbc.resources import folder
from tests.graphs import training_graph
from tests.optimize.fusion.unclustered import UNCLUSTERED, WITHOUT_CLUSTERS
from tests.optimize.planned import H200, Only, assert_equal_but_for_rounding, distance, stepped

# No kernel uses clusters, so that no other group holds the same statistics.
BATCH = 6
FASTER, SLOWER = 0.5, 1.2  # than one by one
SOURCE = """
network small(batch = 6, classes = 5) {
  input image[batch, 3, 12, 12] : float
  input target[batch] : class
  x = image |> conv(8, 3, pad=1) @first |> bn @bn0 |> relu
  y = x |> conv(16, 3, pad=1) @second |> bn @bn1 |> relu |> conv(16, 3, stride=2, pad=1) @third |> bn @bn2
  z = x |> conv(16, 1, stride=2) @down |> bn @bn3
  logits = y + z |> relu |> conv(8, 3) @fourth |> bn @bn4 |> relu |> flatten |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = PRECISION }
"""
BODY = "  y = x |> conv(16"  # the line of SOURCE that tests replace


@functools.cache
def graph(precision: str = "fp16") -> TrainingGraph:
    return training_graph(SOURCE.replace("PRECISION", precision))


def table(steps: TrainingGraph, profile: Profile | None = None) -> CandidateTable:
    return CandidateTable(steps, H200, WITHOUT_CLUSTERS, profile, Rules())


def measured(steps: TrainingGraph, faster: float) -> Profile:
    """Return a profile in which every request takes its estimate; with statistics, `faster` times the estimate."""

    def measurement(request: Request, c: Candidate) -> Measurement:
        time_us = c.time_us * (faster if request.kind == WITH_STATISTICS else 1.0)
        return Measurement(c.provider, c.name, c.settings, c.layouts, c.workspace_bytes, time_us, 0.0, c.deterministic,
                           c.accumulates, (), 0.0)  # fmt: skip

    asked = [need.undivided for need in needs(steps, H200, Policy.UNDIVIDED)]
    measurements = {
        signature(r): tuple(measurement(r, c) for p in WITHOUT_CLUSTERS for c in p.candidates(r, H200)) for r in asked
    }
    return Profile(Identity("NVIDIA H200", "sm_90", 132, "1", 91900, "2026-11-22"), measurements)


def planned(steps: TrainingGraph, faster: float, budget_bytes: int = 10**12) -> Plan:
    plan = search(table(steps, measured(steps, faster)), Limits(budget_bytes, without=frozenset({"concurrent_stream"})))
    verify_plan(plan)
    return plan


def launches(plan: Plan) -> list[tuple[Launch, Kernel]]:
    """Return the training launches that run kernels."""
    return [(launch, launch.work) for launch in plan.train.launches if isinstance(launch.work, Kernel)]


def with_statistics(plan: Plan) -> list[str]:
    """Return the names of the convolutions that run with statistics."""
    return [launch.operations[0] for launch, work in launches(plan) if work.name == WITH_STATISTICS]


def groups_with_statistics(steps: TrainingGraph) -> list[Group]:
    everywhere = pattern_groups(steps.train, live_out(steps, steps.train))
    return [group for group in everywhere if group.launches[0].kind == WITH_STATISTICS]


def test_every_batch_norm_behind_a_convolution_is_found():
    assert {names_of(group.launches[0])[0] for group in groups_with_statistics(graph())} == {
        "first",
        "second",
        "third",
        "down",
        "fourth",
    }
    for group in groups_with_statistics(graph()):
        assert not group.unstored and len(group.replaces) == 2


def test_resnet_has_one_for_each_of_its_convolutions():
    text = (folder("examples") / "resnet.mbc").read_text(encoding="utf-8")
    settings = (("depth", "50"), ("batch", "32"), ("train.precision", "fp16"))
    steps = training_graph(text, *settings)
    assert len(groups_with_statistics(steps)) == 53
    # The first has three channels and seven rows and columns, for which there is only a kernel by wgmma.
    for offered, count in ((table(steps), 53), (CandidateTable(steps, UNCLUSTERED, PROVIDERS), 52)):
        assert len([g for g in Fusion.of(offered).groups[0] if g.launches[0].kind == WITH_STATISTICS]) == count
    assert not [
        g for g in Fusion.of(table(steps)).groups[1] if g.launches[0].kind == WITH_STATISTICS
    ]  # inference has no statistics


@pytest.mark.parametrize(
    "line",
    [
        # Others read the result before the statistics are complete, so the result would come too late.
        "  u = x |> conv(16, 3, pad=1) @second\n  v = u |> relu\n"
        "  y = (u |> bn @bn1) + v |> conv(16, 3, stride=2, pad=1)",
        # Statistics are those of something else.
        "  y = x |> conv(16, 3, pad=1, bias=true) @second |> bn @bn1 |> conv(16, 3, stride=2, pad=1)",
        "  y = x |> conv(16, 3, pad=1) @second |> relu |> bn @bn1 |> conv(16, 3, stride=2, pad=1)",
        "  y = x |> conv_transpose(16, 3, pad=1) @second |> bn @bn1 |> conv(16, 3, stride=2, pad=1)",
    ],
)
def test_other_pairs_are_not_found(line: str):
    lines = [line if old.startswith(BODY) else old for old in SOURCE.replace("PRECISION", "fp16").splitlines()]
    steps = training_graph("\n".join(lines))
    assert any(operation.name == "second" for operation in steps.train)
    assert not [g for g in groups_with_statistics(steps) if "second" in g.replaces]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_without_a_measurement_none_is_taken(precision: str):
    kinds = {operation.kind for operation in Fusion.of(table(graph(precision))).programs().train}
    assert WITH_STATISTICS not in kinds
    asked = {need.undivided.kind for need in needs(graph(precision), H200, Policy.ALL)}
    assert (WITH_STATISTICS in asked) == (precision == "fp16")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_without_wgmma_an_estimate_suffices(precision: str):
    large = SOURCE.replace("12, 12", "96, 96").replace("batch = 6", "batch = 32")
    wide = large.replace("conv(16", "conv(128").replace("conv(8,", "conv(64,").replace("PRECISION", precision)
    programs = Fusion.of(CandidateTable(training_graph(wide), find_spec("a10"), PROVIDERS)).programs()
    assert (WITH_STATISTICS in {operation.kind for operation in programs.train}) == (precision != "fp32")


def test_whole_batches_only_are_measured():
    asked = [need for need in needs(graph(), H200, Policy.ALL) if need.undivided.kind == WITH_STATISTICS]
    assert asked and all(need.requests == (need.undivided,) for need in asked)


def test_a_profile_without_it_leaves_the_step_as_it_is():
    steps = graph()
    profile = measured(steps, FASTER)
    measurements = {key: rows for key, rows in profile.measurements.items() if WITH_STATISTICS not in key}
    assert len(measurements) < len(profile.measurements)
    assert (
        Fusion.of(table(steps, replace(profile, measurements=measurements))).programs()
        == Fusion.of(table(steps, measured(steps, SLOWER))).programs()
    )


def test_only_kernels_measured_faster_are_planned():
    plan = planned(graph(), FASTER)
    assert with_statistics(plan) == ["second", "third", "down", "fourth"]
    slow = planned(graph(), SLOWER)
    assert with_statistics(slow) == []
    assert plan.predictions.train_us < slow.predictions.train_us
    assert load_plan(dump_plan(plan), "plan.json") == plan
    for launch, work in launches(plan):
        if work.name == WITH_STATISTICS:
            values = [plan.buffers[access.buffer].value for access in launch.accesses]
            assert len(values) == 6 and values[-1] is None  # image, filter; result, mean, variance; sums


def test_its_limit_counts_the_product_and_the_written_bytes():
    plan = planned(graph(), FASTER)
    by_kind: dict[str, list[Limit]] = {}
    for limit in limits(plan, plan.train, Ceilings.of(H200, plan.graph.precision)):
        by_kind.setdefault(limit.summary.kind, []).append(limit)
    second = next(limit for limit in by_kind[WITH_STATISTICS] if "second" in limit.summary.name)
    pixels = BATCH * 12 * 12
    assert second.flops == 2 * pixels * 16 * 8 * 9
    assert second.moved_bytes == 2 * (pixels * 8 + 16 * 8 * 9 + pixels * 16) + 2 * 16 * 4
    assert {summary.kind for summary in summarise(plan, plan.train)} >= {WITH_STATISTICS, "convolution"}


def test_the_floor_counts_products_by_themselves():
    """A measured group does not make a convolution alone faster."""
    steps = graph()
    assert step_floor(Fusion.of(table(steps, measured(steps, FASTER)))) == step_floor(
        Fusion.of(table(steps, measured(steps, SLOWER)))
    )


APART = 10.0  # times what the interpreter is taken to need for it


def exact(part: float, budget_bytes: int = 10**12) -> Plan:
    """Return a plan in fp64, which only the interpreter runs."""
    one = CandidateTable(graph("fp64"), H200, (Only(INTERPRETER, WITH_STATISTICS, part),), rules=Rules())
    plan = search(one, Limits(budget_bytes))
    verify_plan(plan)
    return plan


def names(plan: Plan) -> list[tuple[str, ...]]:
    """Return the operations of each launch with statistics."""
    return [launch.operations for launch, work in launches(plan) if "_batch_statistics" in work.name]


@pytest.mark.parametrize("share", [1.0, 0.85, 0.7])
def test_steps_with_and_without_it_agree(share: float):
    """The steps agree also within a budget, in which the result is recomputed."""
    single = exact(APART)
    states = sum(single.graph.values[state.value].type.size_bytes for state in single.graph.states)
    rest = single.predictions.arena_bytes - states
    plan = exact(FASTER, states + int(share * rest) + 4096)
    assert names(single) == [] and len(set(names(plan))) == 5
    assert (len(names(plan)) > 5) == (share < 1)
    assert_equal_but_for_rounding(plan, single)


def test_in_fp16_it_is_no_further_off():
    wanted = stepped(exact(APART))
    off = {faster: distance(stepped(planned(graph(), faster)), wanted) for faster in (FASTER, SLOWER)}
    assert 0 < off[FASTER] < 1.3 * off[SLOWER]
