"""Measuring in several processes: divided, watched, interrupted, killed, resumed. Without a GPU."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from mbc.errors import MbcError
from mbc.hardware.target import LocalGpu
from mbc.measure import fleet, gpu_processes
from mbc.measure.fleet import Progress, Task, choose_gpus, combined, deal, gpus_named, measure_on, name_of, visible_gpus
from mbc.measure.measure import Summary
from mbc.measure.need import Decision, Need
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import signature
from mbc.profile.writer import ProfileWriter
from mbc.progress import announcements_to
from tests.profile.profiles import IDENTITY, measurement, request

ROOT = Path(__file__).resolve().parents[2]
H200 = LocalGpu("NVIDIA H200", "580.1", "sm_90", 1 << 37, 1 << 37)
T4 = LocalGpu("Tesla T4", "580.1", "sm_75", 1 << 34, 1 << 34)
NEEDS = tuple(Need((request(2 * rows), request(rows)), float(rows)) for rows in (1, 3, 5, 7, 9))
EVERYTHING = {signature(r) for need in NEEDS for r in need.requests}


def worker(behaviour: str = "") -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.measure.fake_worker", behaviour)


def task(path: Path, **changes) -> Task:
    return replace(Task(NEEDS, path, math.inf, 1 << 30, False), **changes)


def machine(monkeypatch, *gpus: LocalGpu, visible: str | None = None) -> None:
    monkeypatch.setattr(fleet, "local_gpus", lambda: gpus)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_needs_are_dealt_by_weight():
    assert [[need.weight_us for need in part] for part in deal(NEEDS, 2)] == [[9.0, 5.0, 1.0], [7.0, 3.0]]
    assert deal(NEEDS[:1], 4) == [NEEDS[:1]]
    assert deal((), 2) == []


@pytest.mark.parametrize("gpus", [("0",), ("0", "1"), ("0", "2", "5")])
def test_all_gpus_write_one_profile(tmp_path: Path, gpus: tuple[str, ...]):
    path = tmp_path / "p.sqlite"
    seen: list[Progress] = []
    lines: list[str] = []
    with announcements_to(lines.append):
        outcome = measure_on(gpus, task(path), seen.append, worker())
    assert lines == ["compiling kernels"], "all processes announce the same"
    assert set(read_profile(path).extents) == EVERYTHING
    assert [p.name for p in tmp_path.iterdir()] == ["p.sqlite"]
    assert outcome.left == 0 and not outcome.interrupted
    assert outcome.summary is not None and outcome.summary.measured == len(EVERYTHING)
    assert sorted(outcome.summary.failures) == [f"on {gpu}" for gpu in gpus]
    assert outcome.summary.link_failure == gpus[0], "one GPU alone measures copies: those of several would contend"
    # All figures count from the start, whichever process answers first.
    assert {p.total for p in seen} == {len(EVERYTHING)}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    again = measure_on(gpus, task(path), worker=worker())
    assert (
        again.summary is not None and again.summary.already_measured == len(EVERYTHING) and not again.summary.measured
    )


def decide_the_last(failed: Sequence[str], missing: Sequence[str]) -> Decision:
    assert not failed
    return Decision(tuple(missing[-1:]), 250.0, 0.75)


def test_a_process_measures_decided_requests_and_reports_the_reason(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    seen: list[Progress] = []
    measure_on(("0",), replace(task(path), decide=decide_the_last), seen.append, worker())
    (only,) = read_profile(path).extents
    assert only in EVERYTHING and [p.decision for p in seen] == [Decision((only,), 250.0, 0.75)]
    first = Decision(tuple(EVERYTHING - {only}), 300.0, 0.5)  # made before the process began
    measure_on(("0",), replace(task(path), decide=decide_the_last, decision=first), seen.append, worker())
    assert set(read_profile(path).extents) == EVERYTHING and seen[-1].decision == first


def test_nothing_to_measure(tmp_path: Path):
    outcome = measure_on(("0",), task(tmp_path / "p.sqlite", needs=()), worker=worker())
    assert outcome.summary is None and outcome.left == 0


def test_a_refusal_of_a_process_is_raised(tmp_path: Path):
    with pytest.raises(MbcError, match="no GPU") as caught:
        measure_on(("0", "1"), task(tmp_path / "p.sqlite"), worker=worker("refuses"))
    assert caught.value.code == "MBC077" and caught.value.remedy == "run `mbc doctor`"


def test_a_process_that_dies_is_said_and_loses_one_request_at_most(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    with pytest.raises(MbcError, match=r"of GPU 0 died \(exit status 7\)") as caught:
        measure_on(("0",), task(path), worker=worker("dies"))
    assert caught.value.code == "MBC191"
    assert len(read_profile(path).extents) == 1
    outcome = measure_on(("0",), task(path), worker=worker())
    assert outcome.summary is not None and outcome.summary.already_measured == 1
    assert set(read_profile(path).extents) == EVERYTHING


def test_a_process_that_cannot_start(tmp_path: Path):
    with pytest.raises(MbcError) as caught:
        measure_on(("0",), task(tmp_path / "p.sqlite"), worker=(sys.executable, "-c", "import sys; sys.exit(3)"))
    assert caught.value.code == "MBC191" and "exit status 3" in caught.value.message


def test_a_kernel_that_makes_the_gpu_fail_is_passed_over(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    outcome = measure_on(("0",), task(path), worker=worker("trips"))
    assert set(read_profile(path).extents) == EVERYTHING
    assert outcome.summary is not None and outcome.summary.already_measured == 1
    with pytest.raises(MbcError) as caught:  # measuring all again would fail there again
        measure_on(("0",), task(tmp_path / "q.sqlite", again=True), worker=worker("trips"))
    assert caught.value.code == "MBC088"


@pytest.fixture
def ctrl_c() -> Generator[Callable[[], None]]:
    """Raise SIGINT as a terminal would; tests that run in the background start with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "it is as it was found"


def once(act: Callable[[], None]) -> Callable[[Progress], None]:
    """Return a progress function that calls `act` once, at the first progress."""
    acts = iter([act])
    return lambda now: next(acts, lambda: None)()


def test_an_interrupt_ends_at_the_next_request(tmp_path: Path, ctrl_c: Callable[[], None]):
    path = tmp_path / "p.sqlite"
    outcome = measure_on(("0",), task(path), once(ctrl_c), worker("stays"))
    recorded = len(read_profile(path).extents)
    assert recorded <= 1
    assert outcome.interrupted and outcome.left == len(EVERYTHING) - recorded


def test_nobody_starts_again_after_an_interrupt(tmp_path: Path, ctrl_c: Callable[[], None]):
    path = tmp_path / "p.sqlite"
    outcome = measure_on(("0",), task(path), once(ctrl_c), worker("trips"))
    assert outcome.interrupted and len(read_profile(path).extents) <= 1


def test_a_second_interrupt_ends_at_once(tmp_path: Path, ctrl_c: Callable[[], None]):
    ended: list[int] = []

    def interrupt(now: Progress) -> None:
        ctrl_c()
        with pytest.raises(KeyboardInterrupt) as caught:
            ctrl_c()
        raise caught.value

    class Watched(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            ended.append(super().wait(timeout))
            return ended[-1]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subprocess, "Popen", Watched)
        measure_on(("0", "1"), task(tmp_path / "p.sqlite"), interrupt, worker("stays"))
    assert ended == [-signal.SIGKILL] * 2


def test_an_interrupt_after_the_last_word_is_not_lost(
    tmp_path: Path, ctrl_c: Callable[[], None], monkeypatch: pytest.MonkeyPatch
):
    path, queue = tmp_path / "p.sqlite", SimpleQueue()
    monkeypatch.setattr(gpu_processes, "SimpleQueue", lambda: queue)

    def interrupt(now: Progress) -> None:
        if now.done == len(EVERYTHING) - 1:
            while queue.qsize() < 1:  # the summary
                time.sleep(0.01)
            ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        measure_on(("0",), task(path), interrupt, worker())
    assert set(read_profile(path).extents) == EVERYTHING


def script(path: Path) -> subprocess.Popen[str]:
    """Start a program that measures on two GPUs and whose processes stay at their second requests.

    Its standard error closes when the last of the three processes has ended.
    """
    text = f"""
        import signal
        from pathlib import Path
        from tests.measure.test_fleet import task, worker
        from mbc.measure.fleet import measure_on
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def show(now): print(now.done, flush=True)
        outcome = measure_on(("0", "1"), task(Path({str(path)!r})), show, worker("stays"))
        print("left", outcome.left, outcome.interrupted, flush=True)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_ctrl_c_leaves_a_profile_and_reports_the_rest(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    process = script(path)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=600)[0].splitlines()
    recorded = len(read_profile(path).extents)
    assert recorded <= 2
    assert said[-1] == f"left {len(EVERYTHING) - recorded} True"
    assert process.returncode == 0


def test_processes_do_not_outlive_a_killed_parent(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    process = script(path)
    assert process.stdout is not None
    assert "2\n" in iter(process.stdout.readline, ""), "the script has ended by itself"
    process.kill()
    process.communicate(timeout=600)
    assert len(read_profile(path).extents) == 2
    assert measure_on(("0",), task(path), worker=worker()).left == 0
    assert [p.name for p in tmp_path.iterdir()] == ["p.sqlite"]


def test_a_writer_killed_in_the_middle_loses_nothing_that_was_recorded(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    text = f"""
        import itertools
        from pathlib import Path
        from mbc.profile.writer import ProfileWriter
        from tests.profile.profiles import IDENTITY, measurement, request
        with ProfileWriter(Path({str(path)!r}), IDENTITY) as writer:
            for rows in itertools.count(1):
                writer.record(request(rows), [measurement(engine, 1.0) for engine in range(50)])
                print(rows, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    during = read_profile(path)  # while it is being written
    process.kill()
    said = 20 + len(process.stdout.read().splitlines())
    process.wait()
    process.stdout.close()
    written = read_profile(path)
    assert said <= len(written.extents) <= said + 1 and len(during.extents) >= 20
    assert {len(measurements) for measurements in (*written.measurements.values(), *during.measurements.values())} == {
        50
    }
    with ProfileWriter(path, IDENTITY) as writer:
        assert len(writer.signatures()) == len(written.extents)
        writer.record(request(10**6), [measurement(1, 1.0)])
    assert [p.name for p in tmp_path.iterdir()] == ["p.sqlite"]
    assert len(read_profile(path).extents) == len(written.extents) + 1


def test_summaries_add_up():
    a, b = Summary(1, 2, 3, 4, 5, 6, ("x",), (), 7, False), Summary(10, 20, 30, 40, 50, 60, ("y",), ("z",), 70, True)
    assert combined((a, b)) == Summary(11, 22, 33, 44, 55, 66, ("x", "y"), ("z",), 77, True)
    assert combined(()) is None


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, H200, T4, H200)
    assert visible_gpus() == ("0", "1", "2")
    assert gpus_named("NVIDIA H200") == ("0", "2")
    assert [name_of(v) for v in visible_gpus()] == ["NVIDIA H200", "Tesla T4", "NVIDIA H200"]
    machine(monkeypatch, H200, T4, H200, visible="2, 1")
    assert visible_gpus() == ("2", "1")
    assert gpus_named("NVIDIA H200") == ("2",)
    machine(monkeypatch, H200, visible="GPU-1234")
    assert visible_gpus() == ("GPU-1234",) == choose_gpus("all") and name_of("GPU-1234") == "NVIDIA H200"
    machine(monkeypatch, H200, visible="")
    assert visible_gpus() == ()


def test_choosing_gpus(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, H200, H200)
    assert choose_gpus("all") == ("0", "1")
    assert choose_gpus("1") == ("1",)
    assert choose_gpus("auto") == ("0",)
    machine(monkeypatch, H200, H200, visible="1")
    assert choose_gpus("auto") == ("1",) == choose_gpus("all")


@pytest.mark.parametrize("asked", ["2", "-1", "first", "h200"])
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, asked: str):
    machine(monkeypatch, H200, H200)
    with pytest.raises(MbcError, match=f"this machine has no GPU {asked}; it has 2") as caught:
        choose_gpus(asked)
    assert caught.value.code == "MBC190"


def test_unlike_gpus_do_not_share_a_profile(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, H200, T4)
    with pytest.raises(MbcError, match=r"different GPUs.*0 is an NVIDIA H200, 1 is a Tesla T4") as caught:
        choose_gpus("all")
    assert caught.value.code == "MBC190"
    machine(monkeypatch, H200, T4, visible="0")
    assert choose_gpus("all") == ("0",)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch)
    with pytest.raises(MbcError) as caught:
        choose_gpus("all")
    assert caught.value.code == "MBC077"


def test_many_writers_make_one_file(tmp_path: Path):
    """Writers open the file at one moment and close it in any order."""
    path = tmp_path / "p.sqlite"
    text = f"""
        from pathlib import Path
        import sys
        from mbc.profile.writer import ProfileWriter
        from tests.profile.profiles import IDENTITY, measurement, request
        me = int(sys.argv[1])
        with ProfileWriter(Path({str(path)!r}), IDENTITY) as writer:
            for rows in range(5):
                writer.record(request(10 * me + rows + 1), [measurement(1, 1.0)])
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(text), str(me)], cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for me in range(4)
    ]  # fmt: skip
    assert [p.wait() for p in processes] == [0] * 4
    assert len(read_profile(path).extents) == 20
    with ProfileWriter(path, IDENTITY) as first, ProfileWriter(path, IDENTITY) as second:
        first.record(request(100), [measurement(1, 1.0)])
        second.record(request(101), [measurement(1, 1.0)])
    assert len(read_profile(path).extents) == 22
    assert [p.name for p in tmp_path.iterdir()] == ["p.sqlite"]
