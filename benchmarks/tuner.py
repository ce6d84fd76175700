"""`mbc tune` against a grid of batches and rates: time to a target (images/s as planned for an H200) and what either
costs; and the noise scale of a task where it is known. Trains on the CPU, and goes on where it stopped.

    python benchmarks/tuner.py [--minutes 10] [--tasks synthetic,digits] [--seeds 10]

The grid is trained with one seed. Its winner is then trained with fresh seeds, and so is what each tuning took, a
tuning a seed, for as many epochs as it says. All are evaluated every tenth of an epoch, at constant rates behind a
warm-up of a twentieth of the epochs.

At last the base batch and what each tuning took are trained to their ends, by the schedule that `mbc tune` writes, with
fresh seeds: how far apart their results on test data are, beside how far apart seeds are.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from record import RESULTS, ROOT, attempt, show, write
from tuner_tasks import TASKS, Task, known_noise_scale, target_of, write_data

from mbc.compiler import compile_plan
from mbc.fit import figures
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from mbc.source import Source
from mbc.train.accuracy import inputs_of
from mbc.train.data import Data, open_data
from mbc.train.evaluation import evaluate_on
from mbc.train.inputs import converted
from mbc.train.schedule import Schedule
from mbc.train.share import step_share_of
from mbc.tune.measure import Meter, moments_of, parts_of
from mbc.tune.rates import WARM_UP_SHARE
from mbc.tune.tuner import steps_of

NAME = "tuner"
BASE, BATCHES, RATES = 64, (16, 32, 64, 128, 256, 512, 1024), (0.01, 0.03, 0.1, 0.3)
FRESH = 100  # the first of the fresh seeds
PARTS_OF_AN_EPOCH = 10
STILL = 1e-12  # a rate at which weights stay where they are
COLUMNS = (
    "name", "noise_scale", "known", "off", "winner", "seeds", "not_reached", "winner_s", "tuned_s", "slower",
    "cost_of_grid", "at_base", "at_taken", "lost", "lost_same_epochs",
    "seed_noise", "passed",
)  # fmt: skip
MOST_OFF, MOST_SLOWER, MOST_COST = 0.2, 0.15, 0.05  # asked for: of the noise scale, of the time to target, of the grid


@cache
def plan_of(task: Task, batch: int, *settings: tuple[str, str]) -> Plan:
    options = Options(gpu="h200", settings=(("batch", str(batch)), *settings))
    return compile_plan(Source(f"{task.name}.mbc", task.source), options)


def images_per_s(task: Task, batch: int) -> float:
    return figures(plan_of(task, batch)).images_per_s


def data_of(plan: Plan, folder: Path, part: str) -> Data:
    return open_data(str(folder / f"{part}.npz"), inputs_of(plan.graph), part)


def steps_trained(
    net: Module, plan: Plan, data: Data, schedule: Schedule, seed: int, epochs: int
) -> Iterator[tuple[float, int, float]]:
    """After each step of a training: the epochs behind it, its number within the epoch, from 1, and its loss."""
    inputs, share = inputs_of(plan.graph), step_share_of(plan.graph, 0)
    assert data.rows is not None
    steps = data.rows // plan.graph.batch
    for epoch in range(epochs):
        for step, part in enumerate(part for part in data.shuffled(share, seed, epoch) if part.whole):
            loss = net.step(*converted(part.arrays, inputs), lr=schedule.at(epoch + step / steps, 1 / steps))
            yield epoch + (step + 1) / steps, step + 1, float(loss)


def tested(task: Task, net: Module, plan: Plan, test: Data) -> float:
    told = evaluate_on(net, plan.graph, test)
    value = told.accuracy if task.metric == "accuracy" else told.metrics[task.metric]
    assert value is not None
    return value


def trained(task: Task, folder: Path, batch: int, rate: float, seed: int, most_epochs: int) -> dict[str, Any]:
    """Epochs to the target, in tenths; None where it is not reached. `cost_s` is of what was trained, as planned."""
    plan = plan_of(task, batch)
    data, test, target = data_of(plan, folder, "train"), data_of(plan, folder, "test"), target_of(task, folder)
    schedule = Schedule(rate, most_epochs, warmup_epochs=WARM_UP_SHARE * task.epochs)
    assert data.rows is not None
    steps, epoch_s = data.rows // batch, data.rows / images_per_s(task, batch)
    tests_after = {round(steps * part / PARTS_OF_AN_EPOCH) for part in range(1, PARTS_OF_AN_EPOCH + 1)}
    best = None
    with Module(plan, seed=seed, device="cpu", shadow=False) as net:
        for epochs, step, loss in steps_trained(net, plan, data, schedule, seed, most_epochs):
            if not math.isfinite(loss):
                return {"epochs": None, "best": best, "cost_s": (epochs - 1 / steps) * epoch_s}
            if step in tests_after:
                value = tested(task, net, plan, test)
                best = value if best is None else (max if task.rises else min)(best, value)
                if (value >= target) if task.rises else (value <= target):
                    return {"epochs": epochs, "best": best, "seconds": epochs * epoch_s, "cost_s": epochs * epoch_s}
    return {"epochs": None, "best": best, "seconds": None, "cost_s": most_epochs * epoch_s}


def value_after(task: Task, folder: Path, batch: int, rate: float, epochs: int, seed: int) -> dict[str, Any]:
    """The metric on test data after so many epochs."""
    plan = plan_of(task, batch)
    data, schedule = data_of(plan, folder, "train"), Schedule(rate, epochs, "cosine", WARM_UP_SHARE * task.epochs)
    with Module(plan, seed=seed, device="cpu", shadow=False) as net:
        for _ in steps_trained(net, plan, data, schedule, seed, epochs):
            pass
        return {"value": tested(task, net, plan, data_of(plan, folder, "test"))}


def tuned(task: Task, folder: Path, seed: int) -> dict[str, Any]:
    """What `mbc tune` takes, and what its steps cost as planned."""
    source = folder / f"{task.name}.mbc"
    source.write_text(task.source, encoding="utf-8")
    words = (
        "tune", str(source), "--gpu", "h200", "--device", "cpu", "--data", str(folder / "train.npz"), "--epochs",
        str(task.epochs), "--seed", str(seed), "--json",
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "mbc.cli", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    told = json.loads(done.stdout)
    steps = told["spent"]["range_steps"] + told["spent"]["noise_steps"]
    return {
        "batch": told["taken"]["batch"],
        "rate": told["taken"]["rate"],
        "base_rate": told["base"]["rate"],
        "noise_scale": told["noise_scale"],
        "epochs": told["epochs"],
        "fits": [row["batch"] for row in told["rows"] if row["fits"]],
        "cost_s": steps * BASE / images_per_s(task, BASE),
    }


def noise(task: Task, folder: Path, seed: int, steps: int = 200) -> dict[str, Any]:
    """The noise scale as a step reports it, beside what it is, at the weights that `seed` draws."""
    plan = plan_of(task, BASE // 2, ("train.accumulate", "2"), ("train.noise_scale", "true"))
    data, meter = data_of(plan, folder, "train"), Meter(steps)
    rows = steps_of(plan.graph, data, seed)
    with Module(plan, seed=seed, device="cpu", shadow=False) as net:
        weight, bias = (np.asarray(net.state(f"head.{name}"), np.float64) for name in ("weight", "bias"))
        for step in range(steps):
            meter.add(step, moments_of(net.step(*next(rows), lr=STILL).metrics, parts_of(plan.graph)))
    arrays = np.load(folder / "train.npz")
    known = known_noise_scale(arrays["x"].astype(np.float64), arrays["y"].astype(np.float64), weight, bias)
    found = meter.result().value
    return {
        "noise_scale": found,
        "known": known,
        "off": abs(found / known - 1),
        "passed": abs(found / known - 1) <= MOST_OFF,
    }


class Work:
    """Items by name, each done once; what is done is written at once."""

    def __init__(self, minutes: float) -> None:
        self._until = time.monotonic() + 60 * minutes
        file = RESULTS / f"{NAME}.json"
        there = json.loads(file.read_text())["rows"] if file.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["name"]: row for row in there if "failed" not in row}

    def do(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Its result; None where there is no time left, or it failed."""
        if name not in self.rows:
            if time.monotonic() > self._until:
                return None
            self.rows[name] = attempt(work, name)
            write(NAME, [*self.rows.values()])
        return None if "failed" in self.rows[name] else self.rows[name]


def compare(work: Work, task: Task, folder: Path, seeds: int) -> dict[str, Any]:
    """The summary of one task, of what is done."""
    grid: dict[tuple[int, float], dict[str, Any] | None] = {}
    for batch in BATCHES:
        for rate in RATES:
            name = f"{task.name} grid {batch} {rate}"
            grid[batch, rate] = work.do(name, partial(trained, task, folder, batch, rate, 0, task.epochs))
    reached = {at: row for at, row in grid.items() if row is not None and row.get("seconds") is not None}
    summary: dict[str, Any] = {"name": f"{task.name} summary", "grid": len([row for row in grid.values() if row])}
    if len(grid) != summary["grid"] or not reached:
        return summary
    winner = min(reached, key=lambda at: reached[at]["seconds"])
    pairs = list(_pairs(work, task, folder, seeds, winner))
    if not pairs:
        return summary
    # Of those that both reach: time that ends without the target is no time to it, and is told apart.
    both = [pair for pair in pairs if pair[0].get("seconds") and pair[1].get("seconds")]
    theirs, ours = (float(np.mean([pair[i]["seconds"] for pair in both])) if both else math.nan for i in (0, 1))
    cost = float(np.mean([pair[2]["cost_s"] for pair in pairs])) / sum(row["cost_s"] for row in grid.values() if row)
    missed = [sum(pair[i]["epochs"] is None for pair in pairs) for i in (0, 1)]
    return summary | {
        "winner": list(winner),
        "taken": [[pair[2]["batch"], round(pair[2]["rate"], 4)] for pair in pairs],
        "seeds": len(pairs),
        "winner_not_reached": missed[0],
        "not_reached": missed[1],
        "winner_s": theirs,
        "tuned_s": ours,
        "slower": ours / theirs - 1,
        "cost_of_grid": cost,
        "passed": missed[1] <= missed[0] and ours / theirs - 1 <= MOST_SLOWER and cost <= MOST_COST,
    }


def _pairs(
    work: Work, task: Task, folder: Path, seeds: int, winner: tuple[int, float]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    for seed in range(seeds):
        fresh, prefix = FRESH + seed, f"{task.name} seed {seed}"
        tuning = work.do(f"{prefix} tuning", partial(tuned, task, folder, seed))
        if tuning is None:
            continue
        taken = tuning["batch"], tuning["rate"]
        ours = work.do(f"{prefix} tuned", partial(trained, task, folder, *taken, fresh, tuning["epochs"]))
        theirs = work.do(f"{prefix} winner", partial(trained, task, folder, *winner, fresh, task.epochs))
        if ours is not None and theirs is not None:
            yield theirs, ours, tuning


def compare_values(work: Work, task: Task, folder: Path, seeds: int) -> dict[str, Any]:
    """At the end: of the base batch at its rate, and of what was taken, for the epochs that its tuning writes and for
    as many as at the base batch. `lost` and `lost_same_epochs`: in the mean; `seed_noise`: two standard errors of
    `lost`."""
    ends: dict[str, list[float]] = {"base": [], "taken": [], "taken, same epochs": []}
    for seed in range(seeds):
        tuning = work.rows.get(f"{task.name} seed {seed} tuning")
        if tuning is None:
            continue
        for end, batch, rate, epochs in (
            ("base", BASE, tuning["base_rate"], task.epochs),
            ("taken", tuning["batch"], tuning["rate"], tuning["epochs"]),
            ("taken, same epochs", tuning["batch"], tuning["rate"], task.epochs),
        ):
            ask = partial(value_after, task, folder, batch, rate, epochs, FRESH + seed)
            row = work.do(f"{task.name} seed {seed} end: {end}", ask)
            ends[end].extend([row["value"]] if row else [])
    base, taken, same = ends.values()
    summary: dict[str, Any] = {"name": f"{task.name} ends", "seeds": min(map(len, ends.values()))}
    if len({len(end) for end in ends.values()}) > 1 or len(base) < 2:
        return summary
    sign = 1 if task.rises else -1
    lost, lost_same = (sign * float(np.mean(base) - np.mean(other)) for other in (taken, same))
    noise = 2 * math.sqrt(np.var(base, ddof=1) / len(base) + np.var(taken, ddof=1) / len(taken))
    return summary | {
        "at_base": float(np.mean(base)),
        "at_taken": float(np.mean(taken)),
        "lost": lost,
        "lost_same_epochs": lost_same,
        "seed_noise": noise,
        "passed": lost <= noise,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tasks", default=",".join(task.name for task in TASKS))
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    work, summaries = Work(arguments.minutes), []
    for task in TASKS:
        if task.name not in arguments.tasks.split(","):
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write_data(task, folder)
            if task.name == "synthetic":
                for seed in range(arguments.seeds):
                    row = work.do(f"noise scale, seed {seed}", partial(noise, task, folder, seed))
                    summaries += [row] if row else []
            summaries.append(compare(work, task, folder, arguments.seeds))
            summaries.append(compare_values(work, task, folder, arguments.seeds))
    for row in summaries:
        work.rows[row["name"]] = row
    write(NAME, [*work.rows.values()])
    show(summaries, COLUMNS)


if __name__ == "__main__":
    main()
