"""ResNet-50 fed from the host: bytes that are augmented within the step, against data that lie in the GPU's memory.

Three ways to take the same steps, each with the loss looked at a step later, as `mbc train` does:

* `floats resident`: the network of examples/resnet.mbc, its input in the GPU's memory;
* `bytes resident`: images of 256 x 256 bytes with crop, flip and normalisation, in the GPU's memory;
* `bytes from the host`: the same from NumPy arrays, another mini-batch each step: through pinned memory to the GPU.

What the last one loses against each of the others is the price of the input.

    python benchmarks/feeding.py [--batch 256] [--depth 50] [--steps 50] [--precision bf16] [--device cuda|cpu]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from record import ROOT, attempt, need_gpu, results, show

from mbc.codegen.build import write_package
from mbc.codegen.toolchain import find_toolchain
from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.runtime.module import Module
from mbc.source import Source

BATCHES = 4  # mini-batches that steps go through in turn
FLOATS = "input image[batch, 3, size, size] : float"
BYTES = """input photo[batch, size + 32, size + 32, 3] : uint8
  image = photo |> augment(crop=size, scale=(0.08, 1), flip=true, order=hwc,
                           mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))"""
COLUMNS = ("name", "step_ms", "images_per_s", "idle_ms")


def source(of_bytes: bool) -> Source:
    """The example, or the same with an input of bytes."""
    text = (ROOT / "examples" / "resnet.mbc").read_text(encoding="utf-8")
    assert FLOATS in text
    inputs = [line for line in text.splitlines() if line.strip().startswith("input ")]
    if of_bytes:
        image, *others = inputs
        photo, augmented = BYTES.split("\n", 1)
        text = text.replace("\n".join(inputs), "\n".join((f"  {photo}", *others, augmented)))
        assert image not in text
    return Source("resnet.mbc", text)


def mini_batches(net: Module, on_gpu: bool) -> list[tuple[Any, ...]]:
    draws = np.random.default_rng(0)
    graph = net.plan.graph
    found: list[tuple[Any, ...]] = []
    for _ in range(BATCHES):
        arrays: list[Any] = []
        for name in graph.inputs:
            kind = graph.values[name].type
            match kind.dtype.value:
                case "uint8":
                    array = draws.integers(0, 256, kind.shape, np.uint8)
                case "int32":
                    array = draws.integers(0, 10, kind.shape, np.int32)
                case _:
                    array = draws.standard_normal(kind.shape, np.float32)
            arrays.append(_resident(array) if on_gpu else array)
        found.append(tuple(arrays))
    return found


def _resident(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array).cuda()


def timed(net: Module, batches: Sequence[tuple[Any, ...]], steps: int) -> dict[str, Any]:
    """Milliseconds of a step, the median of ten parts of `steps`, and for how long the GPU had nothing to do."""
    parts, idle_s, last = [], 0.0, None
    for number in range(-max(1, steps // 10), 10):
        began, count = time.perf_counter(), max(1, steps // 10)
        for i in range(count):
            loss = net.step(*batches[i % len(batches)], lr=1e-3)
            if last is not None:
                float(last)
                idle_s += (last.idle_s or 0.0) if number >= 0 else 0.0
            last = loss
        if number >= 0:
            parts.append((time.perf_counter() - began) / count * 1e3)
    step_ms = statistics.median(parts)
    rows = net.plan.graph.batch
    return {
        "step_ms": round(step_ms, 3),
        "spread_ms": round(max(parts) - min(parts), 3),
        "images_per_s": round(rows / step_ms * 1e3),
        "idle_ms": round(idle_s * 1e3 / (10 * max(1, steps // 10)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: that of this machine)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        need_gpu("--device cpu shows that it runs")
    told = {"batch": arguments.batch, "depth": arguments.depth, "size": arguments.size}
    settings = (*((name, str(value)) for name, value in told.items()), ("train.precision", arguments.precision))
    found = results("feeding", settings=dict(settings))
    with tempfile.TemporaryDirectory() as folder:
        for of_bytes in (False, True):
            plan = compile_plan(source(of_bytes), Options(gpu=arguments.gpu, settings=settings))
            place = Path(folder) / ("bytes" if of_bytes else "floats")
            write_package((plan,), place, find_toolchain())
            ways = (("bytes resident", True), ("bytes from the host", False))
            for name, resident in ways if of_bytes else (("floats resident", True),):

                def work(resident: bool = resident, place: Path = place) -> dict[str, Any]:
                    with Module(place, seed=0, device=arguments.device) as net:
                        there = mini_batches(net, resident and arguments.device == "cuda")
                        return timed(net, there, arguments.steps)

                found.put(attempt(work, name))
    rows = list(found.rows.values())
    show(rows, COLUMNS)
    times = {row["name"]: row.get("step_ms") for row in rows}
    host = times.get("bytes from the host")
    for name, step_ms in times.items():
        if host and step_ms and name != "bytes from the host":
            print(f"bytes from the host reach {step_ms / host:.1%} of the speed of {name}")


if __name__ == "__main__":
    main()
