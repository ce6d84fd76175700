"""Locks and checks that decide who may call a module: one call at a time, and on a GPU only where its context is."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar, NoReturn

from mbc.errors import MbcError


class Turns:
    """A lock that calls of one module hold, so that calls of several threads run one after another.

    A process forks between two calls, never during one: the child's copy of the module is consistent, and its lock is
    free.
    """

    _all: ClassVar[weakref.WeakSet[Turns]] = weakref.WeakSet()
    _registering: ClassVar = threading.Lock()
    _held: ClassVar[tuple[Turns, ...]] = ()  # locks that a thread holds while it forks

    def __init__(self) -> None:
        """Create a lock and register it for forks of the process."""
        self._lock = threading.RLock()
        with Turns._registering:
            Turns._all.add(self)

    def __enter__(self) -> None:
        """Acquire the lock."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._lock.release()

    @staticmethod
    def before_fork() -> None:
        """Acquire all locks: wait until no module runs anything."""
        Turns._registering.acquire()
        Turns._held = tuple(Turns._all)
        for turns in Turns._held:
            turns.__enter__()

    @staticmethod
    def after_fork() -> None:
        """Release all locks, in the parent and in the child."""
        for turns in Turns._held:
            turns.__exit__()
        Turns._held = ()
        Turns._registering.release()


os.register_at_fork(before=Turns.before_fork, after_in_parent=Turns.after_fork, after_in_child=Turns.after_fork)


class Home:
    """The process and the thread that opened a module on a GPU.

    CUDA's contexts do not survive a fork, and PyCUDA's contexts belong to one thread.
    """

    def __init__(self) -> None:
        """Store the current process and thread."""
        self._process, self._thread = os.getpid(), threading.get_ident()

    @property
    def is_this_process(self) -> bool:
        """True in the process that opened the module, False in a fork of it."""
        return os.getpid() == self._process

    @contextmanager
    def moved(self) -> Generator[bool]:
        """Make the calling thread the home within this context.

        Yields:
            Whether that is another thread than before.
        """
        before, self._thread = self._thread, threading.get_ident()
        try:
            yield before != self._thread
        finally:
            self._thread = before

    def check(self) -> None:
        """Raise an error in any other process or thread.

        Raises:
            MbcError: MBC235 in a fork of the process, or in another thread.
        """
        if not self.is_this_process:
            raise MbcError(
                "MBC235",
                f"the module was opened on a GPU by process {self._process}, and this is a fork of it, process"
                f" {os.getpid()}: CUDA does not work in a forked process",
                "start the process with multiprocessing.get_context('spawn'), open a Module there and load a"
                " checkpoint of this one",
            )
        if threading.get_ident() != self._thread:
            raise MbcError(
                "MBC235",
                "the module was opened on a GPU by another thread, whose CUDA context this thread does not have",
                "open it in the thread that uses it, or hand its inputs to the thread that opened it",
            )


def refuse_copy(what: str, remedy: str) -> NoReturn:
    """Raise MBC234: a module and its outputs cannot be copied.

    Raises:
        MbcError: MBC234, with the remedy.
    """
    raise MbcError("MBC234", f"{what} cannot be copied or pickled", remedy)
