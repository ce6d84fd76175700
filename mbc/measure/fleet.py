"""Measuring on one or several GPUs of this machine: a process for each, all adding to one profile.

A process of its own leaves nothing behind: no context, no memory, no loaded libraries that a plan would have to reckon
with. It stops at the next request when its input ends, whoever ended it: a parent that is killed leaves no orphans.
"""

from __future__ import annotations

import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import reduce
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from mbc.errors import MbcError
from mbc.hardware.part import whole_name
from mbc.hardware.target import LocalGpu, local_gpus
from mbc.kernels.base import Request
from mbc.measure.need import Decision, Need
from mbc.measure.processes import Process, Told, started, stop
from mbc.profile.writer import fold_log
from mbc.units import with_article

if TYPE_CHECKING:
    from mbc.measure.measure import Decide, Summary

_MOST_FAILURES = 20
WORKER = (sys.executable, "-m", "mbc.measure.worker")


@dataclass(frozen=True, slots=True)
class Task:
    """What one process is to measure, and to leave out: see `mbc.measure.measure.measure`. `multiprocessors`: of the
    GPU, to measure on; None: all. `decide` can be sent to another process; `decision`: its first."""

    needs: tuple[Need, ...]
    path: Path
    measure_for_s: float
    workspace_limit_bytes: int
    again: bool
    link: bool = True
    multiprocessors: int | None = None
    decide: Decide | None = None
    decision: Decision | None = None
    outdated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far all processes have come together. `left_s`: seconds that the rest will take, None while unknown.
    `decision`: by which these are measured, if any."""

    done: int
    total: int
    request: Request
    left_s: float | None
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`left` requests were not reached: time was over, or somebody interrupted (`interrupted`)."""

    summary: Summary | None  # None where every process was interrupted before it could say
    left: int
    interrupted: bool


def visible_gpus() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES may be set to, one GPU each, in the order of nvidia-smi."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        return tuple(name.strip() for name in limited.split(",") if name.strip())
    return tuple(str(index) for index in range(len(local_gpus())))


def name_of(visible: str) -> str:
    """What the driver calls a visible GPU; one named by its UUID is taken for the first's like."""
    here = local_gpus()
    gpu = _gpu(here, visible)
    return (gpu or here[0]).name


def gpus_named(name: str) -> tuple[str, ...]:
    """The visible GPUs that the driver calls `name`, or of which `name` is a part."""
    here, whole = local_gpus(), whole_name(name)
    return tuple(v for v in visible_gpus() if (gpu := _gpu(here, v)) is not None and gpu.name == whole)


def choose_gpus(asked: str) -> tuple[str, ...]:
    """The GPUs meant by `--gpu`: a number, `all`, or `auto` for the first. MBC077 without a GPU, MBC190 where there is
    no such GPU or they are unlike."""
    here, visible = local_gpus(), visible_gpus()
    if not here or not visible:
        raise MbcError(
            "MBC077",
            "measuring needs a GPU, and none can be used here",
            "run `mbc doctor`; plans for a GPU elsewhere need none, see mbc gpus",
        )
    if asked == "auto":
        return visible[:1]
    if asked != "all":
        if not asked.isdecimal() or int(asked) >= len(here):
            raise MbcError(
                "MBC190",
                f"this machine has no GPU {asked}: it has {len(here)}",
                "give the number of one, as mbc gpus lists them, or all",
            )
        return (asked,)
    known = {v: gpu for v in visible if (gpu := _gpu(here, v)) is not None}
    kinds = {(gpu.name, gpu.architecture, gpu.memory_bytes) for gpu in known.values()}
    if len(kinds) > 1:
        listed = ", ".join(f"{v} is {with_article(gpu.name)}" for v, gpu in known.items())
        raise MbcError(
            "MBC190",
            f"unlike GPUs cannot share one profile: {listed}",
            "profile them one after the other with --gpu N, each into a file of its own",
        )
    return visible


def _gpu(here: Sequence[LocalGpu], visible: str) -> LocalGpu | None:
    """None for one that is named by its UUID: the profile itself refuses what is unlike."""
    return here[int(visible)] if visible.isdecimal() and int(visible) < len(here) else None


def deal(needs: Sequence[Need], count: int) -> list[tuple[Need, ...]]:
    """Needs for `count` GPUs in turn, those that weigh most first: what is worth most is measured first on each."""
    ordered = sorted(needs, key=lambda need: -need.weight_us)
    return [tuple(ordered[start::count]) for start in range(min(count, len(ordered)))]


def measure_on(
    gpus: Sequence[str],
    task: Task,
    progress: Callable[[Progress], None] = lambda now: None,
    worker: Sequence[str] = WORKER,
) -> Outcome:
    """Measure on all `gpus` (see `visible_gpus`) at once. Ctrl-C ends every process at its next request, and a second
    time at once, with KeyboardInterrupt.

    Raises what a process failed with, once all have ended, and MBC191 for one that died. A kernel that makes a GPU fail
    is known to the profile by then: new processes pass it over and go on.
    """
    until_s = time.monotonic() + task.measure_for_s
    told: Told = SimpleQueue()
    with _interrupt_told(told):
        for _ in range(_MOST_FAILURES):
            try:
                return _measure_once(gpus, task, progress, worker, told)
            except MbcError as error:
                if error.code != "MBC088" or task.again:
                    raise
            task = replace(task, measure_for_s=max(0.0, until_s - time.monotonic()))
        return _measure_once(gpus, task, progress, worker, told)


@contextmanager
def _interrupt_told(told: Told) -> Generator[None]:
    """The first Ctrl-C is one message more, for as an exception it could come between a message and what is done about
    it. The second raises KeyboardInterrupt wherever it comes."""
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield  # it comes elsewhere, is ignored, or somebody else's
        return

    def tell(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        told.put((-1, "interrupt"))  # may come within a put or get of the queue

    signal.signal(signal.SIGINT, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if not told.empty():  # it came when all had ended
        raise KeyboardInterrupt


def _measure_once(
    gpus: Sequence[str], task: Task, progress: Callable[[Progress], None], worker: Sequence[str], told: Told
) -> Outcome:
    parts = deal(task.needs, len(gpus))
    # Copies of several GPUs at once would get into each other's way.
    tasks = [replace(task, needs=part, link=task.link and index == 0) for index, part in enumerate(parts)]
    with started(worker, list(zip(gpus, tasks, strict=False)), told) as processes:
        outcome = _Watch(processes, told, progress, parts).run()
    fold_log(task.path)
    return outcome


class _Watch:
    """Follows the processes until all have ended."""

    def __init__(
        self,
        processes: Sequence[Process],
        told: Told,
        progress: Callable[[Progress], None],
        parts: Sequence[Sequence[Need]],
    ) -> None:
        self._processes = processes
        self._told = told
        self._progress = progress
        self._counts = {i: (0, sum(len(need.requests) for need in part)) for i, part in enumerate(parts)}
        self._left_s: dict[int, float | None] = {}
        self._decision: Decision | None = None
        self._summaries: dict[int, Summary] = {}
        self._errors: list[MbcError] = []
        self._ended: set[int] = set()
        self._interrupted = False

    def run(self) -> Outcome:
        while len(self._ended) < len(self._processes):
            self._hear(*self._told.get())
        if self._errors:
            raise self._errors[0]
        left = sum(total - done for index, (done, total) in self._counts.items() if index not in self._summaries)
        left += sum(summary.left for summary in self._summaries.values())
        return Outcome(combined(tuple(self._summaries.values())), left, self._interrupted)

    def _hear(self, index: int, message: Any) -> None:
        match message:
            case None:
                self._ended.add(index)
                self._left_s.pop(index, None)
                status = self._processes[index].wait()
                if status and not self._interrupted and not self._errors:
                    self._errors.append(
                        MbcError(
                            "MBC191",
                            f"the process that measured on GPU {index} died (exit status {status})",
                            "run the same command again: it goes on where this one stopped; mbc doctor checks the GPU",
                        )
                    )
            case "interrupt":
                self._interrupted = True
                stop(self._processes)
            case "progress", done, total, request, left_s:
                self._counts[index] = done, total
                self._left_s[index] = left_s
                known = [s for s in self._left_s.values() if s is not None]
                dones, totals = zip(*self._counts.values(), strict=True)
                self._progress(Progress(sum(dones), sum(totals), request, max(known, default=None), self._decision))
            case "decision", decision:
                self._decision = decision
            case "summary", summary:
                self._summaries[index] = summary
            case "error", error:
                if not self._interrupted:  # whoever goes on later meets it again
                    self._errors.append(error)
                stop(self._processes)
            case _:
                raise AssertionError(f"unknown message {message!r}")


def combined(summaries: Sequence[Summary]) -> Summary | None:
    """Counts added, lists joined."""
    if not summaries:
        return None
    kind = type(summaries[0])
    return kind(*(_joined([getattr(s, f.name) for s in summaries]) for f in fields(kind)))


def _joined(values: list[Any]) -> Any:
    return any(values) if isinstance(values[0], bool) else reduce(operator.add, values)
