"""The deepest ResNet that trains under a cap: SuperNeurons' bottlenecks (6, 32, n3, 6), fp32.

At batch 16 n3 is found by planning, by doubling and bisection; n3 = 596 (1,922 layers, theirs) comes first. At batch 1
n3 = 788 is 2,498 layers deep. On a GPU what is found then runs, with the rest of the card occupied.

    python benchmarks/deepest.py [--cap 12GB] [--finest 32] [--steps 20] [--profile FILE] [--plan-only] [--gpu h200]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from cap import GB, Card, planned, run, this_card
from modules import Job, example
from record import attempt, need_gpu, show, start, write

from mbc.errors import BudgetError
from mbc.units import parse_size

STAGES = (6, 32, 6)  # n1, n2, n4
THEIRS, AT_BATCH_ONE = 596, 788
ASKED_LAYERS = 3700
MOST = 1 << 14


def network(n3: int, batch: int) -> Job:
    n1, n2, n4 = STAGES
    pairs = {"n1": n1, "n2": n2, "n3": n3, "n4": n4, "batch": batch}
    return example("resnet_deep", *((name, str(value)) for name, value in pairs.items()))


def layers(n3: int) -> int:
    """As the paper counts: three convolutions a bottleneck, the stem and the linear layer."""
    return 3 * (sum(STAGES) + n3) + 2


def row_of(card: Card, n3: int, batch: int, cap_bytes: int) -> dict[str, Any]:
    began = time.perf_counter()
    made = planned(card, card.capped(network(n3, batch), cap_bytes))
    return {
        "name": f"({STAGES[0]},{STAGES[1]},{n3},{STAGES[2]}) batch {batch}",
        "layers": layers(n3),
        "n3": n3,
        "batch": batch,
        "plan_s": time.perf_counter() - began,
        **made,
    }


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
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: the GPU of this machine)")
    parser.add_argument("--published-only", action="store_true", help="only the two networks of the paper")
    parser.add_argument("--plan-only", action="store_true", help="predictions only; needs no GPU")
    arguments = parser.parse_args()
    if not arguments.plan_only:
        need_gpu("--plan-only predicts without running")
    card = this_card(arguments.gpu, arguments.profile, not arguments.plan_only)
    cap_bytes = arguments.cap
    wanted = [(THEIRS, 16), (AT_BATCH_ONE, 1)]
    if not arguments.published_only:
        wanted.append((deepest(card, 16, cap_bytes, arguments.finest), 16))
    rows: list[dict[str, Any]] = []
    for n3, batch in wanted:
        if not n3:
            continue
        row = attempt(lambda n=n3, b=batch: row_of(card, n, b, cap_bytes), f"n3 = {n3}")
        if not arguments.plan_only and "failed" not in row:
            timed = run({"step": (card.capped(network(n3, batch), cap_bytes), cap_bytes)}, arguments.steps)["step"]
            row |= {key: timed[key] for key in ("failed", "step_ms", "spread_ms", "build_s") if key in timed}
            row["arena_equal"] = timed.get("arena_predicted") == timed.get("arena_taken")
        rows.append(row)
    for row in rows:
        row["passed"] = "failed" not in row
    if not arguments.published_only:
        rows[-1]["passed"] = "failed" not in rows[-1] and rows[-1]["layers"] >= ASKED_LAYERS
    write("deepest_planned" if arguments.plan_only else "deepest", rows, cap_gb=cap_bytes / GB)
    show(
        rows,
        ["name", "layers", "counted_gb", "host_gb", "predicted_ms", "step_ms", "over_bound", "arena_equal", "plan_s",
         "passed"],
    )  # fmt: skip


if __name__ == "__main__":
    start(main)
