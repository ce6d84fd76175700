"""The command that resumes an interrupted training."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from mbc.cli.arguments.shared import options
from mbc.cli.subject import training_graph
from mbc.cli.train_arguments import Prepared
from mbc.train.accuracy import inputs_of
from mbc.train.data import is_tested
from mbc.train.target_metric import target_for
from mbc.train.training_checkpoint import read_progress


def identity(file: Path | None) -> tuple[int, int] | None:
    """Return values that change when a file is replaced or written; None if there is no file."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns)


def how_to_go_on(arguments: argparse.Namespace, written: Path | None, checkpoint: Path | None) -> str:
    """Return the advice after an interrupt.

    Args:
        arguments: Parsed command line of the training.
        written: Last checkpoint of this training; None if none was written.
        checkpoint: Checkpoint that the training was to write; None without one.
    """
    if written is not None:
        # Where the command line has a --resume already, the last one counts.
        more = () if arguments.resume == str(written) else ("--resume", str(written))
        return f"go on with: {shlex.join(('mbc', *arguments.words, *more))}"
    if checkpoint is not None:
        return f"'{checkpoint}' is not written: begin anew"
    return "nothing was saved: with --checkpoint FILE a training is saved when it is interrupted, and can be resumed"


def is_finished(prepared: Prepared) -> bool:
    """Return whether the checkpoint completed all epochs, or reached the target in its last epoch."""
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
