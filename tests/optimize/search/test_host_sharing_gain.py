"""Plans of ranks that share the link to host memory, beside plans of a search that knows only one GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.compiler import compile_plans, try_plan
from mbc.errors import BudgetError
from mbc.hardware.host_sharing import shared_link
from mbc.hardware.streams import Space
from mbc.ir.graph import Role
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.search.host_sharing_gain import beside_other_ranks, retimed
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Copy, Plan
from mbc.profile.locate import find_profile
from mbc.profile.model import calibrated, for_ranks
from mbc.report.devices import device_of, host_sharing_text
from mbc.report.timeline import predicted_timeline
from mbc.source import Source
from tests.optimize.planned import H200
from tests.optimize.shared import EXAMPLES

GPUS = 8
SOURCE = Source("vgg16.mbc", (EXAMPLES / "vgg16.mbc").read_text(encoding="utf-8"))


SETTINGS = {
    "size": "64", "width": "16", "classes": "10", "batch": str(512 * GPUS), "train.precision": "fp32",
    "train.shard_optimizer": "false", "memory.device": "2060MB",
}  # fmt: skip
OPTIONS = Options(gpu="h100", gpus=GPUS, settings=tuple(SETTINGS.items()), without=frozenset({"recompute"}))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Return the plan of a VGG on eight GPUs of one machine, which must offload a little and recomputes nothing."""
    return compile_plans(SOURCE, OPTIONS)[0]


@pytest.fixture(scope="module")
def table(plan: Plan) -> CandidateTable:
    device = device_of(plan)
    assert device is not None
    return CandidateTable(plan.graph, device, PROVIDERS, find_profile(device))


def test_knowing_of_the_others_is_faster(plan: Plan) -> None:
    predictions = plan.predictions
    assert predictions.host_gpus == GPUS and predictions.host_bytes > 0
    assert predictions.oblivious_us > 1.1 * predictions.train_us
    assert "8 GPUs copy with the host at a time: " in host_sharing_text(plan)
    assert "faster than the plan that ignores the others" in host_sharing_text(plan)
    assert load_plan(dump_plan(plan), "shared") == plan
    probe = try_plan(SOURCE, OPTIONS)
    assert probe.train == plan.train and not probe.predictions.oblivious_us


def test_copies_take_the_time_of_the_shared_link(plan: Plan, table: CandidateTable) -> None:
    links = table.device.links
    assert links.host.to_host_gb_s < calibrated(H200, None).host_link.to_host_gb_s / 2
    copies = [
        launch
        for launch in plan.train.launches
        if isinstance(launch.work, Copy) and launch.stream in links.host.directions
    ]
    assert copies
    for copy in copies:
        size_bytes = plan.buffers[copy.accesses[0].buffer].size_bytes
        assert copy.work.time_us == pytest.approx(links.copy_us(size_bytes, copy.stream))


def test_timing_a_plan_anew_by_its_own_links_changes_nothing(plan: Plan, table: CandidateTable) -> None:
    again = retimed(plan, table)
    assert again.predictions.train_us == pytest.approx(plan.predictions.train_us)
    assert again.train.launches == plan.train.launches
    assert predicted_timeline(plan, plan.train).total_us == pytest.approx(plan.predictions.train_us)


def test_a_plan_of_another_graph_is_timed_by_its_own(plan: Plan, table: CandidateTable) -> None:
    """The search may end with another graph, whose own values, such as masks of ReLUs, need times, too."""
    values = {name: value for name, value in plan.graph.values.items() if value.role is not Role.INTERMEDIATE}
    assert len(values) < len(plan.graph.values)
    again = retimed(plan, table.of(replace(plan.graph, values=values)))
    assert again.predictions.train_us == pytest.approx(plan.predictions.train_us)


def test_the_faster_of_both_is_taken(plan: Plan, table: CandidateTable) -> None:
    alone = calibrated(replace(table.device, host_link=H200.host_link), None).host_link
    asked: list[CandidateTable] = []

    def search(other: CandidateTable) -> Plan:
        asked.append(other)
        return plan

    slow = replace(plan, predictions=replace(plan.predictions, train_us=2 * plan.predictions.train_us))
    result = beside_other_ranks(slow, table, alone, GPUS, search)
    assert asked[0].device.host_link == alone and asked[0].graph is table.graph
    assert result.predictions.train_us == result.predictions.oblivious_us == pytest.approx(plan.predictions.train_us)

    fast = replace(plan, predictions=replace(plan.predictions, train_us=plan.predictions.train_us / 2))
    result = beside_other_ranks(fast, table, alone, GPUS, search)
    assert result.predictions.oblivious_us == pytest.approx(2 * result.predictions.train_us)


def test_a_search_that_finds_nothing_or_has_nothing_to_find(plan: Plan, table: CandidateTable) -> None:
    def search(other: CandidateTable) -> Plan:
        raise BudgetError("MBC204", "nothing was found", "")

    for alone in (H200.host_link, table.device.host_link):
        result = beside_other_ranks(plan, table, alone, GPUS, search)
        assert result.train == plan.train and result.predictions.oblivious_us == plan.predictions.train_us
        assert host_sharing_text(result).endswith("as fast as the plan that ignores the others")


def test_ranks_on_machines_of_their_own_share_nothing() -> None:
    settings = (("size", "32"), ("width", "8"), ("batch", "16"), ("classes", "10"), ("memory.device", "4GB"))
    (result,) = compile_plans(SOURCE, Options(gpu="h100", gpus=2, gpus_per_node=1, settings=settings))
    assert result.predictions.host_gpus == 0 and host_sharing_text(result) == ""
    assert for_ranks(H200, None, 2, 1).host_link == shared_link(H200.host_link, (), 1) == H200.host_link
    assert result.predictions.bytes_of(Space.HOST) == 0
