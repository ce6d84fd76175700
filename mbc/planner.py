"""Planning of the GPUs that train one network: measured times, the search, and the plans of all ranks.

The stages of this file are those of ARCHITECTURE.md from `bound` to `verify ranks`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from mbc.constraints import Constraints, warn_without_room
from mbc.errors import BudgetError
from mbc.hardware.host_sharing import check_pinned
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.target import local_memory_bytes
from mbc.ir.graph import TrainingGraph
from mbc.measuring import Measuring, can_measure
from mbc.optimize.bounds.arena_bytes import bytes_of_states
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.effort import SLOW_PROBE
from mbc.optimize.schedule.gradient_buckets import collectives_of, sum_layouts
from mbc.optimize.schedule.step_time import step_us
from mbc.optimize.search.host_sharing_gain import beside_other_ranks
from mbc.optimize.search.profiling_requests import (
    chosen_by_estimate,
    may_gain_by_micro_batches,
    outdated,
    unmeasured,
    untried,
)
from mbc.optimize.search.search import may_fit, search
from mbc.options import Options, Policy
from mbc.plan.collectives import ctas_of
from mbc.plan.file import dump_plan
from mbc.plan.model import Plan
from mbc.plan.techniques import saves_memory
from mbc.plan.verify import verify_plan
from mbc.plan.verify_ranks import verify_ranks
from mbc.profile.locate import find_profile
from mbc.profile.measured_workspace import measured_workspace
from mbc.profile.model import calibrated, for_ranks
from mbc.stages import Stages

# A probe plans sharded optimizer states in two cases. Its step with whole states fits, but takes longer than its lower
# bound times SHARDS_GAIN. Or no step fits, and the bytes that are missing are at most those that sharding frees times
# SHARDS_BYTES.
SHARDS_GAIN, SHARDS_BYTES = 1.05, 2


@dataclass(frozen=True, slots=True)
class Task:
    """The input of planning for all GPUs that train equally many rows.

    Attributes:
        graph: The training step, and inference.
        device: The GPU.
        constraints: Limits of the search.
        options: All further options.
        sharded: Returns the graph with sharded optimizer states if the planner decides about sharding, else None.
    """

    graph: TrainingGraph
    device: DeviceSpec
    constraints: Constraints
    options: Options
    sharded: Callable[[], TrainingGraph] | None = None


def plan_tasks(tasks: Sequence[Task], stages: Stages) -> tuple[Plan, ...]:
    """Return the plan of each task; the tasks are those of all ranks that share a mini-batch.

    Raises:
        BudgetError: There is no plan within the budget of a task.
        MbcError: MBC360, all ranks of this machine together pin more than its memory.
    """
    first, *further = tasks
    plans = [_plan_sharded_or_not(first, stages)]
    if first.graph.ranks is not None:
        # All ranks run the same collectives in the same order, over elements in the same order.
        program, buffers = plans[0].train, plans[0].buffers
        collectives, ctas = collectives_of(program), ctas_of(program) or 0
        layouts = tuple(sum_layouts(program, buffers))
        for task in further:
            rules = replace(task.constraints.rules, collectives=collectives, ctas=ctas, sum_layouts=layouts)
            task = replace(task, constraints=replace(task.constraints, rules=rules))
            plans.append(_TaskPlanner(task, stages, first.device).plan())
        stages.run("verify ranks", lambda: verify_ranks(plans))
        _check_host_memory(plans, first)
    for task, plan in zip(tasks, plans, strict=True):
        if not task.options.is_probe:
            warn_without_room(plan, task.options.gpu)
    return tuple(plan if plan.is_timed else _without_times(plan) for plan in plans)


def _without_times(plan: Plan) -> Plan:
    """Return the plan with all times 0: no GPU takes them, and the search has used them to compare plans."""
    train, infer = (
        replace(program, launches=tuple(replace(one, work=replace(one.work, time_us=0.0)) for one in program.launches))
        for program in (plan.train, plan.infer)
    )
    predictions, bounds = (
        replace(figures, **{field.name: 0.0 for field in fields(figures) if field.name.endswith("_us")})
        for figures in (plan.predictions, plan.bounds)
    )
    return replace(plan, train=train, infer=infer, predictions=predictions, bounds=bounds)


def step_us_of(task: Task, stages: Stages, collectives_like: DeviceSpec) -> float:
    """Return the time of a step in microseconds, infinite if there is no plan within the budget.

    Args:
        task: The task.
        stages: Runs the stages.
        collectives_like: The GPU whose profile times collectives.
    """
    try:
        return step_us(_TaskPlanner(task, stages, collectives_like).plan())
    except BudgetError:
        return math.inf


def _check_host_memory(plans: Sequence[Plan], first: Task) -> None:
    """Raise MBC360 if all ranks of this machine together pin more than its memory."""
    memory_bytes = local_memory_bytes(first.device, first.options.gpu)
    by_rank = {
        rank: plan.predictions.host_bytes for plan in plans if plan.graph.ranks for rank in plan.graph.ranks.members
    }
    if memory_bytes is not None:
        sizes_bytes = [by_rank[rank] for rank in sorted(by_rank)]
        check_pinned(sizes_bytes, first.options.gpus_per_node or len(sizes_bytes), memory_bytes)


def _plan_sharded_or_not(task: Task, stages: Stages) -> Plan:
    """Return the plan with whole optimizer states, or with sharded states if only these fit or are faster.

    Sharded states are planned only if the step uses other techniques to save memory. A probe plans them only where they
    may matter, as SHARDS_GAIN and SHARDS_BYTES say, and not for a step that is far slower than that of another batch.
    """
    if task.sharded is None:
        return _TaskPlanner(task, stages).plan()
    try:
        plan = _TaskPlanner(task, stages).plan()
    except BudgetError as refusal:
        graph = task.sharded()
        lacking_bytes = refusal.needed_bytes - task.constraints.limits.budget_bytes
        freed_bytes = bytes_of_states(task.graph) - bytes_of_states(graph)
        if graph == task.graph or (task.options.is_probe and lacking_bytes > SHARDS_BYTES * freed_bytes):
            raise
        return _TaskPlanner(replace(task, graph=graph), stages).plan()
    train_us, options = plan.predictions.train_us, task.options
    is_settled = train_us <= SHARDS_GAIN * plan.bounds.within_budget_us or train_us * SLOW_PROBE > options.slowest_us
    may_gain = saves_memory(plan) and not (options.is_probe and is_settled)
    graph = task.sharded() if may_gain else task.graph
    if graph == task.graph:
        return plan
    try:
        sharded = _TaskPlanner(replace(task, graph=graph), stages).plan()
    except BudgetError:
        return plan
    return min(plan, sharded, key=lambda one: one.predictions.train_us)


@dataclass
class _TaskPlanner:
    """Planning of one task: the search is repeated as long as new measurements may change the plan.

    Attributes:
        task: The task.
        stages: Runs the stages.
        collectives_like: The GPU whose profile times collectives: that of the first rank, because all ranks take part
            in them; None: the GPU of the task.
    """

    task: Task
    stages: Stages
    collectives_like: DeviceSpec | None = None

    def plan(self) -> Plan:
        """Return the plan, which the independent verifier has accepted.

        Raises:
            BudgetError: There is no plan within the budget.
        """
        options, stages = self.task.options, self.stages
        if options.node_link_gbit and self._host_gpus == self._ranks:
            warnings.warn("--node-link is ignored: all GPUs are in one machine (--gpus-per-node)", stacklevel=2)
        if stages.run("bound", self._may_fit):
            stages.run("measure", self._measuring.begin)
        table = stages.run("find profile", self._tabulate)
        table, plan = self._search_with_micro_batches(table)
        while self._measure_choices(table, plan):
            table, plan = self._search_again()
        plan = self._beside_other_ranks(table, plan)
        plan = replace(plan, predictions=replace(plan.predictions, links=table.device.collectives.links_text))
        stages.run("verify plan", lambda: verify_plan(plan, measured_workspace(table.profile)))
        return plan

    @cached_property
    def _measuring(self) -> Measuring:
        task = self.task
        return Measuring(task.graph, task.device, task.constraints.rules, task.options, self.stages.announce)

    @property
    def _ranks(self) -> int:
        return 1 if self.task.graph.ranks is None else self.task.graph.ranks.size

    @property
    def _host_gpus(self) -> int:
        """Number of GPUs of one machine that copy to its memory at a time."""
        return min(self._ranks, self.task.options.gpus_per_node or self._ranks)

    def _may_fit(self) -> bool:
        """Return whether the shapes may fit the budget; if not, the search refuses them without measurements."""
        graph, device, constraints = self.task.graph, self.task.device, self.task.constraints
        if not can_measure(device, self.task.options):
            return True
        unmeasured_table = CandidateTable(graph, device, constraints.providers, None, constraints.rules)
        return may_fit(unmeasured_table, constraints.limits)

    def _tabulate(self) -> CandidateTable:
        """Return the kernels that can run each operation on this GPU, and their times by the current profile."""
        graph, device, options = self.task.graph, self.task.device, self.task.options
        constraints = self.task.constraints
        profile = find_profile(device, options.profile, options.stale_profile)
        here = calibrated(device, profile)
        if graph.ranks is not None:
            here = for_ranks(here, profile, self._ranks, self._host_gpus)
        if self.collectives_like is not None and self.collectives_like != device:
            other = find_profile(self.collectives_like, options.profile, options.stale_profile)
            here = replace(here, collectives=calibrated(self.collectives_like, other).collectives)
        if self._host_gpus < self._ranks:
            here = replace(here, collectives=here.collectives.across_nodes(self._host_gpus, options.node_link_gbit))
        return CandidateTable(graph, here, constraints.providers, profile, constraints.rules)

    def _search(self, table: CandidateTable) -> Plan:
        """Return the fastest plan that the search finds within the limits.

        `search` refuses budgets that no plan can meet, then runs these stages in a loop, each a package of
        mbc/optimize: candidates (kernels of each operation) -> fusion -> selection (kernel, layout, micro-batches) ->
        schedule (launches, liveness, streams and waits) -> placement; if that exceeds the budget -> remat
        (recomputation, offloading) -> selection with the workspace that is free; at the end the concurrent stream,
        bounds and predictions.
        """
        return search(table, self.task.constraints.limits)

    def _search_again(self) -> tuple[CandidateTable, Plan]:
        table = self.stages.run("find profile again", self._tabulate)
        return table, self.stages.run("search again", lambda: self._search(table), dump_plan)

    def _search_with_micro_batches(self, table: CandidateTable) -> tuple[CandidateTable, Plan]:
        """Search, and search again if micro-batches matter: if memory costs time or nothing fits."""
        try:
            plan = self.stages.run("search", lambda: self._search(table), dump_plan)
            if may_gain_by_micro_batches(plan) and self._measure_micro_batches():
                return self._search_again()
        except BudgetError:
            if not self._measure_micro_batches():
                raise
            return self._search_again()
        return table, plan

    def _measure_micro_batches(self) -> bool:
        """Measure micro-batches, and return whether there were any."""
        return self._measuring.has_more and self.stages.run("measure micro-batches", self._measuring.micro_batches)

    def _measure_choices(self, table: CandidateTable, plan: Plan) -> bool:
        """Measure the requests that the plan chose by uncertain times, and return whether there were any.

        Such times are interpolated between two measured sizes or scaled from larger ones; are those of kernels that
        cuDNN may refuse, because only more rows were tried; are estimates; or were measured before the chosen kernel
        existed.
        """
        of_estimates = unmeasured if self.task.constraints.rules.policy is Policy.ALL else untried

        def measure() -> bool:
            wanted = *of_estimates(plan), *chosen_by_estimate(plan, table.profile)
            return self._measuring.chosen(wanted, outdated(plan, table.other_sizes))

        return self.stages.run("measure again", measure)

    def _beside_other_ranks(self, table: CandidateTable, plan: Plan) -> Plan:
        """Return a plan that takes the host copies of the other ranks into account, if they can change it."""
        limits = self.task.constraints.limits
        if self._host_gpus == 1 or self.task.options.is_probe or "offload" in limits.without or not saves_memory(plan):
            return plan
        alone = calibrated(self.task.device, table.profile).host_link

        def search_as_if_alone() -> Plan:
            return beside_other_ranks(plan, table, alone, self._host_gpus, self._search)

        return self.stages.run("search as if alone", search_as_if_alone, dump_plan)
