"""Whole training steps with convolutions divided into micro-batches and without, under workspace limits, one GPU.

For each network, precision and limit an operation three plans are made from one profile: `legacy`, undivided and with
cuDNN's legacy algorithms only (micro-cuDNN's setting before it divides); `undivided`, with all candidates and layouts;
`divided`, likewise, in slices of any sizes. Plans with the same launches are built and run once. PyTorch with
cudnn.benchmark runs beside them, on both of its cuDNN paths, as it is and with CUDNN_CONV_WSCAP_DBG, the cap on the
workspace of a convolution that it and cuDNN read, in MiB.

Where a gain is less than asked, the operations that take the time are listed with what bounds them.

    python benchmarks/micro_batches.py [--profile FILE] [--measure-for SECONDS] [--only NAME ...] [--precisions LIST]
                                       [--limits 8,16,...] [--steps 30] [--no-torch] [--plan-only]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modules import Job, example
from plans import Planned, make_plans, run_steps
from record import attempt, need_gpu, show, start, write

from mbc.options import Policy

MIB = 1 << 20
LIMITS_MIB = (8, 16, 32, 64, 128, 256, 512, 1024)
TORCH_CAP_MIB = 64
UNLIMITED_MIB = 0  # a limit that is none
LISTED = 12  # operations of a table of what bounds a gain


@dataclass(frozen=True)
class Case:
    """One network at one batch size. `torch`: what torchvision calls it; `limits_mib`: if not those asked for."""

    name: str
    source: str
    batch: int
    precisions: tuple[str, ...]
    settings: tuple[tuple[str, str], ...] = ()
    torch: str = ""
    limits_mib: tuple[int, ...] = ()

    def job(self, precision: str) -> Job:
        pairs = (("batch", str(self.batch)), ("train.precision", precision), *self.settings)
        return example(self.source, *pairs)


CASES = (
    Case("alexnet", "alexnet", 256, ("fp32", "tf32"), torch="alexnet"),
    Case("resnet18", "resnet", 128, ("fp32", "tf32"), (("depth", "18"),), torch="resnet18"),
    Case("vgg16", "vgg16", 256, ("fp32",), limits_mib=(512,)),
)

LEGACY, UNDIVIDED, DIVIDED = PLANS = ("legacy", "undivided", "divided")
OPTIONS: dict[str, dict[str, Any]] = {
    LEGACY: {"policy": Policy.UNDIVIDED, "providers": ("cudnn_legacy", "cublaslt", "mbc")},
    UNDIVIDED: {"policy": Policy.UNDIVIDED},
    DIVIDED: {"policy": Policy.ALL},
}

# Network, precision, limit in MiB, before: the speed-up asked of the divided plan.
ASKED = {
    ("alexnet", "fp32", 64, LEGACY): 1.7,
    ("resnet18", "fp32", 64, LEGACY): 1.35,
    ("alexnet", "fp32", 64, UNDIVIDED): 1.5,
    ("resnet18", "fp32", 64, UNDIVIDED): 1.25,
    ("vgg16", "fp32", 512, UNDIVIDED): 1.7,
}


@dataclass(frozen=True)
class Variant:
    """One plan to make. `limit_mib` 0: none."""

    case: Case
    precision: str
    limit_mib: int
    plan: str

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.precision} {self.limit_mib} MiB {self.plan}"

    def job(self, gpu: str, profile: str | None) -> Job:
        limit = self.limit_mib * MIB or None
        job = replace(self.case.job(self.precision), gpu=gpu)
        return job.with_options(**OPTIONS[self.plan], workspace_limit_bytes=limit, profile=profile)


Plans = Mapping[Variant, Planned]


def variants(arguments: argparse.Namespace) -> list[Variant]:
    """Every plan, and without a limit those that say what a limit costs."""
    limits = tuple(int(word) for word in arguments.limits.split(","))
    precisions = arguments.precisions.split(",")
    return [
        Variant(case, precision, limit, plan)
        for case in CASES
        if not arguments.only or case.name in arguments.only
        for precision in case.precisions
        if precision in precisions
        for limit in (*(case.limits_mib or limits), UNLIMITED_MIB)
        for plan in PLANS
    ]


def rows_of(planned: Plans, timed: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each network, precision and limit. `timed` by step; empty where nothing was run."""
    places = dict.fromkeys((v.case, v.precision, v.limit_mib) for v in planned if v.limit_mib != UNLIMITED_MIB)
    return [_row(planned, timed, *place) for place in places]


def _row(
    planned: Plans, timed: Mapping[str, dict[str, Any]], case: Case, precision: str, limit_mib: int
) -> dict[str, Any]:
    plans = {plan: planned[Variant(case, precision, limit_mib, plan)] for plan in PLANS}
    row: dict[str, Any] = {
        "name": f"{case.name} {precision} {limit_mib} MiB",
        "network": case.name,
        "batch": case.batch,
        "precision": precision,
        "limit_mib": limit_mib,
        "divided_operations": plans[DIVIDED].divided,
    }
    for plan, made in plans.items():
        took = timed.get(made.step, {})
        row[f"{plan}_predicted_ms"] = made.predicted_ms or None
        row[f"{plan}_ms"] = took.get("step_ms")
        row[f"{plan}_spread_ms"] = took.get("spread_ms")
        row[f"{plan}_step"] = made.step
        if why := made.failed or took.get("failed"):
            row[f"{plan}_failed"] = why
    for before in (LEGACY, UNDIVIDED):
        row[f"over_{before}"] = _ratio(row[f"{before}_ms"], row[f"{DIVIDED}_ms"])
        row[f"over_{before}_predicted"] = _ratio(row[f"{before}_predicted_ms"], row[f"{DIVIDED}_predicted_ms"])
        gained = row[f"over_{before}"] or row[f"over_{before}_predicted"]
        asked = ASKED.get((case.name, precision, limit_mib, before))
        if asked is not None and gained is not None:
            row[f"over_{before}_asked"] = asked
            row[f"over_{before}_reached"] = gained >= asked
            if gained < asked:
                free = planned[Variant(case, precision, UNLIMITED_MIB, UNDIVIDED)]
                row[f"over_{before}_bounded_by"] = bounded_by(plans[before], plans[DIVIDED], free)
    return row


def _ratio(before: float | None, after: float | None) -> float | None:
    return before / after if before and after else None


def bounded_by(before: Planned, after: Planned, free: Planned) -> dict[str, Any]:
    """Where the time of the divided step lies, and what even unlimited workspace would gain."""
    earlier = {o.name: o for o in before.operations}
    unlimited = {o.name: o for o in free.operations}
    table = [
        {
            "operation": o.name,
            "before_us": earlier[o.name].time_us if o.name in earlier else None,
            "before": list(earlier[o.name].kernels) if o.name in earlier else [],
            "divided_us": o.time_us,
            "divided": list(o.kernels),
            "micro_batches": list(o.micro_batches),
            "unlimited_us": unlimited[o.name].time_us if o.name in unlimited else None,
        }
        for o in sorted(after.operations, key=lambda o: -o.time_us)
    ]
    convolutions_us = sum(o.time_us for o in after.operations if o.kind.startswith("convolution"))
    return {
        "before_ms": before.predicted_ms,
        "divided_ms": after.predicted_ms,
        "convolutions_ms": convolutions_us / 1e3,
        "the_rest_ms": after.predicted_ms - convolutions_us / 1e3,
        "unlimited_ms": free.predicted_ms or None,
        "most_possible": _ratio(before.predicted_ms, free.predicted_ms),
        "operations": table[:LISTED],
        "other_operations_us": sum(row["divided_us"] for row in table[LISTED:]),
    }


def torch_rows(cases: Iterable[Case], precisions: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """PyTorch's steps: a process for each of its cuDNN paths, as it is and with the cap."""
    wanted = [
        (case.torch, case.batch, precision)
        for case in cases
        for precision in case.precisions
        if case.torch and precision in precisions
    ]
    rows: list[dict[str, Any]] = []
    for path in ("graph", "legacy"):
        for cap in (0, TORCH_CAP_MIB):
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_CUDNN_V8", "CUDNN_CONV_W"))}
            if path == "legacy":
                environment["TORCH_CUDNN_V8_API_DISABLED"] = "1"
            if cap:
                environment["CUDNN_CONV_WSCAP_DBG"] = str(cap)
            command = [sys.executable, __file__, "--torch-child", json.dumps([wanted, steps])]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            about = {"path": path, "cap_mib": cap or None}
            rows += [{**about, **json.loads(line)} for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode:
                rows.append({**about, "name": f"torch {path}", "failed": f"the process ended with {done.returncode}"})
    return rows


def torch_child(wanted: Sequence[Sequence[Any]], steps: int) -> None:
    from resnet50_vs_torch import run_torch

    for model, batch, precision in wanted:
        row = attempt(lambda m=model, b=batch, p=precision: run_torch(p, b, m, steps), f"torch {model} {precision}")
        print(json.dumps({**row, "network": model, "batch": batch, "precision": precision}), flush=True)


def measure_missing(wanted: Sequence[Variant], profile: Path, seconds: float) -> None:
    """Measure what the profile lacks for these plans, within the time."""
    from mbc.measure.gpu import Gpu
    from mbc.measure.measure import measure

    jobs = {(v.case, v.precision): v.case.job(v.precision) for v in wanted}
    found = [need for job in jobs.values() for need in job.needs(Policy.ALL)]
    with Gpu() as gpu:
        done = measure(gpu, found, profile, seconds)
    print(f"{done.measured} requests measured, {done.known} known, {done.left} left. {done.warning}", flush=True)
    for failure in done.failures[:5]:
        print(failure, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--measure-for", type=float, default=0.0, metavar="SECONDS", help="first, into --profile")
    parser.add_argument("--only", nargs="*", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--precisions", default="fp32,tf32")
    parser.add_argument("--limits", default=",".join(map(str, LIMITS_MIB)), help="MiB an operation")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: the GPU of this machine)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="plans made and built side by side")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--plan-only", action="store_true", help="predictions only; needs no GPU")
    parser.add_argument("--torch-child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.torch_child:
        torch_child(*json.loads(arguments.torch_child))
        return
    if not arguments.plan_only:
        need_gpu("--plan-only predicts without running")
    wanted = variants(arguments)
    if arguments.measure_for:
        if not arguments.profile:
            raise SystemExit("--measure-for needs --profile FILE to write to")
        measure_missing(wanted, Path(arguments.profile), arguments.measure_for)
    torch: list[dict[str, Any]] = []
    timed: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {v.name: v.job(arguments.gpu, arguments.profile) for v in wanted}
        by_name = make_plans(jobs, folder, arguments.workers)
        planned = {v: by_name[v.name] for v in wanted}
        for variant, made in planned.items():
            if made.failed:
                print(f"{variant.name}: {made.failed}", file=sys.stderr)
        if not arguments.plan_only:
            # Without a limit they only say what a limit costs.
            steps = [made.step for variant, made in planned.items() if variant.limit_mib != UNLIMITED_MIB]
            (timed,) = run_steps(steps, folder, arguments.workers, arguments.steps)
            if arguments.torch:
                cases = [c for c in CASES if not arguments.only or c.name in arguments.only]
                torch = torch_rows(cases, arguments.precisions.split(","), arguments.steps)
    rows = rows_of(planned, timed)
    free = [
        {"name": v.name, "network": v.case.name, "precision": v.precision, "plan": v.plan,
         "predicted_ms": p.predicted_ms or None}
        for v, p in planned.items() if v.limit_mib == UNLIMITED_MIB
    ]  # fmt: skip
    path = write("micro_batches", rows, torch=torch, unlimited=free)
    keys = ("legacy_ms", "undivided_ms", "divided_ms") if timed else tuple(f"{plan}_predicted_ms" for plan in PLANS)
    gains = [f"over_{plan}{suffix}" for plan in (LEGACY, UNDIVIDED) for suffix in ("", "_predicted")]
    show(rows, ["name", *keys, "divided_operations", *gains])
    show(torch, ["name", "path", "cap_mib", "through_ms", "median_ms", "peak_bytes"])
    print(path.name)


if __name__ == "__main__":
    start(main)
