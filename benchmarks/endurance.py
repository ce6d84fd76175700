"""Long trainings: 100,000 steps of the digits and 5,000 of ResNet-18 in the training loop of `mbc train`.

The trainings write checkpoints, evaluate and prefetch. A training passes under these conditions:

* From the second tenth of the steps on, the process holds the same number of bytes of GPU memory.
* The median step of the last tenth takes at most 2 % longer than that of the second tenth.
* Every loss is finite.
* Host memory grows by at most 1 % of its size.

On a CPU the steps are interpreted; memory and losses are judged, and times are only reported.

    python benchmarks/endurance.py [--device cuda|cpu] [--only NAME ...] [--share 1.0] [--again]
    python benchmarks/endurance.py --device cpu --share 0.001     a rehearsal
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from modules import build, example, open_module
from record import attempt, need_gpu, results, show, start

from mbc.ir.graph import TrainingGraph
from mbc.ir.types import DType
from mbc.train.data import ArrayData
from mbc.train.epoch import Epoch, Interval
from mbc.train.job import Job
from mbc.train.loop import train
from mbc.train.schedule import Schedule

SAMPLES = 100  # of time and memory, over all steps
DRIFT = 0.02
HOST_GROWTH = 0.01


@dataclass(frozen=True)
class Case:
    """A network, its settings on a GPU, and its steps in epochs.

    After each epoch come a test on as many rows as `test_steps` steps take, and a checkpoint.
    """

    network: str
    settings: tuple[tuple[str, str], ...]
    steps: int
    epoch_steps: int
    test_steps: int


CASES = {
    "digits": Case("digits", (), 100_000, 200, 20),
    "resnet18": Case("resnet", (("batch", "32"), ("train.precision", "bf16")), 5_000, 50, 10),
}
SMALLER = {"resnet": (("batch", "4"), ("width", "8"), ("size", "64"), ("classes", "10")), "digits": ()}  # interpreted


@dataclass(frozen=True)
class Sample:
    """Figures after an interval of steps. `device_bytes`: GPU memory of this process, or None if it cannot be read."""

    step: int
    step_us: float
    device_bytes: int | None
    host_bytes: int


def data_of(graph: TrainingGraph, rows: int, seed: int) -> ArrayData:
    """Return normally distributed images, and labels of the first two classes, which every network has."""
    random = np.random.default_rng(seed)
    arrays: list[np.ndarray] = []
    for name in graph.inputs:
        kind = graph.values[name].type
        shape = (rows, *kind.shape[1:])
        if kind.dtype is DType.INT32:
            arrays.append(random.integers(0, 2, shape).astype(np.int32))
        else:
            arrays.append(random.standard_normal(shape, np.float32))
    return ArrayData(tuple(arrays))


def host_bytes() -> int:
    """Return the host memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def run_case(name: str, device: str, gpu: str, share: float) -> dict[str, Any]:
    """Compile and train one network in this process."""
    case = CASES[name]
    steps = max(20, round(case.steps * share))
    case = replace(case, epoch_steps=min(case.epoch_steps, steps // 10))  # epochs enough to see memory stay
    epochs = steps // case.epoch_steps
    job = example(case.network, *case.settings, *(SMALLER[case.network] if device == "cpu" else ()))
    with tempfile.TemporaryDirectory(prefix="mbc-endurance-") as temporary:
        folder = Path(temporary)
        place: Any = folder / "package"
        if device == "cuda":
            built = build(job, place)
            if built.failed:
                raise RuntimeError(built.failed)
        else:
            place = replace(job, gpu=gpu).plan()
        before = usage(device)
        with open_module(place, device) as net:
            return trained(net, case, epochs, folder / "w.safetensors", device, before)


def trained(net: Any, case: Case, epochs: int, checkpoint: Path, device: str, before: Any) -> dict[str, Any]:
    """Return the row of one training."""
    graph = net.plan.graph
    samples: list[Sample] = []
    losses: list[float] = []
    steps = epochs * case.epoch_steps

    def on_interval(now: Interval) -> None:
        losses.append(now.loss)
        step_us = now.seconds / now.steps * 1e6
        samples.append(Sample(now.total_steps, step_us, device_bytes(before, device), host_bytes()))

    def on_epoch(now: Epoch) -> None:
        losses.append(now.loss)

    interval = max(1, min(case.epoch_steps, steps // SAMPLES))
    began_s = time.monotonic()
    train(
        net,
        Job(
            graph, data_of(graph, case.epoch_steps * graph.batch, 1), Schedule(0.01, epochs),
            data_of(graph, case.test_steps * graph.batch, 2), checkpoint=checkpoint, interval=interval,
        ),
        on_epoch=on_epoch, on_interval=on_interval,
    )  # fmt: skip
    row = judged(samples, device == "cuda")
    finite = all(math.isfinite(loss) for loss in losses)
    seconds = round(time.monotonic() - began_s, 1)
    written = checkpoint.stat().st_size
    return {"steps": steps, "epochs": epochs, "seconds": seconds, "checkpoint_bytes": written, **row, "finite": finite,
            "last_loss": losses[-1], "passed": row["passed"] and finite}  # fmt: skip


def judged(samples: list[Sample], on_gpu: bool) -> dict[str, Any]:
    """Return the verdicts on the samples. The first tenth of the steps is warm-up and does not count."""
    tenth = max(1, len(samples) // 10)
    steady = samples[tenth:]
    first, last = steady[:tenth], steady[-tenth:]
    drift = median(s.step_us for s in last) / median(s.step_us for s in first) - 1
    taken = [s.device_bytes for s in steady if s.device_bytes is not None]
    device_grown = max(taken) - min(taken) if taken else None
    host_grown = last[-1].host_bytes - first[0].host_bytes
    grows = host_grown > HOST_GROWTH * first[0].host_bytes
    flat = device_grown == 0 if on_gpu else True
    return {
        "samples": len(samples), "step_us": median(s.step_us for s in steady), "drift": drift,
        "device_bytes": taken[-1] if taken else None, "device_grown_bytes": device_grown,
        "host_bytes": last[-1].host_bytes, "host_grown_bytes": host_grown,
        "passed": flat and not grows and (drift <= DRIFT or not on_gpu),
    }  # fmt: skip


def usage(device: str) -> Any:
    """Return a function that reads the GPU memory in use, or None on a CPU."""
    if device != "cuda":
        return None
    from mbc.runtime.driver import open_driver
    from mbc.runtime.usage import usage_of

    return usage_of(open_driver().Device(0).pci_bus_id())


def device_bytes(before: Any, device: str) -> int | None:
    """Return the GPU memory that this process has taken since `before`, or None on a CPU."""
    if before is None:
        return None
    from mbc.runtime.usage import taken_since

    return taken_since(before, usage(device))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpu", default="h200", help="what a plan that is interpreted is for")
    parser.add_argument("--only", nargs="*", default=[], choices=list(CASES), metavar="NAME")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps")
    parser.add_argument("--again", action="store_true", help="not only what is missing")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        need_gpu("--device cpu --share 0.001 rehearses it")
    held = results("endurance", arguments.again, current=True, device=arguments.device, share=arguments.share)
    wanted = arguments.only or list(CASES)
    for name in wanted:
        if held.done(name):
            continue
        # A process of its own: what it takes of memory is of this network.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            done = pool.submit(run_case, name, arguments.device, arguments.gpu, arguments.share)
            held.put(attempt(done.result, name))
    show(
        [held.rows[name] for name in wanted],
        ["name", "steps", "seconds", "step_us", "drift", "device_grown_bytes", "host_grown_bytes", "last_loss",
         "passed"],
    )  # fmt: skip
    if not all(held.rows[name].get("passed") for name in wanted):
        raise SystemExit("not all keep the rule")


if __name__ == "__main__":
    start(main)
