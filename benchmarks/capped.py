"""Step time under a cap on memory beside the uncapped step: the figures of vDNN, AccUDNN, Capuchin and MONeT.

"Loss" is the additional time over mbc's own plan with unlimited memory at the same batch and precision. If that plan
does not fit the GPU, images/s are compared with those of the largest batch that fits (`free_batch`). As in MONeT's
paper, its caps are shares of the memory of the step that recomputes nothing. To enforce the cap, the rest of the GPU's
memory is occupied. If capped and uncapped plan have the same batch, the gradients of a first step are compared.

    python benchmarks/capped.py [--plan-only] [--only NAME ...] [--workers N] [--steps 20] [--for SECONDS] [--again]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ahead import Task, add_arguments, drive
from cap import GB, stepped, torch_median
from modules import Job, example
from planner import Planner, Wanted
from record import start

NEAR_TIME = 0.08  # predicted against measured
MOST_OVER_BOUND, BOUND_SHARE = 0.03, 0.5  # of the plans that have at least this share of the unlimited peak


@dataclass(frozen=True)
class Case:
    """A network under a cap.

    Attributes:
        name: Name of the row.
        job: The network with its settings.
        most_loss: Largest loss that passes; None if no goal is set.
        cap_bytes: The cap in bytes, or 0 if `cap_share` gives it.
        cap_share: The cap as a share of the memory that the plan without a limit takes.
    """

    name: str
    job: Job
    most_loss: float | None
    cap_bytes: int = 0
    cap_share: float = 0.0


def _job(network: str, precision: str = "fp32", **settings: int) -> Job:
    pairs = [(name, str(value)) for name, value in settings.items()]
    return example(network, *pairs, ("train.precision", precision))


def cases() -> Iterator[Case]:
    """Yield the cases of the four papers."""
    yield Case("vdnn vgg16 256", _job("vgg16", batch=256), 0.05, 12 * GB)
    # The smallest batch, in steps of eight, whose plan without any technique takes more than AccUDNN's 24 GB.
    yield Case("accudnn resnet152", _job("resnet", depth=152, batch=136), 0.05, 8 * GB)
    # Three quarters of the largest batches that Capuchin reports.
    yield Case("capuchin vgg16", _job("vgg16", batch=350 * 3 // 4), 0.26, 16 * GB)
    yield Case("capuchin resnet50", _job("resnet", depth=50, batch=1014 * 3 // 4), 0.26, 16 * GB)
    yield Case("capuchin resnet152", _job("resnet", depth=152, batch=798 * 3 // 4), 0.26, 16 * GB)
    yield Case("capuchin inception_v4", _job("inception_v4", batch=468 * 3 // 4), 0.26, 16 * GB)
    for precision in ("fp32", "bf16"):
        for share, loss in ((0.66, 0.032), (0.53, 0.056), (0.40, 0.093), (0.33, 0.12)):
            job = _job("resnet", precision, depth=50, batch=184)
            yield Case(f"monet resnet50 {precision} {share:.0%}", job, loss, cap_share=share)


def settled(planner: Planner, case: Case) -> Case:
    """Return the case with its cap in bytes."""
    if case.cap_bytes:
        return case
    kept = planner.card.unlimited(case.job).with_options(without=frozenset({"recompute"}))
    return replace(case, cap_bytes=int(case.cap_share * planner.ask(Wanted.of(kept)).figures["counted_gb"] * GB))


def prepared(planner: Planner, case: Case) -> dict[str, Any]:
    """Return the row of a case: its plans under the cap and without one, and their predictions."""
    case = settled(planner, case)
    card, unlimited = planner.card, Wanted.of(planner.card.unlimited(case.job))
    within = Wanted.of(card.capped(case.job, case.cap_bytes))
    planner.begin(within)  # made beside the plan without a limit
    free, limited = planner.ask(unlimited), planner.ask(within)
    row: dict[str, Any] = {"cap_gb": case.cap_bytes / GB, "most_loss": case.most_loss}
    row |= planner.keep(case.name, "capped", within)
    if not limited.fits:
        return row
    row |= {"unlimited_gb": free.figures["counted_gb"], "unlimited_predicted_ms": free.figures["predicted_ms"]}
    if free.figures["counted_gb"] > card.room_gb:
        unlimited = Wanted(f"{unlimited.name} where the card holds it", partial(card.free_here, case.job))
    here = planner.keep(case.name, "free", unlimited)
    row |= {"free_batch": here["batch"], "free_predicted_ms": here["predicted_ms"]}
    row["plans"] = {"capped": case.cap_bytes, "free": 0}
    row["compare"] = ["capped", "free"] if here["batch"] == row["batch"] else []
    return judged(row | {"loss": row["predicted_ms"] / row["unlimited_predicted_ms"] - 1})


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the verdicts on its goals."""
    if row["most_loss"] is not None:
        row["passed"] = row["loss"] <= row["most_loss"]
    if row["cap_gb"] >= BOUND_SHARE * row["unlimited_gb"]:
        row["bound_kept"] = row["over_bound"] <= MOST_OVER_BOUND
    return row


def measured(row: dict[str, Any], timed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the row with its measured steps under the cap and without one.

    If the uncapped step does not fit the GPU, the step at the largest batch that fits is compared, by images/s.
    """
    row["loss_predicted"] = row["loss"]
    row |= stepped(row, timed["capped"])
    if "failed" in row:
        return row | {"passed": False}
    row["time_near"] = abs(row["predicted_over_measured"] - 1) <= NEAR_TIME
    whole = timed["free"].get("step_ms")
    if whole is None:
        return row | {"failed": f"without a cap: {timed['free'].get('failed')}", "passed": False}
    row |= {"free_ms": whole, "free_images_s": row["free_batch"] * 1e3 / whole}
    return judged(row | {"loss": row["free_images_s"] / row["images_s"] - 1})


def tasks() -> Iterator[Task]:
    """Yield the rows of the benchmark."""
    for case in cases():
        yield Task(case.name, partial(prepared, case=case), measured, torch_median(case.job))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    drive("capped", tuple(tasks()), COLUMNS, arguments)


COLUMNS = [
    "name", "batch", "cap_gb", "unlimited_gb", "counted_gb", "host_gb", "predicted_ms", "step_ms", "free_batch",
    "free_ms", "loss", "most_loss", "over_bound", "predicted_over_measured", "arena_equal", "gradient_median", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
