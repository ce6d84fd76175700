"""All that several GPUs of one machine are measured for, by one command: profiles, plans, runs.

GPUs work on one thing at a time; plans are made beside them. What a call has no time for is left to the next one, which
goes on where this one stopped (`--again` begins anew). Figures are those of the scripts that are called.

    python benchmarks/whole_machine.py --for 540 [--gpus N] [--skip NAME ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from many_gpus import spec_name
from record import ROOT, start

from mbc.hardware.target import local_gpus

DONE = ROOT / "build" / "whole_machine"  # a file of each step that ended well, and what all print
LEAST_S = 20.0  # of a call's time, for a step to be begun
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Step:
    """`beside`: it takes processors only, and others go on meanwhile. `needs`: steps that have ended before it begins.
    `timed`: its script is told how long it may take."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    beside: bool = False
    timed: bool = False

    @property
    def is_done(self) -> bool:
        return (DONE / self.name).exists()


def steps(gpu: str, gpus: int, workers: int) -> Iterator[Step]:
    """In the order in which they are begun, once they can be."""
    python, all_, cores = sys.executable, ("--gpus", str(gpus)), ("--workers", str(workers))
    planned = ("--plan-only", "--gpu", gpu, *cores, *all_)

    def script(name: str, *words: str) -> tuple[str, ...]:
        return (python, str(HERE / name), *words)

    unlike = script("unlike_gpus.py", "--gpus", *dict.fromkeys(("2", str(gpus))))  # a pair, too
    rows = ("--only", "resnet50 256", "resnet50 64", "resnet50 32")
    sharing = ("--only", "unet", "vgg16 256")
    yield Step("measure", (*unlike, "--stage", "measure", "--measure-for", "25s"))
    # Before anything is planned: plans fill the channels of the memory that is copied to.
    yield Step("links", (python, "-m", "mbc.cli", "profile", "--gpu", "all"), ("measure",))
    yield Step("plan_unlike", (*unlike, "--stage", "plan", "--gpu", gpu, *cores), ("links",), beside=True)
    yield Step("plan_lending", script("lending.py", "--plan-only", "--gpu", gpu, *all_), ("links",), beside=True)
    yield Step("plan_many", script("many_gpus.py", *planned, *rows), ("links",), beside=True)
    yield Step("plan_contention", script("contention.py", *planned, *sharing), ("links",), beside=True)
    many = script("many_gpus.py", *cores, *all_, "--buckets", "25", *rows)
    yield Step("many", (*many, "--mbc-only"), ("plan_many",), timed=True)
    yield Step("failures", script("rank_failures.py", "--only", "killed", "--kills", "4", *all_), ("links",))
    yield Step("lending", script("lending.py", *all_), ("plan_lending", "links"))
    yield Step("unlike", (*unlike, "--stage", "run"), ("plan_unlike", "links"), timed=True)
    yield Step("contention", script("contention.py", *cores, *all_, *sharing), ("plan_contention",), timed=True)
    yield Step("peers", (*many, "--peers-only"), ("many",), timed=True)


class Call:
    """One call's steps, which all end within `for_s` seconds."""

    def __init__(self, wanted: Sequence[Step], for_s: float) -> None:
        self._steps = {step.name: step for step in wanted}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._tried: set[str] = set()
        self._began_s, self._for_s = time.monotonic(), for_s

    @property
    def left_s(self) -> float:
        return self._began_s + self._for_s - time.monotonic()

    def run(self) -> bool:
        """Whether every step has ended well."""
        while self.left_s > LEAST_S:
            ready = [step for step in self._steps.values() if self._is_ready(step)]
            for step in (s for s in ready if s.beside):
                self._begin(step)
            if alone := next((s for s in ready if not s.beside), None):
                self._begin(alone)
                with suppress(subprocess.TimeoutExpired):
                    self._running[alone.name].wait(max(1.0, self.left_s))
                self._end(alone.name)
            elif not self._running:
                break
            time.sleep(0.5)
            for name in [name for name, process in self._running.items() if process.poll() is not None]:
                self._end(name)
        for name in [*self._running]:
            self._end(name)
        return all(step.is_done for step in self._steps.values())

    def _is_ready(self, step: Step) -> bool:
        begun = step.is_done or step.name in self._tried
        return not begun and all(name not in self._steps or self._steps[name].is_done for name in step.needs)

    def _begin(self, step: Step) -> None:
        words = ("--for", f"{max(1.0, self.left_s - LEAST_S):.0f}") if step.timed else ()
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if step.beside else {}  # what plans is not to take a GPU's memory
        self._tried.add(step.name)
        with (DONE / f"{step.name}.log").open("ab") as log:
            self._running[step.name] = subprocess.Popen(
                [*(("nice", "-n", "10") if step.beside else ()), *step.command, *words],
                stdout=log, stderr=log, cwd=ROOT, env=os.environ | hidden,
            )  # fmt: skip
        self._tell(step.name, "begins")

    def _end(self, name: str) -> None:
        """It is done, unless it failed, had no time left, or may have left rows for want of it."""
        process = self._running.pop(name)
        if process.poll() is None:
            process.terminate()
        process.wait()
        if process.returncode == 0 and not (self._steps[name].timed and self.left_s < 2 * LEAST_S):
            (DONE / name).touch()
        self._tell(name, f"ended with {process.returncode}")

    def _tell(self, name: str, what: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.1f} s  {name} {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="for_s", type=float, default=540.0, metavar="S", help="end by then")
    parser.add_argument("--gpus", type=int, default=0, help="that share a mini-batch (default: the machine's)")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="processes that plan and build")
    parser.add_argument("--skip", nargs="*", default=[], metavar="NAME", help="steps that are taken for done")
    parser.add_argument("--again", action="store_true", help="from the first step on")
    arguments = parser.parse_args()
    here = len(local_gpus())
    if here < max(2, arguments.gpus):
        raise SystemExit(f"this machine has {here} GPUs that can be used, not {max(2, arguments.gpus)}")
    DONE.mkdir(parents=True, exist_ok=True)
    for file in DONE.iterdir() if arguments.again else ():
        file.unlink()
    wanted = [s for s in steps(spec_name(), arguments.gpus or here, arguments.workers) if s.name not in arguments.skip]
    if not Call(wanted, arguments.for_s).run():
        raise SystemExit(f"steps are left: run this again (what they print is in {DONE.relative_to(ROOT)})")


if __name__ == "__main__":
    start(main)
