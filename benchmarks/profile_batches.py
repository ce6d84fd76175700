"""Measure on this GPU the requests that decide plans of the examples at several batches, for the bundled profile.

Each network is compiled as by `mbc compile`: requests that neither the user's own profile nor the bundled profile has
are measured if they can decide the plan (decision 067). `--ship FILE` writes the part of both profiles that a planner
can use. Runs may be repeated: requests that were measured are not measured again.

    python benchmarks/profile_batches.py [--batches 32,256] [--precisions bf16,fp32] [--only NAME ...]
                                         [--seconds 500] [--part 0/4] [--ship FILE.sqlite.gz]

`--part I/N` takes only each N-th network and setting, from the I-th on, so that one process for each of N GPUs can
measure into one profile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from modules import Job, examples
from record import attempt, need_gpu, results, show, start

from mbc.hardware.target import find_device
from mbc.options import Measure
from mbc.profile.edit import ship
from mbc.profile.locate import find_profile
from mbc.profile.paths import file_name

COLUMNS = ("name", "predicted_ms", "measured_share", "new", "left", "seconds")
NOT_OF_BATCHES = ("resnet_deep",)  # a ResNet whose layers the others have


def jobs(batches: str, precisions: str) -> Iterator[tuple[str, Job]]:
    """Yield the networks by name; the first batch and precision of all networks come first."""
    networks = [job for job in examples() if job.name not in NOT_OF_BATCHES]
    networks += [job.with_settings(("depth", "50")) for job in networks if job.name == "resnet"]
    for batch in batches.split(","):
        for precision in precisions.split(","):
            for job in networks:
                created = job.with_settings(("batch", batch), ("train.precision", precision))
                yield " ".join((job.name, *("=".join(pair) for pair in created.settings))), created


def request_counts() -> tuple[int, int]:
    """Return the number of requests in the profiles of this GPU, and how many of these are left to estimates."""
    profile = find_profile(find_device("auto"))
    if profile is None or profile.stale:
        return 0, 0
    return len(profile.measurements), len(profile.left_to_estimate)


def compiled(job: Job, left_s: float) -> dict[str, Any]:
    """Return the row of one compilation."""
    began, (before, _) = time.monotonic(), request_counts()
    predictions = job.with_options(measure=Measure.MISSING, measure_for_s=left_s).plan().predictions
    after, left = request_counts()
    return {
        "predicted_ms": predictions.train_us / 1e3, "measured_share": predictions.measured_share,
        "new": after - before, "left": left, "seconds": time.monotonic() - began,
    }  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="32,256")
    parser.add_argument("--precisions", default="bf16,fp32")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="networks whose label holds one of these")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--part", default="0/1", metavar="I/N")
    parser.add_argument("--ship", type=Path)
    arguments = parser.parse_args()
    need_gpu("nothing can be measured without")
    until_s = time.monotonic() + arguments.seconds
    kept = results(f"profile_batches_{Path(file_name(find_device('auto').name)).stem}", current=True)
    first, step = map(int, arguments.part.split("/"))
    for name, job in islice(jobs(arguments.batches, arguments.precisions), first, None, step):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            break
        if not kept.done(name) and (not arguments.only or any(word in name for word in arguments.only)):
            row = attempt(partial(compiled, job, left_s), name)
            if row.get("seconds", left_s) < left_s:  # otherwise it failed or was cut off, and continues in the next run
                kept.put(row)
            show([row], COLUMNS)
    show(list(kept.rows.values()), COLUMNS)
    profile = find_profile(find_device("auto"))
    if arguments.ship and profile is not None and not profile.stale:
        count = ship(profile, arguments.ship)
        print(f"{count} candidates, {arguments.ship.stat().st_size} bytes: {arguments.ship}")


if __name__ == "__main__":
    start(main)
