"""Measures on one or several GPUs of this machine: one process for each; all write to one profile."""

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
from typing import TYPE_CHECKING, Any

from mbc.errors import MbcError
from mbc.hardware.part import whole_name
from mbc.hardware.target import LocalGpu, local_gpus, sharing_text
from mbc.kernels.base import Request
from mbc.measure.gpu_processes import Failure, GpuProcesses
from mbc.measure.need import Decision, Need
from mbc.profile.writer import fold_log
from mbc.progress import announce
from mbc.units import with_article

if TYPE_CHECKING:
    from mbc.measure.measure import Decide, Summary

_MOST_FAILURES = 20
WORKER = (sys.executable, "-m", "mbc.measure.worker")
FAILURE = Failure("MBC191", "kernels", "run the same command again: it continues from here; mbc doctor checks the GPU")


@dataclass(frozen=True, slots=True)
class Task:
    """Measurements of one process; the fields are the arguments of `mbc.measure.measure.measure`.

    `multiprocessors` is the number of the GPU's multiprocessors to measure on, None for all. `pose`
    is the architecture as which the GPU poses, if any. `decide` must be
    picklable; `decision` is its first result.
    """

    needs: tuple[Need, ...]
    path: Path
    measure_for_s: float
    workspace_limit_bytes: int
    again: bool
    link: bool = True
    multiprocessors: int | None = None
    pose: str = ""
    decide: Decide | None = None
    decision: Decision | None = None
    outdated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of all processes together.

    `left_s` is the estimated time that is left in seconds, None while it is unknown. `decision` is the decision that
    these requests follow, if any.
    """

    done: int
    total: int
    request: Request
    left_s: float | None
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of all processes.

    `left` is the number of requests that were not reached, because the time was over or the user interrupted
    (`interrupted`).
    """

    summary: Summary | None  # None if every process was interrupted before it sent one
    left: int
    interrupted: bool


def visible_gpus() -> tuple[str, ...]:
    """Return the values of CUDA_VISIBLE_DEVICES that select one usable GPU each, in the order of nvidia-smi."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        return tuple(name.strip() for name in limited.split(",") if name.strip())
    return tuple(str(index) for index in range(len(local_gpus())))


def name_of(visible: str) -> str:
    """Return the driver's name of a visible GPU.

    A GPU that is named by its UUID is assumed to be like the first GPU.
    """
    here = local_gpus()
    gpu = _gpu(here, visible)
    return (gpu or here[0]).name


def gpus_named(name: str) -> tuple[str, ...]:
    """Return the visible GPUs that the driver calls `name`, or of which `name` is a part."""
    here, whole = local_gpus(), whole_name(name)
    return tuple(v for v in visible_gpus() if (gpu := _gpu(here, v)) is not None and gpu.name == whole)


def sharing_notes(gpus: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence on each of the visible `gpus` that other processes use, before any measurement begins."""
    here = local_gpus()
    of_each = ((visible, _gpu(here, visible)) for visible in gpus)
    texts = ((visible, "" if gpu is None else sharing_text(gpu)) for visible, gpu in of_each)
    return tuple(f"GPU {visible} is {text}" for visible, text in texts if text)


def choose_gpus(asked: str) -> tuple[str, ...]:
    """Return the GPUs that the option `--gpu` selects.

    Args:
        asked: A number, `all`, or `auto` for the first visible GPU.

    Raises:
        MbcError: MBC077, no GPU can be used; MBC190, there is no such GPU, or the GPUs differ.
    """
    here, visible = local_gpus(), visible_gpus()
    if not here or not visible:
        raise MbcError(
            "MBC077",
            "measuring needs a GPU, but none can be used on this machine",
            "run `mbc doctor`; to plan for another machine's GPU no GPU is needed: see `mbc gpus`",
        )
    if asked == "auto":
        return visible[:1]
    if asked != "all":
        if not asked.isdecimal() or int(asked) >= len(here):
            raise MbcError(
                "MBC190",
                f"this machine has no GPU {asked}; it has {len(here)}",
                "give a number that `mbc gpus` lists, or all",
            )
        return (asked,)
    local = {v: gpu for v in visible if (gpu := _gpu(here, v)) is not None}
    kinds = {(gpu.name, gpu.architecture, gpu.memory_bytes) for gpu in local.values()}
    if len(kinds) > 1:
        listed = ", ".join(f"{v} is {with_article(gpu.name)}" for v, gpu in local.items())
        raise MbcError(
            "MBC190",
            f"different GPUs cannot share one profile: {listed}",
            "profile each with --gpu N, into a separate file",
        )
    return visible


def _gpu(here: Sequence[LocalGpu], visible: str) -> LocalGpu | None:
    """Return the GPU with this number, or None for a GPU named by its UUID.

    In that case the profile refuses a GPU that differs.
    """
    return here[int(visible)] if visible.isdecimal() and int(visible) < len(here) else None


def deal(needs: Sequence[Need], count: int) -> list[tuple[Need, ...]]:
    """Divide needs between `count` GPUs in turn, in order of decreasing weight: each starts with its heaviest."""
    ordered = sorted(needs, key=lambda need: -need.weight_us)
    return [tuple(ordered[start::count]) for start in range(min(count, len(ordered)))]


def measure_on(
    gpus: Sequence[str],
    task: Task,
    progress: Callable[[Progress], None] = lambda now: None,
    worker: Sequence[str] = WORKER,
) -> Outcome:
    """Measure on all `gpus` at once.

    Ctrl-C ends every process at its next request; a second Ctrl-C ends them at once and raises KeyboardInterrupt. If a
    kernel makes a GPU fail, the profile records that kernel, and new processes continue without it.

    Args:
        gpus: Names as in `visible_gpus`.
        task: The requests; they are divided between the GPUs.
        progress: Called after each request.
        worker: Command that starts a process.

    Raises:
        MbcError: The error of a process; MBC191, a process died.
    """
    until_s = time.monotonic() + task.measure_for_s
    for _ in range(_MOST_FAILURES):
        try:
            return _measure_once(gpus, task, progress, worker)
        except MbcError as error:
            if error.code != "MBC088" or task.again:
                raise
        task = replace(task, measure_for_s=max(0.0, until_s - time.monotonic()))
    return _measure_once(gpus, task, progress, worker)


def _measure_once(
    gpus: Sequence[str], task: Task, progress: Callable[[Progress], None], worker: Sequence[str]
) -> Outcome:
    parts = deal(task.needs, len(gpus))
    # Copies of several GPUs at once would slow each other down.
    tasks = [replace(task, needs=part, link=task.link and index == 0) for index, part in enumerate(parts)]
    counts = {index: (0, sum(len(need.requests) for need in part)) for index, part in enumerate(parts)}
    estimates_s: dict[int, float | None] = {}
    decision: Decision | None = None
    interrupted = False

    def hear(index: int, message: Any) -> None:
        nonlocal decision, interrupted
        match message:
            case "interrupt":
                interrupted = True
                processes.stop()
            case "decision", decision:
                pass
            case "line", text:
                # Each process compiles nearly the same kernels, so that one announcement is enough.
                if index == 0:
                    announce(text)
            case "progress", done, total, request, left_s:
                counts[index], estimates_s[index] = (done, total), left_s
                dones, totals = zip(*counts.values(), strict=True)
                left_s = max((s for s in estimates_s.values() if s is not None), default=None)
                progress(Progress(sum(dones), sum(totals), request, left_s, decision))
            case _:
                raise AssertionError(f"unknown message {message!r}")

    processes = GpuProcesses(worker, gpus[: len(tasks)], FAILURE, hear)
    with _interrupt_as_message(processes):
        with processes:
            answers: tuple[Summary | None, ...] = processes.ask(tasks, silent_s=None)
        fold_log(task.path)
    unmeasured = [total - done for answer, (done, total) in zip(answers, counts.values(), strict=True) if not answer]
    summaries = [answer for answer in answers if answer]
    left = sum(unmeasured) + sum(summary.left for summary in summaries)
    return Outcome(combined(summaries), left, interrupted)


@contextmanager
def _interrupt_as_message(processes: GpuProcesses) -> Generator[None]:
    """Turn the first Ctrl-C into a message, and the second into KeyboardInterrupt.

    An exception could occur between the receipt of a message and its handling; a message cannot.
    """
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield  # another thread or handler receives the signal, or the process ignores it
        return

    def tell(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        processes.messages.put((-1, "interrupt"))  # SimpleQueue.put is reentrant

    signal.signal(signal.SIGINT, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    while not processes.messages.empty():
        if processes.messages.get()[1] == "interrupt":  # it came after the last answer
            raise KeyboardInterrupt


def combined(summaries: Sequence[Summary]) -> Summary | None:
    """Return one summary with counts added and lists joined, or None if there are no summaries."""
    if not summaries:
        return None
    kind = type(summaries[0])
    return kind(*(_joined([getattr(s, f.name) for s in summaries]) for f in fields(kind)))


def _joined(values: list[Any]) -> Any:
    return any(values) if isinstance(values[0], bool) else reduce(operator.add, values)
