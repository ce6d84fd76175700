"""The training loop: epochs of steps, test accuracy after each, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.train.accuracy import Predicts, accuracy_on, inputs_of, judged
from mbc.train.checkpoint import Progress, Saves, check_writable, load_checkpoint, save_checkpoint
from mbc.train.data import Data
from mbc.train.divergence import Holds, diverged, divergence, named, not_finite
from mbc.train.inputs import Batch, converted
from mbc.train.metrics import metric_for, rises, value_of
from mbc.train.schedule import Schedule
from mbc.train.share import Group, HoldsStates, Share, agreed, share_of, share_statistics

Array = NDArray[Any]


class Reported(Protocol):
    """The loss of a step. Looking at it, or at the accuracy, may wait for the step."""

    def __float__(self) -> float: ...

    @property
    def accuracy(self) -> float | None:
        """Share of the step's rows classified correctly, None where the network does not classify."""
        ...


class Trainable(Saves, Predicts, Holds, HoldsStates, Protocol):
    """What the loop needs of `mbc.runtime.module.Module`."""

    def step(self, *inputs: Array, lr: float) -> Reported: ...

    @property
    def control(self) -> Mapping[str, int | float]:
        """Counters; `skipped` are steps that changed nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What to train. `checkpoint` is written after every epoch; `resume` is read before the first. `group`: the ranks
    that share each mini-batch, all of which run the same job."""

    graph: TrainingGraph
    data: Data
    schedule: Schedule
    test: Data | None = None
    seed: int = 0
    checkpoint: Path | None = None
    resume: Path | None = None
    group: Group | None = None

    @property
    def share(self) -> Share:
        return share_of(self.graph, 0 if self.group is None else self.group.rank)


@dataclass(frozen=True, slots=True)
class Running:
    """A moment within an epoch. `steps` of `steps_in_epoch` (None: not known) are done, `rows` in `seconds`. `loss` is
    the mean of all but `bad_steps`, whose loss is not finite."""

    epoch: int
    epochs: int
    steps: int
    steps_in_epoch: int | None
    loss: float
    accuracy: float | None
    rows: int
    seconds: float
    bad_steps: int = 0


@dataclass(frozen=True, slots=True)
class Epoch:
    """A finished epoch. `loss` is the mean over its steps but `bad_steps`, whose loss is not finite and which changed
    nothing, `accuracy` that over all; `dropped_rows` did not fill a mini-batch. `first_bad_step` counts from 1, 0 where
    there is none; no good step follows `bad_steps_at_end`. `overflowed_steps` had a finite loss, and were skipped for a
    gradient that fp16 cannot hold. `bad_states` hold values that are not finite since before the first bad step: the
    gradient of an earlier one was not finite though its loss was, and reached them."""

    epoch: int
    epochs: int
    steps: int
    loss: float
    accuracy: float | None
    test_accuracy: float | None
    learning_rate: float
    rows: int
    seconds: float
    dropped_rows: int
    bad_steps: int
    first_bad_step: int = 0
    bad_steps_at_end: int = 0
    overflowed_steps: int = 0
    bad_states: tuple[str, ...] = ()


def train(
    net: Trainable,
    job: Job,
    on_step: Callable[[Running], None] = lambda _: None,
    on_epoch: Callable[[Epoch], None] = lambda _: None,
) -> tuple[Epoch, ...]:
    """Train to the end of the schedule; returns the epochs that were run.

    The same job gives the same bits whether run at once or resumed after any epoch. Raises MBC177 when the data do not
    fill one mini-batch, MBC178 when a whole epoch's losses are not finite, MBC182 when `resume` was made otherwise,
    MBC237 where the schedule goes by a metric that is not known,
    MBC231 when states are not finite after an epoch, or the losses of more than a tenth of its steps, or of its last
    ones, are not: the checkpoint of the epoch before is kept.

    Of several ranks all come to the same decisions: the loss, the number of skipped steps and, after an epoch, all
    states are the same everywhere, and where only reading tells how many rows there are the ranks ask each other.
    """
    if job.checkpoint is not None:
        check_writable(job.checkpoint)
    batch = job.share.batch
    metric = metric_for(job.schedule.metric, judged(job.graph) is not None, job.test is not None)
    done = Progress(epochs=0, steps=0, seed=job.seed, batch=batch)
    if job.resume is not None:
        done = load_checkpoint(net, job.resume)
        _check_resumable(done, job)
    history: list[Epoch] = []
    steps, plateau = done.steps, done.plateau
    for epoch in range(done.epochs, job.schedule.epochs):
        finished = _one_epoch(net, job, epoch, steps, plateau.scale, on_step)
        steps += finished.steps
        history.append(finished)
        why = divergence(not_finite(net), finished)
        if why is not None:
            on_epoch(finished)
            # What else lies there is of another training.
            raise diverged(why, epoch, job.checkpoint if epoch > done.epochs else job.resume)
        if job.schedule.kind == "plateau":
            plateau = plateau.after(value_of(metric, finished), rises(metric), job.schedule)
        if job.checkpoint is not None:
            save_checkpoint(net, job.checkpoint, Progress(epoch + 1, steps, job.seed, batch, plateau))
        on_epoch(finished)
    return tuple(history)


def _check_resumable(done: Progress, job: Job) -> None:
    batch, epochs = job.share.batch, job.schedule.epochs
    same = "resume with the settings it was made with"
    for differs, problem, remedy in (
        (done.seed != job.seed, f"was made with seed {done.seed}, not {job.seed}", same),
        (done.batch != batch, f"was made with mini-batches of {done.batch} rows, not {batch}", same),
        (
            done.epochs > epochs,
            f"has {done.epochs} finished epochs, more than the {epochs} asked for",
            "ask for more with --epochs: those that it has behind it count",
        ),
    ):
        if differs:
            raise MbcError("MBC182", f"the checkpoint '{job.resume}' {problem}", remedy)


@dataclass
class _Sums:
    """What an epoch has added up so far."""

    steps: int = 0
    bad_steps: int = 0
    first_bad_step: int = 0
    bad_steps_at_end: int = 0
    losses: float = 0.0
    accuracies: float = 0.0
    judged_steps: int = 0

    def add(self, loss: float, accuracy: float | None) -> None:
        self.steps += 1
        if math.isfinite(loss):
            self.losses += loss
            self.bad_steps_at_end = 0
        else:
            self.bad_steps += 1
            self.bad_steps_at_end += 1
            self.first_bad_step = self.first_bad_step or self.steps
        if accuracy is not None:
            self.accuracies += accuracy
            self.judged_steps += 1

    @property
    def loss(self) -> float:
        good = self.steps - self.bad_steps
        return self.losses / good if good else math.nan

    @property
    def accuracy(self) -> float | None:
        return self.accuracies / self.judged_steps if self.judged_steps else None


def _one_epoch(
    net: Trainable, job: Job, epoch: int, steps_before: int, scale: float, on_step: Callable[[Running], None]
) -> Epoch:
    """`scale`: of the rates that the schedule gives."""
    share, group, epochs = job.share, job.group, job.schedule.epochs
    batch = share.batch
    inputs = inputs_of(job.graph)
    # Where the length is unknown the rate changes by the epoch only, so that a resumed training sees the same rates.
    steps_in_epoch = None if job.data.rows is None else job.data.rows // batch
    sums = _Sums()
    rate = 0.0
    bad_states: tuple[str, ...] = ()
    issued = 0
    unseen: Reported | None = None
    skipped_before = net.control["skipped"]
    began = time.monotonic()

    def look(loss: Reported) -> None:
        nonlocal bad_states
        sums.add(float(loss), loss.accuracy)
        if sums.first_bad_step == sums.steps:
            # A loss that is not finite changes nothing, so that what is wrong now was so before this step.
            bad_states = not_finite(net)
        seconds = time.monotonic() - began
        now = Running(
            epoch=epoch + 1, epochs=epochs, steps=sums.steps, steps_in_epoch=steps_in_epoch, loss=sums.loss,
            accuracy=sums.accuracy, rows=sums.steps * batch, seconds=seconds, bad_steps=sums.bad_steps,
        )  # fmt: skip
        on_step(now)

    parts = job.data.shuffled(share, job.seed, epoch)

    def following() -> tuple[Batch | None, int]:
        """The rows of the next step; None where they do not fill a mini-batch, and how many they are then."""
        part = next(parts, None)
        whole, rows = (False, 0) if part is None else (part.whole, part.rows)
        if group is not None and job.data.rows is None:
            whole, rows = agreed(part, job.data.common, group, issued)
        return (converted(part.arrays, inputs), 0) if whole and part is not None else (None, rows)

    arrays, dropped = following()
    while arrays is not None:
        taken = 1 / steps_in_epoch if steps_in_epoch else 1.0
        begins = epoch + (issued * taken if steps_in_epoch else 0.0)
        rate = scale * job.schedule.at(begins, taken, steps_before + issued)
        loss = net.step(*arrays, lr=rate)
        issued += 1
        arrays, dropped = following()
        # Looking at a loss waits for its step: at that of the one before, so that the GPU always has work.
        if unseen is not None:
            look(unseen)
        unseen = loss
    if unseen is not None:
        look(unseen)
    seconds = time.monotonic() - began
    if sums.steps == 0:
        raise MbcError(
            "MBC177",
            f"the data hold {dropped} rows, fewer than one mini-batch of {batch}",
            f"give more data, or compile for a smaller mini-batch, for instance with --set batch={max(1, dropped)}",
        )
    if sums.bad_steps == sums.steps:
        raise MbcError(
            "MBC178",
            f"no loss of epoch {epoch + 1} is finite, so nothing was learned in it{named(bad_states)}",
            "lower the learning rate, add a warm-up, or look for values that are not finite in the data",
        )
    if group is not None:
        share_statistics(net, job.graph, group)
    return Epoch(
        epoch=epoch + 1,
        epochs=epochs,
        steps=sums.steps,
        loss=sums.loss,
        accuracy=sums.accuracy,
        test_accuracy=None if job.test is None else accuracy_on(net, job.graph, job.test, group),
        learning_rate=rate,
        rows=sums.steps * batch,
        seconds=seconds,
        dropped_rows=dropped,
        bad_steps=sums.bad_steps,
        first_bad_step=sums.first_bad_step,
        bad_steps_at_end=sums.bad_steps_at_end,
        overflowed_steps=int(net.control["skipped"] - skipped_before) - sums.bad_steps,
        bad_states=bad_states,
    )
