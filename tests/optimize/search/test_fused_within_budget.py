"""Fused operations within a budget: their results are kept, recomputed or offloaded like any other."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from mbc.hardware.streams import Space
from mbc.ir.types import DType, Layout, Precision
from mbc.optimize.schedule.emit_launches import WHOLE, Draft
from mbc.optimize.search import overhead
from mbc.plan.model import Buffer, Launch, Mode, Plan, Program
from tests.graphs import training_graph
from tests.optimize.fusion.test_select_groups import graph, planned
from tests.optimize.fusion.unclustered import UNCLUSTERED
from tests.optimize.planned import trained

OVERHEAD_BYTES = UNCLUSTERED.overhead_bytes


@functools.cache
def kept(precision: str) -> Plan:
    return planned(graph(precision), gpu=UNCLUSTERED)


def within(precision: str, share: float) -> Plan:
    """Return the plan within this share of the arena of the plan without a limit."""
    return planned(
        graph(precision),
        budget_bytes=int(kept(precision).predictions.arena_bytes * share) + OVERHEAD_BYTES,
        gpu=UNCLUSTERED,
    )


def recomputed_outputs(plan: Plan) -> list[Launch]:
    """Return the launches of a training step that write a value which an earlier launch wrote before."""
    launches: list[Launch] = []
    defined_at: dict[str, int] = {}
    for launch in plan.train.launches:
        for access in launch.accesses:
            name = plan.buffers[access.buffer].value
            if (
                name is not None
                and access.mode is Mode.WRITE
                and defined_at.setdefault(name, access.buffer) != access.buffer
            ):
                launches.append(launch)
    return launches


@pytest.mark.parametrize(
    ("precision", "share"),
    [
        ("bf16", 0.7),
        ("fp32", 0.9),
        *(pytest.param("bf16", share, marks=pytest.mark.exhaustive) for share in (0.95, 0.65, 0.6)),
        *(pytest.param("fp32", share, marks=pytest.mark.exhaustive) for share in (0.95, 0.85, 0.8)),
    ],
)
def test_groups_run_again_and_give_the_same_bits(precision: str, share: float):
    plan = within(precision, share)
    assert plan.predictions.arena_bytes <= share * kept(precision).predictions.arena_bytes
    # By a launch of its own, or along with what a later launch of a group does.
    assert any(len(launch.operations) > 1 for launch in recomputed_outputs(plan))
    assert trained(plan) == trained(kept(precision))


@pytest.mark.parametrize("share", [0.7, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (0.9, 0.8, 0.6))])
def test_the_bound_holds_for_groups_too(share: float):
    """No plan is faster than its bound, and the bound of a smaller budget is not lower."""
    bounds = [within("bf16", part).bounds.within_budget_us for part in (share, share + 0.05)]
    assert bounds[0] >= bounds[1] > 0
    assert within("bf16", share).predictions.train_us >= bounds[0] * (1 - 1e-9)


STEM = """
network stem(batch = 64, classes = 5) {
  input image[batch, 3, 128, 128] : float
  input target[batch] : class
  x = image |> conv(64, 3, pad=1) |> bn |> relu |> conv(16, 3, stride=4, pad=1) |> bn |> relu
  logits = x |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = bf16 }
"""


def test_values_that_a_group_recomputes_do_not_count_as_kept():
    """A group recomputes ReLU's large output in the backward pass without reading it; its bytes do not count."""
    steps = training_graph(STEM)
    plan = planned(
        steps, budget_bytes=planned(steps, gpu=UNCLUSTERED).predictions.arena_bytes + OVERHEAD_BYTES, gpu=UNCLUSTERED
    )
    assert plan.predictions.train_us >= plan.bounds.within_budget_us * (1 - 1e-9) > 0


def test_many_launches_reduce_the_budget(monkeypatch: pytest.MonkeyPatch):
    """If the budget just fits all buffers, the bytes of the CUDA graphs must be freed elsewhere."""
    monkeypatch.setattr(overhead, "USUAL_LAUNCHES", 0)
    monkeypatch.setattr(overhead, "LAUNCH_BYTES", 8)
    arena_bytes = kept("bf16").predictions.arena_bytes
    plan = planned(graph("bf16"), budget_bytes=arena_bytes + OVERHEAD_BYTES, gpu=UNCLUSTERED)
    launches = len(plan.train.launches) + len(plan.infer.launches)
    assert plan.predictions.overhead_bytes == OVERHEAD_BYTES + 8 * launches
    assert plan.predictions.arena_bytes < arena_bytes


@pytest.mark.exhaustive
def test_groups_stay_where_little_fits_at_once():
    plan = within("bf16", 0.4)
    assert any(len(launch.operations) > 1 for launch in plan.train.launches)
    assert plan.predictions.train_us >= plan.bounds.within_budget_us * (1 - 1e-9) > 0


def test_page_tables_of_much_host_memory_are_reserved_for():
    draft = Draft((), (), Program((), (), (), ()), Program((), (), (), ()))
    away = Buffer("x", WHOLE, Layout.CHANNELS_FIRST, DType.UINT8, overhead.USUAL_HOST_BYTES, space=Space.HOST)
    usual = overhead.reserved_bytes(UNCLUSTERED, Precision.FP32, replace(draft, buffers=(away,)))
    assert usual == UNCLUSTERED.overhead_bytes
    assert overhead.reserved_bytes(UNCLUSTERED, Precision.FP32, replace(draft, buffers=(away, away))) - usual == (
        overhead.USUAL_HOST_BYTES // overhead.HOST_BYTES_MAPPED
    )
