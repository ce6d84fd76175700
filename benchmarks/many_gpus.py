"""One mini-batch shared by several GPUs of a machine: mbc, and torch.compile with DDP, each on one GPU and on all.

Every row is a network with a number of images for each GPU. For each contender two times are measured in the same run.
First every GPU computes its part as a mini-batch of its own, all GPUs at once; the slowest GPU counts. Then all GPUs
compute the whole mini-batch together. `efficiency` is the first time over the second. DDP runs in two ways: as in
PyTorch's documentation (`ddp`); and with a static graph, gradients as bucket views and the whole step, all-reduces
included, in one CUDA graph (`whole`, the fastest of several bucket sizes). Results of other GPUs are measured again. A
call that was cut off continues where it stopped.

    python benchmarks/many_gpus.py --plan-only --gpu h100
    python benchmarks/many_gpus.py --for 540 --only adamw       # with sharded optimizer states and without
    python benchmarks/many_gpus.py --for 540 [--peers-only] [--only NAME ...] [--gpus 2] [--buckets 25,100,10]

For other numbers of GPUs than two, the results have files of their own (`many_gpus_4.json`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ahead import Task, add_arguments, build, drive
from modules import Job, example
from planner import Planner, Wanted, processes
from record import Results, attempt, results, show, start
from shelf import Shelf

from mbc.bench import several_gpus as ranks
from mbc.bench.contender_messages import BUCKETS_MB, MBC, Contender, Result, ddp_contenders
from mbc.bench.contender_messages import Job as Raced
from mbc.bench.race import TOLERANCES, compared
from mbc.hardware.spec import device_specs
from mbc.hardware.target import find_device, local_gpus

NAME = "many_gpus"
GIB = 1 << 30
LEAST_S = 20.0  # of a call's time, for anything to be begun


@dataclass(frozen=True)
class Asked:
    """The goals of a row: least values.

    Attributes:
        efficiency: mbc's efficiency, by the number of GPUs.
        over_ddp: Time of DDP, run as in PyTorch's documentation, over mbc's time.
        over_whole: Time of DDP in one CUDA graph over mbc's time.
    """

    efficiency: Mapping[int, float] = field(default_factory=dict[int, float])
    over_ddp: float | None = None
    over_whole: float | None = None


# `sync`: batch normalisation over all rows, whose step may take 25 % longer than the row without; on one GPU it is the
# same step.
ASKED = {
    "resnet50 256": Asked({2: 0.985, 4: 3.95 / 4, 8: 7.85 / 8}, 1.6, 1.4),
    "resnet50 64": Asked({2: 0.97, 4: 3.85 / 4, 8: 7.6 / 8}, 3.0, 1.4),
    "resnet50 32": Asked({2: 0.95, 4: 3.8 / 4, 8: 7.5 / 8}, 3.0, 1.4),
    "vgg16 64": Asked({2: 0.96}),
    "resnet50 64 sync": Asked({2: 0.97 / 1.25}),
    "vgg16 64 adamw": Asked(),
    "vgg16 64 adamw sharded": Asked(),
    "resnet152 32 fp32 adamw": Asked(),
    "resnet152 32 fp32 adamw sharded": Asked(),
}
SHARDED = "sharded"  # the optimizer's states; else each GPU has all of them
LONGER = 1.03  # at most: the step with them over the one without
_NETWORKS = {"resnet50": ("resnet", ("depth", "50")), "resnet152": ("resnet", ("depth", "152"))}
_SETTINGS = {
    "sync": (("train.sync_batch_norm", "true"),),
    "fp32": (("train.precision", "fp32"),),
    "adamw": (("train.optimizer", "adamw"), ("train.shard_optimizer", "false")),
    SHARDED: (("train.shard_optimizer", "true"),),
}


@dataclass(frozen=True)
class Case:
    """A network shared by several GPUs. `each`: rows of each GPU."""

    name: str
    job: Job
    each: int

    @property
    def has_peers(self) -> bool:
        """True if DDP is timed, too. It is not if two settings of mbc are compared."""
        return "adamw" not in self.name

    def sized(self, gpus: int) -> Job:
        """Return the job with the mini-batch of `gpus` GPUs."""
        return self.job.with_settings(("batch", str(self.each * gpus)))


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name in ASKED:
        network, each, *words = name.split()
        path, *sets = _NETWORKS.get(network, (network,))
        settings = {"train.precision": "bf16"} | dict(pair for word in words for pair in _SETTINGS[word])
        yield Case(name, example(path, *sets).with_settings(*settings.items()), int(each))


def chosen(words: Sequence[str]) -> list[Case]:
    """Return the rows with these names, or whose names have these words; all rows if there are no words."""
    created = {case.name: case for case in cases()}
    return [
        case
        for name, case in created.items()
        if not words or any(word == name or (word not in created and word in name) for word in words)
    ]


def prepared(planner: Planner, case: Case, gpus: int) -> dict[str, Any]:
    """Return the figures of the plans for one GPU and for all."""
    card = planner.card
    row: dict[str, Any] = {"each": case.each, "gpus": gpus}
    for what, count in (("one", 1), ("all", gpus)):
        job = replace(case.sized(count), gpu=card.gpu).with_options(profile=card.profile, gpus=count)
        wanted = Wanted(f"{Wanted.of(job).name} {card.gpu} x{count}", job.plan)
        result = planner.keep(shelved(case, card.gpu), what, wanted)
        if "failed" in result:
            return row | {"failed": result["failed"]}
        row |= {
            f"{what}_{key}": result[key] for key in ("predicted_ms", "measured_share", "arena_gib") if key in result
        }
    return row | {"plans": {"one": 0, "all": 0}}


def shelved(case: Case, gpu: str) -> str:
    """Return the name under which the plans of a case for a GPU are kept."""
    return f"{case.name} {gpu}"


@dataclass(frozen=True)
class Bench:
    """Times parts of rows. `packages` are mbc's for one GPU and for all, by case, or the reason why there are none."""

    gpus: int
    device: str
    steps: int
    buckets_mb: tuple[int, ...]
    part_s: float
    with_peers: bool
    packages: Mapping[str, Callable[[], tuple[Path, Path] | str]]
    alone: dict[tuple[str, Contender], Result] = field(default_factory=dict[tuple[str, Contender], Result])

    def parts(self, case: Case) -> list[tuple[str, Contender]]:
        """Return the parts of a case's row."""
        precision = case.sized(self.gpus).lowered().precision
        first, *whole = ddp_contenders("torch.compile", precision, self.device == "cuda", ("default",), self.buckets_mb)
        ddp = [("ddp", first), *((f"whole {created.bucket_mb}", created) for created in whole)]
        return ([("mbc", Contender(MBC))] if case.name in self.packages else []) + (
            ddp if case.has_peers and self.with_peers else []
        )

    def timed(self, case: Case, contender: Contender, left_s: float) -> dict[str, Any]:
        """Return both times of a part of a row, or the reason why there are none."""
        job, began = case.sized(self.gpus), time.monotonic()
        package = alone = Path()
        if contender.peer == MBC:
            result = self.packages[case.name]()
            if isinstance(result, str):
                return {"failed": result}
            alone, package = result
        raced = Raced(
            job.source, job.settings, job.network, str(package), self.device, blocks=max(2, self.steps // 5),
            alone_package=str(alone),
        )  # fmt: skip
        key = (case.name, contender.alone)
        if key not in self.alone or self.alone[key].problem:
            self.alone[key] = ranks.run_alone(raced, contender, self.gpus, min(self.part_s, left_s))
        left_s -= time.monotonic() - began
        together = ranks.run_ranks(raced, contender, self.gpus, min(self.part_s, left_s))
        one = self.alone[key]
        return _part(one, together, case.each * self.gpus) | {"seconds": time.monotonic() - began}


def _part(one: Result, together: Result, batch: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "one_ms": one.step_ms or None, "one_spread_ms": one.spread_ms, "one_gib": one.peak_bytes / GIB,
        "all_ms": together.step_ms or None, "all_spread_ms": together.spread_ms, "all_gib": together.peak_bytes / GIB,
        "all_device_gib": together.device_bytes / GIB, "one_losses": one.losses, "all_losses": together.losses,
        "stage": together.stage, "unchecked": together.unchecked, "versions": together.versions or one.versions,
        "first_step_s": together.first_step_s, "one_each_ms": one.each_ms, "all_each_ms": together.each_ms,
    }  # fmt: skip
    problems = [f"{where}: {r.problem}" for where, r in (("one GPU", one), ("all GPUs", together)) if r.problem]
    if problems:
        return row | {"failed": "; ".join(problems)}
    efficiency = one.step_ms / together.step_ms
    return row | {"efficiency": efficiency, "images_s": batch * 1e3 / together.step_ms}


def _against_whole(sharded: Mapping[str, Any], whole: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the step time and memory with sharded optimizer states relative to whole states, and the verdict."""
    if whole is None or "mbc_all_ms" not in whole:
        return {"passed": None}
    longer = sharded["mbc_all_ms"] / whole["mbc_all_ms"]
    return {
        "over_whole_states": longer,
        "saved_gib": whole["mbc_all_gib"] - sharded["mbc_all_gib"],
        "passed": longer <= LONGER,
    }


def summed_up(
    row: dict[str, Any], planned: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the row with the fastest bucket size, ratios, compared losses and verdicts, computed from its parts.

    For a row with sharded states, `whole` is the row with all states on each GPU.
    """
    parts: dict[str, dict[str, Any]] = row["parts"]
    ran = {name: part for name, part in parts.items() if "failed" not in part}
    best = min((n for n in ran if n.startswith("whole")), key=lambda n: ran[n]["all_ms"], default="")
    chosen = {"mbc": ran.get("mbc"), "ddp": ran.get("ddp"), "whole": ran.get(best)}
    summed: dict[str, Any] = {"name": row["name"], "each": row["each"], "gpus": row["gpus"], "machine": row["machine"]}
    for who, part in chosen.items():
        if part is not None:
            summed |= {f"{who}_{key}": part[key] for key in ("one_ms", "all_ms", "efficiency", "images_s", "all_gib")}
    summed["whole_bucket"], summed["whole_stage"] = (
        best.removeprefix("whole ") or None,
        ran.get(best, {}).get("stage"),
    )
    for who in ("ddp", "whole"):
        if f"{who}_all_ms" in summed and "mbc_all_ms" in summed:
            summed[f"over_{who}"] = summed[f"{who}_all_ms"] / summed["mbc_all_ms"]
    for what in ("one", "all") if "mbc_all_ms" in summed and "all_predicted_ms" in planned else ():
        summed[f"{what}_predicted_over_measured"] = planned[f"{what}_predicted_ms"] / summed[f"mbc_{what}_ms"]
    summed |= _losses(row["precision"], ran)
    if "mbc" in ran:
        asked = ASKED.get(row["name"], Asked())
        wanted = (
            ("mbc_efficiency", asked.efficiency.get(row["gpus"])), ("over_ddp", asked.over_ddp),
            ("over_whole", asked.over_whole),
        )  # fmt: skip
        summed["passed"] = all(
            summed.get(key) is not None and summed[key] >= least for key, least in wanted if least is not None
        )
        if row["name"].endswith(SHARDED):
            summed |= _against_whole(summed, whole)
    failed = "; ".join(f"{name}: {part['failed']}" for name, part in parts.items() if "failed" in part)
    return summed | {"precision": row["precision"], "parts": parts} | ({"failed": failed} if failed else {})


def _losses(precision: str, ran: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the largest distance of a contender's losses from those of the first contender, on one GPU and on all."""
    tolerance = next(value for kind, value in TOLERANCES.items() if kind == precision)
    apart = 0.0
    for what in ("one", "all"):
        outcome = [Result(losses=tuple(part[f"{what}_losses"])) for part in ran.values()]
        for result in outcome[1:]:
            apart = max(apart, compared(Contender(""), result, outcome[0], tolerance).apart or 0.0)
    return {"losses_apart": apart, "same_mathematics": apart <= tolerance}


def measure(bench: Bench, wanted: list[Case], planned: Results, measured: Results, for_s: float, again: bool) -> None:
    """Measure every missing part, then the parts that failed; write each when it is measured."""
    began = time.monotonic()
    gpus = local_gpus()[: bench.gpus]
    gpu = spec_name()
    rows = {
        case.name: _begun(case, bench.gpus, [f"{g.name} {g.uuid}" for g in gpus], measured, again) for case in wanted
    }
    todo = [(case, *part) for case in wanted for part in bench.parts(case)]
    todo.sort(key=lambda part: part[1] != MBC)  # of all rows, before any peer
    missing = [part for part in todo if part[1] not in rows[part[0].name]["parts"]]
    failed = [part for part in todo if "failed" in rows[part[0].name]["parts"].get(part[1], {})]
    for case, name, contender in (*missing, *failed):
        left_s = for_s - (time.monotonic() - began)
        if left_s < LEAST_S:
            print("time is over, parts are left: run this again", flush=True)
            return
        print(f"{case.name}: {contender.name}", flush=True)
        result = attempt(lambda c=case, who=contender, s=left_s: bench.timed(c, who, s), name)
        if "failed" in result and for_s - (time.monotonic() - began) < LEAST_S:
            print(f"{name} was cut off: {result['failed']}", flush=True)
            return
        rows[case.name]["parts"][name] = result
        beside = measured.rows.get(case.name.removesuffix(f" {SHARDED}")) if case.name.endswith(SHARDED) else None
        rows[case.name] = summed_up(rows[case.name], planned.rows.get(shelved(case, gpu), {}), beside)
        measured.put(rows[case.name])
        show([result], ["name", "one_ms", "all_ms", "efficiency", "images_s", "all_gib", "stage", "seconds"])


def _begun(case: Case, gpus: int, machine: list[str], measured: Results, again: bool) -> dict[str, Any]:
    """Return the row with the parts that today's code has measured on these GPUs."""
    row = measured.rows.get(case.name, {})
    parts = row.get("parts", {}) if row.get("machine") == machine and row.get("gpus") == gpus and not again else {}
    if "code" in row:  # older; DDP is not of it
        parts = {name: part for name, part in parts.items() if name != "mbc"}
    precision = str(case.job.lowered().precision)
    return {
        "name": case.name, "each": case.each, "gpus": gpus, "machine": machine, "precision": precision, "parts": parts,
    }  # fmt: skip


def of_gpus(name: str, gpus: int) -> str:
    """Return the name of the results for a number of GPUs."""
    return name if gpus == 2 else f"{name}_{gpus}"


def spec_name() -> str:
    """Return the name by which plans call the GPU of this machine."""
    here = find_device("auto").name
    return next((name for name, spec in device_specs().items() if spec.name == here), "auto")


def packages(
    wanted: list[Case], planned: Results, shelf: Shelf, folder: Path, pool: Any
) -> dict[str, Callable[[], tuple[Path, Path] | str]]:
    """Start to build all packages. Return for each case a function that waits for its two packages."""
    gpu = spec_name()

    def begun(case: Case) -> Callable[[], tuple[Path, Path] | str]:
        row = planned.rows.get(shelved(case, gpu))
        if row is None or "failed" in row:
            why = (row or {"failed": "there is no plan: run --plan-only first"})["failed"]
            return lambda: why
        places = {what: folder / f"{case.name.replace(' ', '_')}_{what}" for what in ("one", "all")}
        built: list[Future[str]] = [
            pool.submit(build, shelf.path(shelved(case, gpu), what), places[what]) for what in places
        ]
        return lambda: next((why for b in built if (why := b.result())), None) or (places["one"], places["all"])

    return {case.name: begun(case) for case in wanted}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--gpus", type=int, default=2, help="that share a mini-batch (default 2)")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--peers-only", action="store_true", help="without mbc, and without its plans")
    who.add_argument("--mbc-only", action="store_true", help="without DDP")
    parser.add_argument(
        "--buckets", default=",".join(map(str, BUCKETS_MB)), metavar="M,M", help="MiB (default %(default)s)"
    )
    parser.add_argument("--part", type=float, default=240.0, metavar="S", help="most for one measurement (default 240)")
    arguments = parser.parse_args()
    arguments.plans /= f"{arguments.gpus}_gpus"
    wanted = chosen(arguments.only)
    if arguments.plan_only:
        tasks = [
            Task(shelved(case, arguments.gpu), partial(prepared, case=case, gpus=arguments.gpus), _never)
            for case in wanted
        ]
        drive(of_gpus(NAME, arguments.gpus), tasks, _PLANNED, arguments)
        return
    here = len(local_gpus())
    if here < arguments.gpus:
        raise SystemExit(f"this machine has {here} GPUs that can be used, not {arguments.gpus}: --plan-only needs none")
    name = of_gpus(NAME, arguments.gpus)
    planned, measured = results(f"{name}_planned"), results(name)
    buckets = tuple(int(size) for size in arguments.buckets.split(","))
    with TemporaryDirectory() as folder, processes(arguments.workers) as pool:
        built = {} if arguments.peers_only else packages(wanted, planned, Shelf(arguments.plans), Path(folder), pool)
        with_peers = not arguments.mbc_only
        bench = Bench(arguments.gpus, "cuda", arguments.steps, buckets, arguments.part, with_peers, built)
        measure(bench, wanted, planned, measured, arguments.for_s, arguments.again)
    print()
    show([measured.rows[case.name] for case in wanted if case.name in measured.rows], _COLUMNS)


def _never(row: dict[str, Any], timed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    raise AssertionError(f"{row['name']} is measured here, not by ahead.py ({sorted(timed)})")


_PLANNED = ["name", "gpus", "one_predicted_ms", "all_predicted_ms", "all_measured_share", "all_arena_gib"]
_COLUMNS = [
    "name", "mbc_one_ms", "mbc_all_ms", "mbc_efficiency", "ddp_one_ms", "ddp_all_ms", "ddp_efficiency", "whole_one_ms",
    "whole_all_ms", "whole_efficiency", "whole_bucket", "over_ddp", "over_whole", "one_predicted_over_measured",
    "all_predicted_over_measured", "losses_apart", "over_whole_states", "saved_gib", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
