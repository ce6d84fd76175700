"""Ranks as real processes, each running a few lines of Python with `group`."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 60.0  # for what takes a second on an idle machine
_HEAD = """
import os, sys, time
from mbc.errors import MbcError, RankFailed
from mbc.ranks.environment import read_environment
from mbc.ranks.rank_group import Group
def main():
    environment = read_environment(os.environ)
    assert environment is not None
    with Group.open(environment) as group:
        print("met", flush=True)
        {body}
try:
    main()
except MbcError as error:
    print(error, file=sys.stderr)
    sys.exit(3 if isinstance(error, RankFailed) else 1)
"""


class Rank(subprocess.Popen[str]):
    """A process whose output is read at its end, except for the line that says that it has met the others."""

    def met(self) -> None:
        assert self.stdout is not None and self.stdout.readline() == "met\n", self.said()[1]

    def said(self, within_s: float = LONG_S) -> tuple[str, str]:
        """Return the output and the errors of the process; raise TimeoutExpired if it does not end in time."""
        return self.communicate(timeout=within_s)


def variables(rank: int, size: int, **more: str) -> dict[str, str]:
    return {
        "MBC_RANK": str(rank), "MBC_RANKS": str(size), "MBC_LOCAL_RANK": str(rank), "MBC_LOCAL_RANKS": str(size),
        **more,
    }  # fmt: skip


def start(rank: int, size: int, body: str, **more: str) -> Rank:
    """Start one rank. `body` has the lines of the with statement."""
    script = _HEAD.format(body=body.strip().replace("\n", "\n        "))
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables(rank, size, **more)
    return Rank(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


class Ranks:
    """All ranks of a group. Ranks that still run at the end of the test are killed."""

    def __init__(self) -> None:
        self.all: list[Rank] = []

    def start(self, size: int, body: str, **more: str) -> list[Rank]:
        more.setdefault("MBC_JOB", secrets.token_hex(8))
        self.all += (started := [start(rank, size, body, **more) for rank in range(size)])
        return started

    def start_one(self, rank: int, size: int, body: str, **more: str) -> Rank:
        self.all.append(started := start(rank, size, body, **more))
        return started

    def end(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()


def all_end(processes: list[Rank], within_s: float) -> None:
    """Assert that all processes end within this time from now."""
    deadline_s = time.monotonic() + within_s
    for process in processes:
        process.wait(max(deadline_s - time.monotonic(), 0.01))


def runs(pid: int) -> bool:
    """Return whether a process with this number runs and is not a zombie."""
    try:
        state = re.split(r"\) ", Path(f"/proc/{pid}/stat").read_text())[1][0]
    except OSError:
        return False
    return state != "Z"
