"""Measure on this GPU the requests that plans of the examples can use, into a profile that planning then uses.

All kinds of operations are measured, convolutions also in the micro-batches of the policy. Runs may be repeated: a
request is measured again only for the new kernels that `--kernels` names. `--ship` writes the part that a planner can
use to the folder of bundled profiles.

    python benchmarks/profile_examples.py PROFILE [--seconds 500] [--precisions bf16,tf32,fp32,fp16] [--policy POLICY]
                                          [--only NAME ...] [--set NAME=VALUE ...] [--kernels NAME ...] [--ship FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modules import examples
from record import attempt, show, start, write

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import device_specs
from mbc.ir.types import Precision
from mbc.kernels.base import Request
from mbc.kernels.cuda import KERNELS, OWN
from mbc.measure.need import Need
from mbc.options import Policy


def wanted(arguments: argparse.Namespace) -> list[tuple[str, Sequence[Need]]]:
    """Return the measurements that each network needs, by a label; the deeper ResNets that pages show come first."""
    settings = tuple((pair.split("=", 1)[0], pair.split("=", 1)[1]) for pair in arguments.set)
    jobs = [j for j in examples() if not arguments.only or j.name in arguments.only]
    deeper = [j.with_settings(("depth", "50")) for j in jobs if j.name == "resnet"]
    groups: list[tuple[str, Sequence[Need]]] = []
    for precision in arguments.precisions.split(","):
        Precision(precision)  # refuses an unknown word at once
        for job in (*deeper, *jobs):
            names = {name for name, _ in job.lowered().settings}
            fitting = (pair for pair in settings if pair[0] in names)
            created = job.with_settings(("train.precision", precision), *fitting)
            label = " ".join((job.name, *("=".join(pair) for pair in created.settings)))
            groups.append((label, runnable(created.needs(Policy(arguments.policy)), arguments.kernels)))
    return groups


def runnable(needs: Sequence[Need], kernels: Sequence[str]) -> list[Need]:
    """Return the requests that one of these kernels can run, or all requests if no kernel is named."""
    unknown = set(kernels) - set(KERNELS)
    if unknown:
        raise SystemExit(f"mbc has no kernel called {', '.join(sorted(unknown))}")
    device = next(spec for spec in device_specs().values() if spec.has_bf16_and_tf32 and spec.has(Instruction.CLUSTER))
    return [n for n in needs if not kernels or any(c.name in kernels for c in OWN.candidates(n.undivided, device))]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--precisions", default="bf16,tf32,fp32")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="batch=256, for example")
    parser.add_argument("--policy", default=str(Policy.POWER_OF_TWO), choices=[str(policy) for policy in Policy])
    parser.add_argument("--kernels", nargs="*", default=[], help="only what these can run, and that again")
    parser.add_argument("--ship", type=Path)
    parser.add_argument("--count", action="store_true", help="only say how much there is to do; needs no GPU")
    arguments = parser.parse_args()
    groups = wanted(arguments)
    seen: set[Request] = set()
    for label, result in groups:
        requests = {request for need in result for request in need.requests}
        new = requests - seen
        seen |= new
        print(f"{len(result):4} operations, {len(requests):4} requests, {len(new):4} of them new: {label}", flush=True)
    print(f"{len(seen)} requests in all")
    if arguments.count:
        return
    rows = measured(arguments, groups)
    path = write("profile_examples", rows)
    show(rows, ["name", "measured", "known", "left", "candidates", "refused", "seconds"])
    if arguments.ship:
        from mbc.profile.edit import ship
        from mbc.profile.read_profile import read_profile

        arguments.ship.parent.mkdir(parents=True, exist_ok=True)
        kept = ship(read_profile(arguments.profile), arguments.ship)
        print(f"{kept} candidates, {arguments.ship.stat().st_size} bytes: {arguments.ship}")
    print(path.name)


def measured(arguments: argparse.Namespace, groups: list[tuple[str, Sequence[Need]]]) -> list[dict[str, Any]]:
    """Measure group by group, in the given order, until the time is over; return the rows."""
    from mbc.measure.gpu import Gpu
    from mbc.measure.measure import measure

    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    with Gpu() as gpu:
        for label, items in groups:
            begun = time.monotonic()
            left_s = arguments.seconds - (begun - started)

            def work(items: Sequence[Need] = items, left_s: float = left_s) -> dict[str, Any]:
                summary = measure(gpu, items, arguments.profile, left_s, again=bool(arguments.kernels))
                for failure in summary.failures[:5]:
                    print(failure, file=sys.stderr)
                return {
                    "measured": summary.measured,
                    "known": summary.already_measured,
                    "left": summary.left,
                    "candidates": summary.candidates,
                    "refused": summary.refused,
                    "ruled_out": summary.ruled_out,
                    "failures": list(summary.failures),
                    "unsteady": len(summary.unsteady),
                }

            row = attempt(work, label)
            row["seconds"] = time.monotonic() - begun
            rows.append(row)
            print(label, row.get("measured"), row.get("left"), f"{row['seconds']:.1f} s", flush=True)
    return rows


if __name__ == "__main__":
    start(main)
