"""Comparison of ranks that share a mini-batch with one GPU that trains on the whole: twenty steps in fp32.

All trainings begin with equal weights. The networks are ResNet-18 and the digits example, both with synchronised batch
normalisation, and a network without batch normalisation whose fully connected layers are wide enough that ranks gather
operands. The states after the steps differ by rounding alone, which grows with every step. The measure for that is the
distance between two trainings on one GPU, one of which divides its convolutions into micro-batches of half the rows,
like each rank's rows. Two runs of the ranks must have the same bits. Without synchronisation (`apart`) the ranks must
be far away, if the network has batch normalisation.

    python benchmarks/ranks_as_one.py [--ranks 2] [--steps 20] [--device cuda|cpu]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from modules import Job, example
from numpy.typing import NDArray
from record import ROOT, attempt, show, start, write
from safetensors.numpy import load_file

from mbc.hardware.target import local_gpus
from mbc.source import Source

LEARNING_RATE = "0.001"  # rounding errors grow less: at 0.01 random labels make ResNet-18 chaotic in ten steps
SYNCHRONISED = ("train.sync_batch_norm", "true")
TIMES_YARDSTICK = 2.0
ROUNDING = 2.0**-22  # four roundoffs of fp32: nothing is nearer than that, and the yardstick may be

States = dict[str, NDArray[Any]]

WIDE = """network wide(batch = 64, classes = 10, features = 2048) {
  input image[batch, 3, 32, 32] : float
  input label[batch] : class
  x = image |> conv(32, 3, pad=1, bias=true) |> relu |> maxpool(2)
  x = x |> conv(64, 3, pad=1, bias=true) |> relu |> maxpool(2) |> flatten
  x = x |> linear(features) |> relu |> linear(features) |> relu
  logits = x |> linear(classes)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""


@dataclass(frozen=True)
class Case:
    """A network to train: an example with these settings, or the network of `text`."""

    name: str
    batch: int
    settings: tuple[tuple[str, str], ...] = ()
    text: str = ""

    @property
    def job(self) -> Job:
        """Job of the case's network."""
        settings = (("batch", str(self.batch)), *self.settings)
        return (
            Job(self.name, Source(f"{self.name}.mbc", self.text), settings)
            if self.text
            else example(self.name, *settings)
        )


CASES = (
    Case("resnet", 32, (("depth", "18"), ("size", "64"), ("classes", "10"))),
    Case("digits", 64),
    Case("wide", 64, text=WIDE),
)


@dataclass(frozen=True)
class Trainer:
    """Runs `mbc compile` and `mbc train` over one epoch of random data, in files under `folder`."""

    case: Case
    folder: Path
    device: str

    @property
    def source(self) -> Path:
        """Path of the source."""
        return self.folder / "net.mbc"

    def data(self, steps: int) -> Path:
        """Write the data of `steps` steps, and return their path."""
        network = self.case.job.lowered().network
        draws, file = np.random.default_rng(0), self.folder / "data.npz"
        arrays: dict[str, NDArray[Any]] = {}
        for name in network.inputs:
            shape = network.values[name].type.shape
            many = (steps * shape[0], *shape[1:])
            image = len(shape) > 1
            arrays[name] = (draws.normal(0, 1, many) if image else draws.integers(0, 10, many)).astype(
                np.float32 if image else np.int32
            )
        np.savez(file, allow_pickle=False, **arrays)
        return file

    def package(self, name: str, *options: str, synchronised: bool = True) -> Path:
        """Compile the network with further options, and return the path of the package."""
        settings = [*self.case.job.settings, ("train.precision", "fp32"), *([SYNCHRONISED] if synchronised else [])]
        result = self.folder / name
        command = [
            *(sys.executable, "-m", "mbc.cli", "compile", str(self.source), "--output", str(result)),
            *("--measure", "never", *(() if self.device == "cuda" else ("--gpu", "h200"))),
            *(word for key, value in settings for word in ("--set", f"{key}={value}")),
            *options,
        ]
        _run(command)
        return result

    def states(self, package: Path, data: Path, name: str, ranks: int = 1) -> States:
        """Train one epoch, and return the fp32 states."""
        checkpoint = self.folder / f"{name}.safetensors"
        command = [
            *(sys.executable, "-m", "mbc.cli", "train", str(package), "--gpus", str(ranks)),
            *("--data", str(data), "--epochs", "1", "--lr", LEARNING_RATE, "--device", self.device),
            *("--checkpoint", str(checkpoint)),
        ]
        _run(command)
        return {state: array for state, array in load_file(checkpoint).items() if array.dtype == np.float32}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")


def distances(one: States, other: States) -> tuple[float, float]:
    """Return the median and the largest distance of the states.

    A distance is the norm of the difference over the norm of the state.
    """
    assert one.keys() == other.keys()
    result = [
        float(np.linalg.norm((one[name].astype(np.float64) - other[name]).ravel()) / np.linalg.norm(one[name].ravel()))
        for name in one
        if np.any(one[name])
    ]
    return float(np.median(result)), max(result)


def compared(case: Case, ranks: int, steps: int, device: str) -> dict[str, Any]:
    """Return the row of a case."""
    with tempfile.TemporaryDirectory(prefix="mbc-ranks-") as folder:
        trainer = Trainer(case, Path(folder), device)
        trainer.source.write_text(case.job.source.text)
        data = trainer.data(steps)
        gpus = ("--gpus", str(ranks))
        with ThreadPoolExecutor() as pool:  # of compilers, which are processes
            whole = pool.submit(trainer.package, "whole")
            divided = pool.submit(trainer.package, "divided", "--micro-batch", str(case.batch // ranks))
            shared = pool.submit(trainer.package, "shared", *gpus)
            alone = pool.submit(trainer.package, "alone", *gpus, synchronised=False)
        one = trainer.states(whole.result(), data, "one")
        yardstick = trainer.states(divided.result(), data, "yardstick")
        first, second = (trainer.states(shared.result(), data, name, ranks) for name in ("first", "second"))
        apart = trainer.states(alone.result(), data, "apart", ranks)
        yard_median, yard_worst = distances(one, yardstick)
        median, worst = distances(one, first)
        same = all(first[name].tobytes() == second[name].tobytes() for name in first)
        return {
            "batch": case.batch,
            "median": median,
            "worst": worst,
            "yardstick_median": yard_median,
            "yardstick_worst": yard_worst,
            "apart_median": distances(one, apart)[0],
            "same_bits": same,
            "passed": same and median <= max(TIMES_YARDSTICK * yard_median, ROUNDING),
        }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if local_gpus() else "cpu")
    arguments = parser.parse_args()
    with ThreadPoolExecutor() as pool:  # of commands; nothing is timed
        rows = list(
            pool.map(
                lambda case: attempt(
                    lambda: compared(case, arguments.ranks, arguments.steps, arguments.device), case.name
                ),
                CASES,
            )
        )
    path = write("ranks_as_one", rows, device=arguments.device, ranks=arguments.ranks, steps=arguments.steps)
    columns = ["name", "median", "worst", "yardstick_median", "yardstick_worst", "apart_median", "same_bits", "passed"]
    show(rows, columns)
    print(path.name)


if __name__ == "__main__":
    start(main)
