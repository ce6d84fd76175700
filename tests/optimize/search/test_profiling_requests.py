"""Profiling requests are the requests that planning looks up in a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate, Request
from mbc.kernels.providers import PROVIDERS
from mbc.ops import KINDS
from mbc.optimize.candidates.table import CandidateTable, Rules, conversion_request, request_of
from mbc.optimize.search.profiling_requests import needs, unmeasured, untried
from mbc.options import Policy
from mbc.plan.model import Kernel, Rows
from tests.optimize.planned import NoSizes, kept_plan
from tests.optimize.selection.test_select import graph

H200 = find_spec("h200")


@pytest.mark.parametrize("policy", list(Policy))
def test_every_request_of_planning_is_needed(policy: Policy):
    steps = graph()
    requests = {request for need in needs(steps, H200, policy) for request in need.requests}
    # With policy `all` sizes between them are interpolated.
    table = CandidateTable(
        steps, H200, PROVIDERS, None, Rules(min(policy, Policy.POWER_OF_TWO, key=list(Policy).index))
    )
    for operation in (o for o in (*steps.train, *steps.infer) if not KINDS[o.kind].view):
        for rows in table.micro_batch_rows(operation):
            assert table.request(operation, Rows(0, rows)) in requests
    assert conversion_request(steps.values["image"].type, steps) in requests


def test_slices_are_aligned_and_largest_first():
    (first, *_) = [n for n in needs(graph(), H200, Policy.POWER_OF_TWO) if n.undivided.kind == "convolution"]
    assert [r.inputs[0].shape[0] for r in first.requests] == [8, 4, 2, 1]


def test_policy_all_measures_sizes_halfway_between_powers_of_two_too():
    (first, *_) = [n for n in needs(graph(), H200, Policy.ALL) if n.undivided.kind == "convolution"]
    assert [r.inputs[0].shape[0] for r in first.requests] == [8, 6, 4, 3, 2, 1]


def test_equal_operations_are_needed_once_and_weigh_together():
    listed = needs(graph(), H200, Policy.UNDIVIDED)
    assert len({n.undivided for n in listed}) == len(listed)
    assert list(listed) == sorted(listed, key=lambda n: -n.weight_us)


def test_an_estimate_is_never_faster_than_a_measurement():
    """A measured kernel excludes estimated kernels, however slow it is, unless these need less workspace."""
    steps = graph()
    operation = next(o for o in steps.train if o.kind == "convolution")
    slow = Candidate("cudnn", "convolution", (), (Layout.CHANNELS_FIRST,) * 3, 1 << 10, 1e9, True)

    class Slow(NoSizes):
        def candidates(self, request: Request) -> tuple[Candidate, ...]:
            return (slow,) if request.kind == "convolution" else ()

    table = CandidateTable(steps, H200, PROVIDERS, Slow())
    offered = table.candidates(operation, table.whole)
    assert [c for c in offered if c.workspace_bytes >= slow.workspace_bytes] == [slow]
    leaner = [c for c in offered if c.workspace_bytes < slow.workspace_bytes]
    assert leaner and all(c.time_us >= slow.time_us and not c.measured for c in leaner)


def test_engines_that_were_not_tried_on_a_slice_are_to_be_measured():
    """Engines that cuDNN chooses itself run on every slice, and so do measured kernels and mbc's own."""
    plan = kept_plan("dense")
    assert unmeasured(plan) and not untried(plan)
    (place, launch), *_ = [
        (i, x) for i, x in enumerate(plan.train.launches) if isinstance(x.work, Kernel) and x.work.provider == "cudnn"
    ]

    def tried(work: Kernel) -> tuple[Request, ...]:
        launches = (*plan.train.launches[:place], replace(launch, work=work), *plan.train.launches[place + 1 :])
        return untried(replace(plan, train=replace(plan.train, launches=launches)))

    assert isinstance(launch.work, Kernel)
    engine = replace(launch.work, settings=(("engine", 3),))
    (request,) = tried(engine)
    operation = next(o for o in plan.graph.train if (o.name,) == launch.operations)
    assert request == request_of(plan.graph, operation, Rows(0, plan.graph.batch))
    assert tried(replace(engine, provider="cudnn_legacy")) == (request,)
    assert not tried(replace(engine, measured=True))
