"""Kernels and layouts are chosen by time, conversions included; programs follow the rules of plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.ir.graph import TrainingGraph
from mbc.ir.types import Layout
from mbc.kernels.base import Acceptance, Arguments, Call, Candidate, Request
from mbc.kernels.cuda import OWN
from mbc.optimize.bounds.arena_bytes import floor_bytes
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.schedule.emit_launches import emit_launches
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.search.search import Limits, search
from mbc.optimize.selection.select import choose
from mbc.plan.model import Kernel, Mode, Plan
from mbc.plan.verify import verify_plan
from tests.graphs import training_graph

SOURCE = """
network small(batch = 8, classes = 4) {
  input image[batch, 3, 8, 8] : float
  input target[batch] : class
  x = image |> conv(8, 3, pad=1) |> bn |> relu
  y = x |> conv(8, 3, pad=1) |> relu
  logits = x + y |> maxpool(2) |> flatten |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""
FIRST, LAST = Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST
NO_LIMIT = Limits(without=frozenset({"concurrent_stream"}))  # bounds are of launches one after the other
CHOOSE = Rules()


@dataclass(frozen=True)
class Fake:
    """A provider of every kind in both layouts; convolutions have given times and workspaces for each layout."""

    convolution_us: dict[Layout, float]
    workspace_bytes: dict[Layout, int]
    deterministic: bool = True
    accumulates: bool = True
    name: str = "fake"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        count = len(request.inputs) + len(request.outputs)
        is_convolution = request.kind.startswith("convolution")
        for layout in (FIRST,) if request.kind.startswith("linear") else Layout:
            time_us = self.convolution_us[layout] if is_convolution else 1.0
            workspace = self.workspace_bytes[layout] if is_convolution else 0
            yield Candidate(
                self.name,
                request.kind,
                (),
                (layout,) * count,
                workspace,
                time_us,
                False,
                self.deterministic,
                self.accumulates,
            )

    def arguments(self, call: Call, first_row: int) -> Arguments:
        return Arguments()

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        offered = [c for c in self.candidates(call.request, device) if call.has_layouts(c.layouts)]
        if call.name != call.request.kind or not offered:
            return Acceptance("it takes operands in one layout")
        enough = call.workspace_bytes >= min(c.workspace_bytes for c in offered)
        return Acceptance(workspace_refusal="" if enough else "too little")


def graph() -> TrainingGraph:
    return training_graph(SOURCE)


def table(
    first_us: float, last_us: float, first_bytes: int = 0, last_bytes: int = 0, rules: Rules = CHOOSE, **more: Any
) -> CandidateTable:
    fake = Fake({FIRST: first_us, LAST: last_us}, {FIRST: first_bytes, LAST: last_bytes}, **more)
    return CandidateTable(graph(), find_spec("h200"), (fake,), rules=rules)


def plan(candidates: CandidateTable, limits: Limits = NO_LIMIT, budget_bytes: int = 10**12) -> Plan:
    result = search(candidates, replace(limits, budget_bytes=budget_bytes))
    verify_plan(result, providers=(*candidates.providers, OWN))
    return result


def layouts_of_convolutions(result: Plan) -> set[Layout]:
    kinds = {op.name: op.kind for op in (*result.graph.train, *result.graph.infer)}
    return {
        result.buffers[launch.accesses[1].buffer].layout
        for program in (result.train, result.infer)
        for launch in program.launches
        if launch.operations and kinds[launch.operations[0]] == "convolution"
    }


def conversions(result: Plan) -> int:
    works = [launch.work for launch in result.train.launches]
    return sum(isinstance(work, Kernel) and work.name == "convert" for work in works)


def test_channels_first_needs_no_conversion() -> None:
    result = plan(table(10.0, 10.0))
    assert layouts_of_convolutions(result) == {FIRST}
    assert conversions(result) == 0


def test_faster_channels_last_kernels_pay_for_the_conversions_at_the_ends() -> None:
    result = plan(table(1000.0, 10.0))
    assert layouts_of_convolutions(result) == {LAST}
    # The image, the pooled activation before `flatten` and its gradient behind it.
    assert conversions(result) == 3
    parameters = {b.value: b.layout for b in result.buffers if b.value in ("conv0.weight", "conv0.weight.momentum")}
    assert parameters == {"conv0.weight": LAST, "conv0.weight.momentum": LAST}


def test_a_small_gain_does_not_justify_conversions() -> None:
    assert layouts_of_convolutions(plan(table(10.0, 9.9))) == {FIRST}


def test_workspace_limit_decides() -> None:
    candidates = table(100.0, 10.0, last_bytes=1000)
    assert layouts_of_convolutions(plan(candidates)) == {LAST}
    assert layouts_of_convolutions(plan(candidates, limits=Limits(operation_bytes=999))) == {FIRST}
    with pytest.raises(MbcError, match=r"MBC201.*needs 1000 B of workspace"):
        plan(table(100.0, 10.0, 2000, 1000), limits=Limits(operation_bytes=999))


def test_deterministic_refuses_other_kernels() -> None:
    with pytest.raises(MbcError, match="MBC202"):
        plan(table(1.0, 1.0, rules=Rules(deterministic=True), deterministic=False))


def test_workspace_shrinks_until_the_budget_holds() -> None:
    candidates = table(100.0, 10.0, last_bytes=1 << 30)
    unlimited = plan(candidates)
    assert unlimited.predictions.arena_bytes > 1 << 30
    tight = plan(candidates, budget_bytes=candidates.device.overhead_bytes + (1 << 29))
    assert tight.predictions.arena_bytes + tight.predictions.overhead_bytes <= tight.budget_bytes
    assert tight.predictions.train_us > unlimited.predictions.train_us


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_slices_cover_every_row_and_filter_gradients_add_up(rows: int) -> None:
    result = plan(table(10.0, 10.0, rules=Rules(micro_batch=rows)))
    kinds = {op.name: op.kind for op in result.graph.train}
    micro_batches: dict[str, list[tuple[int, int, Mode]]] = {}
    for launch in result.train.launches:
        for name in launch.operations:
            if kinds[name].startswith("convolution"):
                rows_read, output = launch.accesses[0].rows, launch.accesses[2]
                micro_batches.setdefault(name, []).append((rows_read.start, rows_read.stop, output.mode))
    assert len(micro_batches) == 5  # two forward, one backward_data, two backward_filter
    for name, parts in micro_batches.items():
        assert [start for start, _, _ in parts] == [0, *(stop for _, stop, _ in parts[:-1])]
        assert parts[-1][1] == 8
        later = {mode for _, _, mode in parts[1:]}
        assert later == ({Mode.ACCUMULATE} if "filter" in kinds[name] else {Mode.WRITE})


def test_filter_gradients_stay_whole_where_no_kernel_adds_up() -> None:
    with pytest.warns(RuntimeWarning, match=r"--micro-batch 4: 'conv\d.backward_filter' is not divided: no kernel"):
        result = plan(table(10.0, 10.0, rules=Rules(micro_batch=4), accumulates=False))
    kinds = {op.name: op.kind for op in result.graph.train}
    calls = [kinds[name] for launch in result.train.launches for name in launch.operations]
    assert calls.count("convolution_backward_filter") == 2
    assert calls.count("convolution") == 4


def test_outputs_take_over_inputs_that_die() -> None:
    candidates = table(10.0, 10.0)
    draft = alias_in_place(candidates.graph, emit_launches(candidates, choose(candidates, {})))
    aliased = {b.value for b in draft.buffers if b.alias is not None}
    assert "next.conv0.weight" in aliased, "updates happen in place"
    assert "d.relu1" not in aliased, "the gradient of a sum goes to two readers"
    assert any(name and name.startswith("relu") for name in aliased), "an activation overwrites its input"
    for buffer in draft.buffers:
        if buffer.alias is not None:
            assert draft.buffers[buffer.alias].size_bytes == buffer.size_bytes


def test_bounds() -> None:
    candidates = table(100.0, 10.0, 0, 1 << 20)
    result = plan(candidates, limits=Limits(operation_bytes=0))
    floor, operation = floor_bytes(Fusion.of(candidates))
    assert floor <= result.predictions.arena_bytes
    assert operation.name == result.bounds.floor_operation
    assert result.bounds.fastest_us < result.predictions.train_us


def test_the_choice_without_limits_is_the_fastest() -> None:
    result = plan(table(100.0, 10.0, 0, 1 << 20))
    assert result.predictions.train_us == pytest.approx(result.bounds.fastest_us, rel=1e-6)
