"""Plans made by several processes, each plan once, for rows that are prepared side by side.

A row asks for its plans and waits for them in a thread of its own. The processes that make the plans keep the cores
busy.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cap import Card, planned
from modules import Job
from shelf import Shelf, pack

from mbc.plan.model import Plan


@contextmanager
def processes(count: int) -> Generator[ProcessPoolExecutor]:
    """Yield a pool of `count` new processes. They end with the block, also on Ctrl-C."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as cores
    # New processes, not copies of this one: a CUDA context and threads of BLAS do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield pool
    finally:
        # Without waiting for the pool's thread, which may wait for a lock that an interrupt left locked.
        pool.shutdown(wait=False, cancel_futures=True)
        children = multiprocessing.active_children()
        for process in children:
            process.terminate()
        for process in children:
            process.join()


@dataclass(frozen=True)
class Wanted:
    """A plan to be made. `name` identifies the plan; another process calls `work`, a method of a job or card."""

    name: str
    work: Callable[[], Plan]

    @staticmethod
    def of(job: Job) -> Wanted:
        """Return the plan of a job, named by its settings."""
        settings = (f"{name}={value}" for name, value in job.settings)
        return Wanted(" ".join((job.name, *settings, *(f"-{name}" for name in sorted(job.options.without)))), job.plan)


@dataclass(frozen=True)
class Probe:
    """The figures of a plan and its compressed file. If there is no plan, `figures` has the reason."""

    figures: dict[str, Any]
    packed: bytes = b""

    @property
    def fits(self) -> bool:
        """True if there is a plan."""
        return "failed" not in self.figures


@dataclass
class Planner:
    """Makes plans in the processes of `pool`, each plan once."""

    card: Card
    shelf: Shelf
    pool: ProcessPoolExecutor
    asked: dict[str, Future[Probe]] = field(default_factory=dict[str, Future[Probe]])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, wanted: Wanted) -> Probe:
        """Return the figures and the file of a plan. If another row has asked for the plan before, wait for it."""
        return self.begin(wanted).result()

    def begin(self, wanted: Wanted) -> Future[Probe]:
        """Have a plan made, unless it exists or is being made."""
        with self.lock:
            if wanted.name not in self.asked:
                self.asked[wanted.name] = self.pool.submit(probe, self.card, wanted)
            return self.asked[wanted.name]

    def keep(self, row: str, what: str, wanted: Wanted) -> dict[str, Any]:
        """Put a plan on the shelf of plans to run, and return its figures."""
        plan = self.ask(wanted)
        if plan.fits:
            self.shelf.keep(row, what, plan.packed)
        return {key: value for key, value in plan.figures.items() if key != "name"}


def probe(card: Card, wanted: Wanted) -> Probe:
    """Make a plan, in a process of the pool."""
    figures, plan = planned(card, wanted.work)
    return Probe({"name": wanted.name, **figures}, pack(plan) if plan else b"")
