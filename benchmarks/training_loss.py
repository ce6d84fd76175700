"""Loss of ResNet-18 after 200 steps, by mbc and by PyTorch, in each precision.

The task can be learnt: each class has a coarse pattern of its own with noise on it. One label in five is drawn at
random, so that the loss has a floor well above zero, and 2 % of the floor is more than rounding. Both trainings begin
with equal weights and see equal mini-batches. The mean losses of the last 20 steps are compared. They pass within 2 %
of PyTorch's loss. A further column shows how far PyTorch's precisions are from its fp32, which is the effect of
rounding alone.

    python benchmarks/training_loss.py [--steps 200] [--batch 128] [--size 64] [--precisions fp32,...] [--device cpu]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from modules import Job, build, example, open_module
from record import attempt, show, start, write

from mbc.bench.contender_messages import Contender
from mbc.bench.contender_messages import Job as BenchJob
from mbc.bench.mbc_contender import start_scale
from mbc.bench.torch_contender import Trainer
from mbc.ir.types import Precision

MOST_APART = 0.02
LAST_STEPS = 20
CLASSES = 100
COARSE = 8  # pixels of a pattern's side, before it is enlarged
WRONG_LABELS = 0.2
NOISE = 4.0  # standard deviations, of a pattern's 1
LEARNING_RATE = 0.05

Batch = tuple[np.ndarray, np.ndarray]


def batches(steps: int, rows: int, size: int) -> Iterator[Batch]:
    """Yield images [rows, 3, size, size] and their classes, which are equal for every contender."""
    random = np.random.default_rng(0)
    patterns = random.standard_normal((CLASSES, 3, COARSE, COARSE)).astype(np.float32)
    patterns = patterns.repeat(size // COARSE, 2).repeat(size // COARSE, 3)
    for _ in range(steps):
        classes = random.integers(0, CLASSES, rows)
        noise = random.standard_normal((rows, 3, size, size), np.float32)
        labels = np.where(random.random(rows) < WRONG_LABELS, random.integers(0, CLASSES, rows), classes)
        yield patterns[classes] + np.float32(NOISE) * noise, labels.astype(np.int32)


def losses_of_mbc(job: Job, folder: Path, device: str, data: list[Batch]) -> tuple[list[float], int]:
    """Return the loss of each step, and how many updates were skipped for an overflow."""
    where: Any = job.plan()
    if device == "cuda":
        built = build(job, folder / "package")
        if built.folder is None:
            raise RuntimeError(built.failed)
        where = built.folder
    module = open_module(where, device)
    try:
        if job.lowered().precision is Precision.FP16:
            start_scale(module)
        losses = [float(module.step(*batch, lr=LEARNING_RATE)) for batch in data]
        return losses, int(module.control["skipped"])
    finally:
        module.close()


def losses_of_torch(job: Job, device: str, data: list[Batch]) -> list[float]:
    """Return the loss of each step of PyTorch."""
    text = BenchJob(job.source, job.settings, job.network, "", device, learning_rate=LEARNING_RATE)
    half = job.lowered().precision in (Precision.BF16, Precision.FP16)
    trainer = Trainer(text, Contender("torch", channels_last=half and device == "cuda"))
    return [float(trainer.step(trainer.module.place(batch), None, trainer.forward)) for batch in data]


def compared(job: Job, device: str, data: list[Batch]) -> dict[str, Any]:
    """Return the row of a precision."""
    with tempfile.TemporaryDirectory() as folder:
        ours, skipped = losses_of_mbc(job, Path(folder), device, data)
    theirs = losses_of_torch(job, device, data)
    end, torch_end = (float(np.mean(result[-LAST_STEPS:])) for result in (ours, theirs))
    return {
        "first": ours[0],
        "torch_first": theirs[0],
        "end": end,
        "torch_end": torch_end,
        "apart": abs(end - torch_end) / torch_end,
        "skipped": skipped,
        "losses": ours,
        "torch_losses": theirs,
        "passed": abs(end - torch_end) <= MOST_APART * torch_end,
    }


def beside_fp32(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the distance of PyTorch's loss from its own in fp32, or None if fp32 did not run."""
    fp32_end = next((row["torch_end"] for row in rows if row["name"] == "fp32" and "failed" not in row), None)

    def apart(end: float) -> float | None:
        return None if fp32_end is None else abs(end - fp32_end) / fp32_end

    return [row if "failed" in row else {**row, "torch_from_its_fp32": apart(row["torch_end"])} for row in rows]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--precisions", default="fp32,tf32,bf16,fp16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    data = list(batches(arguments.steps, arguments.batch, arguments.size))
    sizes = {"depth": 18, "batch": arguments.batch, "classes": CLASSES, "size": arguments.size}
    job = example("resnet", *((name, str(value)) for name, value in sizes.items()))
    rows = beside_fp32(
        [
            attempt(lambda p=precision: compared(job.with_settings(("train.precision", p)), arguments.device, data),
                    precision)
            for precision in arguments.precisions.split(",")
        ]
    )  # fmt: skip
    path = write("training_loss", rows, device=arguments.device, **sizes, learning_rate=LEARNING_RATE)
    show(
        rows, ["name", "first", "torch_first", "end", "torch_end", "apart", "torch_from_its_fp32", "skipped", "passed"]
    )
    print(path.name)


if __name__ == "__main__":
    start(main)
