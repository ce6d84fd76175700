"""Predicted steps of the examples, unchanged and beside their rooflines and floors. Needs no GPU.

All plans are made with the bundled profile, by `mbc show --roofline --json`.

    python benchmarks/planned_steps.py [--only NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from record import ROOT, attempt, results, show, start

from mbc.cli import main as mbc

FP32_FLOPS_PER_US = 60e6  # of an H200's fp32 units
STRICT = "not emulated"


def cases() -> dict[str, tuple[str, ...]]:
    """Return the arguments of `mbc show` for each case, by name."""
    described = {
        "alexnet 256 bf16": "alexnet", "alexnet 256 fp32": "alexnet", "alexnet_caffe 512 fp32": "alexnet_caffe",
        "vgg16 64 fp32": "vgg16", "vgg16 128 bf16": "vgg16", "unet 16 bf16": "unet",
        "densenet121 128 bf16": "densenet121", "googlenet 256 bf16": "googlenet",
        "resnet18 256 fp32": "resnet", "resnet50 128 fp32": "resnet", "resnet50 256 bf16": "resnet",
        "resnet50 256 fp16": "resnet", "resnet50 256 tf32": "resnet", "resnet152 128 bf16": "resnet",
    }  # fmt: skip
    described |= {f"resnet{depth} {batch} bf16": "resnet" for depth in (18, 50) for batch in (1, 8, 32)}
    arguments_of: dict[str, tuple[str, ...]] = {}
    for name, example in described.items():
        network, batch, precision = name.split()
        settings = [f"batch={batch}", f"train.precision={precision}"]
        settings += [f"depth={network.removeprefix('resnet')}"] * (example == "resnet")
        arguments = [str(ROOT / "examples" / f"{example}.mbc"), *(word for s in settings for word in ("--set", s))]
        arguments_of[name] = tuple(arguments)
    for name in ("resnet18 256 fp32", "resnet50 128 fp32", "vgg16 64 fp32"):
        arguments_of[f"{name} {STRICT}"] = (*arguments_of[name], "--set", "train.allow_emulated_fp32=false")
    return arguments_of


def as_they_stand() -> dict[str, str]:
    """Return the unchanged sources of all examples by the names of their rows."""
    folder = ROOT / "examples"
    sources = [folder / "01_digits" / "net.mbc", *sorted(folder.glob("*.mbc"))]
    return {f"{source.relative_to(folder).as_posix()} as it stands": str(source) for source in sources}


def shown(*arguments: str) -> dict[str, Any]:
    """Return the output of `mbc show --json` for a plan on an H200."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = mbc(["show", *arguments, "--gpu", "h200", "--json"])
    if code:
        raise RuntimeError(f"mbc show ended with {code}")
    return json.loads(printed.getvalue())


def taken(source: str) -> dict[str, Any]:
    """Return the predicted step of a source, in milliseconds, and the bytes of GPU memory that its plan takes."""
    plan = shown(source)
    predictions = plan["predictions"]
    bytes_taken = predictions["arena_bytes"] + predictions["overhead_bytes"] + plan["prefetch_bytes"]
    return {"step_ms": predictions["train_us"] / 1e3, "batch": plan["batch"], "taken_bytes": bytes_taken}


def planned(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the predicted step of a network on an H200, its limits and its floor, in milliseconds."""
    roofline = shown(*arguments, "--roofline")
    products = [kind for kind in roofline["kinds"] if "convolution" in kind["kind"]]
    in_fp32_units = sum(max(o["memory_us"], o["flops"] / FP32_FLOPS_PER_US) for o in roofline["operations"])
    return {
        "step_ms": roofline["time_us"] / 1e3,
        "limit_ms": roofline["limit_us"] / 1e3,
        "fp32_units_limit_ms": in_fp32_units / 1e3,
        "floor_ms": roofline["floor"]["total_us"] / 1e3,
        "launches": roofline["launches"],
        "gaps_us": roofline["launches"] * roofline["ceilings"]["launch_us"],
        "convolutions_us": sum(kind["time_us"] for kind in products),
        "convolutions_limit_us": sum(kind["limit_us"] for kind in products),
        "measured_share": sum(o["time_us"] for o in roofline["operations"] if not o["estimated"]) / roofline["time_us"],
        "longest": [[o["name"], o["time_us"]] for o in sorted(roofline["operations"], key=lambda o: -o["time_us"])[:3]],
    }


def main() -> None:
    """Plan each case that the results lack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names contain one of these")
    parser.add_argument("--again", action="store_true", help="plan also what the results have")
    arguments = parser.parse_args()
    steps = results("planned_steps", again=arguments.again, planned_for="h200")
    work: dict[str, Callable[[], dict[str, Any]]] = {name: partial(planned, words) for name, words in cases().items()}
    work |= {name: partial(taken, source) for name, source in as_they_stand().items()}
    for name, make in work.items():
        if any(only in name for only in arguments.only) and not steps.done(name):
            steps.put(attempt(make, name))
    show(list(steps.rows.values()), ["name", "step_ms", "limit_ms", "floor_ms", "launches"])


if __name__ == "__main__":
    start(main)
