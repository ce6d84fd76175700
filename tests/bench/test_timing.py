from __future__ import annotations

from mbc.bench import timing
from mbc.bench.timing import time_steps


class Clock:
    """A simulated machine whose steps take a given time when they are waited for, and no time to enqueue."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now_s, self.queued = step_s, 0.0, 0
        self.waits: list[int] = []

    def step(self) -> None:
        self.queued += 1

    def wait(self) -> None:
        self.now_s += self.queued * self.step_s
        self.waits.append(self.queued)
        self.queued = 0


def test_blocks_are_waited_for_at_their_ends(monkeypatch):
    clock = Clock(0.01)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now_s)
    times = time_steps(clock.step, clock.wait, blocks=5, block_s=0.095)
    assert clock.waits[-5:] == [10] * 5 and set(clock.waits[:-5]) == {1}
    assert abs(times.step_ms - 10) < 1e-6 and times.spread_ms < 1e-6 and times.steps == 50


def test_long_steps_are_blocks_by_themselves(monkeypatch):
    clock = Clock(3.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now_s)
    assert time_steps(clock.step, clock.wait, blocks=4, block_s=0.2).steps == 4
    assert clock.waits[-4:] == [1] * 4
