"""The mini-batches that `mbc tune` proposes for ResNet-152 in fp32 within 12e9 bytes, beside PyTorch's largest.

A row is one mini-batch of the ladder on one GPU; those on two are planned only. Its step runs with the rest of the card
occupied. PyTorch (eager, and compiled), in a process of its own, has what its context leaves of the same bytes: its
allocator takes no more. Its mini-batches are tried in steps of 4 (compiled: of 8), its segments can grow, and its
kernels are chosen by trial (`cudnn.benchmark`). `times_batch` and `times_speed` are over the PyTorch that trains the
larger mini-batch, and over the faster one.

    python benchmarks/tuned_batch.py --plan-only
    python benchmarks/tuned_batch.py [--steps 20] [--workers 8]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ahead import Task, add_arguments, drive
from cap import stepped
from modules import Job, example
from planner import Planner, Wanted
from record import RESULTS, ROOT, start
from resnet50_vs_torch import timed

NAME, BUDGET_BYTES, BASE_BATCH, GPUS = "tuned_batch", 12 * 10**9, 32, 2
SETTINGS = (("depth", "152"), ("train.precision", "fp32"))
MULTIPLE, COMPILED_STEP, COMPILED_AT_ONCE = 4, 8, 5  # of PyTorch's mini-batches; compiling one takes a minute
LEAST_TIMES_BATCH = 8.0  # asked for, at no lower images/s
TIMEOUT_S = 400.0
COLUMNS = (
    "name", "predicted_ms", "step_ms", "images_s", "counted_gb", "host_gb", "torch_batch", "torch_images_s",
    "times_batch", "times_speed", "passed",
)  # fmt: skip


def tuned(gpu: str) -> dict[str, Any]:
    """The whole table of `mbc tune`, by plans alone."""
    settings = (
        word for name, value in (*SETTINGS, ("batch", str(BASE_BATCH))) for word in ("--set", f"{name}={value}")
    )
    words = (
        "tune", "examples/resnet.mbc", *settings, "--memory", f"{BUDGET_BYTES}B", "--gpu", gpu, "--gpus", str(GPUS),
        "--dry-run", "--json",
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "mbc.cli", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def ladder(arguments: argparse.Namespace) -> tuple[list[int], list[dict[str, Any]]]:
    """Mini-batches that fit on one GPU, and the rows of several GPUs; those that were found before where steps run."""
    planned = RESULTS / f"{NAME}_planned.json"
    if not arguments.plan_only and planned.exists():
        there = json.loads(planned.read_text(encoding="utf-8"))
        return [row["batch"] for row in there["rows"] if "batch" in row], there["on_several"]
    rows = [row for row in tuned(arguments.gpu)["rows"] if row["fits"]]
    alone = [row["batch"] for row in rows if row["gpus"] == 1]
    return sorted(alone, reverse=True), [row for row in rows if row["gpus"] > 1]


def prepared(planner: Planner, batch: int, name: str) -> dict[str, Any]:
    cap_bytes = BUDGET_BYTES - planner.card.context_bytes
    job = planner.card.capped(resnet(batch), cap_bytes)
    row = planner.keep(name, "step", Wanted.of(job))
    return row if "failed" in row else row | {"plans": {"step": cap_bytes}}


def resnet(batch: int) -> Job:
    return example("resnet", *SETTINGS, ("batch", str(batch)))


def measured(
    row: dict[str, Any], steps: Mapping[str, dict[str, Any]], peers: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    row |= stepped(row, steps["step"])
    if "failed" in row or not peers:
        return row
    torch_batch = max(peer["batch"] for peer in peers.values())
    torch_images_s = max(peer["images_s"] for peer in peers.values())
    row |= {"torch_batch": torch_batch, "torch_images_s": torch_images_s}
    row |= {"times_batch": row["batch"] / torch_batch, "times_speed": row["images_s"] / torch_images_s}
    row["passed"] = row["times_batch"] >= LEAST_TIMES_BATCH and row["times_speed"] >= 1
    return row


def peers(steps: int) -> dict[str, dict[str, Any]]:
    """PyTorch's largest mini-batches and their images/s, by how it runs."""
    eager = child({"compiled": False, "batches": "climb", "steps": steps})
    print(eager)
    found, fits, tried = {"eager": eager}, [eager["batch"]], [eager["batch"]]  # compiled is not tried below eager
    while fits == tried:  # compiled side by side, which is work of the host
        tried = [max(tried) + COMPILED_STEP * (1 + i) for i in range(COMPILED_AT_ONCE)]
        ask = [{"compiled": True, "batches": [one], "steps": 0, "limit": eager["limit"]} for one in tried]
        with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
            fits = [one for one, told in zip(tried, pool.map(child, ask), strict=True) if told["batch"]] or fits
    largest = {"compiled": True, "batches": [max(fits)], "steps": steps, "limit": eager["limit"]}
    compiled = child(largest)
    print(compiled)
    return found | ({"compiled": compiled} if compiled["batch"] else {})


def child(asked: Mapping[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, __file__, "--child", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-5:]))
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_torch(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The largest of `batches` that fits (0: none), or of all multiples; its images/s where there are `steps`."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn import functional as F  # pyright: ignore[reportMissingImports]
    from torchvision.models import resnet152  # pyright: ignore[reportMissingImports]

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model = resnet152(weights=None).cuda().to(memory_format=torch.channels_last).train()
    rule = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4)
    run = torch.compile(model) if asked["compiled"] else model

    def step(images: Any, labels: Any) -> None:
        rule.zero_grad(set_to_none=True)
        F.cross_entropy(run(images), labels).backward()
        rule.step()

    def inputs(batch: int) -> tuple[Any, Any]:
        images = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
        return images, torch.randint(0, 1000, (batch,), device="cuda")

    def trains(batch: int) -> bool:
        try:
            for _ in range(2):  # the second has the optimizer's states
                step(*inputs(batch))
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            rule.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        return True

    limit = asked.get("limit")
    if limit is None:  # alone on the GPU: what the context and libraries have taken
        assert trains(MULTIPLE)
        free, total = torch.cuda.mem_get_info()
        limit = BUDGET_BYTES - (total - free - torch.cuda.memory_reserved())
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    if asked["batches"] == "climb":
        largest = MULTIPLE
        while trains(largest + MULTIPLE):
            largest += MULTIPLE
    else:
        largest = max([batch for batch in asked["batches"] if trains(batch)], default=0)
    told: dict[str, Any] = {"batch": largest, "limit": limit, "torch": torch.__version__}
    if asked["steps"] and largest:
        given = inputs(largest)
        torch.cuda.reset_peak_memory_stats()
        told |= timed(lambda: step(*given), torch.cuda.synchronize, asked["steps"])
        told["images_s"] = largest * 1e3 / told["through_ms"]
        told["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(run_torch(json.loads(arguments.child))))
        return
    batches, on_several = ladder(arguments)
    others = {} if arguments.plan_only else peers(arguments.steps)
    tasks = [
        Task(name, partial(prepared, batch=batch, name=name), partial(measured, peers=others))
        for batch in batches
        for name in [f"batch {batch}"]
    ]
    more = {"budget_bytes": BUDGET_BYTES, "on_several": on_several, **({"peers": others} if others else {})}
    drive(NAME, tasks, COLUMNS, arguments, **more)


if __name__ == "__main__":
    start(main)
