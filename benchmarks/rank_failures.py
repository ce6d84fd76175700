"""Trainings of the digits on several GPUs in which one rank dies, has no memory, or is late.

* `killed`: in every trial one rank gets SIGKILL at a random moment after its start. The row counts the trials in which
  all processes ended within 10 s and the checkpoint was whole, and has the slowest end. Then the training continues
  from the last checkpoint.
* `out of memory`: another process holds the second GPU's memory.
* `late`: one rank is stopped for a minute. The other ranks wait, and the result has the bits of an undisturbed
  training.

    python benchmarks/rank_failures.py [--gpus 2] [--kills 50] [--together 4] [--late 60] [--device cuda|cpu]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from many_gpus import of_gpus
from record import ROOT, attempt, show, start, write
from safetensors import SafetensorError
from safetensors.numpy import load_file

from mbc.hardware.target import local_gpus

END_S = 10.0  # all processes, after the first failure
HANG_S = 40.0
MOST_S = 300.0  # of a training that ends by itself
LATEST_KILL_S = 6.0  # after all ranks have been started: on a GPU they train after some four
MBC = (sys.executable, "-m", "mbc.cli")
WHAT = ("out of memory", "late", "killed")


@dataclass(frozen=True)
class Training:
    """A training of the digits on `ranks` ranks; `folder` has the package and the data."""

    folder: Path
    device: str
    ranks: int

    def command(self, name: str, epochs: int, *options: str) -> list[str]:
        """Return the command line of a training."""
        return [
            *(*MBC, "train", str(self.folder / "net"), "--data", str(self.folder / "digits.train.npz")),
            *("--gpus", str(self.ranks)),
            *("--device", self.device, "--epochs", str(epochs), "--lr", "0.01", "--checkpoint", str(self.file(name))),
            *options,
        ]

    def file(self, name: str) -> Path:
        """Return the path of a checkpoint."""
        return self.folder / f"{name}.safetensors"

    def started(self, name: str, epochs: int, *options: str, **more: str) -> subprocess.Popen[str]:
        """Start a training and return its process."""
        return subprocess.Popen(
            self.command(name, epochs, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=ROOT, env=os.environ | more, start_new_session=True,
        )  # fmt: skip

    def is_whole(self, name: str) -> bool:
        """Return whether the checkpoint is whole, or not written yet."""
        try:
            return not self.file(name).exists() or len(load_file(self.file(name))) > 0
        except SafetensorError:
            return False


def prepared(folder: Path, device: str, ranks: int) -> Training:
    """Build the package, write the data, and return the training."""
    example = ROOT / "examples" / "01_digits"
    prepare = [sys.executable, str(example / "prepare.py"), str(folder)]
    compile_ = [*MBC, "compile", str(example / "net.mbc"), "--gpus", str(ranks), "--output", str(folder / "net")]
    gpu = ["--measure", "never", *(() if device == "cuda" else ("--gpu", "h200"))]
    for command in (prepare, [*compile_, *gpu]):
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return Training(folder, device, ranks)


def parents() -> dict[int, int]:
    """Return the parent of every running process, by process number."""
    result: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if fields[0] != "Z":
                result[int(entry.name)] = int(fields[1])
    return result


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the descendants of a process that have no children. These are the ranks, under any launcher."""
    earlier = parents()
    below = {process.pid}
    while more := {child for child, parent in earlier.items() if parent in below} - below:
        below |= more
    return sorted(below - {process.pid} - {earlier[pid] for pid in below if pid in earlier})


def all_ranks(process: subprocess.Popen[str], count: int) -> list[int]:
    """Wait until all ranks run, and return their processes."""
    until = time.monotonic() + HANG_S
    while time.monotonic() < until and process.poll() is None:
        ranks = ranks_of(process)
        if len(ranks) == count:
            return ranks
        time.sleep(0.05)
    raise RuntimeError(f"it has {len(ranks_of(process))} ranks: {process.communicate()[0][-500:]}")


def ended(process: subprocess.Popen[str], ranks: list[int]) -> tuple[float | None, str]:
    """Return the seconds until all processes ended (None: some did not end), and their output."""
    began = time.monotonic()
    try:
        text, _ = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    while not parents().keys().isdisjoint(ranks):
        if time.monotonic() - began > HANG_S:
            return None, text
        time.sleep(0.02)
    return time.monotonic() - began, text


def kill(training: Training, number: int) -> dict[str, Any]:
    """Kill one rank at a random moment, and return what happened afterwards."""
    draws = random.Random(number)
    name = f"killed{number}"
    process = training.started(name, 100_000)
    ranks = all_ranks(process, training.ranks)
    moment_s = draws.uniform(0, LATEST_KILL_S)
    time.sleep(moment_s)
    rank = draws.randrange(training.ranks)
    with contextlib.suppress(ProcessLookupError):  # then it has failed by itself, which is counted
        os.kill(ranks[rank], signal.SIGKILL)
    seconds, text = ended(process, ranks)
    trained = training.file(name).exists()
    whole = training.is_whole(name)
    return {
        "moment_s": moment_s, "rank": rank, "seconds": seconds, "exit_code": process.returncode, "checkpoint": trained,
        "whole": whole, "told": text.strip().splitlines()[-1][:200] if text.strip() else "",
    }  # fmt: skip


def killed(training: Training, count: int, together: int) -> dict[str, Any]:
    """Return the row of all kills."""
    with ThreadPoolExecutor(together) as pool:
        trials = list(pool.map(lambda number: kill(training, number), range(count)))
    times = [t["seconds"] for t in trials if t["seconds"] is not None]
    kept = next((i for i, t in enumerate(trials) if t["checkpoint"] and t["whole"]), None)
    goes_on = kept is not None and resumes(training, f"killed{kept}")
    return {
        "trials": len(trials),
        "in_time": sum(seconds <= END_S for seconds in times),
        "slowest_s": max(times, default=None),
        "with_checkpoint": sum(t["checkpoint"] for t in trials),
        "whole": sum(t["whole"] for t in trials if t["checkpoint"]),
        "failures_told": sum(t["exit_code"] != 0 for t in trials),
        "goes_on": goes_on,
        "passed": all(t["whole"] and t["exit_code"] and (t["seconds"] or HANG_S) <= END_S for t in trials) and goes_on,
        "each": trials,
    }


def resumes(training: Training, name: str) -> bool:
    """Resume the training from the checkpoint for a while, then interrupt it by Ctrl-C; return whether it saved."""
    before = training.file(name).read_bytes()
    process = training.started(name, 100_000, "--resume", str(training.file(name)))
    all_ranks(process, training.ranks)
    time.sleep(2 * LATEST_KILL_S)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=HANG_S)
    return training.is_whole(name) and training.file(name).read_bytes() != before


def late(training: Training, wait_s: float, epochs: int) -> dict[str, Any]:
    """Return the row of a training whose second rank stops for `wait_s` in the middle of its epochs."""
    process = training.started("on time", epochs)
    process.communicate(timeout=MOST_S)
    process = training.started("late", epochs)
    ranks = all_ranks(process, training.ranks)
    time.sleep(LATEST_KILL_S)
    stopped = process.poll() is None
    if stopped:
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(wait_s)
        os.kill(ranks[1], signal.SIGCONT)
    process.communicate(timeout=MOST_S)
    same = training.file("late").read_bytes() == training.file("on time").read_bytes()
    done = stopped and process.returncode == 0 and same
    return {"stopped": stopped, "stopped_s": wait_s, "exit_code": process.returncode, "same_bits": same, "passed": done}


def out_of_memory(training: Training) -> dict[str, Any]:
    """Return the row of a training that finds no free memory on its second GPU."""
    holding = (
        "import sys, pycuda.driver as d; d.init(); c = d.Device(1).make_context(); "
        "m = d.mem_alloc(d.mem_get_info()[0] - (64 << 20)); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline().strip() == "held"
        process = training.started("out of memory", 100)
        began = time.monotonic()
        seconds, text = ended(process, [])
        lines = [line for line in text.splitlines() if "error" in line]
        return {
            "seconds": time.monotonic() - began, "exit_code": process.returncode, "told": lines[:2],
            "passed": seconds is not None and process.returncode != 0 and "memory" in text,
        }  # fmt: skip
    finally:
        holder.communicate("")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="that train (default 2)")
    parser.add_argument("--only", nargs="*", default=WHAT, choices=WHAT)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--together", type=int, default=4, help="trainings at once")
    parser.add_argument("--late", type=float, default=60.0, metavar="S")
    parser.add_argument("--epochs", type=int, default=300, help="of the training that is late: 10 s or more of them")
    parser.add_argument("--device", default="cuda" if local_gpus() else "cpu")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        write(of_gpus("rank_failures", arguments.gpus), rows, device=arguments.device, gpus=arguments.gpus)
        show([row], [key for key in row if key != "each"])

    with tempfile.TemporaryDirectory(prefix="mbc-ranks-") as folder:
        training = prepared(Path(folder), arguments.device, arguments.gpus)
        work = {
            "out of memory": lambda: out_of_memory(training),
            "late": lambda: late(training, arguments.late, arguments.epochs),
            "killed": lambda: killed(training, arguments.kills, arguments.together),
        }
        for name in arguments.only:
            if name != "out of memory" or arguments.device == "cuda":
                keep(attempt(work[name], name))


if __name__ == "__main__":
    start(main)
