"""The command `mbc train`."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mbc.cli import INTERRUPTED, TERMINATED
from mbc.cli.arguments.shared import measuring_options, options
from mbc.cli.start_ranks import (
    check_plan_of_ranks,
    device_of_ranks,
    plan_of_rank,
    silenced,
    start_ranks,
    subject_for_ranks,
    what_ranks_share,
)
from mbc.cli.subject import package_for_training, plans_of_ranks
from mbc.cli.terminal import notes
from mbc.cli.train_arguments import Prepared, prepare
from mbc.cli.train_result import report
from mbc.cli.train_resume import how_to_go_on, identity, is_finished
from mbc.cli.train_stop import stopping
from mbc.cli.train_view import View
from mbc.ir.kept_gradients import check_updates
from mbc.ranks.environment import read_environment
from mbc.ranks.launch import starts
from mbc.ranks.member import Member
from mbc.ranks.rank_group import Group
from mbc.source import visible
from mbc.train.accuracy import inputs_of
from mbc.train.data import Data, open_data_and_test
from mbc.train.epoch import Epoch, Interval, Running
from mbc.train.job import Job
from mbc.train.logs import Logs
from mbc.train.loop import train
from mbc.train.schedule import USUAL_RATES
from mbc.train.target_metric import TargetMissed

if TYPE_CHECKING:
    from mbc.runtime.module import Module


def run(arguments: argparse.Namespace) -> int:
    """Train a package or a source, alone or as one of several ranks; `--gpus` starts these ranks.

    A source is planned first, and on a machine with a GPU also built.
    """
    environment = read_environment(os.environ)
    if starts(arguments.gpus, environment):
        prepared = prepare(arguments)  # so that one process reports errors, once
        check_plan_of_ranks(arguments.network_or_package, options(arguments), arguments.gpus)
        there = identity(prepared.checkpoint)
        code = start_ranks(arguments)
        # After an interrupt rank 0 prints the advice itself.
        broken = code not in (0, INTERRUPTED, TERMINATED) and identity(prepared.checkpoint) != there
        if broken and not is_finished(prepared):
            print(how_to_go_on(arguments, prepared.checkpoint, prepared.checkpoint), file=sys.stderr)
        return code
    if environment is None:
        missed = _train(prepare(arguments), None)
    else:
        with Group.open(environment) as group, silenced(group.rank != 0):
            missed = _train(prepare(arguments, writes=group.rank == 0), group)
        if group.rank != 0:
            return 0  # all ranks missed the same target, and rank 0 reports it
    if missed is not None:
        raise missed
    return 0


def _train(prepared: Prepared, group: Group | None) -> TargetMissed | None:
    """Run a training; return the error of a training that missed its target, since all its ranks still end in order."""
    schedule, checkpoint = prepared.schedule, prepared.checkpoint
    arguments = prepared.arguments
    net = _open(prepared, group)
    graph = net.plan.graph
    check_updates(graph.optimizer, "mbc train")
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

    def tell(figures: Interval | Epoch) -> None:
        logs.write(figures)
        if prepared.page is not None:
            prepared.page.tell(figures)

    there, missed = identity(checkpoint), None
    keeps = bool(arguments.checkpoint or prepared.resume)
    try:
        with Logs(prepared.log, prepared.tensorboard, prepared.steps) as logs, stopping(job, group, keeps) as stop:
            history = train(net, replace(job, stop=stop), on_step, on_epoch, tell)
    except TargetMissed as error:
        history, missed = error.history, error
    except KeyboardInterrupt:
        view.stop()
        written = checkpoint if identity(checkpoint) != there else prepared.resume
        print(visible(how_to_go_on(arguments, written, checkpoint)), file=sys.stderr)
        raise
    if prepared.record is not None:
        prepared.record.finish(net)
    report(prepared, job, history, net, missed is None)
    return missed


def _open(prepared: Prepared, group: Group | None) -> Module:
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
        if prepared.page is not None:  # rank 0 writes the page; it runs the first plan
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
    """Return the number of rows of the data, which must be equal in all ranks."""
    parts = {"data": data, "test data": test}
    row_counts = {
        name: "none" if part is None else "any number" if part.rows is None else str(part.rows)
        for name, part in parts.items()
    }
    return {f"rows of the {name}": count for name, count in row_counts.items()}
