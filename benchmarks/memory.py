"""Device memory of every example: the bytes that the plan predicts and the bytes that the module takes.

Canaries surround the arena, and two steps and a forward pass run: nothing may be written outside the arena, and the
module may take no other memory. The overhead is the memory in use beside the arena, as NVML reports it. Each example
runs in a process of its own on an otherwise idle GPU. `--profile` records the overheads, which calibrates later plans.

    python benchmarks/memory.py [--precision fp32] [--only NAME ...] [--profile FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from own_process import result_of
from record import attempt, show, write

TIMEOUT_S = 400.0
WITHIN_BYTES = 50_000_000


def used_bytes() -> int:
    """Return the memory in use on the first GPU by all processes. NVML reports it without a context of this process."""
    from mbc.runtime import nvml
    from mbc.runtime.driver import open_driver

    used = nvml.used_bytes(open_driver().Device(0).pci_bus_id())
    if used is None:
        raise RuntimeError("NVML does not say how much of the GPU's memory is in use")
    return used


def run(folder: str) -> dict[str, Any]:
    """Run one package in this process."""
    from modules import open_module, random_inputs

    before = used_bytes()
    module = open_module(Path(folder), "cuda", canaries=True)
    opened = used_bytes()
    graph = module.plan.graph
    inputs = random_inputs(graph)
    module.step(*inputs, lr=1e-4)
    loss = float(module.step(*inputs, lr=1e-4))
    module.forward(*(inputs[graph.inputs.index(name)] for name in graph.infer_inputs))
    module.check_canaries()
    after = used_bytes()
    memory = module.memory
    predictions = module.plan.predictions
    seen = after - before - memory.arena_taken
    return {
        "loss": loss,
        "arena_predicted": predictions.arena_bytes,
        "arena_taken": memory.arena_taken,
        "overhead_predicted": predictions.overhead_bytes,
        "overhead_measured_before": predictions.overhead_measured,
        "overhead_reported": memory.overhead_taken,
        "overhead_seen": seen,
        "after_opening": after - opened,
        "canaries": "intact",
    }


def libraries() -> dict[str, int]:
    """Return the memory of a bare context, and of one with cuDNN. This process must not have used CUDA before."""
    from mbc.measure.gpu import Gpu, open_context

    before = used_bytes()
    open_context()
    context_bytes = used_bytes() - before
    with Gpu(memory_share=0.0):
        return {"context": context_bytes, "libraries": used_bytes() - before}


def apart(*folder: str) -> dict[str, Any]:
    """Call `run` on the package in a folder, or `libraries` without a folder, in a process of its own."""
    return result_of([__file__, "--child", json.dumps(folder)], TIMEOUT_S)


def record(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the measured overheads into a profile, which is made if it does not exist."""
    from mbc.measure.gpu import Gpu
    from mbc.measure.measure import identity
    from mbc.profile.model import Overhead
    from mbc.profile.writer import ProfileWriter

    with Gpu(memory_share=0.0) as gpu:
        here = identity(gpu)
    with ProfileWriter(path, here) as writer:
        for row in rows:
            if "overhead_seen" in row:
                writer.record_overhead(Overhead("step", row["name"], row["overhead_seen"]))
            for what in ("context", "libraries"):
                if what in row:
                    writer.record_overhead(Overhead(what, "", row[what]))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", help="instead of each example's own")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder = json.loads(arguments.child)
        print(json.dumps(run(*folder) if folder else libraries()))
        return
    from modules import Built, build_all, examples

    settings = [("train.precision", arguments.precision)]
    if arguments.batch:
        settings.append(("batch", arguments.batch))
    jobs = [job.with_settings(*settings) for job in examples() if not arguments.only or job.name in arguments.only]

    def measured(built: Built) -> dict[str, Any]:
        if built.failed:
            raise RuntimeError(built.failed)
        return apart(str(built.folder))

    rows = [attempt(apart, "context and libraries")]
    with tempfile.TemporaryDirectory() as folder:
        for built in build_all([(job, Path(folder) / job.name) for job in jobs], os.cpu_count() or 1):
            rows.append(attempt(lambda b=built: measured(b), built.job.name))
    seen = [row["overhead_seen"] for row in rows if "overhead_seen" in row]
    # One figure is reserved for all networks of a GPU: the median of the measured ones is nearest to most.
    calibration = (max(seen) + min(seen)) // 2 if seen else 0
    for row in rows:
        if "overhead_seen" in row:
            row["arena_equal"] = row["arena_predicted"] == row["arena_taken"]
            row["off_calibration"] = row["overhead_seen"] - calibration
            row["passed"] = bool(row["arena_equal"] and abs(row["off_calibration"]) <= WITHIN_BYTES)
    if arguments.profile:
        rows.append(attempt(lambda: record(arguments.profile, rows) or {}, "record"))
    path = write(f"memory_{arguments.precision}", rows, calibration_bytes=calibration)
    show(
        rows,
        ["name", "context", "libraries", "arena_predicted", "arena_taken", "overhead_predicted", "overhead_reported",
         "overhead_seen", "off_calibration", "canaries", "passed"],
    )  # fmt: skip
    print(f"overhead_bytes for the device spec: {calibration}; {path.name}")


if __name__ == "__main__":
    main()
