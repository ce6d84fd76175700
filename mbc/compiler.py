"""The compiler: turns a source into plans, and plans into a package; this file lists its stages."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from pprint import pformat

from mbc.codegen.build import Package, check_output, write_package
from mbc.codegen.toolchain import find_toolchain
from mbc.collection import uncollected
from mbc.constraints import Constraints, constraints_of, warn_without_room
from mbc.errors import BudgetError, MbcError
from mbc.frontend.ast import Program
from mbc.frontend.lower import Lowered, lower
from mbc.frontend.parse import parse
from mbc.hardware.host_sharing import check_pinned
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.target import find_device, local_memory_bytes
from mbc.ir.graph import Ranks, TrainingGraph
from mbc.ir.ranks import even_rows, grouped, rows_by_speed, share_rows
from mbc.ir.text import network_text, training_text
from mbc.measuring import Measuring, can_measure
from mbc.optimize.bounds.infeasible import recommending
from mbc.optimize.candidates.measured_rows import measured_rows
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
from mbc.options import Measure, Options, Overrides, Policy, RankGpu
from mbc.passes.check_graph import verify_network, verify_training
from mbc.passes.shard_optimizer import can_shard, check_can_shard
from mbc.passes.training_step import differentiate
from mbc.plan.collectives import ctas_of
from mbc.plan.file import dump_plan
from mbc.plan.model import Plan
from mbc.plan.techniques import saves_memory
from mbc.plan.verify import verify_plan
from mbc.plan.verify_ranks import verify_ranks
from mbc.profile.locate import find_profile
from mbc.profile.measured_workspace import measured_workspace
from mbc.profile.model import calibrated, for_ranks
from mbc.source import Source
from mbc.stages import Stages
from mbc.units import parse_size, show_enough

RECOMMENDED_STEP = 1.02  # least ratio of the next recommended budget to one that is refused
# A probe plans sharded optimizer states in two cases. Its step with whole states fits, but takes longer than its lower
# bound times SHARDS_GAIN. Or no step fits, and the bytes that are missing are at most those that sharding frees times
# SHARDS_BYTES.
SHARDS_GAIN, SHARDS_BYTES = 1.05, 2


@dataclass(frozen=True, slots=True)
class Compilation:
    """Plans and the package of one network.

    `plans` has one plan for all GPUs that train equally many rows of a mini-batch, in the order of their first ranks.
    """

    plans: tuple[Plan, ...]
    package: Package

    @property
    def plan(self) -> Plan:
        """The plan of the first GPU."""
        return self.plans[0]


@uncollected()
def compile_source(
    source: Source, options: Options, output: Path | None = None, overwrite: bool = False, stages: Stages | None = None
) -> Compilation:
    """Compile one network into a package.

    Args:
        source: The source text.
        options: All further options.
        output: Folder of the package; None for a folder in the current one, named as the network.
        overwrite: Replace a package that exists there.
        stages: Runs the stages and records their times; None for new ones.

    Raises:
        MbcError: Any error that a user can correct.
    """
    stages = stages or Stages(options.dump_stages)
    asked = _read(source, options, stages)
    folder = Path(asked.lowered.network.name) if output is None else output
    stages.run("check output", lambda: check_output(folder, overwrite))
    plans = _plans_or_accepted_budget(asked, options, stages)
    package = stages.run("build package", lambda: write_package(plans, folder, find_toolchain(), overwrite))
    return Compilation(plans, package)


def compile_plan(source: Source, options: Options, stages: Stages | None = None) -> Plan:
    """Return the plan of the training step and the inference pass of one network, without building a package.

    If several GPUs share the mini-batch, the result is the plan of the first GPU.

    Raises:
        MbcError: Any error that a user can correct.
    """
    return compile_plans(source, options, stages)[0]


@uncollected()
def compile_plans(source: Source, options: Options, stages: Stages | None = None) -> tuple[Plan, ...]:
    """Return the plans of all GPUs (`Compilation.plans`), without building a package."""
    stages = stages or Stages(options.dump_stages)
    return _plans_or_accepted_budget(_read(source, options, stages), options, stages)


@uncollected()
def try_plan(source: Source, options: Options, stages: Stages | None = None) -> Plan:
    """Return the plan of `compile_plan`, for searches that plan often.

    A refusal takes half of the time, because the budget that it recommends is not planned again. For several GPUs, the
    plan is not compared with the plan of a GPU that copies alone, and sharded optimizer states are planned only where
    they may matter (`_plan_sharded_or_not`).
    """
    stages, options = stages or Stages(options.dump_stages), replace(options, is_probe=True)
    return _plans(_read(source, options, stages), options, stages)[0]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A source after parsing, the GPU of each rank, and these GPUs by name."""

    program: Program
    lowered: Lowered
    gpus: tuple[RankGpu, ...]
    devices: Mapping[str, DeviceSpec]


@dataclass(frozen=True, slots=True)
class _Task:
    """The input of planning for all GPUs that train equally many rows.

    `sharded` returns the graph with sharded optimizer states if the planner decides about sharding, else it is None.
    """

    graph: TrainingGraph
    device: DeviceSpec
    constraints: Constraints
    options: Options
    sharded: Callable[[], TrainingGraph] | None = None


def _read(source: Source, options: Options, stages: Stages) -> _Asked:
    # The network of the source with the user's settings, and the GPUs to compile for.
    program = stages.run("parse", lambda: parse(source), lambda tree: pformat(tree, width=120))
    lowered = stages.run("lower", lambda: lower(program, options.settings, options.network, options.overrides))
    stages.run("verify network", lambda: verify_network(lowered.network), lambda _: network_text(lowered.network))
    gpus = options.rank_gpus or (RankGpu(options.gpu),) * options.gpus
    names = dict.fromkeys(gpu.gpu for gpu in gpus)
    devices = stages.run("find device", lambda: {name: find_device(name) for name in names}, repr)
    return _Asked(program, lowered, gpus, devices)


def _tasks(asked: _Asked, options: Options, stages: Stages) -> tuple[_Task, ...]:
    gpus, devices, batch = asked.gpus, asked.devices, asked.lowered.network.batch
    if len(gpus) == 1:
        return (_task(asked.lowered, devices[gpus[0].gpu], options, stages, None),)
    if asked.lowered.peer_bytes:
        raise MbcError(
            "MBC103",
            f"memory.peers is for training on one GPU: {len(gpus)} GPUs that share a mini-batch lend no memory",
            "train on one GPU, or leave out memory.peers; if the source sets it: --set memory.peers=0B",
        )

    def of_rows(gpu: RankGpu, rows: int, ranks: Ranks) -> _Task:
        device_bytes = options.overrides.device_bytes if gpu.memory_bytes is None else gpu.memory_bytes
        values = Overrides(rows, device_bytes)
        own = stages.run("lower", lambda: lower(asked.program, options.settings, options.network, values))
        return _task(own, devices[gpu.gpu], replace(options, gpu=gpu.gpu), stages, ranks)

    def step_of_rows_us(gpu: RankGpu, rows: int) -> float:
        others = even_rows(batch - rows, len(gpus) - 1)
        return _step_us(of_rows(gpu, rows, Ranks((rows, *others), (0,))), stages, devices[gpus[0].gpu])

    @cache
    def measured(gpu: RankGpu) -> frozenset[int]:
        rows = even_rows(batch, len(gpus))
        task = of_rows(gpu, rows[0], Ranks(rows, (0,)))
        return measured_rows(task.graph, find_profile(task.device, options.profile, options.stale_profile))

    # Each GPU has a network with its rows: equal numbers, or for different GPUs those that make the step shortest.
    alike = len(set(gpus)) == 1
    shares = (
        share_rows(batch, len(gpus)) if alike else grouped(rows_by_speed(batch, gpus, step_of_rows_us, measured), gpus)
    )
    return tuple(of_rows(gpus[ranks.members[0]], ranks.rows[ranks.members[0]], ranks) for ranks in shares)


def _task(lowered: Lowered, device: DeviceSpec, options: Options, stages: Stages, ranks: Ranks | None) -> _Task:
    constraints = stages.run("constrain", lambda: constraints_of(lowered, device, options))

    # One whole step: forward, backward and update; and inference.
    shard = lowered.shard_optimizer
    check_can_shard(shard is True, ranks, lowered.optimizer)

    def graph_of(sharded: bool) -> TrainingGraph:
        graph = stages.run(
            "differentiate",
            lambda: differentiate(lowered.network, lowered.optimizer, lowered.precision, ranks, sharded),
            training_text,
        )
        stages.run("verify training graph", lambda: verify_training(graph))
        return graph

    sharded = partial(graph_of, True) if shard is None and can_shard(ranks) else None
    return _Task(graph_of(shard is True), device, constraints, options, sharded)


def _step_us(task: _Task, stages: Stages, collectives_like: DeviceSpec) -> float:
    """Return the time of a step in microseconds, infinite if there is no plan within the budget."""
    try:
        return step_us(_plan(task, stages, collectives_like))
    except BudgetError:
        return math.inf


def _plans_or_accepted_budget(asked: _Asked, options: Options, stages: Stages) -> tuple[Plan, ...]:
    """Return the plans of all GPUs.

    Each budget is searched anew, so that the search within the size of the smallest plan of a refusal may miss that
    plan. Therefore the recommended budget is planned, and raised until planning accepts it.

    Raises:
        BudgetError: Nothing fits; the recommended budget has plans.
    """
    try:
        return _plans(asked, options, stages)
    except BudgetError as refusal:
        # Bytes that `rank_gpus` name are not the source's, and a lower bound is not the size of a plan.
        is_certain = refusal.is_certain and len(asked.gpus) == 1
        if is_certain or not refusal.is_planned or any(gpu.memory_bytes for gpu in options.rank_gpus):
            raise
        refused, budget_bytes = refusal, parse_size(show_enough(refusal.needed_bytes))
    while True:
        overrides = replace(options.overrides, device_bytes=budget_bytes)
        here = replace(options, overrides=overrides, measure=Measure.NEVER)  # by the times that the refusal is based on
        lowered = lower(asked.program, here.settings, here.network, here.overrides)
        try:
            _plans(replace(asked, lowered=lowered), here, stages)
        except BudgetError as again:
            least_bytes = max(again.needed_bytes, int(RECOMMENDED_STEP * budget_bytes))
            budget_bytes = parse_size(show_enough(least_bytes))
        else:
            raise recommending(refused, budget_bytes)


def _plans(asked: _Asked, options: Options, stages: Stages) -> tuple[Plan, ...]:
    recorded = dict(options.all_settings)
    settings = tuple((name, " ".join(value.split())) for name, value in recorded.items())  # each on one line
    return tuple(replace(plan, settings=settings) for plan in _of_tasks(_tasks(asked, options, stages), stages))


def _of_tasks(tasks: Sequence[_Task], stages: Stages) -> tuple[Plan, ...]:
    first, *others = tasks
    plans = [_plan_sharded_or_not(first, stages)]
    if first.graph.ranks is not None:
        # All ranks run the same collectives in the same order, over elements in the same order.
        program, buffers = plans[0].train, plans[0].buffers
        collectives, ctas = collectives_of(program), ctas_of(program) or 0
        layouts = tuple(sum_layouts(program, buffers))
        for task in others:
            rules = replace(task.constraints.rules, collectives=collectives, ctas=ctas, sum_layouts=layouts)
            task = replace(task, constraints=replace(task.constraints, rules=rules))
            plans.append(_plan(task, stages, collectives_like=first.device))
        stages.run("verify ranks", lambda: verify_ranks(plans))
        _check_host_memory(plans, first)
    return tuple(plans)


def _check_host_memory(plans: Sequence[Plan], first: _Task) -> None:
    """Raise MBC360 if all ranks of this machine together pin more than its memory."""
    memory_bytes = local_memory_bytes(first.device, first.options.gpu)
    by_rank = {
        rank: plan.predictions.host_bytes for plan in plans if plan.graph.ranks for rank in plan.graph.ranks.members
    }
    if memory_bytes is not None:
        sizes_bytes = [by_rank[rank] for rank in sorted(by_rank)]
        check_pinned(sizes_bytes, first.options.gpus_per_node or len(sizes_bytes), memory_bytes)


def _plan_sharded_or_not(task: _Task, stages: Stages) -> Plan:
    """Return the plan with whole optimizer states, or with sharded states if only these fit or are faster.

    Sharded states are planned only if the step uses other techniques to save memory. A probe plans them only where they
    may matter, as SHARDS_GAIN and SHARDS_BYTES say, and not for a step that is far slower than that of another batch.
    """
    if task.sharded is None:
        return _plan(task, stages)
    try:
        plan = _plan(task, stages)
    except BudgetError as refusal:
        graph = task.sharded()
        lacking_bytes = refusal.needed_bytes - task.constraints.limits.budget_bytes
        freed_bytes = _states_bytes(task.graph) - _states_bytes(graph)
        if graph == task.graph or (task.options.is_probe and lacking_bytes > SHARDS_BYTES * freed_bytes):
            raise
        return _plan(replace(task, graph=graph), stages)
    step_us, options = plan.predictions.train_us, task.options
    is_settled = step_us <= SHARDS_GAIN * plan.bounds.within_budget_us or step_us * SLOW_PROBE > options.slowest_us
    may_gain = saves_memory(plan) and not (options.is_probe and is_settled)
    graph = task.sharded() if may_gain else task.graph
    if graph == task.graph:
        return plan
    try:
        return min(plan, _plan(replace(task, graph=graph), stages), key=lambda one: one.predictions.train_us)
    except BudgetError:
        return plan


def _states_bytes(graph: TrainingGraph) -> int:
    return sum(graph.values[state.value].type.size_bytes for state in graph.states)


def _plan(task: _Task, stages: Stages, collectives_like: DeviceSpec | None = None) -> Plan:
    """Return the plan of a task.

    `collectives_like` is the GPU whose profile times collectives: the first rank's, because all ranks take part in
    them. None means the task's own GPU.
    """
    graph, device, constraints, options = task.graph, task.device, task.constraints, task.options
    providers, rules = constraints.providers, constraints.rules
    limits = constraints.limits
    ranks = 1 if graph.ranks is None else graph.ranks.size
    host_gpus = min(ranks, options.gpus_per_node or ranks)  # GPUs of one machine that copy to its memory at a time

    if options.node_link_gbit and host_gpus == ranks:
        warnings.warn("--node-link is ignored: all GPUs are in one machine (--gpus-per-node)", stacklevel=2)

    def worth_measuring() -> bool:
        """Return whether the shapes may fit the budget; if not, the search refuses them without measurements."""
        return not can_measure(device, options) or may_fit(
            CandidateTable(graph, device, providers, None, rules), limits
        )

    def tabulate() -> CandidateTable:
        profile = find_profile(device, options.profile, options.stale_profile)
        here = calibrated(device, profile)
        if graph.ranks is not None:
            here = for_ranks(here, profile, ranks, host_gpus)
        if collectives_like is not None and collectives_like != device:
            other = find_profile(collectives_like, options.profile, options.stale_profile)
            here = replace(here, collectives=calibrated(collectives_like, other).collectives)
        if host_gpus < ranks:
            here = replace(here, collectives=here.collectives.across_nodes(host_gpus, options.node_link_gbit))
        return CandidateTable(graph, here, providers, profile, rules)

    # The kernels that can run each operation on this GPU, and their times.
    measuring = Measuring(graph, device, rules, options, stages.announce)
    if stages.run("bound", worth_measuring):
        stages.run("measure", measuring.begin)
    table = stages.run("find profile", tabulate)

    # All decisions. `search` refuses budgets that no plan can meet, then runs these stages in a loop, each a package of
    # mbc/optimize: candidates (kernels of each operation) -> fusion -> selection (kernel, layout, micro-batches)
    # -> schedule (launches, liveness, streams and waits) -> placement; if that exceeds the budget -> remat
    # (recomputation, offloading) -> selection with the workspace that is free; at the end the concurrent stream,
    # bounds and predictions.
    def search_again() -> tuple[CandidateTable, Plan]:
        table = stages.run("find profile again", tabulate)
        return table, stages.run("search again", lambda: search(table, limits), dump_plan)

    def knows_more() -> bool:
        """Measure micro-batches, which matter if memory costs time or nothing fits, and return whether any were."""
        return measuring.has_more and stages.run("measure micro-batches", measuring.micro_batches)

    try:
        plan = stages.run("search", lambda: search(table, limits), dump_plan)
        if may_gain_by_micro_batches(plan) and knows_more():
            table, plan = search_again()
    except BudgetError:
        if not knows_more():
            raise
        table, plan = search_again()
    # Requests that the plan chose by uncertain times are measured, and the search runs again. Such times are
    # interpolated between two measured sizes or scaled from larger ones; are those of kernels that cuDNN may refuse,
    # because only more rows were tried; are estimates; or were measured before the chosen kernel existed.
    of_estimates = unmeasured if rules.policy is Policy.ALL else untried

    def measures_more() -> bool:
        wanted = *of_estimates(plan), *chosen_by_estimate(plan, table.profile)
        return measuring.chosen(wanted, outdated(plan, table.other_sizes))

    while stages.run("measure again", measures_more):
        table, plan = search_again()

    # The plan takes the copies of the other ranks into account if they can change it.
    if host_gpus > 1 and not options.is_probe and "offload" not in limits.without and saves_memory(plan):
        alone = calibrated(device, table.profile).host_link
        plan = stages.run(
            "search as if alone",
            lambda plan=plan, table=table: beside_other_ranks(
                plan, table, alone, host_gpus, lambda other: search(other, limits)
            ),
            dump_plan,
        )

    plan = replace(plan, predictions=replace(plan.predictions, links=table.device.collectives.links_text))

    # Every plan must be accepted by the independent verifier.
    stages.run("verify plan", lambda: verify_plan(plan, measured_workspace(table.profile)))
    warn_without_room(plan, options.gpu)
    return plan
