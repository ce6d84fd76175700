"""SuperNeurons' staircase: Caffe's AlexNet at batch 200, its memory counted as the paper counts it, and mbc's plans
counted the same way beside.

First the paper's techniques one after another (`superneurons.py`), with the peaks it publishes. Then mbc: its plan
without a limit, and the fastest one found that counts at most --target. The count leaves out parameters, optimizer
state, their gradients and the images, and is told with and without workspaces; arena and time are those of the whole.
Plans only: no GPU is needed.

    python benchmarks/staircase_alexnet.py [--gpu h200] [--target 500MiB] [--profile FILE]
"""

from __future__ import annotations

import argparse
from typing import Any

from modules import Job, example
from record import attempt, show, start, write
from superneurons import MODES, PUBLISHED_MIB, chain

from mbc.errors import BudgetError
from mbc.ops import KINDS
from mbc.options import UNLIMITED_BYTES
from mbc.plan.live import Kind
from mbc.plan.memory import live_values_at
from mbc.plan.model import Plan
from mbc.units import parse_size

MIB = 1 << 20
BATCH = 200
NEAR = 0.01  # of the published peaks
STEPS = 12  # of bisection over the budget


def paper_rows() -> list[dict[str, Any]]:
    layers = chain(example("alexnet_caffe", ("batch", str(BATCH))).lowered().network)
    rows: list[dict[str, Any]] = []
    for name, count in MODES.items():
        peak = max(count(layers), key=lambda moment: moment.size_bytes)
        off = peak.size_bytes / MIB / PUBLISHED_MIB[name] - 1
        rows.append(
            {
                "name": f"paper: {name}",
                "counted_mib": peak.size_bytes / MIB,
                "published_mib": PUBLISHED_MIB[name],
                "off": off,
                "at": peak.what,
                "passed": abs(off) <= NEAR,
            }
        )
    return rows


def counted_bytes(plan: Plan) -> tuple[int, int]:
    """The most bytes of layer outputs and their gradients at one launch of the step; and with workspaces."""
    graph = plan.graph
    of_updates = {
        name
        for operation in graph.train
        if KINDS[operation.kind].updates
        for name in (*operation.inputs, *operation.outputs)
    }
    most = with_workspace = 0
    for launch in range(len(plan.train.launches)):
        taken = live_values_at(plan, plan.train, launch)
        counted = sum(
            t.size_bytes for t in taken if t.kind in (Kind.ACTIVATIONS, Kind.GRADIENTS) and t.value not in of_updates
        )
        most = max(most, counted)
        workspace = sum(t.size_bytes for t in taken if t.kind is Kind.WORKSPACE)
        with_workspace = max(with_workspace, counted + workspace)
    return most, with_workspace


def plan_row(plan: Plan) -> dict[str, Any]:
    counted, with_workspace = counted_bytes(plan)
    p = plan.predictions
    return {
        "counted_mib": counted / MIB,
        "with_workspace_mib": with_workspace / MIB,
        "arena_mib": p.arena_bytes / MIB,
        "host_mib": p.host_bytes / MIB,
        "predicted_ms": p.train_us / 1e3,
    }


def within_target(job: Job, target_bytes: int) -> dict[str, Any]:
    """The plan of the largest budget, by bisection, that counts at most the target with workspaces."""
    unlimited = job.plan()
    low = unlimited.bounds.floor_bytes + unlimited.predictions.overhead_bytes
    high = unlimited.predictions.arena_bytes + unlimited.predictions.overhead_bytes
    best: Plan | None = None
    smallest = ""
    for _ in range(STEPS):
        middle = (low + high) // 2
        try:
            plan = job.with_settings(("memory.device", f"{middle} B")).plan()
        except BudgetError as error:
            low, smallest = middle, str(error)
            continue
        if counted_bytes(plan)[1] <= target_bytes:
            best, low = plan, middle
        else:
            high = middle
    if best is None:
        raise RuntimeError(f"no plan counts at most {target_bytes / MIB:.0f} MiB. {smallest}")
    return plan_row(best) | {"over_unlimited": best.predictions.train_us / unlimited.predictions.train_us - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--target", type=parse_size, default=500 * MIB)
    parser.add_argument("--profile")
    arguments = parser.parse_args()
    network = example("alexnet_caffe", ("batch", str(BATCH)))
    job = Job(network.name, network.source, network.settings, network.network, arguments.gpu)
    job = job.with_options(profile=arguments.profile).with_settings(("memory.device", f"{UNLIMITED_BYTES} B"))
    rows = paper_rows()
    plain = job.with_options(without=frozenset({"offload", "recompute", "micro_batches"}))
    rows.append(attempt(lambda: plan_row(plain.plan()), "mbc: liveness and placement"))
    rows.append(attempt(lambda: plan_row(job.plan()), "mbc: no limit"))
    full = attempt(lambda: within_target(job, arguments.target), f"mbc: {arguments.target / MIB:.0f} MiB")
    rows.append(full | {"passed": "failed" not in full})
    path = write("staircase_alexnet", rows)
    show(
        rows,
        ["name", "counted_mib", "published_mib", "off", "at", "with_workspace_mib", "arena_mib", "host_mib",
         "predicted_ms", "over_unlimited", "passed"],
    )  # fmt: skip
    print(path.name)


if __name__ == "__main__":
    start(main)
