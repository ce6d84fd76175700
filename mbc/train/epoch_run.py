"""An epoch while it runs: its steps, their sums, and checkpoints within it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from mbc.errors import MbcError
from mbc.runtime.reported_metrics import named_metrics
from mbc.train.accuracy import inputs_of
from mbc.train.divergence import divergence, named, not_finite
from mbc.train.epoch import Epoch, Interval, Running, Tally
from mbc.train.evaluation import Evaluation, evaluate_on
from mbc.train.inputs import Batch, converted
from mbc.train.job import Job, Reported, Trainable
from mbc.train.share import Part, agreed, share_statistics
from mbc.train.training_checkpoint import Progress, save_checkpoint


@dataclass(frozen=True, slots=True)
class _Taken:
    """A step whose loss has not been read; its data arrived after `awaited_s` seconds."""

    loss: Reported
    rate: float
    awaited_s: float


PARTS_ALONE = "of-another-rank"  # a placeholder for a rank that writes no file


class EpochRun:
    """An epoch while it runs, from the point at which `done` left it.

    Attributes:
        kept: The last good checkpoint; None if there is none.
        kept_at: Step of this epoch after which it was written; 0 if it was written before the epoch.
    """

    def __init__(
        self, net: Trainable, job: Job, done: Progress, kept: Path | None, on_step: Callable[[Running], None],
        on_interval: Callable[[Interval], None],
    ) -> None:  # fmt: skip
        """Prepare the epoch.

        Args:
            net: The module.
            job: The training.
            done: Progress so far, within this epoch, too.
            kept: The last checkpoint.
            on_step: Called after every step.
            on_interval: Called after every `job.interval` steps.
        """
        self._net, self._job, self._done = net, job, done
        self._on_step, self._on_interval = on_step, on_interval
        self._inputs, self._named = inputs_of(job.graph), named_metrics(job.graph)
        self._batch = job.share.batch
        self._tally = Tally(skipped_before=int(net.control["skipped"])) if done.running is None else done.running
        self._issued = self._tally.steps
        self._unseen: _Taken | None = None
        self._awaited_s = 0.0  # time that the next step has waited for its data
        self._interval = Tally() if done.interval is None else done.interval
        now = time.monotonic()
        self._began, self._interval_began = now - self._tally.seconds, now - self._interval.seconds
        self.kept, self.kept_at = kept, self._tally.steps

    def run(self) -> Epoch:
        """Run all steps of the epoch and its test, and return its report.

        Raises:
            KeyboardInterrupt: `job.stop` asked for the end; a checkpoint was written before.
            MbcError: MBC177 if the data do not fill one mini-batch, MBC178 if no loss is finite.
        """
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
            # Reading a loss waits for its step. The loss of the step before is read, so that the GPU always has work.
            self._look()
            self._unseen = _Taken(loss, rate, awaited_s)
            every = job.checkpoint_every
            if every and (self._done.steps + self._issued) % every == 0 and arrays is not None:
                self._save()
        self._look()
        tally.seconds = time.monotonic() - self._began
        return self._finished(dropped)

    def _rate(self) -> float:
        """Return the learning rate of the next step.

        If the number of steps is unknown, the rate changes only between epochs, so that a resumed training sees equal
        rates.
        """
        steps = self._job.steps_in_epoch
        begins, takes = (self._issued / steps, 1 / steps) if steps else (0.0, 1.0)
        rate = self._job.schedule.at(self._done.epochs + begins, takes, self._done.steps + self._issued)
        return rate * self._done.plateau.scale

    def _following(self, parts: Iterator[Part]) -> tuple[Batch | None, int]:
        """Return the rows of the next step and 0, or None and the number of remaining rows.

        Remaining rows do not fill a mini-batch.
        """
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
        """Read the loss of the last step, unless it has been read, and report it."""
        if self._unseen is None:
            return
        taken, self._unseen, tally = self._unseen, None, self._tally
        loss, accuracy, idle_s = float(taken.loss), taken.loss.accuracy, taken.loss.idle_s
        metrics = {name: taken.loss.metrics[name] for name in self._named}
        tally.learning_rate = taken.rate
        # A GPU waits for data only after it has finished the step before; other waits do not count as waits for data.
        tally.waited_seconds += taken.awaited_s if idle_s is None else min(taken.awaited_s, idle_s)
        for one in (tally, self._interval):
            one.add(loss, accuracy, metrics)
        if tally.first_bad_step == tally.steps:
            # A step whose loss is not finite changes nothing: values that are wrong now were wrong before this step.
            tally.bad_states = not_finite(self._net)
        now = Running(
            epoch=self._done.epochs + 1, epochs=self._job.schedule.epochs, steps=tally.steps,
            steps_in_epoch=self._job.steps_in_epoch, loss=tally.loss, accuracy=tally.accuracy,
            rows=tally.steps * self._batch, seconds=time.monotonic() - self._began, bad_steps=tally.bad_steps,
            metrics=tally.metrics,
        )  # fmt: skip
        self._on_step(now)
        if self._job.interval and (self._done.steps + tally.steps) % self._job.interval == 0:
            self._tell_interval()

    def _tell_interval(self) -> None:
        interval, now = self._interval, time.monotonic()
        report = Interval(
            epoch=self._done.epochs + 1, total_steps=self._done.steps + self._tally.steps, steps=interval.steps,
            loss=interval.loss, accuracy=interval.accuracy, learning_rate=self._tally.learning_rate,
            rows=interval.steps * self._batch, seconds=now - self._interval_began, bad_steps=interval.bad_steps,
            metrics=interval.metrics,
        )  # fmt: skip
        self._interval, self._interval_began = Tally(), now
        self._on_interval(report)

    def _save(self) -> None:
        """Write a checkpoint within the epoch, unless its state would count as diverged at the epoch's end."""
        if self._job.checkpoint is None and not self._job.is_sharded:
            return
        self._look()
        tally = self._tally
        now = time.monotonic()
        tally.seconds, self._interval.seconds = now - self._began, now - self._interval_began
        self._count_overflows()
        path = self._job.checkpoint if divergence(not_finite(self._net), tally) is None else None
        write(self._net, self._job, path, replace(self._done, running=tally, interval=self._interval))
        if path is not None:
            self.kept, self.kept_at = path, tally.steps

    def _count_overflows(self) -> None:
        skipped = int(self._net.control["skipped"]) - self._tally.skipped_before
        self._tally.overflowed_steps = skipped - self._tally.bad_steps

    def _finished(self, dropped: int) -> Epoch:
        job, tally, number = self._job, self._tally, self._done.epochs + 1
        if tally.steps == 0:
            parts = job.graph.optimizer.accumulate
            step = f"step of {parts} mini-batches, {self._batch} rows" if parts > 1 else f"mini-batch of {self._batch}"
            raise MbcError(
                "MBC177",
                f"the data hold {dropped} rows, fewer than one {step}",
                "give more data, or compile for a smaller mini-batch, for instance with --set"
                f" batch={max(1, dropped // parts)}",
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
        tested = Evaluation()
        if job.test is not None:
            with self._net.averaged() if job.evaluate_ema else nullcontext():
                tested = evaluate_on(self._net, job.graph, job.test, job.group)
        return Epoch(
            epoch=number,
            epochs=job.schedule.epochs,
            steps=tally.steps,
            loss=tally.loss,
            accuracy=tally.accuracy,
            test_accuracy=tested.accuracy,
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
            metrics=tally.metrics,
            test_metrics=tested.metrics,
        )


def writing(job: Job) -> AbstractContextManager[None]:
    """Return a context in which this rank is waited for if another rank has failed."""
    return nullcontext() if job.group is None else job.group.writing()


def write(net: Trainable, job: Job, path: Path | None, progress: Progress) -> None:
    """Write a checkpoint to `path`, or none if it is None.

    If the optimizer's states are sharded, all ranks call this function, and give their parts if rank 0 has a `path`.
    """
    if job.group is not None and job.is_sharded:
        wanted = bool(job.group.broadcast(b"" if path is None else b"write"))
        path = (path or Path(PARTS_ALONE)) if wanted else None
    if path is None:
        return
    with writing(job):
        save_checkpoint(net, path, progress)
