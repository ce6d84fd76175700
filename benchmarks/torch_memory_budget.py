"""mbc beside torch.compile with an activation budget: a step of ResNet-50 in bf16, each at the same memory.

torch.compile recomputes what its partitioner chooses to keep activations within a share of what they would take
(torch._functorch.config.activation_memory_budget). For every share its step is timed and the peak of its allocator
read; then mbc is planned with an arena of that size at most, and its step timed in the same run. Each runs in a process
of its own, with its inputs on the GPU.

    python benchmarks/torch_memory_budget.py [--batch 256] [--budgets 1,0.5,0.1] [--steps 30] [--profile FILE]
                                             [--plan-only] [--gpu h200]

With --plan-only no GPU is needed: torch's figures are those of PEERS.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from cap import Card, planned, run, this_card
from modules import Job, example
from record import attempt, need_gpu, show, start, write
from resnet50_vs_torch import timed

from mbc.device.target import find_device

GIB = 1 << 30
TIMEOUT_S = 900.0
# ResNet-50, batch 256, bf16, by budget: ms and peak GiB, torch 2.11 on one H200.
PEERS = {1.0: (38.2, 10.6), 0.5: (45.6, 6.01), 0.1: (49.0, 8.84)}


def run_torch(batch: int, budget: float, steps: int) -> dict[str, Any]:
    import torch
    from torch._functorch import config
    from torch.nn import functional as F
    from torchvision.models import resnet50

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

    step()  # what compiling and choosing kernels takes for a moment is no part of a step
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found = timed(step, torch.cuda.synchronize, steps)
    return {**found, "peak_bytes": torch.cuda.max_memory_allocated(), "torch": torch.__version__}


def peer(batch: int, budget: float, steps: int, plan_only: bool) -> dict[str, Any]:
    """torch's step in a process of its own, or as it was found before."""
    if plan_only:
        if budget not in PEERS:
            raise RuntimeError(f"no figures of torch at a budget of {budget}; there are {list(PEERS)}")
        time_ms, peak_gib = PEERS[budget]
        return {"median_ms": time_ms, "peak_bytes": int(peak_gib * GIB)}
    command = [sys.executable, __file__, "--child", json.dumps([batch, budget, steps])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def cap_of(card: Card, arena_bytes: int) -> int:
    """The cap that leaves so many bytes for an arena."""
    return arena_bytes + max(0, find_device(card.gpu).overhead_bytes - card.context_bytes)


def result(card: Card, job: Job, budget: float, arguments: argparse.Namespace) -> dict[str, Any]:
    theirs = peer(arguments.batch, budget, arguments.steps, arguments.plan_only)
    cap_bytes = cap_of(card, theirs["peak_bytes"])
    capped = card.capped(job, cap_bytes)
    row: dict[str, Any] = {"torch_ms": theirs["median_ms"], "gib": theirs["peak_bytes"] / GIB}
    row["torch"] = theirs.get("torch")
    made = planned(card, capped)
    row |= {key: made[key] for key in ("failed", "predicted_ms", "host_gb", "over_bound") if key in made}
    ours = made.get("predicted_ms")
    if not arguments.plan_only and "failed" not in made:
        step = run({"step": (capped, cap_bytes)}, arguments.steps)["step"]
        row |= {key: step[key] for key in ("failed", "step_ms", "spread_ms") if key in step}
        ours = step.get("step_ms")
    if ours is not None:
        row["times_faster"] = theirs["median_ms"] / ours
        row["passed"] = row["times_faster"] > 1
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--budgets", default="1,0.5,0.1")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: the GPU of this machine)")
    parser.add_argument("--plan-only", action="store_true", help="predictions beside known figures; needs no GPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(run_torch(*json.loads(arguments.child))))
        return
    if not arguments.plan_only:
        need_gpu("--plan-only predicts without running")
    card = this_card(arguments.gpu, arguments.profile, not arguments.plan_only)
    job = example("resnet", ("depth", "50"), ("batch", str(arguments.batch)), ("train.precision", "bf16"))
    rows = [
        attempt(lambda b=budget: result(card, job, b, arguments), f"activation budget {budget:g}")
        for budget in map(float, arguments.budgets.split(","))
    ]
    write("torch_memory_budget_planned" if arguments.plan_only else "torch_memory_budget", rows, batch=arguments.batch)
    show(
        rows,
        ["name", "gib", "torch_ms", "predicted_ms", "step_ms", "host_gb", "over_bound", "times_faster", "passed"],
    )


if __name__ == "__main__":
    start(main)
