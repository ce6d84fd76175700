"""Who may call a module, and when: one call at a time, and on a GPU only where its context lives."""

from __future__ import annotations

import os
import threading
import weakref
from typing import ClassVar

from mbc.errors import MbcError


class Turns:
    """A lock that calls of one module hold, so that those of several threads run serially.

    A process forks between two calls, never in one: the child's copy of the module is whole, and its lock is free.
    """

    _all: ClassVar[weakref.WeakSet[Turns]] = weakref.WeakSet()
    _registering: ClassVar = threading.Lock()
    _held: ClassVar[tuple[Turns, ...]] = ()  # by a thread that forks

    def __init__(self) -> None:
        self._lock = threading.RLock()
        with Turns._registering:
            Turns._all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @staticmethod
    def before_fork() -> None:
        """Wait until no module runs anything."""
        Turns._registering.acquire()
        Turns._held = tuple(Turns._all)
        for turns in Turns._held:
            turns.__enter__()

    @staticmethod
    def after_fork() -> None:
        """Go on, in the parent and in the child."""
        for turns in Turns._held:
            turns.__exit__()
        Turns._held = ()
        Turns._registering.release()


os.register_at_fork(before=Turns.before_fork, after_in_parent=Turns.after_fork, after_in_child=Turns.after_fork)


class Home:
    """The process and the thread that opened a module on a GPU. CUDA's contexts do not survive a fork, and PyCUDA's
    belong to one thread."""

    def __init__(self) -> None:
        self._process, self._thread = os.getpid(), threading.get_ident()

    @property
    def is_this_process(self) -> bool:
        return os.getpid() == self._process

    def check(self) -> None:
        """MBC235 anywhere else."""
        if not self.is_this_process:
            raise MbcError(
                "MBC235",
                f"the module was opened on a GPU by process {self._process}, and this is a fork of it, process"
                f" {os.getpid()}: CUDA does not work in a forked process",
                "start the process anew (multiprocessing.get_context('spawn')), open a Module there and load a"
                " checkpoint of this one",
            )
        if threading.get_ident() != self._thread:
            raise MbcError(
                "MBC235",
                "the module was opened on a GPU by another thread, whose CUDA context this thread does not have",
                "open it in the thread that uses it, or hand its inputs to the thread that opened it",
            )


def no_copy(what: str, remedy: str) -> MbcError:
    """MBC234: what lies in the memory of a module cannot be had twice."""
    return MbcError("MBC234", f"{what} cannot be copied or pickled", remedy)
