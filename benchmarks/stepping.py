"""Training steps of built packages, timed one after another in another process, which uses the GPU alone.

The time of a step lies between two CUDA events, recorded before and after it while further steps are queued. The copies
of inputs from device memory count; the host's waiting does not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_STEPS = 2  # a module has run every launch once when it is open
SHORTEST_S = 0.25  # of warming up: clocks settle
LEARNING_RATE = 1e-4


def time_package(folder: Path, steps: int, digest_after: int = 0, cap_bytes: int = 0) -> dict[str, Any]:
    """Open the package, time `steps` steps, and return their median, interquartile range and the plan's prediction.

    `digest_after`: number of steps after which `states` gets a digest of all states (0: none). `cap_bytes`: bytes of
    GPU memory that stay free for the module beside the context; the rest is occupied.
    """
    from modules import open_module, random_inputs

    before = occupy(folder, cap_bytes) if cap_bytes else None
    with open_module(folder, "cuda") as module:
        # The context is current once the module is open.
        import pycuda.driver as driver  # pyright: ignore[reportMissingImports]
        from pycuda import gpuarray  # pyright: ignore[reportMissingImports]

        arrays = before.arrays if before else [gpuarray.to_gpu(array) for array in random_inputs(module.plan.graph)]
        states = ""
        for _ in range(digest_after):
            module.step(*arrays, lr=LEARNING_RATE)
        if digest_after:
            states = states_digest(module)
        started = time.perf_counter()
        done, loss = 0, math.nan
        while done < WARM_STEPS or time.perf_counter() - started < SHORTEST_S:
            loss = float(module.step(*arrays, lr=LEARNING_RATE))
            done += 1
        # The default stream is ordered with the module's.
        events = [driver.Event() for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            module.step(*arrays, lr=LEARNING_RATE)
            event.record()
        events[-1].synchronize()
        times = [after.time_since(before) for before, after in itertools.pairwise(events)]
        low, _, high = statistics.quantiles(times, n=4)
        predictions = module.plan.predictions
        return {
            "step_ms": statistics.median(times),
            "spread_ms": high - low,
            "steps": steps,
            "warm_loss": loss,
            "states": states,
            "predicted_ms": predictions.train_us / 1e3,
            "measured_share": predictions.measured_share,
            "arena_predicted": predictions.arena_bytes,
            "arena_taken": module.memory.arena_taken,
            "overhead_predicted": predictions.overhead_bytes,
            "overhead_taken": module.memory.overhead_taken,
        }


@dataclass(frozen=True)
class Occupied:
    """Inputs on the GPU, and an allocation that occupies the rest of its memory."""

    arrays: list[Any]
    ballast: Any


def occupy(folder: Path, cap_bytes: int) -> Occupied:
    """Leave `cap_bytes` of the GPU free, beside the context and the inputs of the package's steps."""
    from modules import random_inputs

    from mbc.measure.gpu import open_context
    from mbc.plan.file import PLAN_FILE, load_plan

    open_context()
    import pycuda.driver as driver  # pyright: ignore[reportMissingImports]
    from pycuda import gpuarray  # pyright: ignore[reportMissingImports]

    plan = load_plan((folder / PLAN_FILE).read_text(encoding="utf-8"), PLAN_FILE)
    arrays = [gpuarray.to_gpu(array) for array in random_inputs(plan.graph)]
    free_bytes, _ = driver.mem_get_info()
    if free_bytes < cap_bytes:
        raise RuntimeError(f"{free_bytes} bytes of the GPU are free, fewer than the cap of {cap_bytes}")
    return Occupied(arrays, driver.mem_alloc(max(1, free_bytes - cap_bytes)))


def states_digest(module: Any) -> str:
    """Return a digest of the bits of all states, by name."""
    digest = hashlib.sha256()
    for name in module.states:
        digest.update(name.encode())
        digest.update(module.state(name).tobytes())
    return digest.hexdigest()


def time_packages(
    folders: Mapping[str, Path], steps: int, digest_after: int = 0, timeout_s: float = 500.0, cap_bytes: int = 0
) -> dict[str, dict[str, Any]]:
    """Return the results of `time_package` by name of package, or `failed`.

    A package that ends the process does not stop the measurement of the others.
    """
    waiting = {name: str(folder) for name, folder in folders.items()}
    result: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline:
        request = json.dumps([waiting, steps, digest_after, cap_bytes])
        with subprocess.Popen(
            [sys.executable, __file__, "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin and process.stdout
            # Reading a line may wait for ever.
            late = threading.Timer(max(0.0, deadline - time.monotonic()), process.kill)
            late.start()
            process.stdin.write(request)
            process.stdin.close()
            for line in process.stdout:
                if line.startswith("{"):
                    row = json.loads(line)
                    name = row.pop("name")
                    result[name] = row
                    waiting.pop(name, None)
                    print(f"  {name}: {row.get('failed') or format(row['step_ms'], '.3f') + ' ms'}", flush=True)
            late.cancel()
        if waiting:
            # Names are timed in order: the first one left is that which ended the process, or was not done.
            name = next(iter(waiting))
            over = time.monotonic() >= deadline
            result[name] = {
                "failed": f"not done in {timeout_s:g} s" if over else f"the process ended with {process.returncode}"
            }
            waiting.pop(name)
    return {**result, **{name: {"failed": "not reached in the time allowed"} for name in waiting}}


def child() -> None:
    """Measure the packages that standard input names, in a process of its own."""
    from record import attempt

    folders, *how = json.loads(sys.stdin.read())
    for name, folder in folders.items():
        print(json.dumps(attempt(lambda f=folder: time_package(Path(f), *how), name)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] != ["--child"]:
        raise SystemExit("stepping.py is a part of other benchmarks")
    child()
