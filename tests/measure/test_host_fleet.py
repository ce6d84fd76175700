"""Copies of several GPUs with the host, measured by several processes.

The tests cover the order of requests, processes that die, hang or copy nothing, and the rate that one process reports.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.hardware.host_sharing import SharedRates, measured_sharing
from mbc.hardware.streams import Stream
from mbc.measure.host_fleet import BACK, OUT, measure_host_sharing
from mbc.measure.shared_copies import COPY_BYTES, RAMP_S, WINDOW_S, Mark, shared_rates
from mbc.profile.read_profile import read_profile


def measured(
    path: Path, gpus: tuple[str, ...], *behaviour: str, silent_s: float = 60.0
) -> tuple[tuple[SharedRates, ...], list[str]]:
    messages: list[str] = []
    worker = (sys.executable, "-m", "tests.measure.fake_host_worker", *behaviour)
    return measure_host_sharing(gpus, path, messages.append, worker, silent_s), messages


def test_the_slowest_of_one_two_and_three_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    path = tmp_path / "p.sqlite"
    rates, messages = measured(path, ("0", "1", "2"))
    assert rates == tuple(SharedRates(n, *(2 * [51.0 - n] + 2 * [(51.0 - n) / 2])) for n in (1, 2, 3))
    assert measured_sharing(read_profile(path).constants) == rates
    assert messages[1] == "copies of 2 GPUs, GB/s each: to the host 49.0, back 49.0, both ways 24.5 and 24.5"


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        ("refuses", "MBC275", "there is too little free GPU memory to measure: all of it is needed"),
        ("dies", "MBC362", "were not measured: the process of GPU 1 died (exit status 7)"),
        ("hangs", "MBC362", "were not measured: no process sent a message for 8 s"),
        ("stalls", "MBC362", "were not measured: a GPU copied almost nothing"),
    ],
)
def test_a_process_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, code: str, words: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    path = tmp_path / "p.sqlite"
    with pytest.raises(MbcError) as caught:
        measured(path, ("0", "1"), behaviour, silent_s=8.0)
    assert caught.value.code == code and words in caught.value.message
    assert not path.exists()


class Lanes:
    """Simulated copies of a GPU: each takes a given time after the copy before it in its direction."""

    def __init__(self, seconds: dict[Stream, float]) -> None:
        self.now, self.seconds = 90.0, seconds
        self.free = dict.fromkeys(seconds, 0.0)
        self.queued: dict[Stream, deque[float]] = {direction: deque() for direction in seconds}

    def copy(self, direction: Stream) -> Ended:
        self.free[direction] = max(self.now, self.free[direction]) + self.seconds[direction]
        return Ended(self, self.free[direction])

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Ended:
    def __init__(self, lanes: Lanes, at: float) -> None:
        self.lanes, self.at = lanes, at

    def query(self) -> bool:
        return self.lanes.now >= self.at

    def time_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, Ended)
        return (self.at - earlier.at) * 1e3


def test_each_direction_has_its_own_rate() -> None:
    lanes = Lanes({OUT: COPY_BYTES / 50e9, BACK: COPY_BYTES / 20e9})
    rates = shared_rates(lanes.copy, (OUT, BACK), 100.0, lambda: lanes.now, lanes.sleep)
    assert rates == {OUT: pytest.approx(50.0), BACK: pytest.approx(20.0)}
    assert lanes.now >= 100.0 + 2 * RAMP_S + WINDOW_S and min(lanes.free.values()) <= lanes.now, "none is left over"


def test_too_few_copies_are_no_rate() -> None:
    lanes = Lanes({OUT: WINDOW_S})
    assert shared_rates(lanes.copy, (OUT,), 100.0, lambda: lanes.now, lanes.sleep) == {OUT: 0.0}
