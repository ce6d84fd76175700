"""Ranks that have met: they gather and compare bytes, and end together when one of them fails.

Rank 0 is connected to all others and forwards their messages. A thread of each rank listens all the time, so that a
failure is noticed at once, whatever the main thread does. A rank that fails sends a message. If a rank is killed, the
kernel closes its connections; if a machine is lost, keepalive notices it within 10 s. A slow rank is no failure, be it
slow by seconds or hours: all others wait for it.
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

# Time after a failure for the main thread to end by itself. With the time before and after it, all ranks end within
# 10 s, except a rank that is writing a checkpoint.
GRACE_S = 5.0
_CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of which a rank learned."""

    rank: int
    reason: str


class Group:
    """All ranks of a training, as one of them sees them. Every rank calls the same methods in the same order.

    `with Group.open(...) as group:` closes the group at the end, and informs the other ranks if an exception leaves the
    body. After a failure of any rank, a process has `grace_s` seconds to end by itself. Then it is ended, since it may
    hang in a call of CUDA. A process is not ended while it is `writing`, and has `grace_s` seconds again afterwards.
    After a failure, all methods that need the other ranks raise MBC264.
    """

    def __init__(
        self, environment: RankEnvironment, links: Mapping[int, Link], grace_s: float | None = GRACE_S
    ) -> None:
        """Start the thread that listens to the other ranks.

        Args:
            environment: This process's rank.
            links: Connections by rank: rank 0 has one to each other rank, every other rank has one to rank 0.
            grace_s: Seconds after a failure until the process is ended; None: never, for callers that end it
                themselves.
        """
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
        self._over = False  # all ranks have reached the end: closed connections are no failures any more
        self._woken, self._waker = Pipe(duplex=False)
        _in_forked_processes(self)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="mbc ranks")
        self._thread.start()

    @classmethod
    def open(
        cls, environment: RankEnvironment, variables: Mapping[str, str] = os.environ, grace_s: float | None = GRACE_S
    ) -> Self:
        """Return the group of ranks with which this process was started, after they have met.

        Raises:
            MbcError: The errors of `mbc.ranks.meeting.meet`.
        """
        return cls(environment, meet(environment, variables), grace_s)

    @property
    def failure(self) -> Failure | None:
        """The first failure of a rank; None if no rank has failed."""
        return self._failure

    def check(self) -> None:
        """Raise MBC264 if a rank has failed."""
        if self._failure is not None:
            raise self._error(self._failure)

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Return the payloads of all ranks, in their order."""
        return self._exchange("gather", payload)

    def broadcast(self, payload: bytes, root: int = 0) -> bytes:
        """Return the payload of rank `root`; the payloads of other ranks are ignored."""
        return self._exchange(f"broadcast of rank {root}", payload if self.rank == root else b"")[root]

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        self._exchange("barrier", b"")

    def agree(self, what: Mapping[str, str]) -> None:
        """Raise MBC263 on all ranks if a fact differs between them: versions, digest of the plan, number of ranks."""
        check_same([json.loads(one) for one in self.gather(json.dumps(dict(what)).encode())])

    def differ(self, what: str, value: str) -> None:
        """Raise MBC266 on all ranks if two have equal values, such as the same GPU."""
        check_distinct(what, [one.decode() for one in self.gather(value.encode())])

    def call_on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` once at the first failure of any rank, or at once if a rank has failed already.

        The rank that fails may be this one. The call comes mostly in another thread, and aborts the main thread's
        waits.
        """
        with self._condition:
            self._on_failure = callback
            late = self._failure is not None
        if late:
            callback()

    def fail(self, reason: str) -> None:
        """Tell all other ranks that this rank fails; ignored after an earlier failure, because the first one counts."""
        self._failed(Failure(self.rank, reason))

    def ask_to_stop(self) -> None:
        """Ask rank 0 to end the training in order, as a signal to rank 0 would.

        Rank 0 then finishes its step, saves, and fails the group; the other ranks wait for that. A rank 0 that has
        failed ignores the request.
        """
        if self.rank == 0:
            self._stop_asked = True
            return
        with suppress(OSError):  # the rank has died: the listening thread notices it
            self._links[0].send(Message("stop"))

    @property
    def stop_asked(self) -> bool:
        """On rank 0: True if some rank has asked it to stop."""
        return self._stop_asked

    @contextmanager
    def writing(self) -> Generator[None]:
        """Keep a failure from ending this process while the body runs.

        The body may wait for other ranks only in ways that notice their failure.
        """
        with self._writing:
            yield

    def close(self) -> None:
        """Wait until all ranks have called this method, then close the connections."""
        self._exchange(_CLOSE, b"")
        self._stop()
        leave_world()

    def __enter__(self) -> Self:
        """Return the group, which the context closes at its end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the group; after an exception tell the other ranks that this rank fails."""
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
                if dict(part.head) != mine:  # all ranks run one program: a difference is a bug
                    theirs = f"{part.head.get('what')} ({part.head.get('call')})"
                    self.fail(f"rank {rank} is at {theirs}, but rank 0 is at {what} ({self._calls})")
                    self.check()
            bodies = (payload, *(part.body for part in parts))
            self._over = what == _CLOSE
            for link in self._links.values():
                with suppress(OSError):  # the rank has died: the listening thread notices it
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
        """Return the next part from a rank; a part that has arrived counts even if a failure has followed it."""
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
                    self._failed(Failure(rank, "it ended without a message (killed, or its machine is lost)"))
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
        if self._grace_s is not None:  # start the timer before calls that may hang
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
            with self._writing:  # wait for the end of the write
                pass
            time.sleep(self._grace_s or 0)  # time to end by itself after that
        # Not through sys.stderr, which the main thread may hold.
        text = self._error(self._failure).message if self._failure is not None else ""
        os.write(2, f"rank {self.rank} is ended after {self._grace_s:.0f} s: {text}\n".encode(errors="replace"))
        os._exit(OTHER_RANK_FAILED if self._failure is not None and self._failure.rank != self.rank else 1)

    def _error(self, failure: Failure) -> MbcError:
        kind = MbcError if failure.rank == self.rank else RankFailed
        return kind(
            "MBC264", f"rank {failure.rank} of {self.size} failed: {failure.reason}",
            "see the messages of that rank; if a checkpoint was written, continue from it with --resume",
        )  # fmt: skip

    def _stop(self) -> None:
        self._waker.send_bytes(b"end")
        self._thread.join(1.0)
        if not self._thread.is_alive():  # otherwise it runs a callback, and reads from connections afterwards
            for link in self._links.values():
                link.close()


def _in_forked_processes(group: Group) -> None:
    """Close the connections in forked processes, which would keep them open after their parent was killed."""
    there = weakref.ref(group)

    def drop() -> None:
        if (alive := there()) is not None:
            for link in alive._links.values():  # pyright: ignore[reportPrivateUsage]
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
