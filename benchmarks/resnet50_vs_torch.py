"""A training step of ResNet-50 by mbc and by PyTorch eager, side by side on one GPU.

Every variant runs in a process of its own, one after the other. PyTorch in fp32 runs twice: on cuDNN's graph API, its
default, and on the legacy API (TORCH_CUDNN_V8_API_DISABLED=1), whose fp32 convolutions are faster on some networks;
bf16 is autocast with channels_last. Inputs are on the GPU; forward, backward and SGD with momentum are timed.

    python benchmarks/resnet50_vs_torch.py [--batch 128] [--steps 30] [--precisions fp32,tf32,bf16] [--depth 50]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import attempt, show, write

WARM_STEPS = 10
TIMEOUT_S = 400.0


def timed(step: Callable[[], None], wait: Callable[[], object], steps: int) -> dict[str, Any]:
    """Median of steps waited for one by one, and the mean of steps enqueued without waiting."""
    for _ in range(WARM_STEPS):
        step()
    wait()
    each: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        wait()
        each.append((time.perf_counter() - started) * 1e3)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    through = (time.perf_counter() - started) * 1e3 / steps
    return {"median_ms": statistics.median(each), "through_ms": through, "least_ms": min(each)}


def run_torch(precision: str, batch: int, network: str, steps: int) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn import functional as F  # pyright: ignore[reportMissingImports]
    from torchvision.models import get_model  # pyright: ignore[reportMissingImports]

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    half = precision in ("bf16", "fp16")
    layout = torch.channels_last if half else torch.contiguous_format
    model = get_model(network, weights=None).cuda().to(memory_format=layout).train()
    rule = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    images = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=layout)
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16

    def step() -> None:
        rule.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype, enabled=half):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(rule)
        scaler.update()

    found = timed(step, torch.cuda.synchronize, steps)
    free, total = torch.cuda.mem_get_info()
    return {
        **found,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "device_bytes": total - free,
        "cudnn": torch.backends.cudnn.version(),
    }


def run_mbc(precision: str, batch: int, network: str, steps: int) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from modules import build, example, open_module

    depth = network.removeprefix("resnet")
    job = example("resnet", ("depth", depth), ("batch", str(batch)), ("train.precision", precision))
    with tempfile.TemporaryDirectory() as folder:
        built = build(job, Path(folder) / "package")
        if built.failed:
            raise RuntimeError(built.failed)
        module = open_module(built.folder, "cuda")
        images = torch.randn(batch, 3, 224, 224, device="cuda")
        labels = torch.randint(0, 1000, (batch,), device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()
        last: list[Any] = []

        def step() -> None:
            last[:] = [module.step(images, labels, lr=0.01)]

        found = timed(step, lambda: float(last[0]), steps)
        predictions = module.plan.predictions
        free, total = torch.cuda.mem_get_info()
        return {
            **found,
            "peak_bytes": predictions.arena_bytes,
            "device_bytes": total - free,
            "predicted_ms": predictions.train_us / 1e3,
            "measured_share": predictions.measured_share,
            "overhead_predicted_bytes": predictions.overhead_bytes,
            "overhead_taken_bytes": module.memory.overhead_taken,
            "plan_s": built.plan_s,
            "build_s": built.build_s,
        }


def child(who: str, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one variant in a process of its own; its last line is the result."""
    environment = dict(os.environ)
    if who == "torch legacy":
        environment["TORCH_CUDNN_V8_API_DISABLED"] = "1"
    command = [sys.executable, __file__, "--child", who.split()[0], "--precisions", precision]
    command += ["--batch", str(arguments.batch), "--steps", str(arguments.steps), "--depth", str(arguments.depth)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    rate = arguments.batch / found["median_ms"] * 1e3
    return {**found, "who": who, "precision": precision, "images_s": rate, "peak_gib": found["peak_bytes"] / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--precisions", default="fp32,tf32,bf16")
    parser.add_argument("--child", choices=("torch", "mbc"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run = run_torch if arguments.child == "torch" else run_mbc
        print(json.dumps(run(arguments.precisions, arguments.batch, f"resnet{arguments.depth}", arguments.steps)))
        return
    rows: list[dict[str, Any]] = []
    for precision in arguments.precisions.split(","):
        peers = ["mbc", "torch", *(["torch legacy"] if precision == "fp32" else [])]
        found = [attempt(lambda who=who, p=precision: child(who, p, arguments), f"{who} {precision}") for who in peers]
        best = min((r["median_ms"] for r in found[1:] if "median_ms" in r), default=None)
        for row in found:
            if best and "median_ms" in row:
                row["times_faster_than_best_torch"] = best / row["median_ms"]
        rows += found
    path = write(f"resnet{arguments.depth}_vs_torch_{arguments.batch}", rows, batch=arguments.batch)
    columns = [
        "name",
        "median_ms",
        "through_ms",
        "images_s",
        "peak_gib",
        "predicted_ms",
        "times_faster_than_best_torch",
    ]
    show(rows, columns)
    print(path.name)


if __name__ == "__main__":
    main()
