"""The largest mini-batch that trains under a cap on memory, and the largest that is nearly as fast as without one.

fp32 with batch statistics of the full mini-batch. Three rows a network: at 12 GB twice SuperNeurons' batch, of which
0.7 of the speed with unlimited memory is asked, the largest batch that keeps this speed, and the largest that fits at
all, whatever its speed. Plans find the last two, several batches at once where there are several workers. On a GPU
they then run like those of `capped.py`: with the rest of the card occupied, and without a cap beside.

    python benchmarks/largest_batch.py --plan-only --workers 32 [--cap 12GB] [--only NAME ...] [--multiple 8] [--again]
    python benchmarks/largest_batch.py --measure [--workers 8] [--cap 12GB] [--only NAME ...] [--steps 20]
                                       [--for SECONDS] [--no-gradients]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import capped
from ahead import Task, add_arguments, drive
from cap import GB, torch_median
from modules import Job, example
from planner import Planner, Probe, Wanted
from record import start

from mbc.units import parse_size

LEAST_SPEED = 0.7  # of the same network's speed without a cap
TIMES_SUPERNEURONS = 2.0
SUPERNEURONS_CAP, CAPUCHIN_CAP = 12 * GB, 16 * GB


@dataclass(frozen=True)
class Case:
    """The largest batches that others report, SuperNeurons at 12 GB and Capuchin at 16. `spare_bytes` as in
    `capped.Case`."""

    name: str
    job: Job
    superneurons: int
    capuchin: int = 0
    spare_bytes: int = 0

    def at(self, batch: int) -> Job:
        return self.job.with_settings(("batch", str(batch)))


def cases() -> tuple[Case, ...]:
    def resnet(depth: int) -> Job:
        return example("resnet", ("depth", str(depth)))

    return (
        Case("alexnet", example("alexnet_caffe"), 1792),
        Case("vgg16", example("vgg16"), 224, 350),
        Case("inception_v4", example("inception_v4"), 240, 468, GB // 2),
        Case("resnet50", resnet(50), 384, 1014),
        Case("resnet101", resnet(101), 256),
        Case("resnet152", resnet(152), 176, 798),
    )


def largest(planner: Planner, case: Case, cap_bytes: int, multiple: int, least_speed: float) -> int:
    """The largest batch, in steps of `multiple`, that fits and keeps this share of the speed without a cap, or 0."""
    card = planner.card

    def plans(count: int) -> list[Wanted]:
        job = case.at(count * multiple)
        return [
            Wanted.of(card.capped(job, cap_bytes - case.spare_bytes)),
            *([Wanted.of(card.unlimited(job))] if least_speed else []),
        ]

    return multiple * planner.largest(plans, partial(keeps, least_speed), max(1, case.superneurons // multiple))


def keeps(least_speed: float, probes: list[Probe]) -> bool:
    """Whether a plan fits and keeps this share of the speed of that without a cap, if there is one."""
    limited, *free = (probe.figures for probe in probes)
    return "failed" not in limited and all(limited["predicted_ms"] * least_speed <= f["predicted_ms"] for f in free)


def prepared(
    planner: Planner, name: str, case: Case, cap_bytes: int, multiple: int, least_speed: float, batch: int = 0
) -> dict[str, Any]:
    """The batch, the largest unless it is given, and its plans as `capped.py` has them."""
    batch = batch or largest(planner, case, cap_bytes, multiple, least_speed)
    if not batch:
        raise RuntimeError("no batch fits" + (f" at {least_speed:.0%} of the speed" if least_speed else ""))
    most_loss = 1 / least_speed - 1 if least_speed else None
    at = capped.Case(name, case.at(batch), most_loss, cap_bytes, spare_bytes=case.spare_bytes)
    row = capped.prepared(planner, at)
    return judged(row | {"superneurons": case.superneurons, "capuchin": case.capuchin or None})


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """With what is asked of the batch: at 12 GB of the one that is fast enough, at 16 GB of the largest."""
    row |= {"speed": 1 / (1 + row["loss"]), "times_superneurons": row["batch"] / row["superneurons"]}
    if row["most_loss"] is not None and row["cap_gb"] * GB == SUPERNEURONS_CAP:
        row["passed"] = row["passed"] and row["times_superneurons"] >= TIMES_SUPERNEURONS
    if row["most_loss"] is None and row["cap_gb"] * GB == CAPUCHIN_CAP and row["capuchin"]:
        row["passed"] = row["batch"] > row["capuchin"]
    return row


def measured(row: dict[str, Any], timed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The row with its steps."""
    row = capped.measured(row, timed)
    return row if "failed" in row else judged(row)


def tasks(cap_bytes: int, multiple: int) -> Iterator[Task]:
    """What is asked comes first, then what is fast enough."""
    twice = (TIMES_SUPERNEURONS, LEAST_SPEED, f"at {TIMES_SUPERNEURONS:.0f} times SuperNeurons'")
    fast_enough, any_speed = (0.0, LEAST_SPEED, f"at {LEAST_SPEED:.0%} of the speed"), (0.0, 0.0, "at all")
    for times, least_speed, what in (*((twice,) if cap_bytes == SUPERNEURONS_CAP else ()), fast_enough, any_speed):
        for case in cases():
            if cap_bytes != CAPUCHIN_CAP or case.capuchin:
                name = f"{case.name} {what}"
                prepare = partial(
                    prepared, name=name, case=case, cap_bytes=cap_bytes, multiple=multiple, least_speed=least_speed,
                    batch=round(times * case.superneurons),
                )  # fmt: skip
                yield Task(name, prepare, measured, torch_median(case.job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=parse_size, default=SUPERNEURONS_CAP)
    parser.add_argument("--multiple", type=int, default=8, help="try multiples of so many rows (default 8)")
    add_arguments(parser)
    arguments = parser.parse_args()
    found = tuple(tasks(arguments.cap, arguments.multiple))
    drive(f"largest_batch_{arguments.cap // GB}gb", found, _COLUMNS, arguments)


_COLUMNS = [
    "name", "batch", "superneurons", "times_superneurons", "capuchin", "counted_gb", "host_gb", "images_s", "speed",
    "predicted_ms", "step_ms", "free_batch", "free_ms", "predicted_over_measured", "arena_equal", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
