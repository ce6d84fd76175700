"""What the profile of one GPU is worth on another of its architecture (`mbc.profile.scaling`), by profiles of both.

Rows of requests: times measured on `--gpu` over those scaled from `--similar`, and over estimates that know of no
profile; `choice`: how much longer the fastest kernel by the scaled times takes there than the fastest measured one.
Rows of steps that the profile of `--gpu` knows: planned with it (`measured_ms`), from the other GPU's alone and from
estimates alone. `predicted` is such a plan's step by itself, `taken` by what its kernels were measured to take, both
over `measured_ms`; `priced` is the share of it that was measured, the rest is as predicted. `asked` requests decide the
plan beside the other GPU's profile, `asked alone` without it (`decisive_requests.py`); `decided` is the step of the
plan by these over `measured_ms` as predicted, `stopped` that by the first STOPPED of them only. Needs no GPU.

    python benchmarks/similar_gpu.py [--gpu h100] [--similar h200] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from decisive_requests import compared
from modules import Job, example
from record import attempt, show, write

from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.ir.graph import TrainingGraph
from mbc.ir.transforms.training_step import differentiate
from mbc.kernels import PROVIDERS
from mbc.kernels.calibration import Spread
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search.profiling_requests import launched_request, needs
from mbc.optimize.search.search import Limits, search
from mbc.options import Policy
from mbc.plan.model import Kernel, Plan
from mbc.profile.locate import bundled_path
from mbc.profile.model import Profile, calibrated, scaled_to, unmeasured
from mbc.profile.read import read_profile
from mbc.profile.signature import read_signature, signature

STOPPED = 20
LEAST_KNOWN = 0.85  # of a step's requests, by either profile
RESNETS = ("50", "101", "152")
COLUMNS = ("name", "count", "median", "p10", "p90", "|error| median", "|error| p90")
STEP_COLUMNS = (
    "name", "known", "known_by_similar", "measured_ms", "scaled predicted", "scaled taken", "scaled priced",
    "estimated predicted", "estimated taken", "estimated priced", "asked", "asked alone", "decided", "decided alone",
    "stopped", "stopped alone",
)  # fmt: skip


def jobs() -> dict[str, Job]:
    """Steps that the bundled profiles of H100 and H200 both know some of."""
    of = partial(example, "resnet")
    found = {
        f"resnet{depth} {batch} bf16": of(("depth", depth), ("batch", batch), ("train.precision", "bf16"))
        for depth in RESNETS
        for batch in ("32", "64", "256")
    }
    return found | {"vgg16 64 bf16": example("vgg16", ("batch", "64"), ("train.precision", "bf16"))}


def requests(device: DeviceSpec, own: Profile, similar: Profile) -> Iterator[dict[str, Any]]:
    """Ratios of times by request, as rows."""
    plain = calibrated(device, None)
    ratios: dict[str, list[float]] = {"scaled": [], "estimated": [], "choice": []}
    for key in own.measurements.keys() & similar.measurements.keys():
        request = read_signature(key)
        mine = {c.variant: c.time_us for c in own.candidates(request)}
        scaled = similar.candidates(request)
        if not mine or not scaled:
            continue
        fastest_us = min(mine.values())
        ratios["scaled"].append(fastest_us / scaled[0].time_us)
        estimates = [c.time_us for p in PROVIDERS for c in p.candidates(request, plain)]
        if estimates:
            ratios["estimated"].append(fastest_us / min(estimates))
        if scaled[0].variant in mine:
            ratios["choice"].append(mine[scaled[0].variant] / fastest_us)
    for name, found in ratios.items():
        spread = Spread.of(found)
        yield {
            "name": name, "count": spread.count, "median": spread.median, "p10": spread.low, "p90": spread.high,
            "|error| median": spread.error, "|error| p90": spread.error_high,
        }  # fmt: skip


def planned(table: CandidateTable) -> Plan:
    return search(table, Limits(without=frozenset({"concurrent_stream"})), table.device.memory_bytes)


def taken(plan: Plan, own: Profile) -> tuple[float, float]:
    """The time of a plan's launches in us as they were measured, and the share of it that was; others as predicted."""
    operations = {operation.name: operation for operation in plan.graph.train}
    total_us = known_us = 0.0
    for launch in plan.train.launches:
        work, time_us = launch.work, launch.work.time_us
        if isinstance(work, Kernel) and launch.operations:
            request = launched_request(plan.graph, launch, operations, plan.buffers)
            wanted = work.provider, work.name, work.settings
            times = [c.time_us for c in own.candidates(request) if (c.provider, c.name, c.settings) == wanted]
            if not work.settings or work.provider == "mbc":
                times = times or [c.time_us for c in own.candidates(request) if (c.provider, c.name) == wanted[:2]]
            time_us = min(times, default=time_us)
            known_us += time_us if times else 0.0
        total_us += time_us
    return total_us, known_us / total_us


def compared_plans(
    graph: TrainingGraph, device: DeviceSpec, own: Profile, profiles: Mapping[str, Profile | None]
) -> dict[str, Any]:
    """The step planned by each of `profiles`, over that by `own`, in columns that begin with its name."""
    spec = calibrated(device, own)
    full = planned(CandidateTable(graph, spec, PROVIDERS, own, Rules()))
    # Kernels one after another, as the prices of the other plans add up.
    measured_us, priced = taken(full, own)
    row: dict[str, Any] = {"measured_ms": measured_us / 1e3, "measured": full.predictions.measured_share}
    row["priced"] = priced
    for name, profile in profiles.items():
        here = replace(calibrated(device, profile), launch_us=spec.launch_us)
        plan = planned(CandidateTable(graph, here, PROVIDERS, profile, Rules()))
        time_us, priced = taken(plan, own)
        row |= {f"{name} predicted": plan.predictions.train_us / measured_us, f"{name} taken": time_us / measured_us}
        row[f"{name} priced"] = priced
    return row


def step(job: Job, device: DeviceSpec, own: Profile, similar: Profile) -> dict[str, Any]:
    lowered = job.lowered()
    graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
    wanted = {signature(need.undivided) for need in needs(graph, device, Policy.UNDIVIDED)}
    known, by_similar = (len(wanted & p.extents.keys()) / len(wanted) for p in (own, similar))
    row: dict[str, Any] = {"known": known, "known_by_similar": by_similar}
    if known < LEAST_KNOWN:
        return row
    row |= compared_plans(graph, device, own, {"scaled": unmeasured(similar), "estimated": None})
    for name, profile in {"": replace(own, similar=similar), " alone": own}.items():
        decided, stopped = (compared(job, device, profile, most) for most in (math.inf, STOPPED))
        row |= {f"asked{name}": decided["measured"], f"decided{name}": decided["over_full"]}
        row |= {f"stopped{name}": stopped["over_full"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--similar", default="h200")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="steps whose name holds one of these")
    arguments = parser.parse_args()
    device, other = find_spec(arguments.gpu), find_spec(arguments.similar)
    own, theirs = (read_profile(bundled_path(spec.name)) for spec in (device, other))
    similar = scaled_to(theirs, other, device)
    rows = list(requests(device, own, similar))
    show(rows, COLUMNS)
    steps: list[dict[str, Any]] = []
    for name, job in jobs().items():
        if not arguments.only or any(word in name for word in arguments.only):
            steps.append(attempt(partial(step, job, device, own, similar), name))
            show(steps[-1:], STEP_COLUMNS)
    write("similar_gpu", [*rows, *steps], gpu=device.name, similar=other.name)
    show(steps, STEP_COLUMNS)


if __name__ == "__main__":
    main()
