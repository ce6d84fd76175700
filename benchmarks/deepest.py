"""The deepest ResNet that trains under a cap: SuperNeurons' bottlenecks (6, 32, n3, 6), fp32.

At batch 16 n3 is found by planning, by doubling and bisection; n3 = 596 (1,922 layers, theirs) comes first. At batch 1
n3 = 788 is 2,498 layers deep. On a GPU what is found then runs, with the rest of the card occupied.

    python benchmarks/deepest.py [--plan-only] [--workers N] [--cap 12GB] [--finest 32] [--n3 N3] [--steps 20]
                                 [--for SECONDS] [--again]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from ahead import Task, add_arguments, drive
from cap import GB, stepped
from modules import Job, example
from planner import Planner, Wanted
from record import start

from mbc.units import parse_size

STAGES = (6, 32, 6)  # n1, n2, n4
THEIRS, AT_BATCH_ONE = 596, 788
ASKED_LAYERS = 3700
DEEPEST = "deepest at batch 16"


def network(n3: int, batch: int) -> Job:
    n1, n2, n4 = STAGES
    pairs = {"n1": n1, "n2": n2, "n3": n3, "n4": n4, "batch": batch}
    return example("resnet_deep", *((name, str(value)) for name, value in pairs.items()))


def layers(n3: int) -> int:
    """As the paper counts: three convolutions a bottleneck, the stem and the linear layer."""
    return 3 * (sum(STAGES) + n3) + 2


def prepared(planner: Planner, name: str, n3: int, batch: int, cap_bytes: int) -> dict[str, Any]:
    row = planner.keep(name, "step", Wanted.of(planner.card.capped(network(n3, batch), cap_bytes)))
    row |= {"layers": layers(n3), "n3": n3, "cap_gb": cap_bytes / GB}
    if "failed" not in row:
        row["plans"] = {"step": cap_bytes}
        row["passed"] = name != DEEPEST or row["layers"] >= ASKED_LAYERS
    return row


def prepared_deepest(planner: Planner, cap_bytes: int, finest: int, known: int | None) -> dict[str, Any]:
    n3 = known or deepest(planner, 16, cap_bytes, finest)
    if n3 < THEIRS:
        raise RuntimeError(f"not even {layers(THEIRS)} layers fit")
    return prepared(planner, DEEPEST, n3, 16, cap_bytes)


def measured(row: dict[str, Any], timed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return row | stepped(row, timed["step"])


def deepest(planner: Planner, batch: int, cap_bytes: int, finest: int) -> int:
    """The largest n3 that fits, to within `finest`."""

    def plans(n3: int) -> list[Wanted]:
        return [Wanted.of(planner.card.capped(network(n3, batch), cap_bytes))]

    return planner.largest(plans, lambda probes: probes[0].fits, THEIRS, finest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=parse_size, default=12 * GB)
    parser.add_argument("--finest", type=int, default=32, help="bottlenecks that bisection ends at (default 32)")
    parser.add_argument("--n3", type=int, help="take this for the deepest at batch 16 instead of searching")
    add_arguments(parser)
    arguments = parser.parse_args()
    cap_bytes = arguments.cap
    tasks = [
        Task(name, partial(prepared, name=name, n3=n3, batch=batch, cap_bytes=cap_bytes), measured)
        for n3, batch in ((AT_BATCH_ONE, 1), (THEIRS, 16))
        for name in [f"({STAGES[0]},{STAGES[1]},{n3},{STAGES[2]}) batch {batch}"]
    ]
    search = partial(prepared_deepest, cap_bytes=cap_bytes, finest=arguments.finest, known=arguments.n3)
    tasks.append(Task(DEEPEST, search, measured))
    drive("deepest", tasks, _COLUMNS, arguments, cap_gb=cap_bytes / GB)


_COLUMNS = [
    "name", "layers", "counted_gb", "host_gb", "predicted_ms", "step_ms", "over_bound", "predicted_over_measured",
    "arena_equal", "plan_s", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
