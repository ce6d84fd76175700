"""Predicted steps and least memory of nnU-Net's presets by GPU (docs/nnunet.md). Needs no GPU.

The plans files in `tests/cases/nnunet` were written by the planners of nnU-Net 2.8.1 for a data set of CT images of
300 x 360 x 360 voxels with 16 classes. Rows are written one by one; another call plans those that are missing.

    python benchmarks/nnunet_plans.py [--again]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from typing import Any

from record import ROOT, attempt, results, show, start

PLANS = {"original": "", "M": "ResEncUNetM", "L": "ResEncUNetL", "XL": "ResEncUNetXL"}
CARDS = (("a100-40", ""), ("rtx-4090", ""), ("rtx-4070-ti-super", ""), ("rtx-3060", "11GB"))
LEAST_ON = "a100-40"  # the GPU for which the least memory is searched


def predicted(preset: str, gpu: str, memory: str, least: bool, limit_s: float) -> dict[str, Any]:
    """Return the predictions of the configuration 3d_fullres of a preset, made within a limit of time."""
    plans = ROOT / "tests" / "cases" / "nnunet" / f"nnUNet{PLANS[preset]}Plans.json"
    words = ["nnunet", "plan", str(plans), "--configuration", "3d_fullres", "--gpu", gpu, "--json"]
    words += [*(["--memory", memory] if memory else []), *([] if least else ["--quick"])]
    command = [sys.executable, "-m", "mbc.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit_s)
    (row,) = json.loads(done.stdout)["rows"]
    figures, at = row["figures"], row["least"]
    return {
        "preset": preset, "card": f"{gpu} {memory}".strip(), "patch": row["configuration"]["patch"],
        "step_ms": figures and figures["train_us"] / 1e3, "low_ms": figures and figures["train_low_us"] / 1e3,
        "high_ms": figures and figures["train_high_us"] / 1e3, "epoch_s": row["epoch_s"],
        "taken_gb": figures and figures["needed_bytes"] / 1e9, "least_gb": at and at["budget_bytes"] / 1e9,
        "least_ms": at and at["train_us"] / 1e3,
    }  # fmt: skip


def main() -> None:
    """Plan what the results lack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="plan also what the results have")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a row may take (default 900)")
    arguments = parser.parse_args()
    held = results("nnunet_plans", again=arguments.again)
    cases = [(preset, *card, False) for card in CARDS for preset in PLANS]
    cases += [(preset, LEAST_ON, "", True) for preset in PLANS]
    work = {
        f"{case[0]} {'least' if case[3] else case[1]}": partial(predicted, *case, arguments.limit) for case in cases
    }
    for name, make in work.items():
        if not held.done(name):
            held.put(attempt(make, name))
    show(list(held.rows.values()), ["name", "step_ms", "low_ms", "high_ms", "epoch_s", "taken_gb", "least_gb"])


if __name__ == "__main__":
    start(main)
