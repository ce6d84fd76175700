"""How long a step takes, of whatever makes steps without waiting for them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

_WARM_STEPS = 3
_WARM_S = 0.5  # clocks settle
_MOST_STEPS = 1000  # of a block


@dataclass(frozen=True, slots=True)
class Timing:
    """Median over blocks, distance of the quartiles, and how many steps were timed."""

    step_ms: float
    spread_ms: float
    steps: int


def time_steps(step: Callable[[], object], wait: Callable[[], object], blocks: int, block_s: float) -> Timing:
    """`blocks` (at least 2) blocks of steps that are waited for at their ends only, each `block_s` long or longer."""
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
