"""The command with which a training that ended early goes on."""

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
    """By which a file is told from one that is written to its place later; None where there is none."""
    try:
        found = None if file is None else file.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns)


def how_to_go_on(arguments: argparse.Namespace, written: Path | None, checkpoint: Path | None) -> str:
    """After an interrupt; `written` is the last checkpoint of this training."""
    if written is not None:
        # Where the command line has another one already the last one counts.
        more = () if arguments.resume == str(written) else ("--resume", str(written))
        return f"go on with: {shlex.join(('mbc', *arguments.words, *more))}"
    if checkpoint is not None:
        return f"'{checkpoint}' is not written: begin anew"
    return "nothing was saved: with --checkpoint FILE a training is saved when it is interrupted, and can be resumed"


def is_finished(prepared: Prepared) -> bool:
    """Whether the checkpoint has all epochs behind it, or its last one has reached the target."""
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
