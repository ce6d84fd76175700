"""Step time under a cap on memory against the same step without one: the figures of vDNN, AccUDNN, Capuchin and MONeT.

"Loss" is against mbc's own plan with unlimited memory at the same batch and precision; where that does not fit the
card, its predicted time stands in for the measured one and the row says so. The cap is enforced by occupying the rest
of the card; gradients of a first step are compared with those of the uncapped plan.

    python benchmarks/capped.py [--only NAME ...] [--steps 20] [--profile FILE] [--plan-only] [--gpu h200]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cap import GB, Card, gradient_distances, planned, run, this_card
from modules import Job, example
from record import attempt, need_gpu, show, start, write

NEAR_TIME = 0.08  # predicted against measured
MOST_OVER_BOUND, BOUND_SHARE = 0.03, 0.5  # of the plans that have at least this share of the unlimited peak
ACCUDNN_PLAIN_BYTES = 24 * GB


@dataclass(frozen=True)
class Case:
    """`cap_bytes`, or `cap_share` of what the plan without a limit takes. `most_loss`: what is asked."""

    name: str
    job: Job
    most_loss: float
    cap_bytes: int = 0
    cap_share: float = 0.0


def _job(network: str, precision: str = "fp32", **settings: int) -> Job:
    pairs = [(name, str(value)) for name, value in settings.items()]
    return example(network, *pairs, ("train.precision", precision))


def cases() -> Iterator[Case]:
    yield Case("vdnn vgg16 256", _job("vgg16", batch=256), 0.05, 12 * GB)
    # Its batch is found by planning: see `accudnn_batch`.
    yield Case("accudnn resnet152", _job("resnet", depth=152), 0.05, 8 * GB)
    # Three quarters of the largest batches that Capuchin reports.
    yield Case("capuchin vgg16", _job("vgg16", batch=350 * 3 // 4), 0.26, 16 * GB)
    yield Case("capuchin resnet50", _job("resnet", depth=50, batch=1014 * 3 // 4), 0.26, 16 * GB)
    yield Case("capuchin resnet152", _job("resnet", depth=152, batch=798 * 3 // 4), 0.26, 16 * GB)
    yield Case("capuchin inception_v4", _job("inception_v4", batch=468 * 3 // 4), 0.26, 16 * GB)
    for precision in ("fp32", "bf16"):
        for share, loss in ((0.66, 0.032), (0.53, 0.056), (0.40, 0.093), (0.33, 0.12)):
            job = _job("resnet", precision, depth=50, batch=184)
            yield Case(f"monet resnet50 {precision} {share:.0%}", job, loss, cap_share=share)


def accudnn_batch(card: Card, job: Job) -> int:
    """The smallest batch, in steps of eight, whose plain plan takes more than AccUDNN's 24 GB."""
    low, high = 0, 8
    while _plain_bytes(card, job, high) <= ACCUDNN_PLAIN_BYTES:
        low, high = high, 2 * high
    while high - low > 8:
        middle = (low + high) // 16 * 8
        low, high = (middle, high) if _plain_bytes(card, job, middle) <= ACCUDNN_PLAIN_BYTES else (low, middle)
    return high


def _plain_bytes(card: Card, job: Job, batch: int) -> int:
    return card.counted_bytes(card.plain(job.with_settings(("batch", str(batch)))).plan())


def settled(card: Card, case: Case) -> Case:
    """The case with its batch and its cap in bytes."""
    job = case.job
    if "batch" not in dict(job.settings):
        job = job.with_settings(("batch", str(accudnn_batch(card, job))))
    cap_bytes = case.cap_bytes
    if not cap_bytes:
        cap_bytes = int(case.cap_share * card.counted_bytes(card.unlimited(job).plan()))
    return replace(case, job=job, cap_bytes=cap_bytes)


def row_of(
    case: Case, limited: dict[str, Any], free: dict[str, Any], timed: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """`limited` and `free` are plans under the cap and without one; `timed`, by "capped" and "free", their steps."""
    row: dict[str, Any] = {"name": case.name, "cap_gb": case.cap_bytes / GB, "most_loss": case.most_loss, **limited}
    row |= {"unlimited_gb": free.get("counted_gb"), "unlimited_predicted_ms": free.get("predicted_ms")}
    if "predicted_ms" in limited and "predicted_ms" in free:
        row["loss_predicted"] = limited["predicted_ms"] / free["predicted_ms"] - 1
        row["loss"] = row["loss_predicted"]
        if case.cap_bytes / GB >= BOUND_SHARE * free["counted_gb"]:
            row["bound_kept"] = limited["over_bound"] <= MOST_OVER_BOUND
    step = timed.get("capped", {})
    if "failed" in step:
        row["failed"] = step["failed"]
    if "step_ms" in step:
        row |= {"step_ms": step["step_ms"], "spread_ms": step["spread_ms"]}
        row["images_s"] = row["batch"] * 1e3 / step["step_ms"]
        row["arena_equal"] = step["arena_predicted"] == step["arena_taken"]
        row["predicted_over_measured"] = limited["predicted_ms"] / step["step_ms"]
        row["time_near"] = abs(row["predicted_over_measured"] - 1) <= NEAR_TIME
        whole = timed.get("free", {}).get("step_ms")
        row["free_ms"] = whole
        row["free_measured"] = whole is not None
        row["loss"] = step["step_ms"] / (whole or free["predicted_ms"]) - 1
    if "loss" in row:
        row["passed"] = row["loss"] <= case.most_loss
    return row


def result(card: Card, case: Case, steps: int, plan_only: bool) -> dict[str, Any]:
    case = settled(card, case)
    limited_job, free_job = card.capped(case.job, case.cap_bytes), card.unlimited(case.job)
    limited, free = planned(card, limited_job), planned(card, free_job)
    if plan_only or "failed" in limited:
        return row_of(case, limited, free, {})
    timed = run({"capped": (limited_job, case.cap_bytes), "free": (card.whole(case.job), 0)}, steps)
    gradients = gradient_distances(limited_job, card.whole(case.job), case.cap_bytes)
    return row_of(case, limited, free, timed) | gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="cases whose name holds one of these")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: the GPU of this machine)")
    parser.add_argument("--plan-only", action="store_true", help="predictions only; needs no GPU")
    arguments = parser.parse_args()
    if not arguments.plan_only:
        need_gpu("--plan-only predicts without running")
    card = this_card(arguments.gpu, arguments.profile, not arguments.plan_only)
    wanted = [case for case in cases() if not arguments.only or any(word in case.name for word in arguments.only)]
    rows: list[dict[str, Any]] = []
    for case in wanted:
        rows.append(attempt(lambda c=case: result(card, c, arguments.steps, arguments.plan_only), case.name))
        show(rows[-1:], _COLUMNS)
        write(_RESULT[arguments.plan_only], rows)
    print()
    show(rows, _COLUMNS)


_RESULT = {False: "capped", True: "capped_planned"}
_COLUMNS = [
    "name", "batch", "cap_gb", "unlimited_gb", "counted_gb", "host_gb", "predicted_ms", "step_ms", "free_ms",
    "loss", "most_loss", "over_bound", "predicted_over_measured", "arena_equal", "gradient_median", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
