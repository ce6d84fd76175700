"""Test accuracy of the digits example after the twelve epochs of `make run`, in several precisions and seeds.

python benchmarks/digits.py [--device auto|cpu|cuda] [--precisions fp32,bf16] [--seeds 0,1,2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import ROOT, attempt, show, write

LEAST_ACCURACY = 0.98
RECIPE = ("--epochs", "12", "--lr", "0.1", "--schedule", "cosine", "--warmup", "1")
EXAMPLE = ROOT / "examples" / "01_digits"


def command(*arguments: str) -> str:
    """Run a command line of mbc and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "mbc.cli", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


def trained(folder: Path, package: Path, device: str, seed: str) -> dict[str, Any]:
    """Return the row of one training."""
    data = ("--data", str(folder / "digits.train.npz"), "--test", str(folder / "digits.test.npz"))
    said = command("train", str(package), *data, *RECIPE, "--device", device, "--seed", seed, "--json")
    accuracy = json.loads(said)["epochs"][-1]["test_accuracy"]
    return {"test_accuracy": accuracy, "passed": accuracy >= LEAST_ACCURACY}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precisions", default="fp32,tf32,bf16,fp16")
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        subprocess.run([sys.executable, str(EXAMPLE / "prepare.py"), str(folder)], check=True)
        for precision in options.precisions.split(","):
            package = folder / f"digits_{precision}"
            command(
                "compile", str(EXAMPLE / "net.mbc"), "--set", f"train.precision={precision}", "--output", str(package)
            )
            for seed in options.seeds.split(","):
                name = f"{precision} seed {seed}"
                rows.append(attempt(lambda p=package, s=seed: trained(folder, p, options.device, s), name))
    show(rows, ("name", "test_accuracy", "passed"))
    print(write(f"digits_{options.device}", rows, device=options.device).name)


if __name__ == "__main__":
    main()
