"""The process that `mbc.measure.fleet` starts to measure on one GPU: it makes the measurements of a task."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from mbc.kernels.base import Request
from mbc.measure.fleet import Task
from mbc.measure.gpu import Gpu
from mbc.measure.gpu_processes import Say, serve
from mbc.measure.measure import Summary, measure
from mbc.measure.need import Decision
from mbc.progress import announcements_to

OpenGpu = Callable[[Task], AbstractContextManager[Any]]


def work(open_gpu: OpenGpu, measuring: Callable[..., Summary], task: Task, say: Say) -> Generator[object]:
    """Do one task, and end early, at the next request, when stdin ends; yield the summary.

    Args:
        open_gpu: Opens the GPU of the task.
        measuring: `mbc.measure.measure.measure`, or a substitute.
        task: The task.
        say: Sends progress and decisions to the parent.
    """
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

    with announcements_to(lambda text: say(("line", text))), open_gpu(task) as gpu:
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
    yield summary


def _wait_for_end(stdin: int, ended: threading.Event) -> None:
    # Not through the file object, whose lock this thread would hold when the process ends.
    while os.read(stdin, 1):
        pass
    ended.set()


if __name__ == "__main__":
    serve(partial(work, lambda task: Gpu(multiprocessors=task.multiprocessors, pose=task.pose), measure))
