"""Arguments of `mbc train`, checked before anything is planned."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from mbc.cli.arguments.shared import options
from mbc.cli.outputs import check_outputs
from mbc.cli.subject import check_plannable
from mbc.cli.train_page import TrainPage
from mbc.cli.train_record import TrainRecord
from mbc.errors import MbcError
from mbc.runtime.checkpoint import Checkpoint
from mbc.train.data import check_place
from mbc.train.logs import check_logs
from mbc.train.schedule import Schedule
from mbc.train.training_checkpoint import best_beside, check_not_best, check_writable, read_progress


@dataclass(frozen=True, slots=True)
class Prepared:
    """A training whose arguments have been checked."""

    arguments: argparse.Namespace
    schedule: Schedule
    seed: int
    checkpoint: Path | None  # this and the next five: None where another rank writes them
    best: Path | None
    ema: Path | None
    log: Path | None
    tensorboard: Path | None
    page: TrainPage | None
    record: TrainRecord | None
    resume: Path | None
    weights: Path | None  # initial weights; None for a resumed training
    steps: int  # steps before `resume` was written

    @property
    def keeps_nothing(self) -> bool:
        """True if no option keeps the trained weights."""
        return (self.arguments.checkpoint, self.arguments.resume, self.arguments.save_ema) == (None, None, None)


def prepare(arguments: argparse.Namespace, writes: bool = True) -> Prepared:
    """Check the arguments of a training.

    Args:
        arguments: Parsed command line.
        writes: Whether this process writes the files; False for all ranks but the first.

    Raises:
        MbcError: An argument is out of range, a file cannot be read or written, or two options contradict each other.
    """
    schedule = Schedule(  # raises an error for a value out of range
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
        Checkpoint(weights)  # check the file before anything is planned
    steps = 0 if progress is None else progress.steps_in_all
    return Prepared(
        arguments, schedule, seed, checkpoint, best, ema, log, tensorboard, page, record, resume, weights, steps
    )


def _check_places(arguments: argparse.Namespace, checkpoint: bool, log: bool) -> None:
    """Raise MBC238 if an option needs a checkpoint, a log or test data, and none is given."""
    if arguments.evaluate == "ema" and arguments.test is None:
        raise MbcError("MBC238", "--evaluate ema needs data to test the averages on", "give --test DATA, too")
    for option, there, where, remedy in (
        ("checkpoint_every", checkpoint, "the checkpoint", "--checkpoint FILE"),
        ("keep_best", checkpoint, "the checkpoint", "--checkpoint FILE"),
        ("log_every", log, "the log", "--log FILE, --tensorboard FOLDER or --report FILE"),
    ):
        if getattr(arguments, option) is not None and not there:
            name = option.replace("_", "-")
            raise MbcError("MBC238", f"--{name} needs a file for {where}", f"give {remedy}, too")
