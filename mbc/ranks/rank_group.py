"""Ranks that have met: they gather and compare bytes, and end together when one of them fails.

Rank 0 is connected to all others and passes on what they say. A thread of each rank listens all the time, so that a
failure is known at once, whatever the main thread does: the rank that fails says so, and of one that is killed the
kernel closes the connections (a machine that is lost is noticed in 10 s, by keepalive). A rank that is slow, by
seconds or hours, is no failure: all others wait for it.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from types import TracebackType
from typing import Any, Self

from mbc.errors import OTHER_RANK_FAILED, MbcError, RankFailed
from mbc.ranks.agreement import check_distinct, check_same
from mbc.ranks.environment import RankEnvironment
from mbc.ranks.meeting import meet
from mbc.ranks.messages import Link, Message
from mbc.ranks.mpi import leave_world

# After a failure, for a main thread to end by itself: with what comes before and after it all ranks end in 10 s, but
# for one that writes a checkpoint.
GRACE_S = 5.0
_CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure that a rank learnt of."""

    rank: int
    reason: str


class Group:
    """All ranks of a training, in one of them. Every rank calls the same methods in the same order.

    `with Group.open(...) as group:` closes it at the end, and tells the others when an exception leaves the body. After
    a failure, of this rank or another one, the process has `grace_s` to end by itself and is ended then, since it may
    hang in a call of CUDA's (None: never, for those who end it themselves). While it is `writing` it is not ended, and
    has that time again afterwards. All methods that need the others raise MBC264 after a failure.
    """

    def __init__(
        self, environment: RankEnvironment, links: Mapping[int, Link], grace_s: float | None = GRACE_S
    ) -> None:
        self.environment = environment
        self.rank, self.size = environment.rank, environment.size
        self._links = dict(links)
        self._grace_s = grace_s
        self._condition = threading.Condition()
        self._parts: dict[int, deque[Message]] = {rank: deque() for rank in links}
        self._failure: Failure | None = None
        self._on_failure: Callable[[], None] | None = None
        self._calls = 0
        self._stop_asked = False
        self._writing = threading.Lock()
        self._over = False  # all ranks have come to the end: closed connections are none of anybody's business
        self._woken, self._waker = Pipe(duplex=False)
        _in_forked_processes(self)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="mbc ranks")
        self._thread.start()

    @classmethod
    def open(
        cls, environment: RankEnvironment, variables: Mapping[str, str] = os.environ, grace_s: float | None = GRACE_S
    ) -> Self:
        """Meet the others; raises what `mbc.ranks.meeting.meet` does."""
        return cls(environment, meet(environment, variables), grace_s)

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def check(self) -> None:
        """MBC264 where a rank has failed."""
        if self._failure is not None:
            raise self._error(self._failure)

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Those of all ranks, in their order."""
        return self._exchange("gather", payload)

    def broadcast(self, payload: bytes, root: int = 0) -> bytes:
        """That of rank `root`; what the others pass is ignored."""
        return self._exchange(f"broadcast of rank {root}", payload if self.rank == root else b"")[root]

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        self._exchange("barrier", b"")

    def agree(self, what: Mapping[str, str]) -> None:
        """MBC263 on all ranks where they differ in some value: versions, digest of the plan, number of ranks."""
        check_same([json.loads(one) for one in self.gather(json.dumps(dict(what)).encode())])

    def differ(self, what: str, value: str) -> None:
        """MBC266 on all ranks where two have the same value: the same GPU."""
        check_distinct(what, [one.decode() for one in self.gather(value.encode())])

    def call_on_failure(self, callback: Callable[[], None]) -> None:
        """Called once at the first failure, this rank's own included, mostly in another thread: it aborts what the main
        thread may wait for. At once where a rank has failed already."""
        with self._condition:
            self._on_failure = callback
            late = self._failure is not None
        if late:
            callback()

    def fail(self, reason: str) -> None:
        """Tell all others that this rank fails. Ignored after an earlier failure: the first one counts."""
        self._failed(Failure(self.rank, reason))

    def ask_to_stop(self) -> None:
        """Rank 0 is asked to end the training in order, as by a signal to itself: to finish its step, to save, and to
        fail the group then, for which the others wait. Ignored by a rank 0 that has failed."""
        if self.rank == 0:
            self._stop_asked = True
            return
        with suppress(OSError):  # it has died: the listening thread knows, or will
            self._links[0].send(Message("stop"))

    @property
    def stop_asked(self) -> bool:
        """Of rank 0: whether some rank has asked it to stop."""
        return self._stop_asked

    @contextmanager
    def writing(self) -> Generator[None]:
        """While the body runs, which waits for other ranks only where it notices their failure, a failure does not end
        this process."""
        with self._writing:
            yield

    def close(self) -> None:
        """The orderly end: waits until all ranks have come to it."""
        self._exchange(_CLOSE, b"")
        self._stop()
        leave_world()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.fail(_reason(error))
        self._stop()

    def _exchange(self, what: str, payload: bytes) -> tuple[bytes, ...]:
        self.check()
        self._calls += 1
        mine = {"what": what, "call": self._calls}
        if self.rank == 0:
            parts = [self._next(rank) for rank in range(1, self.size)]
            for rank, part in enumerate(parts, 1):
                if dict(part.head) != mine:  # all ranks run one program, or it is a bug
                    theirs = f"{part.head.get('what')} ({part.head.get('call')})"
                    self.fail(f"rank {rank} is at {theirs} where rank 0 is at {what} ({self._calls})")
                    self.check()
            bodies = (payload, *(part.body for part in parts))
            self._over = what == _CLOSE
            for link in self._links.values():
                with suppress(OSError):  # it has died: the listening thread knows, or will
                    link.send(Message("all", mine | {"sizes": [len(body) for body in bodies]}, b"".join(bodies)))
            return bodies
        with suppress(OSError):
            self._links[0].send(Message("part", mine, payload))
        whole = self._next(0)
        ends = [0]
        for size in whole.head["sizes"]:
            ends.append(ends[-1] + size)
        return tuple(whole.body[start:end] for start, end in itertools.pairwise(ends))

    def _next(self, rank: int) -> Message:
        """The next part from a rank. What has come counts, even where a failure has come after it."""
        with self._condition:
            self._condition.wait_for(lambda: self._parts[rank] or self._failure is not None)
            if self._parts[rank]:
                return self._parts[rank].popleft()
        self.check()
        raise AssertionError("a wait ended without reason")

    def _listen(self) -> None:
        ranks: dict[Any, int] = {link.connection: rank for rank, link in self._links.items()}
        while True:
            for ready in wait([*ranks, self._woken]):
                if ready is self._woken:
                    return
                rank = ranks[ready]
                try:
                    message = self._links[rank].receive()
                except (OSError, EOFError, ValueError):
                    del ranks[ready]
                    self._failed(Failure(rank, "it ended without a word (killed, or its machine is lost)"))
                    continue
                if message.kind == "fail":
                    self._failed(Failure(message.head["rank"], message.head["reason"]))
                    continue
                if message.kind == "stop":
                    self._stop_asked = True
                    continue
                with self._condition:
                    self._over = self._over or (self.rank != 0 and message.head["what"] == _CLOSE)
                    self._parts[rank].append(message)
                    self._condition.notify_all()

    def _failed(self, failure: Failure) -> None:
        with self._condition:
            if self._failure is not None or self._over:
                return
            self._failure = failure
            callback = self._on_failure
            self._condition.notify_all()
        if self._grace_s is not None:  # before anything that may hang
            timer = threading.Timer(self._grace_s, self._end)
            timer.daemon = True
            timer.start()
        for link in self._links.values():
            with suppress(OSError):
                link.send(Message("fail", {"rank": failure.rank, "reason": failure.reason}))
        if callback is not None:
            callback()

    def _end(self) -> None:
        while self._writing.locked():
            with self._writing:  # until it is written
                pass
            time.sleep(self._grace_s or 0)  # to end by itself after that
        # Not by sys.stderr, which the main thread may hold.
        text = self._error(self._failure).message if self._failure is not None else ""
        os.write(2, f"rank {self.rank} is ended after {self._grace_s:.0f} s: {text}\n".encode(errors="replace"))
        os._exit(OTHER_RANK_FAILED if self._failure is not None and self._failure.rank != self.rank else 1)

    def _error(self, failure: Failure) -> MbcError:
        kind = MbcError if failure.rank == self.rank else RankFailed
        return kind(
            "MBC264", f"rank {failure.rank} of {self.size} failed: {failure.reason}",
            "see what that rank said; where a training has written a checkpoint, --resume goes on from it",
        )  # fmt: skip

    def _stop(self) -> None:
        self._waker.send_bytes(b"end")
        self._thread.join(1.0)
        if not self._thread.is_alive():  # else it is in a callback, and reads connections after that
            for link in self._links.values():
                link.close()


def _in_forked_processes(group: Group) -> None:
    """A forked process holds none of the connections: it would keep them open when its parent is killed."""
    there = weakref.ref(group)

    def drop() -> None:
        if (found := there()) is not None:
            for link in found._links.values():  # pyright: ignore[reportPrivateUsage]
                with suppress(OSError):
                    link.close()

    os.register_at_fork(after_in_child=drop)


def _reason(error: BaseException) -> str:
    match error:
        case MbcError():
            return f"{error.code}: {error.message}"
        case KeyboardInterrupt() | SystemExit():
            return "it was interrupted"
        case _:
            return f"{type(error).__name__}: {error}"
