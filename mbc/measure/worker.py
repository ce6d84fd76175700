"""The process that `mbc.measure.fleet` starts to measure on one GPU: it receives a task by stdin and sends messages."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from mbc.errors import MbcError
from mbc.kernels.base import Request
from mbc.measure.fleet import Task
from mbc.measure.gpu import Gpu
from mbc.measure.measure import Summary, measure
from mbc.measure.need import Decision
from mbc.measure.processes import received, speaker


def serve(open_gpu: Callable[[Task], AbstractContextManager[Any]], measuring: Callable[..., Summary]) -> None:
    """Do one task, and end early, at the next request, when stdin ends.

    Args:
        open_gpu: Opens the GPU of the task.
        measuring: `mbc.measure.measure.measure`, or a substitute.
    """
    say = speaker()
    task: Task = received()
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(sys.stdin.fileno(), ended), daemon=True).start()

    def progress(done: int, total: int, request: Request, left_s: float | None = None) -> None:
        say(("progress", done, total, request, left_s))
        if ended.is_set():
            raise KeyboardInterrupt

    first = [task.decision] if task.decision is not None else []

    def decided(failed: Collection[str], missing: Collection[str]) -> Decision:
        assert task.decide is not None
        decision = first.pop() if first else task.decide(failed, missing)
        say(("decision", decision))
        return decision

    try:
        with open_gpu(task) as gpu:
            summary = measuring(
                gpu,
                task.needs,
                task.path,
                measure_for_s=task.measure_for_s,
                workspace_limit_bytes=task.workspace_limit_bytes,
                progress=progress,
                again=task.again,
                link=task.link,
                decide=None if task.decide is None else decided,
                outdated=task.outdated,
            )
        say(("summary", summary))
    except MbcError as error:
        say(("error", MbcError(error.code, error.message, error.remedy)))
    except (KeyboardInterrupt, BrokenPipeError):
        pass


def _wait_for_end(stdin: int, ended: threading.Event) -> None:
    # Not through the file object, whose lock this thread would hold when the process ends.
    while os.read(stdin, 1):
        pass
    ended.set()


if __name__ == "__main__":
    serve(lambda task: Gpu(multiprocessors=task.multiprocessors), measure)
