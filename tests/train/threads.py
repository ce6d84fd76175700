"""Ranks as threads of one process, with the interface of `Group` and `Membership`, without sockets and MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mbc.ranks.agreement import check_distinct, check_same

PATIENCE_S = 60.0  # for what takes a moment: a test that would hang fails
Result = TypeVar("Result")


class ThreadRank:
    """One rank of several, which is a member of the group and of a module's ranks."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, parts: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._parts = barrier, parts

    def _gather(self, mine: Any) -> tuple[Any, ...]:
        self._parts[self.rank] = mine
        self._barrier.wait(PATIENCE_S)
        all_parts = tuple(self._parts)
        self._barrier.wait(PATIENCE_S)
        return all_parts

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        return self._gather(payload)

    def broadcast(self, payload: bytes) -> bytes:
        return self._gather(payload)[0]

    def writing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sum_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        first, *others = self._gather(array.copy())
        total = first.copy()
        for other in others:
            total += other
        return np.asarray(total, array.dtype)

    def gather_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.stack(self._gather(array.copy()))

    def agree(self, facts: Mapping[str, str]) -> None:
        check_same(self._gather(dict(facts)))

    def differ(self, what: str, value: str) -> None:
        check_distinct(what, self._gather(value))

    def device_of(self, visible: int) -> int:
        return self.rank

    def check(self) -> None:
        if self._barrier.broken:
            raise threading.BrokenBarrierError

    def on_failure(self, act: Callable[[], None]) -> None:
        pass


def run_ranks(size: int, body: Callable[[ThreadRank], Result]) -> Sequence[Result]:
    """Return the results of `body` on each rank. An error of one rank ends the waits of the others, and is raised."""
    barrier, parts = threading.Barrier(size), [None] * size

    def one(rank: int) -> Result:
        try:
            return body(ThreadRank(rank, size, barrier, parts))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
