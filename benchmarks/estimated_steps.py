"""Whole steps of the examples as estimated, beside what the profile of the same GPU predicts. Needs no GPU.

Only steps that the profile knows at least nine tenths of are shown. In strict fp32 the profile has what no estimate
knows of: FFT and Winograd, so that its plans are faster, not better predicted.

    python benchmarks/estimated_steps.py [--precisions bf16,tf32,fp32] [--only NAME ...]
"""

from __future__ import annotations

import argparse
from typing import Any

from modules import Job, examples
from record import attempt, show, write

from mbc.hardware.spec import find_spec
from mbc.ir.transforms.training_step import differentiate
from mbc.kernels import PROVIDERS
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search.search import Limits, search
from mbc.plan.model import Predictions
from mbc.profile.locate import find_profile
from mbc.profile.model import Profile, calibrated

GPU = "h200"
KNOWN = 0.9


def predicted(job: Job, profile: Profile | None) -> Predictions:
    """Of the undivided step without limits."""
    lowered, device = job.lowered(), find_spec(GPU)
    graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
    table = CandidateTable(graph, calibrated(device, profile), PROVIDERS, profile, Rules())
    return search(table, Limits(None, None), device.memory_bytes).predictions


def compared(job: Job, profile: Profile) -> dict[str, Any]:
    known = predicted(job, profile)
    if known.measured_share < KNOWN:
        return {"measured_share": known.measured_share}
    guess = predicted(job, None)
    return {
        "measured_share": known.measured_share,
        "profile_ms": known.train_us / 1e3,
        "estimated_ms": guess.train_us / 1e3,
        "low_ms": guess.train_low_us / 1e3,
        "high_ms": guess.train_high_us / 1e3,
        "ratio": known.train_us / guess.train_us,
        "in_range": guess.train_low_us <= known.train_us <= guess.train_high_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", default="bf16,tf32,fp32")
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    profile = find_profile(find_spec(GPU))
    assert profile is not None
    rows: list[dict[str, Any]] = []
    for precision in arguments.precisions.split(","):
        for job in examples():
            if not arguments.only or job.name in arguments.only:
                told = job.with_settings(("train.precision", precision))
                row = attempt(lambda told=told: compared(told, profile), f"{job.name} {precision}")
                if "ratio" in row or "failed" in row:
                    rows.append(row)
    path = write("estimated_steps", rows)
    show(rows, ["name", "profile_ms", "estimated_ms", "low_ms", "high_ms", "ratio", "in_range"])
    print(path.name)


if __name__ == "__main__":
    main()
