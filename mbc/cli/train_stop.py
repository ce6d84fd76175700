"""Ctrl-C and SIGTERM during `mbc train`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from mbc.cli.terminal import stoppable, terminated_as_interrupted
from mbc.errors import RankFailed
from mbc.ranks.rank_group import Group
from mbc.train.job import Job


@contextmanager
def stopping(job: Job, group: Group | None, keeps: bool) -> Generator[Callable[[], bool]]:
    """Yield the function for `Job.stop`, which returns before each step whether the training must stop.

    A rank that receives the signal asks rank 0 to stop. Rank 0 ends its current step, however long it takes, writes the
    checkpoint and ends all ranks; until then it needs the other ranks. If the states are sharded, every rank writes its
    part of the checkpoint. All ranks then ask rank 0 before each step, so that all stop before the same step.

    Args:
        job: Training that runs.
        group: Ranks of the training; None for one process.
        keeps: Whether the training writes a checkpoint.
    """
    if group is None or not keeps:
        if job.checkpoint is not None:
            with stoppable() as stop:
                yield stop
            return
        with terminated_as_interrupted():
            yield lambda: False
        return
    with stoppable() as interrupted:

        def agreed(stop: bool) -> bool:
            return bool(group.broadcast(b"stop" if stop else b"")) if job.is_sharded else stop

        if group.rank == 0:
            yield lambda: agreed(interrupted() or group.stop_asked)
            return
        asked = stopped = False

        def ask() -> bool:
            # Called before a step, not in the signal handler, which may have interrupted another message.
            nonlocal asked, stopped
            if interrupted() and not asked:
                asked = True
                group.ask_to_stop()
            stopped = agreed(False)
            return stopped

        try:
            try:
                yield ask
            except KeyboardInterrupt:
                if stopped:
                    group.barrier()  # rank 0 writes, and ends all ranks
                raise
        except RankFailed:
            if interrupted():
                raise KeyboardInterrupt from None
            raise
