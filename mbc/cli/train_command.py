"""`mbc train`"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mbc.cli import INTERRUPTED, TERMINATED
from mbc.cli.arguments.groups import measuring_options, options
from mbc.cli.outputs import check_outputs
from mbc.cli.places import check_plannable, package_for_training, plans_of_ranks, training_graph
from mbc.cli.ranks import (
    check_plan_of_ranks,
    device_of_ranks,
    plan_of_rank,
    silenced,
    start_ranks,
    subject_for_ranks,
    what_ranks_share,
)
from mbc.cli.terminal import notes
from mbc.cli.train_page import TrainPage
from mbc.cli.train_record import TrainRecord
from mbc.cli.train_stop import stopping
from mbc.cli.train_view import View, show_loss
from mbc.errors import MbcError
from mbc.ranks.environment import read_environment
from mbc.ranks.group import Group
from mbc.ranks.launch import starts
from mbc.ranks.member import Member
from mbc.runtime.checkpoint import Checkpoint
from mbc.source import visible
from mbc.train.accuracy import inputs_of
from mbc.train.checkpoint import best_beside, check_not_best, check_writable, read_progress
from mbc.train.data import Data, check_place, is_tested, open_data_and_test
from mbc.train.epoch import Epoch, Interval, Running
from mbc.train.job import Job
from mbc.train.logs import Logs, check_logs
from mbc.train.loop import train
from mbc.train.schedule import USUAL_RATES, Schedule
from mbc.train.target import TargetMissed, target_for

if TYPE_CHECKING:
    from mbc.runtime.module import Module


def run(arguments: argparse.Namespace) -> int:
    """Train a package, or a source that is planned (and on a GPU machine built) first, alone or as one of several
    ranks; `--gpus` starts those."""
    environment = read_environment(os.environ)
    if starts(arguments.gpus, environment):
        prepared = _prepare(arguments)  # what is wrong is told once, by this process
        check_plan_of_ranks(arguments.network_or_package, options(arguments), arguments.gpus)
        there = _identity(prepared.checkpoint)
        code = start_ranks(arguments)
        # Of an interrupt rank 0 tells itself.
        broken = code not in (0, INTERRUPTED, TERMINATED) and _identity(prepared.checkpoint) != there
        if broken and not _is_finished(prepared):
            print(_how_to_go_on(arguments, prepared.checkpoint, prepared.checkpoint), file=sys.stderr)
        return code
    if environment is None:
        missed = _train(_prepare(arguments), None)
    else:
        with Group.open(environment) as group, silenced(group.rank != 0):
            missed = _train(_prepare(arguments, writes=group.rank == 0), group)
        if group.rank != 0:
            return 0  # all have missed the same target, and the first one says so
    if missed is not None:
        raise missed
    return 0


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A training whose arguments have been checked."""

    arguments: argparse.Namespace
    schedule: Schedule
    seed: int
    checkpoint: Path | None  # None where another rank writes it
    best: Path | None  # likewise
    ema: Path | None  # likewise
    log: Path | None  # likewise
    tensorboard: Path | None  # likewise
    page: TrainPage | None  # likewise
    record: TrainRecord | None  # likewise
    resume: Path | None
    weights: Path | None  # to begin with; None where it is resumed
    steps: int  # those before `resume` was written

    @property
    def keeps_nothing(self) -> bool:
        return (self.arguments.checkpoint, self.arguments.resume, self.arguments.save_ema) == (None, None, None)


def _prepare(arguments: argparse.Namespace, writes: bool = True) -> _Prepared:
    schedule = Schedule(  # which refuses what is out of range, before anything is planned
        1.0 if arguments.lr is None else arguments.lr, arguments.epochs, arguments.schedule, arguments.warmup,
        arguments.step_epochs, arguments.step_factor, arguments.milestones, arguments.power, arguments.patience,
        arguments.plateau_metric,
    )  # fmt: skip
    resume = None if arguments.resume is None else Path(arguments.resume)
    progress = None if resume is None else read_progress(resume)
    if resume is not None and progress is not None and arguments.checkpoint is None:
        check_not_best(resume, progress)
    seed = arguments.seed
    if seed is None:
        seed = 0 if progress is None else progress.seed
    checkpoint = resume if arguments.checkpoint is None else Path(arguments.checkpoint)
    log, tensorboard = (None if place is None else Path(place) for place in (arguments.log, arguments.tensorboard))
    _check_places(arguments, checkpoint is not None, any((log, tensorboard, arguments.report)))
    best = None if arguments.keep_best is None or checkpoint is None else best_beside(checkpoint)
    ema = None if arguments.save_ema is None else Path(arguments.save_ema)
    check_outputs(
        {
            "--checkpoint": checkpoint, "--keep-best": best, "--save-ema": ema, "--log": log,
            "--report": arguments.report, "--record": arguments.record,
        },
        {
            "NET": arguments.network_or_package, "--data": arguments.data, "--test": arguments.test,
            "--settings": arguments.settings_file, "--weights": None if resume is not None else arguments.weights,
        },
    )  # fmt: skip
    if not writes:
        checkpoint = best = ema = log = tensorboard = None
    for file in filter(None, (checkpoint, best, ema)):
        check_writable(file)
    check_logs(log, tensorboard)
    page = TrainPage(Path(arguments.report), log) if writes and arguments.report is not None else None
    record = TrainRecord(Path(arguments.record), arguments.device) if writes and arguments.record is not None else None

    check_plannable(arguments.network_or_package, options(arguments))
    for place in (arguments.data, arguments.test):
        if place is not None:
            check_place(place)
    weights = None if arguments.weights is None or resume is not None else Path(arguments.weights)
    if weights is not None:
        Checkpoint(weights)  # before anything is planned
    steps = 0 if progress is None else progress.steps_in_all
    return _Prepared(
        arguments, schedule, seed, checkpoint, best, ema, log, tensorboard, page, record, resume, weights, steps
    )


def _check_places(arguments: argparse.Namespace, checkpoint: bool, log: bool) -> None:
    """MBC238 where an option needs a checkpoint, a log or test data that are not asked for."""
    if arguments.evaluate == "ema" and arguments.test is None:
        raise MbcError("MBC238", "--evaluate ema does not say on what the averages are tested", "give --test DATA, too")
    for option, there, where, remedy in (
        ("checkpoint_every", checkpoint, "the checkpoint", "--checkpoint FILE"),
        ("keep_best", checkpoint, "the checkpoint", "--checkpoint FILE"),
        ("log_every", log, "the log", "--log FILE, --tensorboard FOLDER or --report FILE"),
    ):
        if getattr(arguments, option) is not None and not there:
            name = option.replace("_", "-")
            raise MbcError("MBC238", f"--{name} does not say where {where} is to be", f"give {remedy}, too")


def _train(prepared: _Prepared, group: Group | None) -> TargetMissed | None:
    """Returns the error of a training that ended in order, at which ranks end in order, too."""
    schedule, checkpoint = prepared.schedule, prepared.checkpoint
    arguments = prepared.arguments
    net = _open(prepared, group)
    graph = net.plan.graph
    if arguments.lr is None:
        schedule = replace(schedule, rate=USUAL_RATES[graph.optimizer.kind])
    data, test = open_data_and_test(arguments.data, arguments.test, inputs_of(graph))
    if group is not None:
        group.agree(_lengths(data, test))
    job = Job(
        graph, data, schedule, test, prepared.seed, checkpoint, prepared.resume, group,
        checkpoint_every=arguments.checkpoint_every or 0, best=prepared.best,
        best_metric=None if arguments.keep_best is True else arguments.keep_best, interval=arguments.log_every or 0,
        evaluate_ema=arguments.evaluate == "ema", ema=prepared.ema, target=arguments.target,
    )  # fmt: skip
    view = View(data, job.share.batch)
    if prepared.keeps_nothing:
        view.note("weights are not kept: --checkpoint FILE writes them")

    def on_step(now: Running) -> None:
        if group is not None:
            group.check()
        view.on_step(now)
        if prepared.record is not None:
            prepared.record.on_step(net)

    def on_epoch(epoch: Epoch) -> None:
        view.on_epoch(epoch)
        tell(epoch)

    def tell(told: Interval | Epoch) -> None:
        logs.write(told)
        if prepared.page is not None:
            prepared.page.tell(told)

    there, missed = _identity(checkpoint), None
    keeps = bool(arguments.checkpoint or prepared.resume)
    try:
        with Logs(prepared.log, prepared.tensorboard, prepared.steps) as logs, stopping(job, group, keeps) as stop:
            history = train(net, replace(job, stop=stop), on_step, on_epoch, tell)
    except TargetMissed as error:
        history, missed = error.history, error
    except KeyboardInterrupt:
        view.stop()
        written = checkpoint if _identity(checkpoint) != there else prepared.resume
        print(visible(_how_to_go_on(arguments, written, checkpoint)), file=sys.stderr)
        raise
    if prepared.record is not None:
        prepared.record.finish(net)
    _report(prepared, job, history, net, missed is None)
    return missed


def _open(prepared: _Prepared, group: Group | None) -> Module:
    from mbc.runtime.module import Module

    arguments, seed = prepared.arguments, prepared.seed
    place, device = arguments.network_or_package, arguments.device
    planning = measuring_options(arguments) if device != "cpu" else options(arguments)
    if group is None:
        subject, member = package_for_training(place, planning, device, arguments.output), None
    else:
        device = device_of_ranks(device)
        group.agree(what_ranks_share(arguments, device, seed, prepared.resume or prepared.weights))
        member = Member(group)
        if device == "cpu":
            member.check_mpi()  # before anything takes long
        shared = subject_for_ranks(place, planning, device, arguments.output, group)
        subject = shared if isinstance(shared, Path) else plan_of_rank(shared, group.rank)
        if prepared.page is not None:  # of rank 0, which runs the first plan
            prepared.page.show_ranks(plans_of_ranks(str(shared), planning) if isinstance(shared, Path) else shared)
    with notes():
        listener = None if prepared.record is None else prepared.record.open()
        net = Module(subject, seed=seed, device=device, ranks=member, listener=listener)
    if prepared.record is not None:
        prepared.record.check(net)
    if prepared.weights is not None:
        net.load(prepared.weights, weights_only=True)
    return net


def _lengths(data: Data, test: Data | None) -> dict[str, str]:
    """In which the data of ranks must be alike."""
    parts = {"data": data, "test data": test}
    known = {
        name: "none" if part is None else "any number" if part.rows is None else str(part.rows)
        for name, part in parts.items()
    }
    return {f"rows of the {name}": rows for name, rows in known.items()}


def _identity(file: Path | None) -> tuple[int, int] | None:
    """By which a file is told from one that is written to its place later; None where there is none."""
    try:
        found = None if file is None else file.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns)


def _how_to_go_on(arguments: argparse.Namespace, written: Path | None, checkpoint: Path | None) -> str:
    """After an interrupt; `written` is the last checkpoint of this training."""
    if written is not None:
        # Where the command line has another one already the last one counts.
        more = () if arguments.resume == str(written) else ("--resume", str(written))
        return f"go on with: {shlex.join(('mbc', *arguments.words, *more))}"
    if checkpoint is not None:
        return f"'{checkpoint}' is not written: begin anew"
    return "nothing was saved: with --checkpoint FILE a training is saved when it is interrupted, and can be resumed"


def _is_finished(prepared: _Prepared) -> bool:
    """Whether the checkpoint has all epochs behind it, or its last one has reached the target."""
    arguments = prepared.arguments
    assert prepared.checkpoint is not None
    progress = read_progress(prepared.checkpoint)
    if progress.epochs >= arguments.epochs:
        return True
    if arguments.target is None or progress.last is None:
        return False
    graph = training_graph(arguments.network_or_package, options(arguments))
    tested = is_tested(arguments.data, arguments.test, inputs_of(graph))
    return target_for(arguments.target, graph, tested).is_reached(progress.last)


def _report(prepared: _Prepared, job: Job, history: tuple[Epoch, ...], net: Module, reached: bool) -> None:
    """`reached`: the target, if there is one."""
    target = job.resolved_target()
    arguments, checkpoint, best, device = prepared.arguments, prepared.checkpoint, prepared.best, net.device
    record = None if prepared.record is None else prepared.record.written
    page = None if prepared.page is None else prepared.page.write(net.plan, None if record is None else record[1])
    if arguments.json:
        result = {
            "device": device,
            "ranks": net.ranks,
            "epochs": [asdict(epoch) for epoch in history],
            "target": None if target is None else {"metric": target.by.name, "value": target.value, "reached": reached},
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "best": None if best is None else str(best),
            "ema": None if prepared.ema is None else str(prepared.ema),
            "report": None if page is None else str(page),
            "record": None if record is None else str(record[0]),
        }
        print(json.dumps(result, indent=2))
        return
    aimed = "" if target is None else f"{target.by.name} {target.value:g}"
    if not history:
        behind = f"reached {aimed}" if target is not None and reached else f"all {arguments.epochs} epochs behind it"
        print(f"nothing to do: '{prepared.resume}' has {behind}")
        return
    last = history[-1]
    if target is not None and reached:
        print(f"the target {aimed} is reached after epoch {last.epoch}: {target.by.of(last):.4f}")
    after = f"after {last.epoch} epoch{'s' if last.epoch > 1 else ''} ({device})"
    if last.test_accuracy is not None:
        of = " of the moving averages" if arguments.evaluate == "ema" else ""
        print(f"test accuracy{of}: {last.test_accuracy:.2%} {after}")
    else:
        print(f"{show_loss(last)} {after}")
    if checkpoint is not None:
        print(f"weights: {checkpoint}")
    if prepared.ema is not None:
        print(f"moving averages: {prepared.ema}")
    if page is not None:
        print(f"page: {page}")
    if record is not None:
        print(f"record of a step: {record[0]}")
    if best is not None and best.exists():
        told = read_progress(best)
        found = "" if told.best is None else f", {told.best.metric} {told.best.value:.4f}"
        print(f"best weights: {best} (epoch {told.epochs}{found})")
