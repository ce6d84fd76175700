"""The compiler: turns a source into plans, and plans into a package."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from pprint import pformat

from mbc.codegen.build import Package, check_output, write_package
from mbc.codegen.toolchain import find_toolchain
from mbc.collection import uncollected
from mbc.constraints import constraints_of
from mbc.errors import BudgetError, MbcError
from mbc.frontend.ast import Program
from mbc.frontend.lower import Lowered, lower
from mbc.frontend.parse import parse
from mbc.hardware.part import whole_name
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.target import find_device, is_default
from mbc.ir.graph import Ranks, TrainingGraph
from mbc.ir.ranks import even_rows, grouped, rows_by_speed, share_rows
from mbc.ir.text import network_text, training_text
from mbc.optimize.bounds.infeasible import recommending
from mbc.optimize.candidates.measured_rows import measured_rows
from mbc.options import Measure, Options, Overrides, RankGpu
from mbc.passes.check_graph import verify_network, verify_training
from mbc.passes.shard_optimizer import can_shard, check_can_shard
from mbc.passes.training_step import differentiate
from mbc.plan.model import Plan
from mbc.planner import Task, plan_tasks, step_us_of
from mbc.profile.locate import find_profile
from mbc.source import Source
from mbc.stages import Stages
from mbc.units import parse_size, show_enough

RECOMMENDED_STEP = 1.02  # least ratio of the next recommended budget to one that is refused


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


def _read(source: Source, options: Options, stages: Stages) -> _Asked:
    # The network of the source with the user's settings, and the GPUs to compile for.
    program = stages.run("parse", lambda: parse(source), lambda tree: pformat(tree, width=120))
    lowered = stages.run("lower", lambda: lower(program, options.settings, options.network, options.overrides))
    stages.run("verify network", lambda: verify_network(lowered.network), lambda _: network_text(lowered.network))
    gpus = options.rank_gpus or (RankGpu(options.gpu),) * options.gpus
    names = dict.fromkeys(gpu.gpu for gpu in gpus)
    devices = stages.run("find device", lambda: {name: find_device(name) for name in names}, repr)
    asked = _Asked(program, lowered, gpus, devices)
    if options.explains_gpu and (note := _note_on_gpu(asked, options)):
        warnings.warn(note, RuntimeWarning, stacklevel=2)
    return asked


def _note_on_gpu(asked: _Asked, options: Options) -> str:
    """Say where a plan runs if that is not on the GPU that the user named, or if the user named none; else nothing."""
    option, precision = "--gpus" if options.rank_gpus else "--gpu", asked.lowered.precision
    if not precision.runs_on_gpus:
        has_named = any(whole_name(name) != "auto" for name in asked.devices)
        return f"{precision} runs on the CPU only, so that {option} has no effect on where it runs" if has_named else ""
    default = next((device.name for name, device in asked.devices.items() if is_default(name)), None)
    if default is None:
        return ""
    return f"this machine has no GPU that mbc can use: planned for {default}; {option} names another"


def _tasks(asked: _Asked, options: Options, stages: Stages) -> tuple[Task, ...]:
    gpus, devices, batch = asked.gpus, asked.devices, asked.lowered.network.batch
    if len(gpus) == 1:
        return (_task(asked.lowered, devices[gpus[0].gpu], options, stages, None),)
    if asked.lowered.peer_bytes:
        raise MbcError(
            "MBC103",
            f"memory.peers is for training on one GPU: {len(gpus)} GPUs that share a mini-batch lend no memory",
            "train on one GPU, or leave out memory.peers; if the source sets it: --set memory.peers=0B",
        )

    def of_rows(gpu: RankGpu, rows: int, ranks: Ranks) -> Task:
        device_bytes = options.overrides.device_bytes if gpu.memory_bytes is None else gpu.memory_bytes
        values = Overrides(rows, device_bytes)
        own = stages.run("lower", lambda: lower(asked.program, options.settings, options.network, values))
        return _task(own, devices[gpu.gpu], replace(options, gpu=gpu.gpu), stages, ranks)

    def step_of_rows_us(gpu: RankGpu, rows: int) -> float:
        others = even_rows(batch - rows, len(gpus) - 1)
        return step_us_of(of_rows(gpu, rows, Ranks((rows, *others), (0,))), stages, devices[gpus[0].gpu])

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


def _task(lowered: Lowered, device: DeviceSpec, options: Options, stages: Stages, ranks: Ranks | None) -> Task:
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
    return Task(graph_of(shard is True), device, constraints, options, sharded)


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
    return tuple(replace(plan, settings=settings) for plan in plan_tasks(_tasks(asked, options, stages), stages))
