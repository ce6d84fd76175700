"""Errors of the forward pass of imported networks on a GPU: mbc's and torch's in fp32, both against float64.

The networks are those of `imported.py`, and its two networks with attention. They have random weights and statistics
and run in evaluation mode. torch computes fp32 on the same GPU, without TF32. A network passes if mbc's error is at
most twice torch's. Nothing is measured: kernels are chosen by the existing profiles. Each network is a process of its
own, several side by side on the GPU.

    python benchmarks/imported_cuda.py [--only NAME,NAME] [--for SECONDS] [--processes 8] [--limit 120]
    python benchmarks/imported_cuda.py --device cpu --only timm/resnet18

Rows are written one by one; another call continues with those that are missing or failed. No row begins after the
seconds of `--for`. With `--device cpu` the interpreter takes the GPU's place, which rehearses the run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gradients import TIMES_TORCH
from imported import ATTENTION, NETWORKS, distance, evaluated, exported, prepared, size_of
from record import Results, attempt, build_kernels, need_gpu, results, show, start

from mbc.compiler import compile_plan, compile_source
from mbc.interchange.importing import ImportedModel
from mbc.ops.base import Array
from mbc.options import Measure, Options
from mbc.runtime.module import Module
from mbc.source import Source

MEMORY = "6GB"  # of each: they share the GPU
BATCH = 2
COLUMNS = ("name", "error", "torch_error", "times_torch")


def errors(name: str, size: int, device: str) -> dict[str, Any]:
    """Return mbc's and torch's errors in fp32, relative to the norm of torch's result in float64."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    network = prepared(name)
    size = size_of(name, size)
    images = torch.randn(BATCH, 3, size, size)
    created = exported(network, name, images)
    result = forward(created, images.numpy(), device)
    network, images = network.to(device), images.to(device)
    single = evaluated(network, images)
    exact = evaluated(network.double(), images.double())
    if not exact.any():
        raise RuntimeError("torch's result is 0 everywhere, beside which nothing can be compared")
    ours, theirs = distance(result, exact), distance(single, exact)
    return {"error": ours, "torch_error": theirs, "times_torch": ours / theirs, "size": size}


def forward(imported_model: ImportedModel, images: Array, device: str) -> Array:
    """Return the first output of mbc's inference program, in fp32."""
    settings = (("memory.device", MEMORY), ("train.precision", "fp32"))
    source = Source("imported.mbc", imported_model.source)
    with tempfile.TemporaryDirectory() as folder:
        if device == "cpu":
            module = Module(compile_plan(source, Options("h200", settings)), 0, device)
        else:
            options = Options(settings=settings, measure=Measure.NEVER)
            module = Module(compile_source(source, options, Path(folder) / "imported").package.folder, 0, device)
        with module:
            module.load_state_dict(imported_model.network.arrays)
            outputs = module.forward(images)
    return outputs[0] if isinstance(outputs, tuple) else outputs


def of_process(name: str, size: int, device: str, limit_s: float) -> dict[str, Any]:
    """Return the errors of a network, computed in a process of its own."""
    command = [sys.executable, __file__, "--alone", "--only", name, "--size", str(size), "--device", device]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compiler that it waits for
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError("\n".join(said.strip().splitlines()[-6:]) or f"exit code {process.returncode}")
    return json.loads(out.strip().splitlines()[-1])


def compare(
    kept: Results, names: Sequence[str], size: int, device: str, limit_s: float, at_once: int, until: float
) -> None:
    """Write a row for each network that has none, `at_once` networks side by side; none begins after `until`."""

    def row(name: str) -> dict[str, Any] | None:
        return attempt(lambda: of_process(name, size, device, limit_s), name) if time.monotonic() < until else None

    with ThreadPoolExecutor(at_once) as pool:
        for done in as_completed([pool.submit(row, name) for name in names if not kept.done(name)]):
            if errors_row := done.result():
                kept.put(errors_row)
                show([errors_row], COLUMNS)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names with their family, such as timm/resnet50")
    parser.add_argument("--size", type=int, default=96, help="of the images (default 96)")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="begin no row later")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a network may take (default 120)")
    parser.add_argument("--processes", type=int, default=8, help="side by side (default 8)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--again", action="store_true", help="take none of the rows that are there")
    parser.add_argument("--alone", action="store_true", help="one network in this process, printed as JSON")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.alone:
        print(json.dumps(errors(arguments.only, arguments.size, arguments.device)))
        return
    until = time.monotonic() + arguments.seconds
    names = arguments.only.split(",") if arguments.only else [*NETWORKS, *ATTENTION]
    if arguments.device == "cuda":
        need_gpu("rehearse by --device cpu")
        build_kernels("fp32")
    kept = results(f"imported_{arguments.device}", again=arguments.again, size=arguments.size)
    compare(kept, names, arguments.size, arguments.device, arguments.limit, arguments.processes, until)
    rows = [row for row in kept.rows.values() if "failed" not in row]
    within = sum(row["times_torch"] <= TIMES_TORCH for row in rows)
    kept.more |= {"within_rule": within, "of": len(rows), "failed": len(kept.rows) - len(rows)}
    kept.arrange(names)
    show(list(kept.rows.values()), COLUMNS)
    print(f"{within} of {len(rows)} networks at most {TIMES_TORCH} times as far from float64 as torch")


if __name__ == "__main__":
    start(main)
