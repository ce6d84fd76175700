"""One step on the GPU, launch by launch: what each launch of the plan takes and when it runs, measured and predicted.

PyTorch's profiler (kineto, CUPTI) runs in the process of the module and writes two traces. In the first the step runs
launch by launch, each waited for, which says what kernels a launch consists of. In the second it is replayed as it
always is, as one graph, whose kernels have names and times but no launch: the n-th run of a kernel belongs to the n-th
launch that runs it. (Of launches that run the same kernel at the same time one may be taken for the other.)

    python benchmarks/step_trace.py PLAN [--steps 5] [--name NAME] [--keep FOLDER] [--read]

PLAN: a file of build/plans (as `capped.py --plan-only` leaves it), or a built package. Writes
`results/step_trace_<name>.json`: a row a launch, in the plan's order, and sums by kind; `--keep` has the raw traces,
from which `--read` writes it anew. `mbc report --with` and `mbc trace --with` show the result beside the plan.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ahead import build
from modules import open_module, random_inputs
from record import ROOT, need_gpu, show, start, write
from shelf import unpack

from mbc.hardware.target import find_device
from mbc.ops.fused import joined_kind
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.simulate import timeline
from mbc.plan.file import PLAN_FILE, load_plan
from mbc.plan.model import Copy, Launch, Plan
from mbc.report.measured import launch_name

WARM_STEPS = 5
LEARNING_RATE = 1e-4
NAME_CHARACTERS = 60  # of a kernel's
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CALLS = frozenset({"cuda_runtime", "cuda_driver"})
WAITED, REPLAYED = "cudaStreamSynchronize", "cudaGraphLaunch"


@dataclass(frozen=True)
class Event:
    """A kernel, copy or fill on the GPU, or a call of CUDA's that starts some of them. Calls and what they start have
    the same `correlation`."""

    category: str
    name: str
    start_us: float
    end_us: float
    correlation: int


@dataclass(frozen=True)
class Trace:
    """Both in the order of their starts."""

    on_gpu: tuple[Event, ...]
    calls: tuple[Event, ...]

    @staticmethod
    def of(document: Mapping[str, Any]) -> Trace:
        """Of a chrome trace as kineto writes it."""
        events = sorted(_events(document), key=lambda event: event.start_us)
        on_gpu, calls = (tuple(e for e in events if e.category in kinds) for kinds in (ON_GPU, CALLS))
        return Trace(on_gpu, calls)


def _events(document: Mapping[str, Any]) -> Iterator[Event]:
    for one in document["traceEvents"]:
        if one.get("ph") == "X" and one.get("cat") in ON_GPU | CALLS:
            begun = float(one["ts"])
            number = int(one.get("args", {}).get("correlation", -1))
            yield Event(one["cat"], one["name"], begun, begun + float(one.get("dur", 0.0)), number)


def names_by_launch(trace: Trace, launches: int) -> list[list[str]]:
    """The names of what each launch runs on the GPU, of a step whose launches are waited for one by one."""
    waits = [call.end_us for call in trace.calls if call.name.startswith(WAITED)]
    if len(waits) < launches:
        counts = dict(Counter(call.name for call in trace.calls))
        raise RuntimeError(f"{len(waits)} waits for {launches} launches were traced; the calls are {counts}")
    issued = {call.correlation: call.start_us for call in trace.calls}
    found: list[list[str]] = [[] for _ in range(launches)]
    number = 0
    for event in sorted(trace.on_gpu, key=lambda e: issued.get(e.correlation, e.start_us)):
        if event.category != "kernel" and event.correlation not in issued:
            continue  # inputs and figures, which PyCUDA copies
        while number < launches and waits[number] <= issued.get(event.correlation, event.start_us):
            number += 1
        if number < launches:
            found[number].append(event.name)
    return found


def replays(trace: Trace) -> list[list[Event]]:
    """What each replay of a graph runs on the GPU, in the order of the starts."""
    found: dict[int, list[Event]] = {call.correlation: [] for call in trace.calls if call.name.startswith(REPLAYED)}
    for event in trace.on_gpu:
        if event.correlation in found:
            found[event.correlation].append(event)
    steps = [events for events in found.values() if events]
    if not steps:
        counts = dict(Counter(call.name for call in trace.calls))
        raise RuntimeError(f"no replay with {len(trace.on_gpu)} events on the GPU was traced; the calls are {counts}")
    return steps


def by_launch(step: Sequence[Event], names: Sequence[Sequence[str]]) -> tuple[list[list[Event]], Counter[str]]:
    """The events of one replay by launch; and what is left of the names: above zero what did not run, below it what no
    launch is known to run."""
    waiting: dict[str, deque[int]] = {}
    left: Counter[str] = Counter()
    for number, wanted in enumerate(names):
        for name in wanted:
            waiting.setdefault(name, deque()).append(number)
            left[name] += 1
    found: list[list[Event]] = [[] for _ in names]
    for event in step:
        if waiting.get(event.name):
            found[waiting[event.name].popleft()].append(event)
        left[event.name] -= 1
    return found, Counter({name: count for name, count in left.items() if count})


def rows_of(plan: Plan, names: Sequence[Sequence[str]], steps: Sequence[Sequence[Event]]) -> list[dict[str, Any]]:
    """A row a launch: medians over the steps. `gap_us`: after what its stream did before, or since the step began."""
    disturbed = contention(plan.train, plan.graph, plan.buffers, find_device(plan.target.gpu))
    predicted = timeline(plan.train, contention=disturbed)
    kinds = {op.name: op.kind for op in plan.graph.train}
    timed = [by_launch(step, names)[0] for step in steps]
    begun = [step[0].start_us for step in steps]
    free = [dict.fromkeys({launch.stream for launch in plan.train.launches}, begun_us) for begun_us in begun]
    rows: list[dict[str, Any]] = []
    for i, launch in enumerate(plan.train.launches):
        row: dict[str, Any] = {
            "name": launch_name(i, launch),
            "kind": _kind(launch, kinds),
            "stream": str(launch.stream),
            "kernels": [name[:NAME_CHARACTERS] for name in names[i]],
            "alone_us": launch.work.time_us,
            "predicted_us": predicted.ends_us[i] - predicted.starts_us[i],
            "predicted_start_us": predicted.starts_us[i],
            "predicted_gap_us": predicted.stalls_us[i],
        }
        spans: list[tuple[float, float, float]] = []
        for events, begun_us, ends in zip(timed, begun, free, strict=True):
            parts = events[i]
            if parts:
                first, last = min(e.start_us for e in parts), max(e.end_us for e in parts)
                spans.append((last - first, first - begun_us, first - ends[launch.stream]))
                ends[launch.stream] = last
        if spans:
            measured = (median(column) for column in zip(*spans, strict=True))
            row |= dict(zip(("measured_us", "start_us", "gap_us"), measured, strict=True))
        rows.append(row)
    return rows


def _kind(launch: Launch, kinds: Mapping[str, str]) -> str:
    if isinstance(launch.work, Copy):
        return f"copy {launch.stream}"
    return joined_kind([kinds[name] for name in launch.operations]) or "conversion"


def sums_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By kind of launch, what is longest first; of launches that were found in the trace."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "measured_us" in row:
            names = ("predicted_us", "measured_us", "predicted_gap_us", "gap_us")
            total = found.setdefault(row["kind"], {"name": row["kind"], "launches": 0, **dict.fromkeys(names, 0.0)})
            total["launches"] += 1
            for name in names:
                total[name] += row[name]
    for total in found.values():
        total["predicted_over_measured"] = (
            total["predicted_us"] / total["measured_us"] if total["measured_us"] else None
        )
    return sorted(found.values(), key=lambda total: -total["measured_us"])


def trace_steps(folder: Path, steps: int, eager: bool, path: Path) -> None:
    """Trace so many steps of a built package, or one launch by launch, into a file."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.profiler import ProfilerActivity, profile  # pyright: ignore[reportMissingImports]

    with profile(activities=[ProfilerActivity.CUDA]):
        torch.ones(1, device="cuda").sum().item()  # the profiler is there before graphs are made
    with open_module(folder, "cuda", eager=eager) as module:
        from pycuda import gpuarray  # pyright: ignore[reportMissingImports]

        arrays = [gpuarray.to_gpu(array) for array in random_inputs(module.plan.graph)]
        for _ in range(0 if eager else WARM_STEPS):
            float(module.step(*arrays, lr=LEARNING_RATE))
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(1 if eager else steps):
                float(module.step(*arrays, lr=LEARNING_RATE))
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))


def trace_both(plan: Path, steps: int, launches: Path, replayed: Path) -> None:
    """Both traces of a plan or a package, into these files."""
    need_gpu("--read takes traces that are there")
    with tempfile.TemporaryDirectory() as made:
        folder = plan
        if plan.is_file():
            folder = Path(made) / "package"
            if failed := build(plan, folder):
                raise SystemExit(failed)
        trace_steps(folder, 1, True, launches)
        trace_steps(folder, steps, False, replayed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("--steps", type=int, default=5, help="replays that are traced (default 5)")
    parser.add_argument("--name", help="of the result (default: that of the plan)")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "traces", help="folder of the raw traces")
    parser.add_argument("--read", action="store_true", help="take the traces that are in --keep; needs no GPU")
    arguments = parser.parse_args()
    name = arguments.name or arguments.plan.name.removesuffix(".json.gz").replace(".", "_")
    arguments.keep.mkdir(parents=True, exist_ok=True)
    paths = [arguments.keep / f"{name}_{what}.json" for what in ("launches", "replays")]
    if not arguments.read:
        trace_both(arguments.plan, arguments.steps, *paths)
    launches, replayed = (Trace.of(json.loads(path.read_text(encoding="utf-8"))) for path in paths)
    plan = unpack(arguments.plan) if arguments.plan.is_file() else load_plan(
        (arguments.plan / PLAN_FILE).read_text(encoding="utf-8"), PLAN_FILE
    )  # fmt: skip
    names, steps = names_by_launch(launches, len(plan.train.launches)), replays(replayed)
    rows = rows_of(plan, names, steps)
    sums, left = sums_of(rows), dict(by_launch(steps[0], names)[1])
    step_us = median(max(e.end_us for e in step) - step[0].start_us for step in steps)
    predicted_us = plan.predictions.train_us
    write(
        f"step_trace_{name}", rows, step_us=step_us, predicted_us=predicted_us, steps=len(steps), left=left, sums=sums
    )
    show(sums, list(sums[0]) if sums else [])
    print(f"step {step_us:,.0f} us, {predicted_us:,.0f} predicted; names that do not match: {left or 'none'}")


if __name__ == "__main__":
    start(main)
