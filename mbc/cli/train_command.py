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
from mbc.cli.terminal import StatusLine, bar, notes, terminated_as_interrupted
from mbc.train.accuracy import inputs_of
from mbc.train.checkpoint import check_writable, read_progress
from mbc.train.data import Data, check_place, has_part, open_data
from mbc.train.divergence import named
from mbc.train.loop import Epoch, Job, Running, train
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
    progress = None if resume is None else read_progress(resume)
    seed = arguments.seed
    if seed is None:
        seed = 0 if progress is None else progress.seed
    checkpoint = resume if arguments.checkpoint is None else Path(arguments.checkpoint)
    if checkpoint is not None:
        check_writable(checkpoint)

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
    there = _identity(checkpoint)
    try:
        with terminated_as_interrupted():
            history = train(net, job, view.on_step, view.on_epoch)
    except KeyboardInterrupt:
        view.stop()
        written = checkpoint if _identity(checkpoint) != there else resume
        print(_how_to_go_on(written, checkpoint), file=sys.stderr)
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


def _identity(file: Path | None) -> tuple[int, int] | None:
    """By which a file is told from one that is written to its place later; None where there is none."""
    try:
        found = None if file is None else file.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns)


def _how_to_go_on(written: Path | None, checkpoint: Path | None) -> str:
    """After an interrupt: `written` is the last checkpoint of this training."""
    if written is not None:
        return f"go on with: --resume {written}"
    if checkpoint is not None:
        return f"no epoch was finished, so that '{checkpoint}' is not written: begin anew"
    return "nothing was saved: with --checkpoint FILE a training can be resumed after every epoch"


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
        print(f"{_loss(last)} {after}")
    if checkpoint is not None:
        print(f"weights: {checkpoint}")


def _loss(shown: Running | Epoch) -> str:
    """A mean loss, and over how many steps it is where that is not all."""
    number = f"{shown.loss:.4f}" if abs(shown.loss) < 1e6 else f"{shown.loss:.3e}"
    over = f" (mean of {shown.steps - shown.bad_steps:,} of {shown.steps:,} steps)" if shown.bad_steps else ""
    return f"loss {number}{over}"


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
        parts.append(_loss(now))
        if now.accuracy is not None:
            parts.append(f"accuracy {now.accuracy:.1%}")
        parts.append(f"{now.rows / max(now.seconds, 1e-9):,.0f} images/s")
        self._line.update("  ".join(parts))

    def on_epoch(self, epoch: Epoch) -> None:
        if epoch.dropped_rows:
            self._say_dropped(epoch.dropped_rows)
        parts = [f"epoch {epoch.epoch:>{len(str(epoch.epochs))}}/{epoch.epochs}"]
        parts.append(_loss(epoch))
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
        if epoch.overflowed_steps:
            steps = "1 step was" if epoch.overflowed_steps == 1 else f"{epoch.overflowed_steps} steps were"
            parts.append(f"({steps} skipped for gradients that fp16 cannot hold: the loss scale was lowered)")
        self._line.line("  ".join(parts))

    def stop(self) -> None:
        self._line.clear()

    def _say_dropped(self, rows: int) -> None:
        if not self._said_dropped:
            self._said_dropped = True
            self._line.line(
                f"note: the last {rows} rows of each epoch do not fill a mini-batch of {self._batch} and are dropped"
            )
