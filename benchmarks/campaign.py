"""Calls to worker processes, several at a time, until no call is left or the time is over.

Campaigns share this loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")


def side_by_side(
    pool: Executor, workers: int, next_call: Callable[[], tuple[Callable[..., Result], Any] | None], until_s: float
) -> Iterator[Result]:
    """Yield the results of calls as they end, `workers` calls at a time.

    Args:
        pool: Executor of the calls.
        workers: Calls that run at a time.
        next_call: Returns a function and its arguments, or None if no call is left; it is asked again after each
            result.
        until_s: Time of `time.monotonic` after which no call begins.
    """
    running: set[Future[Result]] = set()
    while True:
        while len(running) < workers and time.monotonic() < until_s and (call := next_call()) is not None:
            running.add(pool.submit(call[0], *call[1]))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()
