"""How few measurements decide a plan (`mbc.optimize.search.decisive_requests`), told by a profile that has all of them.

Each step is planned as on a GPU that nobody measured: what is decided to be measured next is taken from the bundled
profile, and the rest left to estimates. `measured` of the `known` requests of the profile were. `over_full`: the step
of that plan, by what it knows, over the one by the whole profile; `rounds`: decisions, and `decide_s` what they took
here. With `--stop N` measuring is interrupted after N requests. Needs no GPU.

    python benchmarks/decisive_requests.py [--gpu h200] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from modules import Job, example, examples
from record import attempt, show, write

from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.ir.graph import TrainingGraph
from mbc.ir.transforms.training_step import differentiate
from mbc.kernels import PROVIDERS
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search import decisive_requests
from mbc.optimize.search.profiling_requests import needs
from mbc.optimize.search.search import Limits, search
from mbc.options import Policy
from mbc.plan.model import Plan
from mbc.profile.locate import bundled_path
from mbc.profile.model import Measurement, Profile, calibrated
from mbc.profile.read import read_profile
from mbc.profile.signature import signature

COLUMNS = ("name", "known", "measured", "rounds", "decide_s", "full_ms", "step_ms", "over_full", "measured_share")
LEAST_KNOWN = 0.9  # of a network's requests
LARGE = (
    ("resnet50 256 bf16", example("resnet", ("depth", "50"), ("batch", "256"), ("train.precision", "bf16"))),
    ("resnet50 128 fp32", example("resnet", ("depth", "50"), ("batch", "128"), ("train.precision", "fp32"))),
    ("densenet121 128 bf16", example("densenet121", ("batch", "128"), ("train.precision", "bf16"))),
    ("mobilenet_v2 256 bf16", example("mobilenet_v2", ("batch", "256"), ("train.precision", "bf16"))),
    ("googlenet 256 bf16", example("googlenet", ("batch", "256"), ("train.precision", "bf16"))),
)


def planned(graph: TrainingGraph, device: DeviceSpec, profile: Profile) -> Plan:
    table = CandidateTable(graph, calibrated(device, profile), PROVIDERS, profile, Rules())
    return search(table, Limits(), device.memory_bytes)


def decided(
    graph: TrainingGraph, device: DeviceSpec, profile: Profile, known: set[str], most: float
) -> tuple[Profile, int]:
    """What of `profile` would have been measured, by its keys `known`, `most` of these, and by how many decisions."""
    found: dict[str, tuple[Measurement, ...]] = {}
    decisive, rounds = decisive_requests.Decisive(graph, device, Rules()), 0

    def so_far() -> Profile:
        extents = {key: profile.extents[key] for key in found}
        return replace(profile, measurements=dict(found), extents=extents, earlier={})

    with patch.object(decisive_requests, "find_profile", lambda _: so_far()):  # pyright: ignore[reportUnknownLambdaType]
        while len(found) < most and (requests := decisive((), known - found.keys()).requests):
            found |= {key: profile.measurements[key] for key in requests[: int(min(most, 1e9)) - len(found)]}
            rounds += 1
    made = so_far()
    return replace(made, left_to_estimate=frozenset(known - found.keys())), rounds + 1


def compared(job: Job, device: DeviceSpec, profile: Profile, most: float) -> dict[str, Any]:
    lowered = job.lowered()
    graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
    wanted = {signature(need.undivided) for need in needs(graph, device, Policy.UNDIVIDED)}
    known = wanted & profile.extents.keys() & set(profile.measurements)
    row: dict[str, Any] = {"wanted": len(wanted), "known": len(known)}
    if len(known) < LEAST_KNOWN * len(wanted):
        return row
    full = planned(graph, device, profile)
    began = time.perf_counter()
    found, rounds = decided(graph, device, profile, known, most)
    row |= {"measured": len(found.measurements), "rounds": rounds, "decide_s": time.perf_counter() - began}
    plan = planned(graph, device, found)
    row |= {"full_ms": full.predictions.train_us / 1e3, "step_ms": plan.predictions.train_us / 1e3}
    row |= {"over_full": row["step_ms"] / row["full_ms"], "measured_share": plan.predictions.measured_share}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200", help="whose bundled profile to take (default h200)")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows whose name holds one of these")
    parser.add_argument(
        "--stop", type=float, default=math.inf, metavar="N", help="after N requests (default: at the end)"
    )
    arguments = parser.parse_args()
    device = find_spec(arguments.gpu)
    profile = read_profile(bundled_path(device.name))
    # Of no date: kernels that came after a request was measured are not in what is given out, nor in the whole.
    profile = replace(profile, extents={key: replace(extent, date="") for key, extent in profile.extents.items()})
    jobs = dict(LARGE)
    for job in examples():
        for precision in ("bf16", "fp32"):
            jobs[f"{job.name} {precision}"] = job.with_settings(("train.precision", precision))
    rows: list[dict[str, Any]] = []
    for name, job in jobs.items():
        if not arguments.only or any(word in name for word in arguments.only):
            rows.append(attempt(partial(compared, job, device, profile, arguments.stop), name))
            show(rows[-1:], COLUMNS)
    write(f"decisive_requests{'' if math.isinf(arguments.stop) else '_stopped'}", rows, gpu=device.name)
    show([row for row in rows if "over_full" in row], COLUMNS)


if __name__ == "__main__":
    main()
