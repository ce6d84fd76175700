"""The largest mini-batch that trains under a cap on memory, and the largest that is nearly as fast as without one.

fp32 with batch statistics of the full mini-batch. Plans find the batches: the largest there is, by doubling and
bisection, and the largest whose step takes at most 1/0.7 of what it takes with unlimited memory. On a GPU both then
run, with the rest of the card occupied.

    python benchmarks/largest_batch.py [--cap 12GB] [--only NAME ...] [--multiple 8] [--steps 20] [--profile FILE]
                                       [--plan-only] [--gpu h200]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cap import GB, Card, run, this_card
from modules import Job, example
from record import attempt, need_gpu, show, start, write

from mbc.fit import Probe, Search, largest_batch
from mbc.plan.model import Plan
from mbc.units import parse_size

LEAST_SPEED = 0.7  # of the same network's speed without a cap
TIMES_SUPERNEURONS = 2.0


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


def result(card: Card, case: Case, cap_bytes: int, multiple: int) -> dict[str, Any]:
    """Batches by planning."""

    def plan_at(batch: int) -> Plan:
        return card.capped(case.job.with_settings(("batch", str(batch))), cap_bytes).plan()

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
        "largest_images_s": largest.images_per_s,
        "largest_speed": free_us(largest.batch) / largest.train_us,
        "times_superneurons": largest.batch / case.superneurons,
        "probes": [
            {"batch": p.at, "images_s": p.figures.images_per_s if p.figures else None} for p in limited.found.values()
        ],
    }
    if enough is not None and enough.figures is not None:
        f = enough.figures
        row |= {"at_speed": f.batch, "at_speed_images_s": f.images_per_s}
        row["at_speed_speed"] = free_us(f.batch) / f.train_us
        row["passed"] = f.batch >= TIMES_SUPERNEURONS * case.superneurons
    return row


def measured(card: Card, case: Case, row: dict[str, Any], cap_bytes: int, steps: int) -> dict[str, Any]:
    """Steps of both batches under the cap."""
    jobs = {
        key: (card.capped(case.job.with_settings(("batch", str(row[key]))), cap_bytes), cap_bytes)
        for key in ("largest", "at_speed")
        if row.get(key)
    }
    found: dict[str, Any] = {}
    for key, timed in run(jobs, steps).items():
        if "failed" in timed:
            found[f"{key}_failed"] = timed["failed"]
            continue
        found[f"{key}_ms"] = timed["step_ms"]
        found[f"{key}_images_s_measured"] = row[key] * 1e3 / timed["step_ms"]
        found[f"{key}_arena_equal"] = timed["arena_predicted"] == timed["arena_taken"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=parse_size, default=12 * GB)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--multiple", type=int, default=8, help="try multiples of so many rows (default 8)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: the GPU of this machine)")
    parser.add_argument("--plan-only", action="store_true", help="predictions only; needs no GPU")
    arguments = parser.parse_args()
    if not arguments.plan_only:
        need_gpu("--plan-only predicts without running")
    card = this_card(arguments.gpu, arguments.profile, not arguments.plan_only)
    rows: list[dict[str, Any]] = []
    for case in cases():
        if arguments.only and case.name not in arguments.only:
            continue
        row = attempt(lambda c=case: result(card, c, arguments.cap, arguments.multiple), case.name)
        if not arguments.plan_only and "failed" not in row:
            row |= attempt(lambda c=case, r=row: measured(card, c, r, arguments.cap, arguments.steps), case.name)
        rows.append(row)
        show(rows[-1:], _COLUMNS)
        planned = "_planned" if arguments.plan_only else ""
        write(f"largest_batch_{arguments.cap // GB}gb{planned}", rows)
    print()
    show(rows, _COLUMNS)


_COLUMNS = [
    "name", "largest", "largest_images_s", "largest_speed", "largest_ms", "at_speed", "at_speed_images_s",
    "at_speed_speed", "at_speed_ms", "superneurons", "capuchin", "times_superneurons", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
