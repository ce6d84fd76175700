"""Sudden ends and full disks: mbc is killed at random moments, or lacks space, home, cache or the right time.

The commands are `mbc compile`, measuring, and `mbc train`. After a kill at any moment, all earlier files exist, nothing
is half-written, and the same command once more gives the result of an uninterrupted command, bit for bit. In the other
trials a command does its work or refuses it with an error of mbc's own, and no earlier file is lost. Needs no GPU: see
`torture_subjects.py`. Kills add up over calls.

    python benchmarks/torture.py [--kills 1000] [--for 1800] [--workers N] [--only kill full ...]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from campaign import side_by_side
from record import Results, attempt, results, show, start
from sudden_ends import Ended, Killer, calls_of, can_mount, ended, enlarged, file_limit, forked, mounted, read_only, run
from torture_subjects import SUBJECTS, Subject, copy, digest

Row = dict[str, Any]
DAY_S = 86_400.0
ADDED = ("kills", "done_before", "wrong")  # of a row of kills, over calls


class Bench:
    """A folder for trials, with the files of each subject before and after its work."""

    def __init__(self, folder: Path) -> None:
        """Work in `folder`."""
        self.folder = folder
        self.log = folder / "said"
        self._baselines: dict[str, tuple[Path, Any, float, int]] = {}

    def baseline(self, subject: Subject) -> tuple[Path, Any, float, int]:
        """Return the folder before the work, the state after it, its seconds, and its number of calls that write."""
        if subject.name not in self._baselines:
            before, after = self.folder / f"{subject.name}_before", self.folder / f"{subject.name}_after"
            shutil.rmtree(before, ignore_errors=True)
            before.mkdir()
            self._load(subject)
            require(run(lambda: subject.begin(before), self.log), "the beginning")
            copy(before, after)
            done = require(run(lambda: subject.work(after), self.log), "the work")
            if subject.name == "compile":
                both = [digest(place / "package") for place in (before, after)]
                (before / "known.json").write_text(str(both).replace("'", '"'), encoding="ascii")
            counted = copy(before, self.folder / "counted")
            calls = calls_of(lambda: subject.work(counted), self.log)
            self._baselines[subject.name] = before, subject.state(after), done.seconds, calls
        return self._baselines[subject.name]

    def _load(self, subject: Subject) -> None:
        """Do the work once in this process, so that its forks have loaded everything."""
        once, here, environment = self.folder / "once", Path.cwd(), dict(os.environ)
        shutil.rmtree(once, ignore_errors=True)
        once.mkdir()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            subject.begin(once)
            subject.work(once)
        os.chdir(here)
        os.environ.clear()
        os.environ.update(environment)


def require(result: Ended, what: str) -> Ended:
    """Return the end of a process if it succeeded; otherwise raise RuntimeError."""
    if result.code != 0:
        raise RuntimeError(f"{what} ended with {result.code}: {result.said}")
    return result


def killed(bench: Bench, subject: Subject, count: int, seed: int, until_s: float = float("inf")) -> Row:
    """Return the row of `count` kills. Each is checked at once, and again after the same command has run once more."""
    before, state, seconds, calls = bench.baseline(subject)
    killer = Killer(random.Random(seed), calls, seconds)
    row: Row = {"kills": 0, "done_before": 0, "wrong": []}
    while row["kills"] < count and time.monotonic() < until_s:
        place = copy(before, bench.folder / "trial")
        result = killer.kill(lambda place=place: subject.work(place), bench.log)
        row["kills" if result.killed else "done_before"] += 1
        wrong = subject.wrong(place) if result.killed or result.code == 0 else f"exit {result.code}: {result.said}"
        again = run(lambda place=place: subject.again(place), bench.log)
        if not wrong and again.code != 0:
            wrong = f"again: exit {again.code}: {again.said}"
        if not wrong and subject.state(place) != state:
            wrong = "again: not what it is without an interruption"
        if wrong:
            row["wrong"].append({"seed": seed, "number": killer.number, "why": wrong[-300:]})
            copy(place, bench.folder / f"wrong_{subject.name}_{seed}_{killer.number}")
    return row


def refused(bench: Bench, subject: Subject, moment: Callable[[Path], None]) -> Row:
    """Return the row of one run in the difficult environment that `moment` makes: the answer, and the files lost."""
    before, _, _, _ = bench.baseline(subject)
    place = copy(before, bench.folder / "trial")

    def work() -> int:
        moment(place)
        return subject.work(place)

    ended_as = run(work, bench.log)
    wrong = "" if ended_as.clear else f"exit {ended_as.code}: {ended_as.said[-600:]}"
    return {"code": ended_as.code, "wrong": wrong or subject.wrong(place), "said": errors_of(ended_as)}


def errors_of(result: Ended) -> list[str]:
    """Return mbc's error messages in the output of a process."""
    return [line for line in result.said.splitlines() if line.startswith("error MBC")]


def gathered(trials: list[Row]) -> Row:
    """Return one row that sums up many trials."""
    said = Counter(line[6:12] for trial in trials for line in trial.get("said", ()))
    wrong = [{"trial": number, "why": trial["wrong"]} for number, trial in enumerate(trials) if trial["wrong"]]
    return {
        "trials": len(trials),
        "done": sum(trial["code"] == 0 for trial in trials),
        "errors": dict(said),
        "wrong": wrong,
    }


def full_disk(bench: Bench, subject: Subject, trials: int) -> Row:
    """Return the row of trials on disks with little space, from none to enough.

    Then the disk is enlarged: all earlier files must be whole, and the same command once more must give the result of a
    command that never met a full disk.
    """
    before, state, _, _ = bench.baseline(subject)
    place = bench.folder / "disk"
    place.mkdir(exist_ok=True)
    mounts = can_mount(bench.log)
    there = sum(path.stat().st_size + 4096 for path in before.rglob("*"))
    rows: list[Row] = []
    for number in range(trials):
        spare = int(there * (2.0 * number / max(1, trials - 1)) ** 2) // 4 + 4096
        if not mounts:
            rows.append(refused(bench, subject, lambda _, spare=spare: file_limit(spare // 4)))
            continue

        def work(spare: int = spare) -> int:
            mounted(place, there + spare)
            shutil.copytree(before, place, dirs_exist_ok=True)
            os.environ["TMPDIR"] = tempfile.tempdir = str(place)
            code = subject.work(place)
            os.chdir("/")
            os.environ["TMPDIR"] = tempfile.tempdir = str(bench.folder)
            enlarged(place, 1 << 30)
            wrong = subject.wrong(place)
            if not wrong and subject.again(place) == 0 and subject.state(place) != state:
                wrong = "once there is space: not what it is without a full disk"
            if wrong:
                print(f"WRONG: {wrong}", flush=True)
            return code

        end = run(work, bench.log)
        wrong = "" if end.clear else f"exit {end.code}: {end.said[-600:]}"
        wrong = wrong or (end.said[end.said.index("WRONG: ") :] if "WRONG: " in end.said else "")
        rows.append({"code": end.code, "wrong": wrong, "said": errors_of(end)[:1]})
    return {"how": "a file system of its own" if mounts else "a limit on the size of files", **gathered(rows)}


def hard_home(bench: Bench, subject: Subject) -> Row:
    """Return the row of a home that is read-only; it holds the cache and the user's own profiles."""
    home = bench.folder / "hard_home"
    home.mkdir(exist_ok=True)
    mounts = can_mount(bench.log)

    def moment(place: Path) -> None:
        if mounts:
            mounted(home, 1 << 16)
            read_only(home)
            os.environ["MBC_TORTURE_HOME"] = str(home)
        else:
            os.environ["MBC_TORTURE_HOME"] = "/dev/null/home"

    return gathered([refused(bench, subject, moment)])


def full_tmp(bench: Bench, subject: Subject) -> Row:
    """Return the row of two trials: temporary files may take 4 KiB in all, or no temporary file can be written."""
    small = bench.folder / "tmp"
    small.mkdir(exist_ok=True)
    mounts = can_mount(bench.log)

    def moment(place: Path) -> None:
        if mounts:
            mounted(small, 4096)
            (small / "full").write_bytes(bytes(4096))
            os.environ["TMPDIR"] = tempfile.tempdir = str(small)
        else:
            os.environ["TMPDIR"] = tempfile.tempdir = "/dev/null/tmp"

    def nowhere(place: Path) -> None:
        os.environ["TMPDIR"] = str(bench.folder / "none")
        tempfile.tempdir = None

    return gathered([refused(bench, subject, moment), refused(bench, subject, nowhere)])


def clock_back(bench: Bench, subject: Subject) -> Row:
    """Return the row of a clock that goes back at each reading, while the dates of all files are in the future.

    The resulting state must equal that with a right clock.
    """
    before, state, _, _ = bench.baseline(subject)
    place = copy(before, bench.folder / "trial")
    tomorrow_s = time.time() + DAY_S
    for path in (*place.rglob("*"), place):
        os.utime(path, (tomorrow_s, tomorrow_s))

    def work() -> int:
        now_s = time.time()
        looks = iter(range(10**9))
        time.time = lambda: now_s - 60.0 * next(looks)
        return subject.work(place)

    ended_as = run(work, bench.log)
    wrong = f"exit {ended_as.code}: {ended_as.said[-600:]}" if ended_as.code else ""
    if not wrong and subject.state(place) != state:
        wrong = "not what it is with a right clock"
    return gathered([{"code": ended_as.code, "wrong": wrong}])


def together(bench: Bench, subject: Subject, trials: int) -> Row:
    """Return the row of two processes that do the same work on the same files.

    Each does its work or is refused, and nothing is lost.
    """
    before, state, seconds, _ = bench.baseline(subject)
    draw = random.Random(trials)
    rows: list[Row] = []
    for _ in range(trials):
        place = copy(before, bench.folder / "trial")
        logs = [bench.folder / "said_first", bench.folder / "said_second"]
        first = forked(lambda place=place: subject.work(place), logs[0])
        time.sleep(draw.uniform(0.0, seconds / 2))
        second = forked(lambda place=place: subject.work(place), logs[1])
        wrong = ""
        while not wrong and os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            wrong = subject.glance(place)  # concurrent readers see whole files
            time.sleep(0.005)
        ends = [ended(number, log) for number, log in zip((first, second), logs, strict=True)]
        unclear = [f"exit {end.code}: {end.said[-600:]}" for end in ends if not end.clear]
        wrong = wrong or (unclear[0] if unclear else "") or subject.wrong(place)
        if not wrong and subject.name != "train" and subject.state(place) != state:
            wrong = "not what one of them alone makes"
        said = [line for end in ends for line in errors_of(end)]
        rows.append({"code": max(end.code for end in ends), "wrong": wrong, "said": said})
    return gathered(rows)


def cache_removed(bench: Bench, trials: int) -> Row:
    """Return the row of trials in which the folder of compiled objects is removed during the build of a package."""
    subject = SUBJECTS["compile"]
    before, state, _, _ = bench.baseline(subject)
    rows: list[Row] = []
    for _ in range(trials):
        place = copy(before, bench.folder / "trial")
        worker = forked(lambda place=place: subject.work(place), bench.log)
        removed = 0
        while os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            removed += (place / "home" / "cache").exists()
            shutil.rmtree(place / "home" / "cache", ignore_errors=True)
        end = ended(worker, bench.log)
        wrong = f"exit {end.code}: {end.said[-600:]}" if end.code else ""
        if not wrong and subject.state(place) != state:
            wrong = "the package is another one"
        rows.append({"code": end.code, "wrong": wrong})
    return gathered(rows)


HARD: dict[str, Callable[[Bench, Subject, int], Row]] = {
    "full disk": full_disk,
    "read-only home": lambda bench, subject, _: hard_home(bench, subject),
    "full temporary folder": lambda bench, subject, _: full_tmp(bench, subject),
    "clock set back": lambda bench, subject, _: clock_back(bench, subject),
    "two processes": together,
}


Call = tuple[Callable[..., Row], Any]  # what a worker does, and its arguments


class Campaign:
    """Rows of environments and of kills, made by several processes at a time, each with its own folder and subjects."""

    def __init__(self, held: Results, folder: Path, workers: int, until_s: float) -> None:
        """Continue with the rows of `held`, and begin nothing after `until_s`."""
        self._held, self._folder, self._workers, self._until_s = held, folder, workers, until_s

    def places(self, wanted: Callable[[str], bool], trials: int) -> None:
        """Run all trials except kills, each once."""
        pairs = [(what, subject) for what in HARD for subject in SUBJECTS] + [("cache removed", "compile")]
        missing = [
            (_place_row, (self._folder, what, subject, trials))
            for what, subject in pairs
            if wanted(name := f"{what}: {subject}") and not self._held.done(name)
        ]
        calls = iter(missing)
        for row in self._rows(lambda: next(calls, None)):
            self._held.put(row)

    def kills(self, wanted: Callable[[str], bool], count: int) -> None:
        """Kill each subject `count` times, a few kills at a time and in turn. A subject that fails is dropped."""
        names = {f"kill -9: {subject}": subject for subject in SUBJECTS}
        asked = {name: self._held.kept(name).get("kills", 0) for name in names if wanted(name)}

        def next_call() -> Call | None:
            name = min(asked, key=asked.__getitem__, default=None)
            if name is None or asked[name] >= count:
                return None
            kills = min(5, count - asked[name])
            asked[name] += kills
            return _kills_row, (self._folder, names[name], kills, asked[name] - kills, self._until_s)

        for more in self._rows(next_call):
            row = self._held.kept(more["name"])
            if "failed" in more:
                asked.pop(more["name"], None)
                self._held.put(more)
            else:
                self._held.put({**more, **{key: row.get(key, type(more[key])()) + more[key] for key in ADDED}})

    def _rows(self, next_call: Callable[[], Call | None]) -> Iterator[Row]:
        # A worker is a fresh interpreter, since it forks its trials.
        with ProcessPoolExecutor(self._workers, multiprocessing.get_context("spawn")) as pool:
            yield from side_by_side(pool, self._workers, next_call, self._until_s)


@functools.cache
def _bench(folder: Path) -> Bench:
    """Return the bench of this process."""
    place = folder / str(os.getpid())
    place.mkdir(parents=True)
    return Bench(place)


def _place_row(folder: Path, what: str, subject: str, trials: int) -> Row:
    def work() -> Row:
        bench = _bench(folder)
        return HARD[what](bench, SUBJECTS[subject], trials) if what in HARD else cache_removed(bench, trials)

    return attempt(work, f"{what}: {subject}")


def _kills_row(folder: Path, subject: str, kills: int, seed: int, until_s: float) -> Row:
    return attempt(lambda: killed(_bench(folder), SUBJECTS[subject], kills, seed, until_s), f"kill -9: {subject}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="in all, earlier calls included")
    parser.add_argument("--trials", type=int, default=24, help="of what is not killed")
    parser.add_argument("--for", dest="for_s", type=float, default=float("inf"), metavar="S", help="begin no more then")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="rows whose name holds one of these")
    parser.add_argument("--again", action="store_true", help="not only what is missing")
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave what is wrong there")
    arguments = parser.parse_args()
    held = results("torture", arguments.again)

    def wanted(name: str) -> bool:
        return not arguments.only or any(word in name for word in arguments.only)

    with tempfile.TemporaryDirectory(prefix="mbc-torture-") as folder:
        place = (Path(folder) if arguments.keep is None else arguments.keep).absolute()
        campaign = Campaign(held, place, arguments.workers, time.monotonic() + arguments.for_s)
        campaign.places(wanted, arguments.trials)
        campaign.kills(wanted, -(-arguments.kills // len(SUBJECTS)))
    held.arrange([f"kill -9: {name}" for name in SUBJECTS])
    rows = [row for name, row in held.rows.items() if wanted(name)]
    show(
        [{**row, "wrong": len(row.get("wrong", ()))} for row in rows],
        ["name", "kills", "done_before", "trials", "done", "errors", "wrong"],
    )
    bad = [
        f"{row['name']}: {row.get('failed') or row['wrong'][0]}" for row in rows if row.get("wrong") or "failed" in row
    ]
    if bad:
        raise SystemExit("\n".join(bad))


if __name__ == "__main__":
    start(main)
