"""Hostile inputs of every kind that mbc reads, changed at random or guided by coverage.

The inputs are sources, plans, checkpoints, profiles, archives of data, ONNX models (if onnx is installed) and command
lines. If atheris is installed, it guides by coverage.

The rule: mbc accepts an input or refuses it with an error of its own. It raises no other exception, prints no message
that acts on a terminal, and uses at most 10 s of processor time and 1 GB of memory. Each target runs in processes of a
few thousand inputs, in turn. The first input of each cause that breaks the rule is kept in
`build/fuzz/TARGET/findings`. When a later run shows that a finding keeps the rule, it counts as mended; move it to
`tests/fuzz/corpus/TARGET`, with which every run begins. A call continues the random draws of the call before, so inputs
add up over calls.

    python benchmarks/fuzz.py [--inputs 1000000] [--for 3600] [--workers N] [--only TARGET ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from campaign import side_by_side
from fuzz_rule import corpus
from fuzz_targets import TARGETS
from fuzz_worker import Journal, keep_finding
from record import ROOT, Results, results, show, start

HERE = Path(__file__).resolve().parent
WORK = ROOT / "build" / "fuzz"
# What a process imports: this checkout before an installed mbc.
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
CHUNK_S = 200.0  # of one process, about
KILLS = {
    signal.SIGPROF: "more than 10 s of processor time",
    signal.SIGALRM: "waits for ever",
    signal.SIGKILL: "killed, for memory perhaps",
    signal.SIGSEGV: "a crash of the interpreter",
    signal.SIGABRT: "an abort",
}
Row = dict[str, Any]


def fresh(name: str) -> Row:
    """Return the row of a target that has judged no input yet."""
    return {"name": name, "inputs": 0, "guided_inputs": 0, "seconds": 0.0, "findings": [], "mended": 0, "answers": {},
            "slowest_s": 0.0, "corpus": 0}  # fmt: skip


def chunk(name: str, seed: int, inputs: int, guided: bool, work: Path = WORK) -> Row:
    """Judge `inputs` inputs, and return what they add to the row of their target.

    If an input kills its process, fewer inputs are judged.
    """
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    shared = Path("/dev/shm")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mbc-fuzz-", dir=shared if shared.is_dir() else None) as own:
        journal, report_file = Journal(Path(own) / "journal"), Path(own) / "report.json"
        command = [sys.executable, str(HERE / "fuzz_worker.py"), name, str(folder), f"{own}/scratch"]
        command += ["--seed", str(seed), "--inputs", str(inputs), *(["--guided"] if guided else [])]
        done = subprocess.run(command, capture_output=True, cwd=ROOT, env=ENVIRONMENT)
        report = (
            json.loads(report_file.read_text(encoding="utf-8"))
            if report_file.exists()
            else {"answers": {}, "slowest_s": 0.0}
        )
    seconds = time.monotonic() - began_s
    if journal.count == 0:
        raise RuntimeError(f"no input was judged: {done.stderr.decode(errors='replace')[-2000:]}")
    if done.returncode < 0:
        why = KILLS.get(signal.Signals(-done.returncode), f"signal {-done.returncode}")
        keep_finding(folder, f"signal{-done.returncode}_{seed}", journal.data, why)
    elif done.returncode > 0 and journal.count < inputs:
        keep_finding(folder, f"exit{done.returncode}_{seed}", journal.data,
                     f"ended with {done.returncode}: {done.stderr.decode(errors='replace')[-1000:]}")  # fmt: skip
    return {
        "inputs": journal.count,
        "guided_inputs": journal.count if guided else 0,
        "seconds": round(seconds, 1),
        **report,
        "findings": findings(folder),
        "corpus": len(list((folder / "corpus").glob("*"))),
    }


def added(row: Row, more: Row) -> Row:
    """Return the row of a target with the results of one more chunk added."""
    answers = Counter(row["answers"])
    answers.update(more["answers"])
    return {
        **row,
        **more,
        **{key: row[key] + more[key] for key in ("inputs", "guided_inputs")},
        "seconds": round(row["seconds"] + more["seconds"], 1),
        "answers": dict(answers.most_common()),
        "slowest_s": max(row["slowest_s"], more["slowest_s"]),
    }


def findings(folder: Path) -> list[Row]:
    """Return the findings by name, each with the last line of its message."""
    rows: list[Row] = []
    for path in sorted((folder / "findings").glob("*.json")):
        lines = json.loads(path.read_text(encoding="utf-8"))["why"].strip().splitlines()
        rows.append({"name": path.stem, "why": ascii(lines[-1])[1:-1][:200]})
    return rows


def judge_again(name: str, work: Path = WORK) -> int:
    """Judge each earlier finding again, put aside those that now keep the rule, and return their number.

    Each finding is judged in a process of its own.
    """
    mended = 0
    folder = work / name / "findings"
    for path in sorted(folder.glob("*.bin")):
        if judged(name, path) is None:
            aside = work / name / "mended"
            aside.mkdir(exist_ok=True)
            path.replace(aside / path.name)
            path.with_suffix(".json").replace(aside / f"{path.stem}.json")
            mended += 1
    return mended


def judged(name: str, path: Path) -> str | None:
    """Return how the answer to one input breaks the rule, or None if it keeps the rule."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "fuzz_worker.py"), name, folder, f"{folder}/scratch", "--one", str(path)]
        done = subprocess.run(command, capture_output=True, cwd=ROOT, env=ENVIRONMENT)
        if done.returncode < 0:
            return KILLS.get(signal.Signals(-done.returncode), f"signal {-done.returncode}")
        result = findings(Path(folder))
        if done.returncode > 0:
            return done.stderr.decode(errors="replace")[-500:]
        return result[0]["why"] if result else None


def chunk_of(row: Row) -> int:
    """Return the number of inputs that take about CHUNK_S seconds, judged by the speed so far."""
    if not row["inputs"]:
        return 500
    return max(200, min(50_000, int(CHUNK_S * row["inputs"] / max(row["seconds"], 1.0))))


def campaign(held: Results, names: list[str], inputs: int, until_s: float, guided: bool, workers: int) -> None:
    """Judge chunks of the targets in turn, `workers` at a time, until all targets have their share of `inputs`."""
    asked = {name: held.rows[name]["inputs"] for name in names}  # those of running chunks included
    turn = 0

    def next_call() -> tuple[Callable[..., tuple[str, int, Row]], Any] | None:
        nonlocal turn
        open_ = [name for name in names if asked[name] < inputs * TARGETS[name].share]
        if not open_:
            return None
        # The target that is furthest behind its share; every eighth chunk is guided by coverage, which takes several
        # times as long.
        name = min(open_, key=lambda n: asked[n] / TARGETS[n].share)
        turn += 1
        count, seed = chunk_of(held.rows[name]), asked[name]
        asked[name] += count
        by_coverage = guided and turn % 8 == 0
        return lambda: (name, count, chunk(name, seed, count, by_coverage)), ()

    with ThreadPoolExecutor(workers) as pool:
        for name, count, more in side_by_side(pool, workers, next_call, until_s):
            held.put(added(held.rows[name], more))
            asked[name] -= count - more["inputs"]
            print(f"{sum(row['inputs'] for row in held.rows.values()):,} inputs", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets, earlier calls included")
    parser.add_argument("--for", dest="for_s", type=float, default=float("inf"), metavar="S", help="begin no more then")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--only", nargs="*", default=[], choices=list(TARGETS), metavar="TARGET")
    parser.add_argument("--again", action="store_true", help="count from 0")
    arguments = parser.parse_args()
    until_s = time.monotonic() + arguments.for_s
    guided = importlib.util.find_spec("atheris") is not None
    held = results("fuzz", arguments.again, coverage_guided=guided, limits="10 s, 1 GB")
    names = [name for name in TARGETS if not arguments.only or name in arguments.only]
    for name in names:
        row = {**fresh(name), **held.kept(name)}
        held.put({**row, "mended": row["mended"] + judge_again(name), "findings": findings(WORK / name)})
    print(f"{'guided by coverage' if guided else 'drawn from seeds: atheris is not installed'}", flush=True)
    campaign(held, names, arguments.inputs, until_s, guided, arguments.workers)
    held.arrange(list(TARGETS))
    rows = [held.rows[name] for name in names]
    show(
        [{**row, "findings": len(row["findings"]), "kinds of answers": len(row["answers"])} for row in rows],
        ["name", "inputs", "guided_inputs", "seconds", "slowest_s", "kinds of answers", "corpus", "findings", "mended"],
    )
    wrong = [f"{row['name']}: {finding['why']}" for row in rows for finding in row["findings"]]
    print(f"{sum(row['inputs'] for row in rows):,} inputs, {len(wrong)} findings; committed: "
          f"{sum(len(corpus(TARGETS[name])) for name in names)}")  # fmt: skip
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    start(main)
