"""The time of a step that is launched without waiting for its end."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_WARM_STEPS = 3
_WARM_S = 0.5  # until clocks settle
_MOST_STEPS = 1000  # largest number of steps of a block
_RANK_WARM_STEPS = 20  # a number, not a time: all ranks run the same steps


@dataclass(frozen=True, slots=True)
class Timing:
    """Median over blocks, distance of the quartiles, and number of timed steps."""

    step_ms: float
    spread_ms: float
    steps: int


def time_steps(step: Callable[[], object], wait: Callable[[], object], blocks: int, block_s: float) -> Timing:
    """Measure `blocks` (at least 2) blocks of steps, each of at least `block_s`; wait only at the end of a block."""
    began = time.perf_counter()
    warm = 0
    while warm < _WARM_STEPS or (time.perf_counter() - began < _WARM_S and block_s > 0):
        step()
        wait()
        warm += 1
    each_s = (time.perf_counter() - began) / warm
    count = max(1, min(_MOST_STEPS, math.ceil(block_s / each_s)))
    times_ms: list[float] = []
    for _ in range(blocks):
        began = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        times_ms.append((time.perf_counter() - began) * 1e3 / count)
    low, middle, high = statistics.quantiles(times_ms, n=4)
    return Timing(middle, high - low, blocks * count)


def time_each_step(
    step: Callable[[], object], mark: Callable[[], Any], between_ms: Callable[[Any, Any], float], steps: int
) -> Timing:
    """Measure `steps` (at least 2) steps one by one; all ranks run the same number, however long it takes.

    Args:
        step: Launch a step.
        mark: Return a mark between steps: a CUDA event, or the host's clock if steps are waited for.
        between_ms: Wait for the later of two marks, and return the time between them in ms.
        steps: Number of steps.
    """
    for _ in range(_RANK_WARM_STEPS):
        step()
    marks = [mark()]
    for _ in range(steps):
        step()
        marks.append(mark())
    between_ms(marks[0], marks[-1])
    times_ms = [between_ms(before, after) for before, after in itertools.pairwise(marks)]
    low, middle, high = statistics.quantiles(times_ms, n=4)
    return Timing(middle, high - low, steps)


def host_mark() -> float:
    """Return the host's clock."""
    return time.perf_counter()


def host_between_ms(before: float, after: float) -> float:
    """Return the time between two marks in ms."""
    return (after - before) * 1e3
