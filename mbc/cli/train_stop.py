"""What Ctrl-C and SIGTERM do to `mbc train`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from mbc.cli.terminal import stoppable, terminated_as_interrupted
from mbc.errors import RankFailed
from mbc.ranks.rank_group import Group
from mbc.train.job import Job


@contextmanager
def stopping(job: Job, group: Group | None, keeps: bool) -> Generator[Callable[[], bool]]:
    """Gives `Job.stop`. `keeps`: whether a checkpoint is written, by rank 0 after the step that is under way, however
    long that takes. It needs the others until then: whichever rank has the signal tells it, and all end when they learn
    that rank 0 has. Where the checkpoint takes all ranks, all stop before the same step, which they ask rank 0 before
    each, and give their parts."""
    if group is None or not keeps:
        if job.checkpoint is not None:
            with stoppable() as stop:
                yield stop
            return
        with terminated_as_interrupted():
            yield lambda: False
        return
    with stoppable() as interrupted:

        def told(stop: bool) -> bool:
            return bool(group.broadcast(b"stop" if stop else b"")) if job.is_sharded else stop

        if group.rank == 0:
            yield lambda: told(interrupted() or group.stop_asked)
            return
        asked = stopped = False

        def ask() -> bool:
            # Before a step, not in the handler of the signal, which may have broken off another message.
            nonlocal asked, stopped
            if interrupted() and not asked:
                asked = True
                group.ask_to_stop()
            stopped = told(False)
            return stopped

        try:
            try:
                yield ask
            except KeyboardInterrupt:
                if stopped:
                    group.barrier()  # rank 0 writes, and ends all
                raise
        except RankFailed:
            if interrupted():
                raise KeyboardInterrupt from None
            raise
