"""The number of epochs that a tuned training needs to reach a target.

On one device the training runs in this process, on several GPUs by ranks of `mbc train`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mbc.cli.start_ranks import check_ranks, run_ranks
from mbc.ir.graph import TrainingGraph
from mbc.plan.file import PLAN_FILE, dump_plan
from mbc.plan.model import Plan
from mbc.progress import busy
from mbc.runtime.module import Module
from mbc.source import visible
from mbc.train.accuracy import inputs_of
from mbc.train.data import is_tested, open_data_and_test
from mbc.train.epoch import Epoch
from mbc.train.job import Job
from mbc.train.loop import train
from mbc.train.schedule import Schedule
from mbc.train.target_metric import target_for

SCHEDULE = "constant"  # a decaying rate needs the last epoch, which is unknown here


def check_target(arguments: argparse.Namespace) -> None:
    """Raise MBC265 or MBC266 if the largest number of ranks cannot be started here; called before planning."""
    if arguments.shared_by > 1:
        check_ranks(arguments.shared_by, arguments.device)


def check_metric(arguments: argparse.Namespace, graph: TrainingGraph) -> None:
    """Raise MBC237 if the metric of the target does not exist; called before training."""
    target_for(arguments.target, graph, is_tested(arguments.data, arguments.test, inputs_of(graph)))


def epochs_to_target(
    arguments: argparse.Namespace,
    plan: Plan,
    rate: float,
    warmup_epochs: float,
    subject_of: Callable[[Plan], Plan | Path],
) -> int:
    """Train to the target and return the number of epochs.

    Args:
        arguments: Parsed command line.
        plan: Plan of the tuned mini-batch.
        rate: Learning rate.
        warmup_epochs: Duration of the warm-up in epochs.
        subject_of: Return the package or plan from which a module of a plan is opened.

    Raises:
        MbcError: MBC318, the target is not reached (with the best value); or any error of training.
        SystemExit: A rank failed and has printed why.
    """
    if plan.graph.ranks is not None:
        return _by_ranks(arguments, plan, rate, warmup_epochs, subject_of)
    schedule = Schedule(rate, arguments.epochs, SCHEDULE, warmup_epochs)
    data, test = open_data_and_test(arguments.data, arguments.test, inputs_of(plan.graph))
    job = Job(plan.graph, data, schedule, test, arguments.seed, target=arguments.target)
    target = job.resolved_target()
    assert target is not None
    with busy(f"training to {target.by.name} {target.value:g}") as at:

        def on_epoch(epoch: Epoch) -> None:
            at(f"epoch {epoch.epoch}: {target.by.of(epoch):.4f}")

        with Module(subject_of(plan), seed=arguments.seed, device=arguments.device) as net:
            return len(train(net, job, on_epoch=on_epoch))


def _by_ranks(
    arguments: argparse.Namespace,
    plan: Plan,
    rate: float,
    warmup_epochs: float,
    subject_of: Callable[[Plan], Plan | Path],
) -> int:
    """Train by ranks of `mbc train`; the batches of a ladder are multiples of the GPUs, so all ranks run one plan."""
    assert plan.graph.ranks is not None
    metric, value = arguments.target
    subject = subject_of(plan)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as result:
        if not isinstance(subject, Path):
            (file := Path(folder) / PLAN_FILE).write_text(dump_plan(subject), encoding="utf-8")
            subject = file
        options = {
            "data": arguments.data, "test": arguments.test, "epochs": arguments.epochs, "target": f"{metric}={value!r}",
            "lr": repr(rate), "schedule": SCHEDULE, "warmup": repr(warmup_epochs), "seed": arguments.seed,
            "device": arguments.device, "gpus": plan.graph.ranks.size,
        }  # fmt: skip
        given = (f"--{name}={option}" for name, option in options.items() if option is not None)
        words = ["train", str(subject), *given, "--json"]
        print(visible(f"runs {shlex.join(('mbc', *words))}"), file=sys.stderr)
        code = run_ranks(words, plan.graph.ranks.size, arguments.device, result)
        if code:
            raise SystemExit(code)
        result.seek(0)
        return len(json.load(result)["epochs"])
