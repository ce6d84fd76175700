"""Groups that exist in one layout only, between operations that are faster in another layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from mbc.ir.types import Layout
from mbc.kernels.base import Candidate, Request
from mbc.kernels.providers import PROVIDERS
from mbc.ops.fused import Fused
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Fusion, plain
from mbc.optimize.selection.select import choose
from mbc.optimize.selection.selector import Selector
from tests.optimize.planned import H200, NoSizes, graph_of

SOURCE = """
network small(batch = 8, classes = 4) {
  input image[batch, 16, 8, 8] : float
  input target[batch] : class
  x = image |> conv(16, 3, pad=1) |> bn |> relu |> conv(16, 3, pad=1) |> bn |> relu |> conv(16, 3, pad=1)
  logits = x |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd() }
"""
SINGLE_US, GROUP_US, OTHER_LAYOUT_US = 3.0, 1.0, 50.0


@dataclass(frozen=True)
class Lying(NoSizes):
    """A profile with groups in channels last only, slow conversions, and fast convolutions in layout `fast`."""

    fast: Layout = Layout.CHANNELS_FIRST
    convert_us: float = 10.0
    cudnn: int = 0
    origin: str = "made up"

    def candidates(self, request: Request) -> Iterable[Candidate]:
        for candidate in (c for provider in PROVIDERS for c in provider.candidates(request, H200)):
            images = {
                layout
                for layout, type_ in zip(candidate.layouts, (*request.inputs, *request.outputs), strict=False)
                if len(type_.shape) == 4 and type_.shape[0] == 8
            }
            if isinstance(request.attributes, Fused):
                if images == {Layout.CHANNELS_LAST}:
                    yield replace(candidate, time_us=GROUP_US, measured=True)
            elif request.kind == "convert":
                yield replace(candidate, time_us=self.convert_us, measured=True)
            else:
                slow = request.kind.startswith("convolution") and images != {self.fast}
                yield replace(candidate, time_us=OTHER_LAYOUT_US if slow else SINGLE_US, measured=True)


def table(profile: Lying) -> CandidateTable:
    return CandidateTable(graph_of(SOURCE), H200, PROVIDERS, profile)


@pytest.mark.parametrize(
    ("profile", "grouped"),
    [(Lying(), False), (Lying(convert_us=0.1), True), (Lying(fast=Layout.CHANNELS_LAST), True)],
    ids=["changes of layout cost more", "they cost little", "there are none"],
)
def test_groups_are_used_if_they_save_more_than_conversions_cost(profile: Lying, grouped: bool) -> None:
    tabulated = table(profile)
    greedy, fastest = Fusion.of(tabulated).programs(), Selector.of(tabulated).fastest_fused()
    assert any(isinstance(o.attributes, Fused) for o in greedy.train)
    assert any(isinstance(o.attributes, Fused) and "relu" in o.kind for o in fastest.train) == grouped
    times_us = {programs: choose(tabulated, {}, programs=programs).train_us for programs in (greedy, fastest)}
    assert times_us[fastest] == min(times_us.values())
    assert (fastest == greedy) == grouped
    assert grouped or times_us[fastest] < times_us[greedy]


def test_one_layout_has_groups_of_that_layout_only() -> None:
    tabulated = table(Lying(fast=Layout.CHANNELS_LAST))
    assert Fusion.of(tabulated).programs(layout=Layout.CHANNELS_LAST) == Fusion.of(tabulated).programs()
    assert (
        Fusion.of(tabulated).programs(layout=Layout.CHANNELS_FIRST).infer
        == plain(tabulated.graph).infer
        != Fusion.of(tabulated).programs().infer
    )
