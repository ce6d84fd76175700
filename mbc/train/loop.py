"""The training loop: epochs of steps, test accuracy after each, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.train.accuracy import Predicts, accuracy_on, inputs_of, judged
from mbc.train.checkpoint import Best, Progress, Saves, check_writable, load_checkpoint, save_checkpoint
from mbc.train.data import Data
from mbc.train.divergence import Holds, diverged, divergence, named, not_finite
from mbc.train.epoch import Epoch, Interval, Running, Tally
from mbc.train.inputs import Batch, converted
from mbc.train.metrics import metric_for, value_of
from mbc.train.schedule import Schedule
from mbc.train.share import Group, HoldsStates, Part, Share, agreed, share_of, share_statistics

Array = NDArray[Any]


class Reported(Protocol):
    """The loss of a step. Looking at it, or at the accuracy, may wait for the step."""

    def __float__(self) -> float: ...

    @property
    def accuracy(self) -> float | None:
        """Share of the step's rows classified correctly, None where the network does not classify."""
        ...

    @property
    def idle_s(self) -> float | None:
        """How long the device had nothing to do before the step; None where steps are computed when they are called."""
        ...


@dataclass(frozen=True, slots=True)
class _Taken:
    """A step whose loss nobody has looked at; its data came after `awaited_s`."""

    loss: Reported
    rate: float
    awaited_s: float


class Trainable(Saves, Predicts, Holds, HoldsStates, Protocol):
    """What the loop needs of `mbc.runtime.module.Module`."""

    def step(self, *inputs: Array, lr: float) -> Reported: ...

    @property
    def control(self) -> Mapping[str, int | float]:
        """Counters; `skipped` are steps that changed nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What to train. `resume` is read before the first epoch. `checkpoint` is written after every epoch, and within
    epochs after every `checkpoint_every` steps (0: not); `best` when an epoch was better than all before it, by
    `best_metric` (`mbc.train.metrics`). `group`: the ranks that share each mini-batch, all of which run the same job;
    the first one writes. Figures are told after every `interval` steps (0: not). `stop` is asked before every step, and
    after every epoch: where it says True, the checkpoint is written and the training ends as by Ctrl-C."""

    graph: TrainingGraph
    data: Data
    schedule: Schedule
    test: Data | None = None
    seed: int = 0
    checkpoint: Path | None = None
    resume: Path | None = None
    group: Group | None = None
    checkpoint_every: int = 0
    best: Path | None = None
    best_metric: str | None = None
    interval: int = 0
    stop: Callable[[], bool] = lambda: False

    @property
    def share(self) -> Share:
        return share_of(self.graph, 0 if self.group is None else self.group.rank)

    @property
    def steps_in_epoch(self) -> int | None:
        """None where only reading tells."""
        return None if self.data.rows is None else self.data.rows // self.share.batch

    def metric(self, wanted: str | None) -> str:
        """MBC237 where it is not known."""
        return metric_for(wanted, judged(self.graph) is not None, self.test is not None)


def train(
    net: Trainable,
    job: Job,
    on_step: Callable[[Running], None] = lambda _: None,
    on_epoch: Callable[[Epoch], None] = lambda _: None,
    on_interval: Callable[[Interval], None] = lambda _: None,
) -> tuple[Epoch, ...]:
    """Train to the end of the schedule; returns the epochs that were finished. `on_step` is called after every step,
    `on_interval` after every `job.interval` steps, `on_epoch` after every epoch, before its checkpoint is written; on
    all ranks. What they raise ends the training; an epoch of which `on_epoch` did not return is run again on a resume.

    The same job gives the same bits whether run at once or resumed from any checkpoint. Raises MBC177 when the data do
    not fill one mini-batch, MBC178 when a whole epoch's losses are not finite, MBC182 when `resume` was made otherwise,
    MBC237 where a metric is not known, MBC231 when states are not finite after an epoch, or the losses of more than a
    tenth of its steps, or of its last ones, are not: the last checkpoint is kept, which is of before that.

    Of several ranks all come to the same decisions: the loss, the number of skipped steps and, after an epoch, all
    states are the same everywhere, and where only reading tells how many rows there are the ranks ask each other.
    """
    for file in (job.checkpoint, job.best):
        if file is not None:
            check_writable(file)
    plateau_metric, best_metric = job.metric(job.schedule.metric), job.metric(job.best_metric)
    done = Progress(epochs=0, steps=0, seed=job.seed, batch=job.share.batch)
    if job.resume is not None:
        done = load_checkpoint(net, job.resume)
        _check_resumable(done, job, plateau_metric)
    history: list[Epoch] = []
    kept = job.resume
    for number in range(done.epochs, job.schedule.epochs):
        epoch = _EpochRun(net, job, done, kept, on_step, on_interval)
        finished = epoch.run()
        history.append(finished)
        why = divergence(not_finite(net), finished)
        if why is not None:
            on_epoch(finished)
            # What else lies there is of another training.
            raise diverged(why, number, epoch.kept, epoch.kept_at)
        done = replace(done, epochs=number + 1, steps=finished.total_steps, running=None, interval=None)
        if job.schedule.kind == "plateau":
            value = value_of(plateau_metric, finished)
            done = replace(done, plateau=done.plateau.after(value, plateau_metric, job.schedule))
        # Before the checkpoint: what is not told now, after a death for one, is told when the epoch is run again.
        on_epoch(finished)
        best = Best(best_metric, value_of(best_metric, finished))
        if job.best is not None and (not job.best.exists() or best.is_better_than(done.best)):
            done = replace(done, best=best)
            # First: where nothing but this is written, the epoch is run again after a resume, and writes this again.
            _write(net, job, job.best, done)
        if job.checkpoint is not None:
            _write(net, job, job.checkpoint, done)
        kept = job.checkpoint
        if number + 1 < job.schedule.epochs and job.stop():
            raise KeyboardInterrupt
    return tuple(history)


def _check_resumable(done: Progress, job: Job, plateau_metric: str) -> None:
    batch, epochs = job.share.batch, job.schedule.epochs
    steps, of_data = 0 if done.running is None else done.running.steps, job.steps_in_epoch
    same = "resume with the settings it was made with"
    for differs, problem, remedy in (
        (done.seed != job.seed, f"was made with seed {done.seed}, not {job.seed}", same),
        (done.batch != batch, f"was made with mini-batches of {done.batch} rows, not {batch}", same),
        (
            done.epochs > epochs,
            f"has {done.epochs} finished epochs, more than the {epochs} asked for",
            "ask for more with --epochs: those that it has behind it count",
        ),
        (
            of_data is not None and steps > of_data,
            f"is of step {steps} of an epoch, and one epoch of the data has {of_data}",
            "resume with the data it was made with",
        ),
        (
            # The best value of one metric is none of another's: no accuracy is better than a loss of 2.1.
            job.schedule.kind == "plateau" and done.plateau.metric not in (None, plateau_metric),
            f"was made with a plateau of the metric '{done.plateau.metric}', not '{plateau_metric}'",
            f"resume with the same one, as --plateau-metric {done.plateau.metric}, or with another schedule",
        ),
    ):
        if differs:
            raise MbcError("MBC182", f"the checkpoint '{job.resume}' {problem}", remedy)


def _write(net: Trainable, job: Job, path: Path, progress: Progress) -> None:
    """A checkpoint, for which a rank is waited for where another one has failed."""
    with nullcontext() if job.group is None else job.group.writing():
        save_checkpoint(net, path, progress)


class _EpochRun:
    """An epoch under way, from where `done` says that it was left. `kept` is the last checkpoint, written after step
    `kept_at` of this epoch, 0 where it is of before."""

    def __init__(
        self, net: Trainable, job: Job, done: Progress, kept: Path | None, on_step: Callable[[Running], None],
        on_interval: Callable[[Interval], None],
    ) -> None:  # fmt: skip
        self._net, self._job, self._done = net, job, done
        self._on_step, self._on_interval = on_step, on_interval
        self._inputs = inputs_of(job.graph)
        self._batch = job.share.batch
        self._tally = Tally(skipped_before=int(net.control["skipped"])) if done.running is None else done.running
        self._issued = self._tally.steps
        self._unseen: _Taken | None = None
        self._awaited_s = 0.0  # by the next step, for its data
        self._interval = Tally() if done.interval is None else done.interval
        now = time.monotonic()
        self._began, self._interval_began = now - self._tally.seconds, now - self._interval.seconds
        self.kept, self.kept_at = kept, self._tally.steps

    def run(self) -> Epoch:
        job, net, tally = self._job, self._net, self._tally
        parts = job.data.shuffled(job.share, job.seed, self._done.epochs, self._issued)
        arrays, dropped = self._following(parts)
        while arrays is not None:
            if job.stop():
                self._save()
                raise KeyboardInterrupt
            rate, awaited_s = self._rate(), self._awaited_s
            loss = net.step(*arrays, lr=rate)
            self._issued += 1
            arrays, dropped = self._following(parts)
            # Looking at a loss waits for its step: at that of the one before, so that the GPU always has work.
            self._look()
            self._unseen = _Taken(loss, rate, awaited_s)
            every = job.checkpoint_every
            if every and (self._done.steps + self._issued) % every == 0 and arrays is not None:
                self._save()
        self._look()
        tally.seconds = time.monotonic() - self._began
        return self._finished(dropped)

    def _rate(self) -> float:
        """Where the number of steps is not known the rate changes by the epoch only, so that a resumed training sees
        the same rates."""
        steps = self._job.steps_in_epoch
        begins, takes = (self._issued / steps, 1 / steps) if steps else (0.0, 1.0)
        rate = self._job.schedule.at(self._done.epochs + begins, takes, self._done.steps + self._issued)
        return rate * self._done.plateau.scale

    def _following(self, parts: Iterator[Part]) -> tuple[Batch | None, int]:
        """The rows of the next step; None where they do not fill a mini-batch, and how many they are then."""
        data, group = self._job.data, self._job.group
        began = time.monotonic()
        part = next(parts, None)
        arrays = converted(part.arrays, self._inputs) if part is not None and part.whole else None
        self._awaited_s = time.monotonic() - began
        whole, rows = (False, 0) if part is None else (part.whole, part.rows)
        if group is not None and data.rows is None:
            whole, rows = agreed(part, data.common, group, self._issued)
        return (arrays, 0) if whole else (None, rows)

    def _look(self) -> None:
        """At the loss of the last step, where nobody has."""
        if self._unseen is None:
            return
        taken, self._unseen, tally = self._unseen, None, self._tally
        loss, accuracy, idle_s = float(taken.loss), taken.loss.accuracy, taken.loss.idle_s
        tally.learning_rate = taken.rate
        # A GPU waits for data only when it has finished the step before; other reasons to wait are none of the data's.
        tally.waited_seconds += taken.awaited_s if idle_s is None else min(taken.awaited_s, idle_s)
        for one in (tally, self._interval):
            one.add(loss, accuracy)
        if tally.first_bad_step == tally.steps:
            # A loss that is not finite changes nothing, so that what is wrong now was so before this step.
            tally.bad_states = not_finite(self._net)
        now = Running(
            epoch=self._done.epochs + 1, epochs=self._job.schedule.epochs, steps=tally.steps,
            steps_in_epoch=self._job.steps_in_epoch, loss=tally.loss, accuracy=tally.accuracy,
            rows=tally.steps * self._batch, seconds=time.monotonic() - self._began, bad_steps=tally.bad_steps,
        )  # fmt: skip
        self._on_step(now)
        if self._job.interval and (self._done.steps + tally.steps) % self._job.interval == 0:
            self._tell_interval()

    def _tell_interval(self) -> None:
        interval, now = self._interval, time.monotonic()
        told = Interval(
            epoch=self._done.epochs + 1, total_steps=self._done.steps + self._tally.steps, steps=interval.steps,
            loss=interval.loss, accuracy=interval.accuracy, learning_rate=self._tally.learning_rate,
            rows=interval.steps * self._batch, seconds=now - self._interval_began, bad_steps=interval.bad_steps,
        )  # fmt: skip
        self._interval, self._interval_began = Tally(), now
        self._on_interval(told)

    def _save(self) -> None:
        """Within the epoch. What would count as diverged at its end does not replace what has not."""
        if self._job.checkpoint is None:
            return
        self._look()
        tally = self._tally
        now = time.monotonic()
        tally.seconds, self._interval.seconds = now - self._began, now - self._interval_began
        self._count_overflows()
        if divergence(not_finite(self._net), tally) is None:
            progress = replace(self._done, running=tally, interval=self._interval)
            _write(self._net, self._job, self._job.checkpoint, progress)
            self.kept, self.kept_at = self._job.checkpoint, tally.steps

    def _count_overflows(self) -> None:
        skipped = int(self._net.control["skipped"]) - self._tally.skipped_before
        self._tally.overflowed_steps = skipped - self._tally.bad_steps

    def _finished(self, dropped: int) -> Epoch:
        job, tally, number = self._job, self._tally, self._done.epochs + 1
        if tally.steps == 0:
            raise MbcError(
                "MBC177",
                f"the data hold {dropped} rows, fewer than one mini-batch of {self._batch}",
                f"give more data, or compile for a smaller mini-batch, for instance with --set batch={max(1, dropped)}",
            )
        if tally.bad_steps == tally.steps:
            raise MbcError(
                "MBC178",
                f"no loss of epoch {number} is finite, so nothing was learned in it{named(tally.bad_states)}",
                "lower the learning rate, add a warm-up, or look for values that are not finite in the data",
            )
        if job.group is not None:
            share_statistics(self._net, job.graph, job.group)
        self._count_overflows()
        return Epoch(
            epoch=number,
            epochs=job.schedule.epochs,
            steps=tally.steps,
            loss=tally.loss,
            accuracy=tally.accuracy,
            test_accuracy=None if job.test is None else accuracy_on(self._net, job.graph, job.test, job.group),
            learning_rate=tally.learning_rate,
            rows=tally.steps * self._batch,
            seconds=tally.seconds,
            dropped_rows=dropped,
            bad_steps=tally.bad_steps,
            first_bad_step=tally.first_bad_step,
            bad_steps_at_end=tally.bad_steps_at_end,
            overflowed_steps=tally.overflowed_steps,
            bad_states=tally.bad_states,
            total_steps=self._done.steps + tally.steps,
            waited_seconds=tally.waited_seconds,
        )
