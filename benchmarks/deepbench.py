"""DeepBench's 3 x 3 and 5 x 5 convolutions at N = 256, divided over undivided under workspace limits, one GPU.

One precision after another: candidates of all powers of two are measured into a profile (what is there already is
not measured again), then for every pass and limit the best undivided and the best divided way are looked up, once of
cuDNN's legacy algorithms alone and once of all candidates and layouts. The menu's division is compared with trying
every division, run on the GPU for its time and compared with the undivided result on the same operands.

Writes results/deepbench_PRECISION.json. `--no-run` needs no GPU: it reads the profile and runs nothing.

    python benchmarks/deepbench.py [--profile FILE] [--precisions fp32,tf32,bf16] [--only WORD ...]
                                   [--measure-for SECONDS] [--run-for SECONDS] [--no-run]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from deepbench_layers import BATCH, Operation, operations
from division import Offers, brute_force_us, divided, menus, offers, undivided
from record import ROOT, attempt, need_gpu, show, start, write

from mbc.ir.types import Precision
from mbc.measure.need import Need
from mbc.optimize.candidates.pareto import Point
from mbc.profile.model import Profile
from mbc.profile.read import read_profile

MIB = 1 << 20
LIMITS_MIB = (64, 128, 256, 512)
SETS: dict[str, tuple[str, ...]] = {"legacy": ("cudnn_legacy",), "all": ()}
WITHIN = 0.02  # of the predicted time, when run
SAME, OTHER = 1e-6, 5e-6  # normalised L2 from the undivided result in fp32: same algorithm, another one
FP32_TFLOPS = 60.0  # only to order and weigh the operations
Run = Callable[[Operation, Point, Point | None], dict[str, Any]]


def needs(wanted: Iterable[Operation]) -> list[Need]:
    """Cheap operations weigh most: of them most figures are had in a time."""
    return [
        Need(tuple(o.request(rows) for rows in o.sizes), 1e6 / (o.layer.flops / FP32_TFLOPS * 1e-6)) for o in wanted
    ]


def rows_of(profile: Profile, operation: Operation, run: Run | None) -> list[dict[str, Any]]:
    """One row for each limit and set of candidates, of an operation that was measured."""
    requests = {rows: operation.request(rows) for rows in operation.sizes}
    found: list[dict[str, Any]] = []
    ran: dict[tuple[Any, ...], dict[str, Any]] = {}  # the same choice under several limits runs once
    for name, providers in SETS.items():
        offered = offers(profile, requests, providers)
        if not offered:
            continue
        fronts = menus(offered, BATCH, operation.sums)
        for limit in LIMITS_MIB:
            whole = undivided(offered, BATCH, limit * MIB)
            best = divided(fronts, limit * MIB)
            row = figures(operation, name, limit, offered, whole, best)
            if run is not None and best is not None and len(best.micro_batches) > 1:
                key = (best.micro_batches, whole and whole.micro_batches)
                if key not in ran:
                    ran[key] = attempt(lambda b=best, w=whole: run(operation, b, w), operation.name)
                row = {**row, **ran[key]}
            found.append(row)
    return found


def figures(
    operation: Operation, candidates: str, limit_mib: int, offered: Offers, whole: Point | None, best: Point | None
) -> dict[str, Any]:
    """What the profile alone says."""
    brute_us = brute_force_us(offered, BATCH, operation.sums, limit_mib * MIB)
    best_us = best.time_us if best else math.inf
    return {
        "name": operation.name,
        "suite": operation.layer.suite,
        "candidates": candidates,
        "limit_mib": limit_mib,
        "undivided_us": whole and whole.time_us,
        "undivided": whole and described(whole),
        "divided_us": best and best.time_us,
        "divided": best and described(best),
        "workspace_mib": best and best.workspace_bytes / MIB,
        "speed_up": whole.time_us / best_us if whole and best else None,
        "brute_force_us": brute_us if math.isfinite(brute_us) else None,
        "is_brute_force": bool(best_us == brute_us or math.isclose(best_us, brute_us, rel_tol=1e-6)),
    }


def described(point: Point) -> list[str]:
    """`4 x 64 rows: cudnn_legacy algorithm=5 layout=0`, a line for each kind of slice."""
    counts: dict[tuple[int, str], int] = {}
    for part in point.micro_batches:
        settings = " ".join(f"{key}={value}" for key, value in part.candidate.settings)
        key = (part.rows, f"{part.candidate.provider} {settings}".strip())
        counts[key] = counts.get(key, 0) + 1
    return [f"{count} x {rows} rows: {what}" for (rows, what), count in counts.items()]


def same_algorithm(best: Point, whole: Point) -> bool:
    """Whether every slice runs what the undivided operation runs."""
    used = {
        (s.candidate.provider, s.candidate.name, s.candidate.settings)
        for s in (*best.micro_batches, *whole.micro_batches)
    }
    return len(used) == 1


def runner(gpu: Any, library: Any, until: float) -> Run:
    """Runs one chosen division: its time, and its distance from the undivided result."""
    from divided_run import MOST_SETS, Bench, distance

    def run(operation: Operation, best: Point, whole: Point | None) -> dict[str, Any]:
        if time.monotonic() > until:
            return {"run": "not reached in the time allowed"}
        gpu.reset()
        bench = Bench(gpu, library, operation, best.micro_batches[0].candidate.layouts, MOST_SETS)
        took_us, spread_us = bench.time_us(best.micro_batches)
        found: dict[str, Any] = {
            "run_us": took_us,
            "spread_us": spread_us,
            "run_over_predicted": took_us / best.time_us,
            "within": abs(took_us / best.time_us - 1) <= WITHIN,
        }
        if whole is not None:
            result = bench.output(best.micro_batches)
            gpu.reset()
            reference = Bench(gpu, library, operation, whole.micro_batches[0].candidate.layouts, 1).output(
                whole.micro_batches
            )
            found["same_algorithm"] = same = same_algorithm(best, whole)
            found["distance"] = distance(result, reference)
            if operation.precision is Precision.FP32:
                found["equal"] = found["distance"] <= (SAME if same else OTHER)
        return found

    return run


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means and totals over the operations that run undivided, for each suite, set and limit."""
    found: list[dict[str, Any]] = []
    for suite in (*dict.fromkeys(r["suite"] for r in rows), "together"):
        for candidates in SETS:
            for limit in LIMITS_MIB:
                these = [
                    r for r in rows
                    if suite in (r["suite"], "together") and r["candidates"] == candidates and r["limit_mib"] == limit
                ]  # fmt: skip
                both = [r for r in these if r["speed_up"] is not None]
                if not both:
                    continue
                before, after = (sum(r[key] for r in both) / 1e3 for key in ("undivided_us", "divided_us"))
                ran = [abs(r["run_over_predicted"] - 1) for r in these if "run_over_predicted" in r]
                found.append(
                    {
                        "name": f"{suite} {candidates} {limit} MiB",
                        "suite": suite,
                        "candidates": candidates,
                        "limit_mib": limit,
                        "operations": len(both),
                        "only_divided": sum(r["undivided_us"] is None and r["divided_us"] is not None for r in these),
                        "undivided_ms": before,
                        "divided_ms": after,
                        "total_speed_up": before / after,
                        "mean_speed_up": float(np.exp(np.mean([math.log(r["speed_up"]) for r in both]))),
                        "most": max(r["speed_up"] for r in both),
                        "is_brute_force": all(r["is_brute_force"] for r in these),
                        "ran": len(ran),
                        "within": sum(off <= WITHIN for off in ran),
                        "worst_off": max(ran, default=None),
                        "worst_distance": max((r["distance"] for r in these if "distance" in r), default=None),
                    }
                )
    return found


def finish(profile: Profile, wanted: Sequence[Operation], run: Run | None, more: dict[str, Any]) -> None:
    """Rows, table and file of one precision."""
    precision = wanted[0].precision
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    for operation in wanted:
        found = rows_of(profile, operation, run)
        rows += found
        if not found:
            left.append(operation.name)
    means = summary(rows)
    identity = profile.identity
    path = write(
        f"deepbench_{precision}",
        rows,
        precision=str(precision),
        summary=means,
        not_measured=left,
        profile={key: getattr(identity, key) for key in ("gpu", "driver", "cudnn", "date")},
        **more,
    )
    show(
        means,
        ["name", "operations", "only_divided", "undivided_ms", "divided_ms", "total_speed_up", "mean_speed_up", "most",
         "is_brute_force", "ran", "within", "worst_off", "worst_distance"],
    )  # fmt: skip
    for row in rows:
        if row.get("failed") or row.get("within") is False or row.get("equal") is False or not row["is_brute_force"]:
            kept = ("name", "candidates", "limit_mib", "divided", "run_over_predicted", "distance", "failed")
            print({key: row.get(key) for key in kept})
    print(f"{path.name}: {len(rows)} rows, {len(left)} operations not measured", flush=True)


def on_gpu(arguments: argparse.Namespace, precisions: Sequence[Precision]) -> None:
    from mbc.measure.gpu import Gpu
    from mbc.measure.kernel_library import KernelLibrary
    from mbc.measure.measure import measure

    started = time.monotonic()
    with Gpu() as gpu:
        for place, precision in enumerate(precisions):
            wanted = operations(precision, tuple(arguments.only))
            # What is left of the time is for the precisions that are left, in equal parts.
            left_s = arguments.measure_for - (time.monotonic() - started)
            begun = time.monotonic()
            done = measure(
                gpu, needs(wanted), arguments.profile, max(0.0, left_s / (len(precisions) - place)),
                workspace_limit_bytes=max(LIMITS_MIB) * MIB,
            )  # fmt: skip
            measured_s = time.monotonic() - begun
            counts = f"{done.measured} measured, {done.known} known, {done.ruled_out} ruled out, {done.left} left"
            print(f"{precision}: {counts}, {measured_s:.0f} s. {done.warning}", flush=True)
            for failure in done.failures[:5]:
                print(failure, file=sys.stderr)
            profile = read_profile(arguments.profile)
            more = {
                "requests_left": done.left,
                "measured_s": measured_s,
                "failures": list(done.failures),
                "unsteady": len(done.unsteady),
            }
            begun = time.monotonic()
            if arguments.run:
                gpu.reset()
                with KernelLibrary.open(gpu, precision) as library:
                    until = time.monotonic() + arguments.run_for / len(precisions)
                    finish(profile, wanted, runner(gpu, library, until), more)
            else:
                finish(profile, wanted, None, more)
            arguments.measure_for += time.monotonic() - begun  # running has a limit of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=ROOT / "build" / "deepbench.sqlite", help="made when not there")
    parser.add_argument("--precisions", default="fp32,tf32,bf16")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="layers whose name holds it: alexnet 5x5")
    parser.add_argument("--measure-for", type=float, default=1e9, metavar="SECONDS", help="for all precisions together")
    parser.add_argument("--run-for", type=float, default=1e9, metavar="SECONDS", help="likewise, of chosen divisions")
    parser.add_argument("--no-run", dest="run", action="store_false", help="choose by the profile only; needs no GPU")
    arguments = parser.parse_args()
    precisions = [Precision(word) for word in arguments.precisions.split(",")]
    if arguments.run:
        need_gpu("--no-run chooses by a profile")
        on_gpu(arguments, precisions)
        return
    for precision in precisions:
        finish(read_profile(arguments.profile), operations(precision, tuple(arguments.only)), None, {})


if __name__ == "__main__":
    start(main)
