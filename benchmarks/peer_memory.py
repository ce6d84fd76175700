"""Step time under a cap on memory where another GPU lends what it has to spare, beside the same with the host alone.

ResNet-152 at batch 598 in fp32 takes 104 GB where nothing limits it; the cap is 16 GB, as Capuchin's. "Loss" is as in
`capped.py`, which makes and runs the rows. They need two GPUs that reach each other directly; the lender's memory is
neither capped nor occupied.

    python benchmarks/peer_memory.py [--plan-only] [--only NAME ...] [--workers N] [--steps 20] [--again]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from ahead import Task, add_arguments, drive
from cap import GB, torch_median
from capped import COLUMNS, Case, measured, prepared
from modules import example
from record import start

MOST_LOSS = 0.05  # with as much of the peer's memory as it has to spare


def cases() -> Iterator[Case]:
    job = example("resnet", ("depth", "152"), ("batch", "598"), ("train.precision", "fp32"))
    yield Case("host alone", job, None, 16 * GB)
    for lent, most_loss in (("64 GB", MOST_LOSS), ("4 GB", None)):
        yield Case(f"peer lends {lent}", job.with_settings(("memory.peers", lent)), most_loss, 16 * GB)


def tasks() -> Iterator[Task]:
    for case in cases():
        yield Task(case.name, partial(prepared, case=case), measured, torch_median(case.job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    drive("peer_memory", tuple(tasks()), [*COLUMNS, "peer_gb"], arguments)


if __name__ == "__main__":
    start(main)
