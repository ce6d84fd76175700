"""A step of ResNet-50 in bf16 by mbc and by torch.compile with an activation budget, at equal memory.

torch.compile recomputes activations that its partitioner chooses, so that the stored activations take at most a share
of their size without recomputation (torch._functorch.config.activation_memory_budget). mbc is planned with an arena no
larger than the peak of torch's allocator in an earlier run (PEERS). Then both are timed in one run, each in a process
of its own with its inputs on the GPU, and torch's peak is read again.

    python benchmarks/torch_memory_budget.py [--plan-only] [--budgets 0.5,1,0.1] [--steps 20] [--for SECONDS] [--again]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from ahead import Task, add_arguments, drive
from cap import Card, stepped
from modules import Job, example
from own_process import result_of
from planner import Planner, Wanted
from record import start

from mbc.bench.timing import time_steps
from mbc.hardware.target import find_device

GIB = 1 << 30
BATCH = 256
TIMEOUT_S = 900.0
# ResNet-50, batch 256, bf16, by budget: ms and peak GiB, torch 2.11 on one H200.
PEERS = {1.0: (38.2, 10.6), 0.5: (45.6, 6.01), 0.1: (49.0, 8.84)}


def run_torch(batch: int, budget: float, steps: int) -> dict[str, Any]:
    """Return the step time and the peak of PyTorch's compiled step."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch._functorch import config  # pyright: ignore[reportMissingImports]
    from torch.nn import functional as F  # pyright: ignore[reportMissingImports]
    from torchvision.models import resnet50  # pyright: ignore[reportMissingImports]

    config.activation_memory_budget = budget
    torch.backends.cudnn.benchmark = True
    model = resnet50(weights=None).cuda().to(memory_format=torch.channels_last).train()
    rule = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4)
    images = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    compiled = torch.compile(model)

    def step() -> None:
        rule.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(compiled(images), labels)
        loss.backward()
        rule.step()

    step()  # memory for compiling and choosing kernels is not part of a step
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    timing = time_steps(step, torch.cuda.synchronize, steps, 0.0)
    return {"median_ms": timing.step_ms, "peak_bytes": torch.cuda.max_memory_allocated(), "torch": torch.__version__}


def earlier_step(budget: float) -> dict[str, Any]:
    """Return torch's step of an earlier run."""
    if budget not in PEERS:
        raise RuntimeError(f"no figures of torch at a budget of {budget}; there are {list(PEERS)}")
    time_ms, peak_gib = PEERS[budget]
    return {"median_ms": time_ms, "peak_bytes": int(peak_gib * GIB)}


def run_peer(batch: int, budget: float, steps: int) -> dict[str, Any]:
    """Return torch's step, measured in a process of its own."""
    return result_of([__file__, "--child", json.dumps([batch, budget, steps])], TIMEOUT_S)


def cap_of(card: Card, arena_bytes: int) -> int:
    """Return the cap that leaves `arena_bytes` for an arena."""
    return arena_bytes + max(0, find_device(card.gpu).overhead_bytes - card.context_bytes)


def prepared(planner: Planner, job: Job, name: str, budget: float) -> dict[str, Any]:
    """Return the row of mbc's plan within the memory that torch took in an earlier run."""
    theirs = earlier_step(budget)
    cap_bytes = cap_of(planner.card, theirs["peak_bytes"])
    row = planner.keep(name, "step", Wanted.of(planner.card.capped(job, cap_bytes)))
    row |= {"budget": budget, "torch_ms": theirs["median_ms"], "torch_gib": theirs["peak_bytes"] / GIB}
    if "failed" in row:
        return row
    row |= {"arena_gib": row["arena_bytes"] / GIB, "plans": {"step": cap_bytes}}
    return judged(row, row["predicted_ms"])


def judged(row: dict[str, Any], ours_ms: float) -> dict[str, Any]:
    """Return the row with its verdict: mbc's step must be faster, and its arena no larger than torch's memory."""
    row["times_faster"] = row["torch_ms"] / ours_ms
    row["passed"] = row["times_faster"] > 1 and row["arena_gib"] <= row["torch_gib"]
    return row


def measured(row: dict[str, Any], timed: Mapping[str, dict[str, Any]], batch: int, steps: int) -> dict[str, Any]:
    """Return the row with both steps measured in the same run."""
    row |= stepped(row, timed["step"])
    if "failed" in row:
        return row
    theirs = run_peer(batch, row["budget"], steps)
    row |= {"torch_ms": theirs["median_ms"], "torch_gib": theirs["peak_bytes"] / GIB, "torch": theirs["torch"]}
    return judged(row, row["step_ms"])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="0.5,1,0.1")
    add_arguments(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(run_torch(*json.loads(arguments.child))))
        return
    job = example("resnet", ("depth", "50"), ("batch", str(BATCH)), ("train.precision", "bf16"))
    tasks = [
        Task(name, partial(prepared, job=job, name=name, budget=budget),
             lambda row, timed: measured(row, timed, BATCH, arguments.steps))
        for budget in map(float, arguments.budgets.split(","))
        for name in [f"activation budget {budget:g}"]
    ]  # fmt: skip
    drive("torch_memory_budget", tasks, _COLUMNS, arguments, batch=BATCH)


_COLUMNS = [
    "name", "torch_gib", "arena_gib", "torch_ms", "predicted_ms", "step_ms", "host_gb", "over_bound", "times_faster",
    "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
