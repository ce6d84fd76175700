"""`mbc profile` on a GPU, killed (SIGKILL) at random moments: after each kill the profile opens, and holds all that it
held after the kill before, unchanged. The next run goes on with it; the last one is let through. It passes where most
were at work when they were killed and the profile grew meanwhile. (`torture.py` kills measuring on a fake driver, a
thousand times.)

    python benchmarks/profile_kills.py [--kills 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from record import ROOT, attempt, need_gpu, results, show, start

from mbc.profile.read import read_profile

SOURCE = ROOT / "examples" / "resnet.mbc"
SETTINGS = ("--set", "depth=18", "--set", "batch=64", "--set", "train.precision=bf16")
FIRST_S, LONGEST_S = 2.0, 12.0  # of a run before it is killed: it loads, builds kernels, and measures
LAST_S = 60
COLUMNS = ("name", "at_work", "before", "known", "lost", "passed")


def command(file: Path, measure_for: str) -> list[str]:
    words = ("profile", str(SOURCE), *SETTINGS, "-o", str(file), "--measure-for", measure_for)
    return [sys.executable, "-m", "mbc.cli", *words]


def known(file: Path) -> dict[str, Any]:
    """Times by request, as they are on disk."""
    return dict(read_profile(file).measurements) if file.exists() else {}


def kill_after(seconds: float, words: Sequence[str]) -> bool:
    """Run this command for so long at most; whether it was still at work then."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def judged(name: str, at_work: bool, before: dict[str, Any], file: Path) -> dict[str, Any]:
    """Raises where the profile is damaged."""
    now = known(file)
    lost = sum(now.get(request) != times for request, times in before.items())
    return {
        "name": name, "at_work": at_work, "before": len(before), "known": len(now), "lost": lost, "passed": not lost,
    }  # fmt: skip


def campaign(kills: int, seed: int, file: Path) -> Iterator[dict[str, Any]]:
    draws = random.Random(seed)
    for number in range(kills):
        before = known(file)
        at_work = kill_after(draws.uniform(FIRST_S, LONGEST_S), command(file, "120s"))
        yield judged(f"kill {number}", at_work, before, file)
    before = known(file)
    done = subprocess.run(command(file, f"{LAST_S}s"), capture_output=True, text=True, timeout=4 * LAST_S)
    row = judged("let through", False, before, file)
    yield row | {
        "passed": row["passed"] and done.returncode == 0,
        "said": done.stderr[-300:] if done.returncode else "",
    }


def together(rows: Sequence[dict[str, Any]], kills: int) -> dict[str, Any]:
    """The row of the campaign: whether it says something, and nothing was lost."""
    killed = [row for row in rows if row.get("at_work")]
    told = 2 * len(killed) > kills and max((row["known"] for row in killed), default=0) > 0
    return {"name": "all", "at_work": len(killed), "passed": told and all(row.get("passed") for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    need_gpu("torture.py kills measuring on a fake driver")
    kept = results("profile_kills", again=True, source=SOURCE.name, seed=arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        rows = campaign(arguments.kills, arguments.seed, Path(folder) / "p.sqlite")
        while len(row := attempt(partial(next, rows, {}), "the profile is damaged")) > 1:
            kept.put(row)
            if "failed" in row:
                break
    kept.put(together([*kept.rows.values()], arguments.kills))
    show([*kept.rows.values()], COLUMNS)


if __name__ == "__main__":
    start(main)
