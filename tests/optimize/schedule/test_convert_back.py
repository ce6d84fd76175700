"""A value that is needed again in two layouts is converted back from the layout that is read first."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mbc.compiler import compile_plan
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate, Request
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.schedule.convert_back import convert_back, is_conversion
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.search.search import Limits, search
from mbc.optimize.selection.select import choose
from mbc.options import Options
from mbc.plan.model import Mode, Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers
from mbc.source import Source
from tests.optimize.planned import Adapted, Without, plan_of, planned_table, trained

NETWORK = """
network normalised(batch = 4, classes = 3) {
  input image[batch, 2, 8, 8] : float
  input target[batch] : class
  x = image |> conv(4, 3, pad=1) |> relu |> lrn |> maxpool(2)
  logits = x |> conv(4, 3, pad=1) |> relu |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""
EXAMPLE = Path(__file__).parents[3] / "examples" / "alexnet_caffe.mbc"


@dataclass(frozen=True)
class TwoLayouts(Adapted):
    """Providers whose response normalisation is channels first only, and whose other kernels are channels last only."""

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        wanted = Layout.CHANNELS_FIRST if request.kind.startswith("lrn") else Layout.CHANNELS_LAST
        types = (*request.inputs, *request.outputs)
        candidates = list(self.inner.candidates(request, device))

        def in_layouts(candidate: Candidate) -> bool:
            pairs = zip(types, candidate.layouts, strict=True)
            return all(layout is wanted for type_, layout in pairs if len(type_.shape) == 4)

        matching = [candidate for candidate in candidates if in_layouts(candidate)]
        return matching if matching and request.kind != "convert" else candidates


@functools.cache
def table() -> CandidateTable:
    tabulated = planned_table(NETWORK, "normalised")
    providers = tuple(TwoLayouts(Without(provider)) for provider in PROVIDERS)
    return CandidateTable(tabulated.graph, tabulated.device, providers, None, Rules())


@functools.cache
def draft() -> Draft:
    return emit_launches(table(), choose(table(), {}))


def reads(step: Draft, buffer: int) -> list[int]:
    return [
        i
        for i, launch in enumerate(step.train.launches)
        if any(access.buffer == buffer and access.mode is Mode.READ for access in launch.accesses)
    ]


def relu_buffers(step: Draft) -> dict[Layout, list[int]]:
    """Return the buffers of the first ReLU's output, which `lrn` reads."""
    launches = step.train.launches
    value = next(step.buffers[at.accesses[0].buffer].value for at in launches if at.operations[:1] == ("lrn0",))
    by_layout: dict[Layout, list[int]] = {}
    for i, buffer in enumerate(step.buffers):
        if buffer.value == value and reads(step, i):
            by_layout.setdefault(buffer.layout, []).append(i)
    return by_layout


def test_one_layout_stays_and_gives_the_other_back():
    before, after = relu_buffers(draft()), relu_buffers(converted := convert_back(table(), draft(), 1))
    (last,) = before[Layout.CHANNELS_LAST]
    (first,) = before[Layout.CHANNELS_FIRST]
    # Both are read in the backward pass, the first in the other layout.
    assert reads(draft(), first)[-1] < reads(draft(), last)[-1]
    assert len(converted.train.launches) == len(draft().train.launches) + 1
    early, late = after[Layout.CHANNELS_LAST]
    (stays,) = after[Layout.CHANNELS_FIRST]
    launches = converted.train.launches
    (reader,) = reads(converted, late)
    back = launches[reader - 1]
    assert is_conversion(back, converted.buffers)
    assert [access.buffer for access in back.accesses] == [stays, late]
    # The first copy is free once it is converted.
    (only,) = reads(converted, early)
    assert is_conversion(launches[only], converted.buffers)


def test_small_values_stay_in_both_layouts():
    most_bytes = max(buffer.size_bytes for buffer in draft().buffers)
    assert convert_back(table(), draft(), most_bytes + 1) is draft()


def test_a_value_that_is_needed_in_one_layout_only_stays():
    """A converted draft, in which the value is read once in each layout, is not converted further."""
    converted = convert_back(table(), draft(), 1)
    assert convert_back(table(), converted, 1) is converted


@functools.cache
def kept() -> Plan:
    return search(table(), Limits(1 << 40))


def test_the_bits_are_the_same():
    plans = [plan_of(kept(), step) for step in (draft(), convert_back(table(), draft(), 1))]
    for plan in plans:
        verify_plan(plan)
    states = [trained(plan, Transfers.IN_ORDER) for plan in plans]
    assert states[0] == states[1]


def test_a_budget_converts_back_where_recomputing_takes_longer():
    """AlexNet at batch 512 in half of its memory converts ReLU's output instead of repeating the convolution."""
    sets = ("batch", "512"), ("memory.device", "3.48GB")
    source = Source("alexnet_caffe.mbc", EXAMPLE.read_text(encoding="utf-8"))
    plan = compile_plan(source, Options(gpu="h200", settings=sets))
    launches = [launch for launch in plan.train.launches if launch.operations == ("convolution0.conv0",)]
    rows = {access.rows for launch in launches for access in launch.accesses if access.mode is not Mode.READ}
    assert len(rows) == len(launches)  # no part of the batch twice
    conversions = [launch for launch in plan.train.launches if is_conversion(launch, plan.buffers)]
    of_relu = [
        tuple(plan.buffers[access.buffer].layout for access in launch.accesses)
        for launch in conversions
        if plan.buffers[launch.accesses[0].buffer].value == "convolution0.relu0"
    ]
    assert len(of_relu) == 2 and of_relu[0] == of_relu[1][::-1]


@pytest.mark.parametrize("without", [frozenset({"recompute"})])
def test_it_is_a_recomputation(without: frozenset[str]):
    sets = ("batch", "512"), ("memory.device", "4.8GB")
    source = Source("alexnet_caffe.mbc", EXAMPLE.read_text(encoding="utf-8"))
    plan = compile_plan(source, Options(gpu="h200", settings=sets, without=without))
    of_relu = [
        launch
        for launch in plan.train.launches
        if is_conversion(launch, plan.buffers) and plan.buffers[launch.accesses[0].buffer].value == "convolution0.relu0"
    ]
    assert len(of_relu) == 1
