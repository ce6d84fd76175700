"""What a plan gains that knows of the other ranks' copies: the search is run again as if each GPU were the only one of
its machine, and what it finds is timed with what the link carries while all copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from mbc.errors import BudgetError
from mbc.hardware.transfers import HostLink
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.simulate import simulate
from mbc.optimize.search.predicted_times import TimedProgram, predicted_times
from mbc.plan.model import Copy, Plan, Program
from mbc.plan.traffic import copied_bytes


def beside_other_ranks(
    aware: Plan, table: CandidateTable, alone: HostLink, gpus: int, search: Callable[[CandidateTable], Plan]
) -> Plan:
    """`aware`, the plan of `table`, whose link to the host is that of `gpus` GPUs that copy at a time; or the plan that
    `search` finds for a link that is `alone` its GPU's, where that is faster all the same. Both times are in it.

    The ranks' copies are not kept apart in time: whatever the phases, a link shared moves no fewer bytes than one that
    ranks have in turn (decision 059).
    """
    shared = table.device.host_link
    if replace(alone, measured=shared.measured) == shared:  # they do not disturb one another
        return _noted(aware, gpus, aware)
    try:
        oblivious = retimed(search(table.on(replace(table.device, host_link=alone))), table)
    except BudgetError:  # times decide which of many steps is tried, and so what is found near the least
        return _noted(aware, gpus, aware)
    return _noted(min(aware, oblivious, key=lambda plan: plan.predictions.train_us), gpus, oblivious)


def _noted(plan: Plan, gpus: int, oblivious: Plan) -> Plan:
    told = replace(plan.predictions, host_gpus=gpus, oblivious_us=oblivious.predictions.train_us)
    return replace(plan, predictions=told)


def retimed(plan: Plan, table: CandidateTable) -> Plan:
    """The same launches, addresses and waits, timed by the links of `table`'s device. The plan's graph may be another
    than the table's, with masks of ReLUs for instance."""
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
        replace(launch, work=links.copy(copied_bytes(plan, launch), launch.stream))
        if isinstance(launch.work, Copy) and launch.stream in (*links.host.directions, *links.peer.directions)
        else launch
        for launch in program.launches
    )
    return replace(program, launches=launches)
