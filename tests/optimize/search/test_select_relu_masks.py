"""ReLU bit masks are planned only if a profile has measured that they are faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest

from mbc.ir.graph import TrainingGraph
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate, Request
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search.profiling_requests import needs
from mbc.optimize.search.search import Limits, search
from mbc.optimize.search.select_relu_masks import with_relu_masks
from mbc.optimize.selection.selector import Selector
from mbc.options import Policy
from mbc.passes.relu_bit_masks import mask_relus, residual_relus
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from tests.graphs import training_graph
from tests.optimize.fusion.test_select_groups import launched
from tests.optimize.fusion.unclustered import UNCLUSTERED
from tests.optimize.planned import NoSizes, trained

SOURCE = """
network small(batch = 8, classes = 5) {
  input image[batch, 8, 12, 12] : float
  input target[batch] : class
  x = image |> conv(16, 3, pad=1) |> bn |> relu
  y = x + (x |> conv(16, 3, pad=1) |> bn) |> relu @first
  z = (y |> conv(16, 3, pad=1) |> bn) + (y |> conv(16, 1) |> bn) |> relu @second
  w = z + (z |> conv(16, 3, pad=1) |> bn) |> relu @third
  logits = w |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = PRECISION }
"""
FORWARD = ("batch_normalize+add+relu+relu_mask", "batch_normalize*+add+relu+relu_mask")


def graph(precision: str = "fp32") -> TrainingGraph:
    return training_graph(SOURCE.replace("PRECISION", precision))


@dataclass(frozen=True)
class Measured(NoSizes):
    """A profile that has measured everything; groups take half the time, so that small tensors use them, too.

    So everything has one layout. `times`: factors by kind.
    """

    times: Callable[[str], float] = lambda kind: 1.0
    layout: Layout = Layout.CHANNELS_LAST
    knows: Callable[[str], bool] = lambda kind: True
    cudnn: int = 0
    origin: str = "made up"

    def candidates(self, request: Request) -> Iterable[Candidate]:
        if not self.knows(request.kind):
            return ()
        factor = self.times(request.kind) * (0.5 if "+" in request.kind else 1.0)
        return tuple(
            replace(c, measured=True, time_us=c.time_us * factor * (0.5 if self.layout in c.layouts else 1.0))
            for provider in PROVIDERS
            for c in provider.candidates(request, UNCLUSTERED)
        )


def table(profile: Measured | None = None, precision: str = "fp32") -> CandidateTable:
    return CandidateTable(graph(precision), UNCLUSTERED, PROVIDERS, profile, Rules())


def planned(tabulated: CandidateTable, budget_bytes: int = 1 << 40) -> Plan:
    plan = search(tabulated, Limits(budget_bytes, without=frozenset({"concurrent_stream"})))
    verify_plan(plan)
    return plan


def masks_of(tabulated: CandidateTable) -> list[str]:
    """Return the masks that save time."""
    masked = with_relu_masks(Selector.of(tabulated))
    return [op.name for op in masked.table.graph.train if op.kind == "relu_mask"] if masked is not None else []


def unsigned() -> CandidateTable:
    """Return candidates with a profile that has not measured bit masks."""
    return table(Measured(knows=lambda kind: "mask" not in kind))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bit_masks_are_taken_where_they_were_measured_as_faster(precision: str):
    tabulated = table(Measured(), precision)
    assert masks_of(tabulated) == ["first.mask", "second.mask", "third.mask"]
    assert launched(planned(tabulated).train) >= {
        "batch_normalize_add_relu_mask",
        "dual_batch_normalize_add_relu_mask",
        "relu_backward_masked_bn_reduce",
        "add_relu_backward_masked_bn_reduce",
    }


@pytest.mark.parametrize(
    "profile",
    [
        None,
        Measured(knows=lambda kind: "mask" not in kind),
        Measured(knows=lambda kind: kind not in FORWARD),
        Measured(times=lambda kind: 9.0 if "relu_backward_masked+" in kind else 1.0),
        Measured(layout=Layout.CHANNELS_FIRST),
    ],
    ids=["estimated", "never measured", "in part", "slower", "channels first"],
)
def test_elsewhere_the_step_stays(profile: Measured | None):
    tabulated = table(profile)
    assert with_relu_masks(Selector.of(tabulated)) is None


def test_relus_are_chosen_one_by_one():
    tabulated = table(Measured(times=lambda kind: 9.0 if kind == FORWARD[1] else 1.0))
    assert masks_of(tabulated) == ["first.mask", "third.mask"]


def within(tabulated: CandidateTable, share: float) -> Plan:
    """Return the plan within this share of the arena of the plan without a limit and without bit masks."""
    arena_bytes = planned(unsigned()).predictions.arena_bytes
    return planned(tabulated, int(share * arena_bytes) + UNCLUSTERED.overhead_bytes)


@pytest.mark.parametrize("share", [2.0, 0.9, 0.75, 0.7])
def test_plans_with_bit_masks_are_no_slower_and_give_the_same_bits(share: float):
    signed = within(table(Measured()), share)
    assert signed.predictions.train_us <= within(unsigned(), share).predictions.train_us
    assert trained(signed) == trained(planned(unsigned()))


def test_within_a_budget_relus_have_bit_masks_whose_output_is_kept():
    """If ReLU's output is recomputed in reductions, it gets no mask, which fused rematerialization would not read."""
    plain, signed = within(unsigned(), 0.9), within(table(Measured()), 0.9)
    kept = [
        name for name in ("first", "second", "third") if sum(name in x.operations for x in plain.train.launches) == 1
    ]
    assert kept == ["third"]
    assert [op.name for op in signed.graph.train if op.kind == "relu_mask"] == ["third.mask"]


def test_reductions_recompute_the_output_of_a_relu_with_bit_masks(monkeypatch: pytest.MonkeyPatch):
    """A plan with some bit masks may still recompute the output of a ReLU."""
    monkeypatch.setattr("mbc.optimize.search.search.masks_of_kept", lambda unmasked, masked, draft: masked)
    monkeypatch.setattr("mbc.optimize.effort.DEFERRED_SHARE", 2.0)  # operands are much of so small a step
    signed = within(table(Measured(times=lambda kind: 0.5 if "+relu_backward_masked" in kind else 1.0)), 0.9)
    assert any(name.endswith("_masked") for name in launched(signed.train))
    assert trained(signed) == trained(planned(unsigned()))


def test_within_a_budget_a_small_gain_is_not_looked_for():
    tabulated = table(Measured(times=lambda kind: 1.5 if "mask" in kind else 1.0))
    assert masks_of(tabulated)
    assert within(tabulated, 2.0).graph != tabulated.graph
    assert within(tabulated, 0.7).graph == tabulated.graph  # with masks it would take 1 % less


def test_both_forms_are_asked_of_a_profile():
    plain = graph()
    signed = mask_relus(plain, residual_relus(plain))
    requests = {need.undivided for need in needs(plain, UNCLUSTERED, Policy.UNDIVIDED)}
    kinds = {request.kind for request in requests}
    assert kinds >= {
        *FORWARD,
        "relu_mask",
        "relu_backward_masked",
        "relu_backward_masked+batch_normalize_backward_reduce",
    }
    assert kinds >= {kind.removesuffix("+relu_mask") for kind in FORWARD}
    asked = CandidateTable(signed, UNCLUSTERED, PROVIDERS)
    assert {asked.request(op, asked.whole) for op in signed.train if "mask" in op.kind} <= requests
