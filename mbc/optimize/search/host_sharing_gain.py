"""The gain of a plan that accounts for the other ranks' copies.

The search is run again as if each GPU were the only one of its machine. Its result is timed with the rate of the link
while all GPUs copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from mbc.errors import BudgetError
from mbc.hardware.transfers import HostLink
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.simulate import simulate
from mbc.optimize.search.predicted_times import TimedProgram, predicted_times
from mbc.plan.model import Copy, Plan, Program, copy_work
from mbc.plan.traffic import copied_bytes


def beside_other_ranks(
    aware: Plan, table: CandidateTable, alone: HostLink, gpus: int, search: Callable[[CandidateTable], Plan]
) -> Plan:
    """Return the faster of two plans: one that accounts for the copies of other ranks, and one that ignores them.

    The times of both are noted in the result. Copies of different ranks are not separated in time: a shared link moves
    as many bytes as one that ranks use in turn (decision 059).

    Args:
        aware: The plan of `table`, whose link to the host is that of `gpus` GPUs that copy at the same time.
        table: Candidates of the step.
        alone: The link of a GPU that copies alone.
        gpus: GPUs that share the link.
        search: Plans a step from a table.
    """
    shared = table.device.host_link
    if replace(alone, measured=shared.measured) == shared:  # the GPUs do not slow down one another
        return _noted(aware, gpus, aware)
    try:
        oblivious = retimed(search(table.on(replace(table.device, host_link=alone))), table)
    except BudgetError:  # times decide which steps are tried, so near the least budget a search may fail
        return _noted(aware, gpus, aware)
    return _noted(min(aware, oblivious, key=lambda plan: plan.predictions.train_us), gpus, oblivious)


def _noted(plan: Plan, gpus: int, oblivious: Plan) -> Plan:
    predictions = replace(plan.predictions, host_gpus=gpus, oblivious_us=oblivious.predictions.train_us)
    return replace(plan, predictions=predictions)


def retimed(plan: Plan, table: CandidateTable) -> Plan:
    """Return a plan with the same launches, addresses and waits, timed by the links of `table`'s device.

    The plan's graph may differ from the table's, for instance by masks of ReLUs.
    """
    table = table.of(plan.graph)
    train, infer = (_retimed(plan, program, table) for program in (plan.train, plan.infer))

    def timed(program: Program) -> TimedProgram:
        return program, simulate(program, contention=contention(program, plan.graph, plan.buffers, table.device))

    times = predicted_times(table, plan.buffers, timed(train), timed(infer))
    predictions = replace(plan.predictions, **asdict(times))
    return replace(plan, train=train, infer=infer, predictions=predictions)


def _retimed(plan: Plan, program: Program, table: CandidateTable) -> Program:
    links = table.device.links
    launches = tuple(
        replace(launch, work=copy_work(links, copied_bytes(plan, launch), launch.stream))
        if isinstance(launch.work, Copy) and launch.stream in (*links.host.directions, *links.peer.directions)
        else launch
        for launch in program.launches
    )
    return replace(program, launches=launches)
