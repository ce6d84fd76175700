"""Step time under a cap on memory if another GPU lends its spare memory, beside the step with host memory alone.

ResNet-152 at batch 598 in fp32 takes 104 GB without a limit; the cap is 16 GB, as in Capuchin's paper. `capped.py`
explains "loss" and runs the rows. The benchmark needs two GPUs with peer access. The lender's memory is neither capped
nor occupied.

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

MOST_LOSS = 0.05  # where the other GPU lends all that it has to spare


def cases() -> Iterator[Case]:
    """Yield the step with the host alone, and the steps with a GPU that lends much or little memory."""
    job = example("resnet", ("depth", "152"), ("batch", "598"), ("train.precision", "fp32"))
    yield Case("host alone", job, None, 16 * GB)
    for lent, most_loss in (("64 GB", MOST_LOSS), ("4 GB", None)):
        yield Case(f"peer lends {lent}", job.with_settings(("memory.peers", lent)), most_loss, 16 * GB)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    tasks = [Task(case.name, partial(prepared, case=case), measured, torch_median(case.job)) for case in cases()]
    drive("peer_memory", tasks, [*COLUMNS, "peer_gb"], parser.parse_args())


if __name__ == "__main__":
    start(main)
