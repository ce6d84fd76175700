"""Several GPUs of a machine that all copy with its memory: what that costs, and what a plan gains that knows of it.

* A step that lives on transfers: a network in a part of its memory, without recomputation. `loss` is that of all GPUs
  over one GPU under the same cap (`one`), by the plan that knows of the others (`aware`) and by the one that does not
  (`oblivious`). A cap bounds what one GPU's plan takes; NCCL's memory comes on top of it on several.
* Kim et al.'s own claim, on GPUs of 12 GB: the largest batch that trains by liveness and placement alone (`plain`), and
  twice that with everything (`twice`), by images/s.

Plans and predictions need no GPU; rates of copies by several GPUs are those of the profile, else an estimate. On a
machine with the GPUs the plans run; what a call has no time for is left to the next.

    python benchmarks/contention.py --plan-only --gpu h100 [--gpus 2] [--only NAME ...] [--workers N]
    mbc profile --gpu all && python benchmarks/contention.py --for 500 [--gpus 2] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ahead import Task, add_arguments, build, drive
from cap import BATCHES, GB, PLAIN, Card
from many_gpus import of_gpus, spec_name
from modules import Job, example
from planner import Planner, Probe, Wanted, processes
from record import Results, attempt, results, show, start
from shelf import Shelf, unpack

from mbc.bench import ranks
from mbc.bench.job import MBC, Contender
from mbc.bench.job import Job as Raced
from mbc.hardware.target import find_device, local_gpus
from mbc.plan.model import Plan
from mbc.profile.locate import find_profile
from mbc.profile.model import for_ranks
from mbc.report.timeline import predicted_timeline, stalls

NAME = "contention"
LEAST_S = 30.0  # of a call's time, for a plan's run to be begun
PART_S = 150.0  # the most that one run may take
MOST_LOSS = {2: 0.10, 4: 0.15}  # of an aware plan over one GPU, by the number of GPUs
LEAST_GAIN = 0.99  # over the oblivious plan
KIM_CAP = 12 * GB
NO_RECOMPUTATION = frozenset({"recompute"})
TIMES_PLAIN = 2


@dataclass(frozen=True)
class Case:
    """`each`: rows of a GPU, of Kim's cases those to begin the search for the largest batch with. `share`: of the
    memory that the network takes on one GPU without a limit; None: Kim's."""

    name: str
    job: Job
    each: int
    share: float | None = None

    def sized(self, gpus: int, each: int | None = None) -> Job:
        return self.job.with_settings(("batch", str((self.each if each is None else each) * gpus)))


def cases() -> Iterator[Case]:
    def job(name: str, precision: str, *sets: tuple[str, str]) -> Job:
        # Sharded states are another way to save memory, on several GPUs only.
        return example(name, *sets, ("train.precision", precision), ("train.shard_optimizer", "false"))

    yield Case("unet 16 bf16 in half", job("unet", "bf16"), 16, 1 / 2)
    yield Case("unet 16 bf16 in a third", job("unet", "bf16"), 16, 1 / 3)
    yield Case("vgg16 256 bf16 in 5/6", job("vgg16", "bf16"), 256, 5 / 6)
    yield Case("resnet50 fp32 12 GB", job("resnet", "fp32", ("depth", "50")), 64)
    yield Case("vgg16 fp32 12 GB", job("vgg16", "fp32"), 128)


@dataclass(frozen=True)
class Maker:
    """Plans of one row. `gpus` share a mini-batch."""

    planner: Planner
    case: Case
    gpus: int

    def wanted(self, job: Job, gpus: int, budget_bytes: float | None, **options: Any) -> Wanted:
        card = self.planner.card
        job = replace(job, gpu=card.gpu).with_options(profile=card.profile, gpus=gpus, **options)
        job = (
            card.unlimited(job)
            if budget_bytes is None
            else job.with_settings(("memory.device", f"{budget_bytes:.0f} B"))
        )
        alone = " oblivious" if options.get("gpus_per_node") else ""
        return Wanted(f"{Wanted.of(job).name} {card.gpu} x{gpus}{alone}", job.plan)

    def kept(self, row: dict[str, Any], what: str, wanted: Wanted) -> Plan:
        """The plan, whose figures enter the row. RuntimeError where there is none."""
        name = _shelved(self.case, self.planner.card.gpu)
        found = self.planner.keep(name, what, wanted)
        if "failed" in found:
            raise RuntimeError(f"{what}: {found['failed']}")
        plan = unpack(self.planner.shelf.path(name, what))
        waits = stalls(plan.train, predicted_timeline(plan, plan.train))
        row |= {f"{what}_predicted_ms": found["predicted_ms"], f"{what}_host_gb": found["host_gb"],
                f"{what}_images_s": found["images_s"], f"{what}_measured_share": found["measured_share"],
                f"{what}_stalls": len(waits), f"{what}_stalls_ms": sum(s.time_us for s in waits) / 1e3}  # fmt: skip
        row["plans"][what] = 0
        return plan


def _shelved(case: Case, gpu: str) -> str:
    """The name of its plans for a GPU."""
    return f"{case.name} {gpu}"


def prepared(planner: Planner, case: Case, gpus: int) -> dict[str, Any]:
    maker = Maker(planner, case, gpus)
    row: dict[str, Any] = {"gpus": gpus, "gpu": planner.card.gpu, "plans": {}}
    return _offloading(maker, row) if case.share is not None else _kim(maker, row)


def _offloading(maker: Maker, row: dict[str, Any]) -> dict[str, Any]:
    case, gpus, card = maker.case, maker.gpus, maker.planner.card
    assert case.share is not None
    free = maker.planner.ask(maker.wanted(case.sized(1), 1, None)).figures
    if "failed" in free:
        raise RuntimeError(free["failed"])
    cap_bytes = case.share * (free["counted_gb"] * GB + card.context_bytes)
    row |= {"batch": case.each * gpus, "cap_gb": cap_bytes / GB, "free_predicted_ms": free["predicted_ms"]}
    maker.kept(row, "one", maker.wanted(case.sized(1), 1, cap_bytes, without=NO_RECOMPUTATION))
    cap_bytes += communicator_bytes(card, gpus)
    aware = maker.kept(row, "aware", maker.wanted(case.sized(gpus), gpus, cap_bytes, without=NO_RECOMPUTATION))
    maker.kept(
        row, "oblivious",
        maker.wanted(case.sized(gpus), gpus, cap_bytes, without=NO_RECOMPUTATION, gpus_per_node=1),
    )  # fmt: skip
    # What it says of itself is without the others.
    row["oblivious_claimed_ms"] = row["oblivious_predicted_ms"]
    row["oblivious_predicted_ms"] = aware.predictions.oblivious_us / 1e3 or row["aware_predicted_ms"]
    return judged(row, "predicted_ms")


def communicator_bytes(card: Card, gpus: int) -> int:
    """What a plan reserves for NCCL."""
    device = find_device(card.gpu)
    return for_ranks(device, find_profile(device, card.profile), gpus).communicator_bytes


def _kim(maker: Maker, row: dict[str, Any]) -> dict[str, Any]:
    case, gpus = maker.case, maker.gpus

    def plain(each: int) -> Wanted:
        return maker.wanted(case.sized(gpus, each), gpus, KIM_CAP, without=PLAIN)

    def fits(probes: list[Probe]) -> bool:
        return all(probe.fits for probe in probes)

    count = maker.planner.largest(lambda count: [plain(count * BATCHES)], fits, max(1, case.each // BATCHES))
    if not count:
        raise RuntimeError("no batch fits without techniques that save memory")
    each = count * BATCHES
    row |= {"cap_gb": KIM_CAP / GB, "plain_batch": each * gpus, "twice_batch": TIMES_PLAIN * each * gpus}
    maker.kept(row, "plain", plain(each))
    maker.kept(row, "twice", maker.wanted(case.sized(gpus, TIMES_PLAIN * each), gpus, KIM_CAP))
    return judged(row, "predicted_ms")


def judged(row: dict[str, Any], time: str) -> dict[str, Any]:
    """With what follows from the plans' times, predicted or measured (`time`: predicted_ms, ms)."""
    if f"aware_{time}" in row:
        one, aware, oblivious = (row[f"{what}_{time}"] for what in ("one", "aware", "oblivious"))
        row |= {"loss": aware / one - 1, "oblivious_loss": oblivious / one - 1, "gain": oblivious / aware}
        row["passed"] = row["loss"] <= MOST_LOSS.get(row["gpus"], 1.0) and row["gain"] >= LEAST_GAIN
        return row
    speeds = {what: row[f"{what}_batch"] * 1e3 / row[f"{what}_{time}"] for what in ("plain", "twice")}
    row |= {f"{what}_images_s": speed for what, speed in speeds.items()}
    row["speed"] = speeds["twice"] / speeds["plain"]
    row["passed"] = row["speed"] >= 1
    return row


def measure(
    wanted: list[Case], planned: Results, measured: Results, shelf: Shelf, arguments: argparse.Namespace
) -> None:
    """Runs every plan of rows that are not complete, each written when it is done."""
    began = time.monotonic()
    machine = [f"{gpu.name} {gpu.uuid}" for gpu in local_gpus()[: arguments.gpus]]
    with TemporaryDirectory() as folder, processes(arguments.workers) as pool:
        todo = [(case, row) for case in wanted if (row := _begun(case, planned, measured, machine, arguments))]
        built = {
            (case.name, what): pool.submit(
                build, shelf.path(_shelved(case, row["gpu"]), what), _place(folder, case, what)
            )
            for case, row in todo
            for what in row["plans"]
            if f"{what}_ms" not in row
        }
        for (name, what), future in built.items():
            case, row = next((case, row) for case, row in todo if case.name == name)
            left_s = arguments.for_s - (time.monotonic() - began)
            if left_s < LEAST_S:
                print("time is over, parts are left: run this again", flush=True)
                for other in built.values():
                    other.cancel()
                return
            place = _place(folder, case, what)
            why = future.result()
            found = {"failed": why} if why else attempt(
                lambda c=case, r=row, w=what, p=place, s=left_s: run(c, r, w, p, min(PART_S, s), arguments.steps), name
            )  # fmt: skip
            if "failed" in found:
                measured.put(row | {"failed": f"{what}: {found['failed']}"})
                continue
            row.pop("failed", None)
            row |= {f"{what}_{key}": value for key, value in found.items() if key != "name"}
            row[f"{what}_predicted_over_measured"] = row[f"{what}_predicted_ms"] / row[f"{what}_ms"]
            measured.put(judged(row, "ms") if all(f"{p}_ms" in row for p in row["plans"]) else row)
            print(f"{name}: {what} {row[f'{what}_ms']:.2f} ms, predicted {row[f'{what}_predicted_ms']:.2f}", flush=True)


def _begun(
    case: Case, planned: Results, measured: Results, machine: list[str], arguments: argparse.Namespace
) -> dict[str, Any] | None:
    """The row as far as it was measured on these GPUs; None where there is no plan, or nothing is left to do."""
    plan = planned.rows.get(case.name)
    if plan is None or "failed" in plan or plan["gpus"] != len(machine):
        print(f"{case.name}: there are no plans for {len(machine)} GPUs: run --plan-only first", flush=True)
        return None
    row = measured.rows.get(case.name, {})
    if arguments.again or row.get("machine") != machine or row.get("plans") != plan["plans"]:
        row = dict(plan) | {"machine": machine}
        row.pop("passed", None)
    return None if all(f"{what}_ms" in row for what in row["plans"]) else dict(row)


def run(case: Case, row: Mapping[str, Any], what: str, package: Path, limit_s: float, steps: int) -> dict[str, Any]:
    """One plan's step: of `one` on one GPU, of the others on all at once."""
    gpus = 1 if what == "one" else row["gpus"]
    batch = row.get(f"{what}_batch") or case.each * gpus
    job = case.job.with_settings(("batch", str(batch)))
    raced = Raced(
        job.source, job.settings, job.network, str(package), "cuda", blocks=max(2, steps // 5),
        alone_package=str(package),
    )  # fmt: skip
    contender = Contender(MBC)
    if gpus == 1:
        result = ranks.run_alone(raced, contender, 1, limit_s)
    else:
        result = ranks.run_ranks(raced, contender, gpus, limit_s)
    if result.problem:
        return {"failed": result.problem}
    return {
        "ms": result.step_ms, "spread_ms": result.spread_ms, "each_ms": result.each_ms, "losses": result.losses,
        "device_gib": result.device_bytes / (1 << 30),
    }  # fmt: skip


def _place(folder: str, case: Case, what: str) -> Path:
    return Path(folder) / f"{''.join(c if c.isalnum() else '_' for c in case.name)}_{what}"


def _never(row: dict[str, Any], timed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    raise AssertionError(f"{row['name']} is measured here, not by ahead.py ({sorted(timed)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--gpus", type=int, default=2, help="that share a mini-batch (default 2)")
    arguments = parser.parse_args()
    arguments.plans /= f"{arguments.gpus}_gpus"
    wanted = [case for case in cases() if not arguments.only or any(word in case.name for word in arguments.only)]
    if arguments.plan_only:
        tasks = [Task(case.name, partial(prepared, case=case, gpus=arguments.gpus), _never) for case in wanted]
        drive(of_gpus(NAME, arguments.gpus), tasks, _PLANNED, arguments)
        return
    here = len(local_gpus())
    if here < arguments.gpus:
        raise SystemExit(f"this machine has {here} GPUs that can be used, not {arguments.gpus}: --plan-only needs none")
    name = of_gpus(NAME, arguments.gpus)
    planned, measured = results(f"{name}_planned"), results(name)
    print(f"plans were made for {planned.rows and next(iter(planned.rows.values())).get('gpu')}, this is {spec_name()}")
    measure(wanted, planned, measured, Shelf(arguments.plans), arguments)
    print()
    show([measured.rows[case.name] for case in wanted if case.name in measured.rows], _MEASURED)


_PLANNED = [
    "name", "gpus", "cap_gb", "one_predicted_ms", "aware_predicted_ms", "oblivious_predicted_ms", "loss",
    "oblivious_loss", "gain", "aware_host_gb", "aware_stalls", "aware_stalls_ms", "oblivious_stalls", "plain_batch",
    "plain_images_s", "twice_batch", "twice_images_s", "speed", "twice_stalls", "twice_stalls_ms", "passed",
]  # fmt: skip
_MEASURED = [
    "name", "gpus", "cap_gb", "one_ms", "aware_ms", "oblivious_ms", "loss", "oblivious_loss", "gain",
    "aware_predicted_over_measured", "plain_batch", "plain_images_s", "twice_batch", "twice_images_s", "speed",
    "twice_predicted_over_measured", "aware_stalls", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
