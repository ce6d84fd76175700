"""The training loop: epochs of steps, a test after each, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mbc.errors import MbcError
from mbc.ir.averages import averages_of
from mbc.runtime.averaging import check_averages
from mbc.train.divergence import diverged, divergence, not_finite
from mbc.train.epoch import Epoch, Interval, Running
from mbc.train.epoch_run import EpochRun, write, writing
from mbc.train.job import Job, Trainable
from mbc.train.training_checkpoint import Best, Progress, check_writable, load_checkpoint


def train(
    net: Trainable,
    job: Job,
    on_step: Callable[[Running], None] = lambda _: None,
    on_epoch: Callable[[Epoch], None] = lambda _: None,
    on_interval: Callable[[Interval], None] = lambda _: None,
) -> tuple[Epoch, ...]:
    """Train to the target or the end of the schedule, and return the epochs of this run.

    The same job gives the same bits whether it runs at once or is resumed from any checkpoint. All of several ranks
    come to the same decisions: the loss, the metrics, the number of skipped steps and, after an epoch, all states are
    equal everywhere. If the number of rows is known only after reading them, the ranks ask each other.

    Args:
        net: The module.
        job: The training.
        on_step: Called after every step, on all ranks, like the other callbacks. An error of a callback ends the
            training.
        on_epoch: Called after every epoch, before its checkpoint is written. A resumed training repeats an epoch for
            which `on_epoch` did not return.
        on_interval: Called after every `job.interval` steps.

    Raises:
        MbcError: MBC177 if the data do not fill one mini-batch, MBC178 if no loss of an epoch is finite, MBC182 if
            `resume` was made with other settings, MBC211 if moving averages are asked for that the network does not
            keep, MBC237 if a metric is not available, and MBC231 if after an epoch states are not finite, or the losses
            of more than a tenth of its steps or of its last steps are not finite. The last checkpoint, from before
            that, is kept.
        TargetMissed: MBC318, after the last epoch and its checkpoint, if no epoch has reached the target.
        KeyboardInterrupt: `job.stop` asked for the end.
    """
    if job.evaluate_ema or job.ema is not None:
        check_averages(averages_of(job.graph), job.graph.name)
    for file in (job.checkpoint, job.best, job.ema):
        if file is not None:
            check_writable(file)
    plateau, by, target = job.criterion(job.schedule.metric), job.criterion(job.best_metric), job.resolved_target()
    done = Progress(epochs=0, steps=0, seed=job.seed, batch=job.share.batch)
    if job.resume is not None:
        done = load_checkpoint(net, job.resume)
        _check_resumable(done, job, plateau.name)
    history: list[Epoch] = []
    kept = job.resume

    # Only the last epoch counts: the weights of an earlier epoch that reached the target may be gone.
    last = done.last

    def is_reached() -> bool:
        return target is not None and target.is_reached(last)

    while done.epochs < job.schedule.epochs and not is_reached():
        epoch = EpochRun(net, job, done, kept, on_step, on_interval)
        finished = epoch.run()
        history.append(finished)
        why = divergence(not_finite(net), finished)
        if why is not None:
            on_epoch(finished)
            # Other files at these paths belong to other trainings, so that only `kept` is named.
            raise diverged(why, done.epochs, epoch.kept, epoch.kept_at)
        done = replace(done, epochs=done.epochs + 1, steps=finished.total_steps, running=None, interval=None)
        if job.schedule.kind == "plateau":
            done = replace(done, plateau=done.plateau.after(plateau.of(finished), plateau, job.schedule))
        # Without a target, progress must not name an epoch as the nearest one.
        last = None if target is None else target.of(finished)
        done = replace(done, nearest=None if target is None else target.nearest(done.nearest, finished))
        # Before the checkpoint: if the process dies here, the epoch is run again and reported then.
        on_epoch(finished)
        best = Best(by.name, by.of(finished), finished.epoch)
        keeps = job.best is not None and (not job.best.exists() or best.is_better_than(done.best, by.rises))
        if keeps:
            done = replace(done, best=best)
        # The best checkpoint comes first: if nothing else is written, a resumed training repeats the epoch and writes
        # it again.
        write(net, job, job.best if keeps else None, done)
        if job.ema is not None:
            with writing(job):
                net.save(job.ema, ema=True)
        write(net, job, job.checkpoint, done)
        kept = job.checkpoint
        if done.epochs < job.schedule.epochs and not is_reached() and job.stop():
            raise KeyboardInterrupt
    if target is not None and not is_reached():
        raise target.missed(done.nearest, done.epochs, tuple(history))
    return tuple(history)


def _check_resumable(done: Progress, job: Job, plateau_metric: str) -> None:
    batch, epochs = job.share.batch, job.schedule.epochs
    steps, of_data = 0 if done.running is None else done.running.steps, job.steps_in_epoch
    same = "resume with the settings of the checkpoint"
    for differs, problem, remedy in (
        (done.seed != job.seed, f"was made with seed {done.seed}, not {job.seed}", same),
        (done.batch != batch, f"was made with mini-batches of {done.batch} rows, not {batch}", same),
        (
            done.epochs > epochs,
            f"has {done.epochs} finished epochs, more than the {epochs} asked for",
            "ask for more with --epochs, which counts the finished epochs, too",
        ),
        (
            of_data is not None and steps > of_data,
            f"was written after step {steps} of an epoch, but one epoch of the data has only {of_data}",
            "resume with the data of the checkpoint",
        ),
        (
            # The best values of two metrics cannot be compared: no accuracy is better than a loss of 2.1.
            job.schedule.kind == "plateau" and done.plateau.metric not in (None, plateau_metric),
            f"was made with a plateau of the metric '{done.plateau.metric}', not '{plateau_metric}'",
            f"resume with the same metric (--plateau-metric {done.plateau.metric}), or with another schedule",
        ),
    ):
        if differs:
            raise MbcError("MBC182", f"the checkpoint '{job.resume}' {problem}", remedy)
