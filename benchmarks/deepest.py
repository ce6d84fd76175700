"""The deepest ResNet that trains under a cap: SuperNeurons' bottlenecks (6, 32, n3, 6), fp32.

At batch 16 n3 is found by planning, by doubling and bisection; n3 = 596 (1,922 layers, theirs) comes first. At batch 1
n3 = 788 is 2,498 layers deep. On a GPU what is found then runs, with the rest of the card occupied.

    python benchmarks/deepest.py [--plan-only] [--cap 12GB] [--finest 32] [--steps 20] [--for SECONDS] [--again]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from ahead import Shelf, Task, add_arguments, drive
from cap import GB, Card, planned, stepped
from modules import Job, example
from record import start

from mbc.errors import BudgetError
from mbc.units import parse_size

STAGES = (6, 32, 6)  # n1, n2, n4
THEIRS, AT_BATCH_ONE = 596, 788
ASKED_LAYERS = 3700
MOST = 1 << 14
DEEPEST = "deepest at batch 16"


def network(n3: int, batch: int) -> Job:
    n1, n2, n4 = STAGES
    pairs = {"n1": n1, "n2": n2, "n3": n3, "n4": n4, "batch": batch}
    return example("resnet_deep", *((name, str(value)) for name, value in pairs.items()))


def layers(n3: int) -> int:
    """As the paper counts: three convolutions a bottleneck, the stem and the linear layer."""
    return 3 * (sum(STAGES) + n3) + 2


def prepared(card: Card, name: str, n3: int, batch: int, cap_bytes: int, shelf: Shelf) -> dict[str, Any]:
    began = time.perf_counter()
    row, plan = planned(card, card.capped(network(n3, batch), cap_bytes))
    row |= {"layers": layers(n3), "n3": n3, "cap_gb": cap_bytes / GB, "plan_s": time.perf_counter() - began}
    if plan is not None:
        shelf.keep(name, "step", plan)
        row["plans"] = {"step": cap_bytes}
        row["passed"] = name != DEEPEST or row["layers"] >= ASKED_LAYERS
    return row


def prepared_deepest(card: Card, cap_bytes: int, finest: int, shelf: Shelf) -> dict[str, Any]:
    n3 = deepest(card, 16, cap_bytes, finest)
    if not n3:
        raise RuntimeError(f"not even {layers(THEIRS)} layers fit")
    return prepared(card, DEEPEST, n3, 16, cap_bytes, shelf)


def measured(row: dict[str, Any], timed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return row | stepped(row, timed["step"])


def deepest(card: Card, batch: int, cap_bytes: int, finest: int) -> int:
    """The largest n3 known to fit, to within `finest`; 0 where not even theirs does."""

    def fits(n3: int) -> bool:
        try:
            card.capped(network(n3, batch), cap_bytes).plan()
        except BudgetError as error:
            print(f"  {layers(n3)} layers: {error.message}", flush=True)
            return False
        print(f"  {layers(n3)} layers fit", flush=True)
        return True

    if not fits(THEIRS):
        return 0
    low, high = THEIRS, 2 * THEIRS
    while high < MOST and fits(high):
        low, high = high, 2 * high
    while high - low > finest:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=parse_size, default=12 * GB)
    parser.add_argument("--finest", type=int, default=32, help="bottlenecks that bisection ends at (default 32)")
    add_arguments(parser)
    arguments = parser.parse_args()
    card, cap_bytes = Card(arguments.gpu, arguments.profile), arguments.cap
    tasks = [
        Task(name, lambda shelf, m=name, n=n3, b=batch: prepared(card, m, n, b, cap_bytes, shelf), measured)
        for n3, batch in ((AT_BATCH_ONE, 1), (THEIRS, 16))
        for name in [f"({STAGES[0]},{STAGES[1]},{n3},{STAGES[2]}) batch {batch}"]
    ]
    tasks.append(Task(DEEPEST, lambda shelf: prepared_deepest(card, cap_bytes, arguments.finest, shelf), measured))
    drive("deepest", tasks, _COLUMNS, arguments, cap_gb=cap_bytes / GB)


_COLUMNS = [
    "name", "layers", "counted_gb", "host_gb", "predicted_ms", "step_ms", "over_bound", "predicted_over_measured",
    "arena_equal", "plan_s", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
