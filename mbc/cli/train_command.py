"""`mbc train`"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mbc.cli.arguments.groups import measuring_options, options
from mbc.cli.places import check_plannable, package_for_training
from mbc.cli.terminal import StatusLine, bar, notes
from mbc.train.checkpoint import read_progress
from mbc.train.data import Data, check_place, has_part, open_data
from mbc.train.loop import Epoch, Job, Running, inputs_of, named, train
from mbc.train.schedule import USUAL_RATES, Schedule

if TYPE_CHECKING:
    from mbc.ir.graph import TrainingGraph


def run(arguments: argparse.Namespace) -> int:
    """Train a package, or a source that is planned (and on a GPU machine built) first."""
    from mbc.runtime.module import Module

    schedule = Schedule(  # which refuses what is out of range, before anything is planned
        1.0 if arguments.lr is None else arguments.lr, arguments.epochs, arguments.schedule, arguments.warmup,
        arguments.step_epochs, arguments.step_factor,
    )  # fmt: skip
    resume = None if arguments.resume is None else Path(arguments.resume)
    seed = arguments.seed
    if seed is None:
        seed = 0 if resume is None else read_progress(resume).seed
    checkpoint = resume if arguments.checkpoint is None else Path(arguments.checkpoint)

    check_plannable(arguments.network_or_package, options(arguments))
    for place in (arguments.data, arguments.test):
        if place is not None:
            check_place(place)
    planning = measuring_options(arguments) if arguments.device != "cpu" else options(arguments)
    subject = package_for_training(arguments.network_or_package, planning, arguments.device, arguments.output)
    with notes():
        net = Module(subject, seed=seed, device=arguments.device)
    graph = net.plan.graph
    if arguments.lr is None:
        schedule = replace(schedule, rate=USUAL_RATES[graph.optimizer.kind])
    data, test = _data(arguments, graph)
    job = Job(graph, data, schedule, test, seed, checkpoint, resume)
    view = _View(data, graph.batch)
    try:
        history = train(net, job, view.on_step, view.on_epoch)
    except KeyboardInterrupt:
        view.stop()
        if checkpoint is not None and checkpoint.exists():
            print(f"go on with: --resume {checkpoint}", file=sys.stderr)
        raise
    _report(arguments, history, checkpoint, net.device)
    return 0


def _data(arguments: argparse.Namespace, graph: TrainingGraph) -> tuple[Data, Data | None]:
    inputs = inputs_of(graph)
    data = open_data(arguments.data, inputs, "train")
    if arguments.test is not None:
        return data, open_data(arguments.test, inputs, "test")
    if has_part(arguments.data, inputs, "test"):
        return data, open_data(arguments.data, inputs, "test")
    return data, None


def _report(arguments: argparse.Namespace, history: tuple[Epoch, ...], checkpoint: Path | None, device: str) -> None:
    if arguments.json:
        result = {
            "device": device,
            "epochs": [asdict(epoch) for epoch in history],
            "checkpoint": None if checkpoint is None else str(checkpoint),
        }
        print(json.dumps(result, indent=2))
        return
    if not history:
        print(f"nothing to do: '{checkpoint}' has all {arguments.epochs} epochs behind it")
        return
    last = history[-1]
    after = f"after {last.epoch} epoch{'s' if last.epoch > 1 else ''} ({device})"
    if last.test_accuracy is not None:
        print(f"test accuracy: {last.test_accuracy:.2%} {after}")
    else:
        print(f"loss: {last.loss:.4f}{_over(last)} {after}")
    if checkpoint is not None:
        print(f"weights: {checkpoint}")


def _over(shown: Running | Epoch) -> str:
    """Behind a mean loss: over how many steps it is, where that is not all."""
    return f" (mean of {shown.steps - shown.bad_steps:,} of {shown.steps:,} steps)" if shown.bad_steps else ""


class _View:
    """Shows a training on stderr."""

    def __init__(self, data: Data, batch: int) -> None:
        self._line = StatusLine()
        self._said_dropped = False
        self._batch = batch
        if data.rows is not None and data.rows % batch and data.rows > batch:
            self._say_dropped(data.rows % batch)

    def on_step(self, now: Running) -> None:
        if not self._line.due():
            return
        parts = [f"epoch {now.epoch:>{len(str(now.epochs))}}/{now.epochs}"]
        if now.steps_in_epoch is not None:
            share = now.steps / now.steps_in_epoch
            parts.append(f"{bar(share)} {share:4.0%}")
        else:
            parts.append(f"step {now.steps}")
        parts.append(f"loss {now.loss:.4f}{_over(now)}")
        if now.accuracy is not None:
            parts.append(f"accuracy {now.accuracy:.1%}")
        parts.append(f"{now.rows / max(now.seconds, 1e-9):,.0f} images/s")
        self._line.update("  ".join(parts))

    def on_epoch(self, epoch: Epoch) -> None:
        if epoch.dropped_rows:
            self._say_dropped(epoch.dropped_rows)
        parts = [f"epoch {epoch.epoch:>{len(str(epoch.epochs))}}/{epoch.epochs}", f"loss {epoch.loss:.4f}{_over(epoch)}"]
        if epoch.accuracy is not None:
            parts.append(f"accuracy {epoch.accuracy:.1%}")
        if epoch.test_accuracy is not None:
            parts.append(f"test accuracy {epoch.test_accuracy:.2%}")
        parts.append(f"{epoch.rows / max(epoch.seconds, 1e-9):,.0f} images/s")
        if epoch.bad_steps:
            steps = "1 step" if epoch.bad_steps == 1 else f"{epoch.bad_steps} steps"
            parts.append(
                f"({steps} with a loss that is not finite changed nothing, the first is step {epoch.first_bad_step}"
                f"{named(epoch.bad_states)})"
            )
        self._line.line("  ".join(parts))

    def stop(self) -> None:
        self._line.clear()

    def _say_dropped(self, rows: int) -> None:
        if not self._said_dropped:
            self._said_dropped = True
            self._line.line(
                f"note: the last {rows} rows of each epoch do not fill a mini-batch of {self._batch} and are dropped"
            )
