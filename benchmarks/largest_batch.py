"""The largest mini-batch that trains under a cap on memory, and the largest that is nearly as fast as without one.

fp32 with batch statistics of the full mini-batch. Plans find the batches: the largest there is, by doubling and
bisection, and the largest whose step takes at most 1/0.7 of what it takes with unlimited memory. On a GPU both then
run, with the rest of the card occupied.

    python benchmarks/largest_batch.py [--plan-only] [--cap 12GB] [--only NAME ...] [--multiple 8] [--steps 20]
                                       [--for SECONDS] [--again]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ahead import Shelf, Task, add_arguments, drive
from cap import GB, Card
from modules import Job, example
from record import start

from mbc.fit import Probe, Search, largest_batch
from mbc.plan.model import Plan
from mbc.units import parse_size

LEAST_SPEED = 0.7  # of the same network's speed without a cap
TIMES_SUPERNEURONS = 2.0
SUPERNEURONS_CAP, CAPUCHIN_CAP = 12 * GB, 16 * GB


@dataclass(frozen=True)
class Case:
    """`published`: largest batches by what reports them, at 12 GB (SuperNeurons) or 16 GB (Capuchin)."""

    name: str
    job: Job
    superneurons: int
    capuchin: int = 0


def cases() -> list[Case]:
    def resnet(depth: int) -> Job:
        return example("resnet", ("depth", str(depth)))

    return [
        Case("alexnet", example("alexnet_caffe"), 1792),
        Case("vgg16", example("vgg16"), 224, 350),
        Case("inception_v4", example("inception_v4"), 240, 468),
        Case("resnet50", resnet(50), 384, 1014),
        Case("resnet101", resnet(101), 256),
        Case("resnet152", resnet(152), 176, 798),
    ]


def fastest_enough(limited: Search, free: Callable[[int], float], multiple: int, most: int) -> Probe | None:
    """The largest batch of `limited` up to `most` that keeps LEAST_SPEED of `free` (µs by batch), by bisection."""

    def keeps(count: int) -> bool:
        figures = limited.probe(count * multiple).figures
        return figures is not None and figures.train_us * LEAST_SPEED <= free(figures.batch)

    low, high = 0, most // multiple + 1
    if keeps(high - 1):
        low = high - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return limited.probe(low * multiple) if low else None


def prepared(card: Card, case: Case, cap_bytes: int, multiple: int, shelf: Shelf) -> dict[str, Any]:
    """Batches by planning; the plans of the two are kept."""
    plans: dict[int, Plan] = {}

    def plan_at(batch: int) -> Plan:
        plans[batch] = card.capped(case.job.with_settings(("batch", str(batch))), cap_bytes).plan()
        return plans[batch]

    times: dict[int, float] = {}

    def free_us(batch: int) -> float:
        if batch not in times:
            job = card.unlimited(case.job.with_settings(("batch", str(batch))))
            times[batch] = job.plan().predictions.train_us
        return times[batch]

    fit = largest_batch(plan_at, case.superneurons, multiple)
    limited = Search(plan_at, {probe.at: probe for probe in fit.probes})
    largest = fit.largest
    enough = fastest_enough(limited, free_us, multiple, largest.batch)
    row: dict[str, Any] = {
        "cap_gb": cap_bytes / GB,
        "superneurons": case.superneurons,
        "capuchin": case.capuchin or None,
        "largest": largest.batch,
        "largest_predicted_ms": largest.train_us / 1e3,
        "largest_images_s": largest.images_per_s,
        "largest_speed": free_us(largest.batch) / largest.train_us,
        "times_superneurons": largest.batch / case.superneurons,
        "plans": {"largest": cap_bytes},
        "probes": [
            {"batch": p.at, "images_s": p.figures.images_per_s if p.figures else None} for p in limited.found.values()
        ],
    }
    shelf.keep(case.name, "largest", plans[largest.batch])
    if case.capuchin and cap_bytes == CAPUCHIN_CAP:
        row["passed"] = largest.batch > case.capuchin
    if enough is not None and enough.figures is not None:
        f = enough.figures
        row |= {"at_speed": f.batch, "at_speed_predicted_ms": f.train_us / 1e3, "at_speed_images_s": f.images_per_s}
        row["at_speed_speed"] = free_us(f.batch) / f.train_us
        row["plans"]["at_speed"] = cap_bytes
        shelf.keep(case.name, "at_speed", plans[f.batch])
        if cap_bytes == SUPERNEURONS_CAP:
            row["passed"] = f.batch >= TIMES_SUPERNEURONS * case.superneurons
            # What the speed is measured against: without a cap, at the largest batch that the card holds.
            job = case.job.with_settings(("batch", str(f.batch)))
            here = card.free_here(job, card.unlimited(job).plan())
            row |= {"free_batch": here.graph.batch, "free_predicted_ms": here.predictions.train_us / 1e3}
            row["plans"]["free"] = 0
            shelf.keep(case.name, "free", here)
    return row


def measured(row: dict[str, Any], timed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The row with its steps."""
    for what, step in timed.items():
        if "failed" in step:
            row["failed"] = f"{what}: {step['failed']}"
            continue
        batch = row["free_batch" if what == "free" else what]
        row[f"{what}_ms"] = step["step_ms"]
        row[f"{what}_images_s"] = batch * 1e3 / step["step_ms"]
        row[f"{what}_arena_equal"] = step["arena_predicted"] == step["arena_taken"]
        row[f"{what}_predicted_over_measured"] = row[f"{what}_predicted_ms"] / step["step_ms"]
    if "free_ms" in row:
        for what in ("largest", "at_speed"):
            if f"{what}_ms" in row:
                row[f"{what}_speed"] = row[f"{what}_images_s"] / row["free_images_s"]
        if "at_speed_ms" in row:
            row["passed"] = row["passed"] and row["at_speed_speed"] >= LEAST_SPEED
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=parse_size, default=SUPERNEURONS_CAP)
    parser.add_argument("--multiple", type=int, default=8, help="try multiples of so many rows (default 8)")
    add_arguments(parser)
    arguments = parser.parse_args()
    card = Card(arguments.gpu, arguments.profile)
    gb = arguments.cap // GB
    tasks = [
        Task(f"{case.name} {gb} GB", lambda shelf, c=named: prepared(card, c, arguments.cap, arguments.multiple, shelf),
             measured)
        for case in cases()
        for named in [replace(case, name=f"{case.name} {gb} GB")]
        if arguments.cap != CAPUCHIN_CAP or case.capuchin
    ]  # fmt: skip
    drive(f"largest_batch_{gb}gb", tasks, _COLUMNS, arguments)


_COLUMNS = [
    "name", "largest", "largest_images_s", "largest_speed", "largest_ms", "at_speed", "at_speed_images_s",
    "at_speed_speed", "at_speed_ms", "free_batch", "superneurons", "capuchin", "times_superneurons", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
