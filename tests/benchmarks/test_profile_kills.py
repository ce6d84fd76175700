"""Kills of measuring: which are judged to have lost something, and when a campaign passes. No GPU takes part."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import profile_kills

from mbc.errors import MbcError
from mbc.profile.edit import write_profile
from tests.profile.profiles import measurement, profile, request

LONG_S = 600.0  # a limit for what ends by itself at once


def keep(file: Path, times_us: Mapping[int, float]) -> None:
    """Write a profile with these times, by the rows of a request."""
    held = {request(rows): [measurement(3, time_us)] for rows, time_us in times_us.items()}
    write_profile(profile(held), file)


def test_a_command_that_is_at_work_is_killed(tmp_path: Path) -> None:
    done = tmp_path / "done"
    words = [sys.executable, "-c", f"import time, pathlib; time.sleep(5); pathlib.Path({str(done)!r}).touch()"]
    assert profile_kills.kill_after(0.0, words)
    assert not done.exists()  # kill_after waits for the process: had it not been killed, the file would be there


def test_a_command_that_has_ended_is_not_at_work(tmp_path: Path) -> None:
    done = tmp_path / "done"
    words = [sys.executable, "-c", f"import pathlib; pathlib.Path({str(done)!r}).touch()"]
    assert not profile_kills.kill_after(LONG_S, words)
    assert done.exists()


def test_what_is_gone_or_changed_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "p.sqlite"
    assert profile_kills.known(file) == {}
    keep(file, {8: 1.0, 16: 2.0})
    before = profile_kills.known(file)
    row = {"name": "kill 3", "at_work": True, "before": 2, "known": 2, "lost": 0, "passed": True}
    assert profile_kills.judged("kill 3", True, before, file) == row
    keep(file, {8: 1.0, 16: 2.0, 32: 3.0})
    assert profile_kills.judged("kill 3", True, before, file) == row | {"known": 3}
    keep(file, {8: 1.0, 16: 2.5, 32: 3.0})
    assert profile_kills.judged("kill 3", True, before, file) == row | {"known": 3, "lost": 1, "passed": False}
    file.unlink()
    assert profile_kills.judged("kill 3", False, before, file) == row | {
        "at_work": False, "known": 0, "lost": 2, "passed": False,
    }  # fmt: skip


def test_a_damaged_profile_is_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "p.sqlite"
    keep(file, {8: 1.0})
    before = profile_kills.known(file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(MbcError, match="MBC073"):
        profile_kills.judged("kill 3", True, before, file)


def grows(monkeypatch: pytest.MonkeyPatch, file: Path, last: Sequence[str]) -> list[float]:
    """Each run that is killed measures one more request, and the last one is this command. Returns after how long they
    are killed."""
    killed: list[float] = []

    def kill_after(seconds: float, words: Sequence[str]) -> bool:
        assert str(file) in words
        killed.append(seconds)
        keep(file, {8 * (i + 1): 1.0 for i in range(len(killed))})
        return len(killed) != 2

    def command(asked: Path, measure_for: str) -> list[str]:
        return [*last, str(asked)]

    monkeypatch.setattr(profile_kills, "kill_after", kill_after)
    monkeypatch.setattr(profile_kills, "command", command)
    return killed


def test_a_campaign_goes_on_with_one_profile_and_lets_the_last_run_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "p.sqlite"
    killed = grows(monkeypatch, file, [sys.executable, "-c", "pass"])
    rows = list(profile_kills.campaign(3, 0, file))
    assert [row["name"] for row in rows] == ["kill 0", "kill 1", "kill 2", "let through"]
    assert [(row["before"], row["known"], row["at_work"]) for row in rows] == [
        (0, 1, True), (1, 2, False), (2, 3, True), (3, 3, False),
    ]  # fmt: skip
    assert all(row["passed"] for row in rows) and rows[-1]["said"] == ""
    assert all(profile_kills.FIRST_S <= seconds <= profile_kills.LONGEST_S for seconds in killed)
    assert len(set(killed)) == 3
    first = list(killed)
    killed.clear()
    assert len(list(profile_kills.campaign(3, 0, tmp_path / "p.sqlite"))) == 4 and killed == first


def test_a_last_run_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grows(monkeypatch, tmp_path / "p.sqlite", [sys.executable, "-c", "import sys; sys.exit('no GPU')"])
    *_, last = profile_kills.campaign(1, 0, tmp_path / "p.sqlite")
    assert last["name"] == "let through" and not last["passed"] and last["said"] == "no GPU\n"


def row(at_work: bool = True, known: int = 5, passed: bool = True) -> dict[str, Any]:
    return {"at_work": at_work, "known": known, "passed": passed}


@pytest.mark.parametrize(
    ("rows", "at_work", "passed"),
    [
        ([row(), row(), row(), row(at_work=False)], 3, True),
        ([row(), row(), row(at_work=False), row(at_work=False)], 2, False),  # of four kills half found nothing to kill
        ([row(known=0), row(known=0), row(known=0), row(at_work=False)], 3, False),  # nothing was there to be lost
        ([row(known=0), row(), row(known=0), row(at_work=False)], 3, True),
        ([row(), row(passed=False), row(), row()], 4, False),
        ([row(), row(), row(), {"failed": "MBC073"}], 3, False),
        ([], 0, False),
    ],
)
def test_a_campaign_passes_that_says_something_and_lost_nothing(
    rows: list[dict[str, Any]], at_work: int, passed: bool
) -> None:
    assert profile_kills.together(rows, 4) == {"name": "all", "at_work": at_work, "passed": passed}
