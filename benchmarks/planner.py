"""Plans made by several processes, each once, for rows that are prepared side by side.

A row asks for the plans that it needs and waits for them in a thread of its own; what fills the cores is the plans. The
figures of each are written as soon as they are known, so that a search which was cut off goes on where it was.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from cap import Card, planned
from modules import Job
from record import Results
from seek import largest
from shelf import Shelf, pack

from mbc.plan.model import Plan


@contextmanager
def processes(count: int) -> Generator[ProcessPoolExecutor]:
    """So many of them. What nobody waits for any more ends with the block, as all does on Ctrl-C."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as cores
    # New processes, not copies of this one: a CUDA context and threads of BLAS do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield pool
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)  # by whom they are joined


@dataclass(frozen=True)
class Wanted:
    """A plan to be made. Of one `name` there is one plan; `work` goes to another process: a method of a job or card."""

    name: str
    work: Callable[[], Plan]

    @staticmethod
    def of(job: Job) -> Wanted:
        settings = (f"{name}={value}" for name, value in job.settings)
        return Wanted(" ".join((job.name, *settings, *(f"-{name}" for name in sorted(job.options.without)))), job.plan)


@dataclass(frozen=True)
class Probe:
    """`figures` of a plan, or why there is none; `packed` is empty where only they are known."""

    figures: dict[str, Any]
    packed: bytes = b""

    @property
    def fits(self) -> bool:
        return "failed" not in self.figures


@dataclass
class Planner:
    """Asks `pool` for plans. `known`: figures by the names of plans, also of an earlier run. `rows`: those that are not
    prepared yet."""

    card: Card
    shelf: Shelf
    known: Results
    pool: ProcessPoolExecutor
    workers: int
    rows: set[str]
    asked: dict[str, Future[Probe]] = field(default_factory=dict[str, Future[Probe]])
    waiting: Counter[str] = field(default_factory=Counter[str])
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def width(self) -> int:
        """How many plans a row may ask for at once, so that there is work for everyone."""
        return -(-self.workers // max(1, len(self.rows)))

    def ask(self, wanted: Wanted) -> Probe:
        return next(self.each([[wanted]]))[0]

    def each(self, groups: Sequence[Sequence[Wanted]]) -> Generator[list[Probe]]:
        """The plans of each group in order, all of them being made at once until the generator is closed."""
        everyone = [wanted for group in groups for wanted in group]
        futures = {wanted.name: self._begin(wanted) for wanted in everyone}
        try:
            for group in groups:
                yield [futures[wanted.name].result() for wanted in group]
        finally:
            for wanted in everyone:
                self._withdraw(wanted.name)

    def largest(
        self, at: Callable[[int], list[Wanted]], yes: Callable[[list[Probe]], bool], start: int, finest: int = 1
    ) -> int:
        """The largest count whose plans `at` it are answered with `yes`, as `seek.largest`."""

        def answers(counts: Sequence[int]) -> Generator[bool]:
            with closing(self.each([at(count) for count in counts])) as found:
                for probes in found:
                    yield yes(probes)

        return largest(answers, lambda: self.width, start, finest)

    def keep(self, row: str, what: str, wanted: Wanted) -> dict[str, Any]:
        """Put that plan among those that are to run, and give its figures."""
        found = self.ask(wanted)
        if found.fits:
            packed = found.packed or self.pool.submit(probe, self.card, wanted).result().packed
            self.shelf.keep(row, what, packed)
        return {key: value for key, value in found.figures.items() if key != "name"}

    def _begin(self, wanted: Wanted) -> Future[Probe]:
        with self.lock:
            self.waiting[wanted.name] += 1
            if wanted.name not in self.asked:
                if wanted.name in self.known.rows:
                    future: Future[Probe] = Future()
                    future.set_result(Probe(self.known.rows[wanted.name]))
                else:
                    future = self.pool.submit(probe, self.card, wanted)
                    future.add_done_callback(self._note)
                self.asked[wanted.name] = future
            return self.asked[wanted.name]

    def _withdraw(self, name: str) -> None:
        """What nobody waits for and has not begun is not begun."""
        with self.lock:
            self.waiting[name] -= 1
            if not self.waiting[name] and self.asked[name].cancel():
                del self.asked[name]

    def _note(self, done: Future[Probe]) -> None:
        # What was ended with its process says nothing about the plan.
        if not done.cancelled() and done.exception() is None:
            with self.lock:
                self.known.put(done.result().figures)


def probe(card: Card, wanted: Wanted) -> Probe:
    """In a process of the pool."""
    figures, plan = planned(card, wanted.work)
    return Probe({"name": wanted.name, **figures}, pack(plan) if plan else b"")
