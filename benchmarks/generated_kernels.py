"""Compare the bandwidth of each memory-bound kernel written by hand with that of the kernel generated in its place.

    python benchmarks/generated_kernels.py --plan-only        requests only; needs no GPU
    python benchmarks/generated_kernels.py [--baseline CHECKOUT] [--only KERNEL ...] [--for SECONDS] [--again]

The requests are those of the survey's networks (`kernel_survey.py`): of the examples and of five imported networks in
bf16. For each kernel these are the request that moves most bytes and the one in the middle, in every layout that the
kernel takes, and the largest one also in fp16 and fp32. Operations whose operands have one shape are also run on a
large image, because networks may have only small ones, in blocks of squeeze and excitation. Both kernels are timed in
turns (`in_turns.py`) in at least 20 rounds. `ratio` is the median of the generated kernel's time over the other's.
`difference` is the largest relative L2 distance between samples of their outputs. With `--baseline` the kernel written
by hand is that of another checkout, for kernels that this one has no longer.

Writes `results/generated_kernels.json` with the chosen requests and a row for each measurement. Another call continues
with the rows that are missing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from imported_sources import imported_jobs
from in_turns import Worker, in_turns
from kernel_worker import GENERATED
from modules import example, examples
from record import RESULTS, ROOT, attempt, need_gpu, results, show, start, write

from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import KERNELS
from mbc.kernels.cuda.base import PROVIDER, OwnKernel
from mbc.kernels.cuda.generated.generated_map import generated_kernel
from mbc.options import Policy
from mbc.plan.kernel_call import call_of
from mbc.plan.model import Kernel, Plan
from mbc.profile.signature import asked_kind, read_signature, signature

WORKER = (sys.executable, str(Path(__file__).with_name("kernel_worker.py")))
NAME = "generated_kernels"
PRECISIONS = (Precision.BF16, Precision.FP16, Precision.FP32)
FOLDERS = ("pointwise/", "fused/", "norm/")  # of kernels whose time is that of the bytes that they move
LEAST_ROUNDS = 20
BUDGET_US = 2000.0  # of one timing
LARGE_IMAGE = (64, 256, 56, 56)
LIMIT_S = 500.0  # of one answer; before the first answer a process compiles kernels
COLUMNS = ("name", "hand_us", "generated_us", "hand_gb_s", "generated_gb_s", "ratio", "spread", "difference")


def kernels_of(plan: Plan) -> Iterator[tuple[OwnKernel, Request]]:
    """Yield the memory-bound kernels of a plan that are written by hand, with their requests."""
    for program, operations in ((plan.train, plan.graph.train), (plan.infer, plan.graph.infer)):
        by_name = {operation.name: operation for operation in operations}
        for launch in program.launches:
            work = launch.work
            kernel = KERNELS.get(work.name) if isinstance(work, Kernel) and work.provider == PROVIDER else None
            if kernel is not None and kernel.file.startswith(FOLDERS):
                yield kernel, call_of(plan, launch, by_name).request


def moved_bytes(request: Request) -> float:
    """Return the bytes that a launch reads and writes at least."""
    kind = asked_kind(request)
    shares = kind.reads(request.attributes, request.inputs) if kind and kind.reads else (1.0,) * len(request.inputs)
    read_bytes = sum(share * t.size_bytes for share, t in zip(shares, request.inputs, strict=True))
    return read_bytes + sum(t.size_bytes for t in request.outputs)


def is_generated(request: Request) -> bool:
    """Return whether a kernel can be generated for a request; there is none for a conversion."""
    return asked_kind(request) is not None and generated_kernel(request) is not None


def on_large_image(request: Request) -> Request | None:
    """Return the request on a large image; None if it has several shapes, is as large, or has no generated kernel."""
    (shape, *others) = {t.shape for t in (*request.inputs, *request.outputs)}
    if others or len(shape) != len(LARGE_IMAGE) or math.prod(shape) >= math.prod(LARGE_IMAGE):
        return None
    inputs, outputs = (
        tuple(replace(t, shape=LARGE_IMAGE) for t in types) for types in (request.inputs, request.outputs)
    )
    large = replace(request, inputs=inputs, outputs=outputs)
    return large if is_generated(large) else None


def chosen(pairs: Iterable[tuple[OwnKernel, Request]]) -> dict[str, dict[str, Any]]:
    """Return, by a name, the request of each kernel that moves most bytes and the one in the middle."""
    by_kernel: dict[str, dict[str, Request]] = defaultdict(dict)
    for kernel, request in pairs:
        by_kernel[kernel.name][signature(request)] = request
    for requests in by_kernel.values():
        large = [large for request in requests.values() if (large := on_large_image(request))]
        requests |= {signature(request): request for request in large}
    result: dict[str, dict[str, Any]] = {}
    for name in sorted(by_kernel):
        requests = sorted(by_kernel[name].items(), key=lambda item: (-moved_bytes(item[1]), item[0]))
        for place in dict.fromkeys((0, len(requests) // 2)):
            key, request = requests[place]
            layouts = [[*map(str, orders)] for orders in KERNELS[name].layouts(request)]
            shape = "x".join(map(str, request.inputs[0].shape))
            result[f"{name} {shape}"] = {
                "kernel": name, "signature": key, "layouts": layouts, "largest": place == 0,
            }  # fmt: skip
    return result


def plan_requests() -> dict[str, dict[str, Any]]:
    """Return the chosen requests of the survey's networks."""

    def pairs() -> Iterator[tuple[OwnKernel, Request]]:
        for job in (*imported_jobs(), example("resnet", ("depth", "50")), *examples()):
            job = replace(job, gpu="h200").with_settings(("train.precision", "bf16"))
            yield from kernels_of(job.with_options(policy=Policy.UNDIVIDED).plan())
            print(f"{job.name}: planned", flush=True)

    return chosen(pairs())


def chosen_before() -> dict[str, dict[str, Any]]:
    """Return the requests that an earlier call chose."""
    for path in (folder / f"{NAME}.json" for folder in (RESULTS, ROOT / "benchmarks" / "results")):
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))["requests"]
    return {}


def in_precision(request: Request, precision: Precision) -> Request:
    """Return a request of a step in bf16 with operands as in a step in another precision."""

    def converted(type_: TensorType) -> TensorType:
        return replace(type_, dtype=precision.working if type_.dtype is DType.BF16 else type_.dtype)

    inputs, outputs = tuple(map(converted, request.inputs)), tuple(map(converted, request.outputs))
    return replace(request, inputs=inputs, outputs=outputs, precision=precision)


def launches_of(requests: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Request, Sequence[str]]]:
    """Return kernel, request and layouts of each row, those in bf16 first."""
    result: dict[str, tuple[str, Request, Sequence[str]]] = {}
    for precision in PRECISIONS:
        for name, about in requests.items():
            if precision is Precision.BF16 or about["largest"]:
                request = in_precision(read_signature(about["signature"]), precision)
                for layouts in about["layouts"]:
                    order = "channels_last" if Layout.CHANNELS_LAST.value in layouts else "channels_first"
                    result[f"{name} {precision.value} {order}"] = about["kernel"], request, layouts
    return result


class Asked(Protocol):
    """A process that answers requests."""

    def ask(self, **request: Any) -> Any:
        """Return the answer to a request."""
        ...


def row_of(
    kernel: str, request: Request, layouts: Sequence[str], workers: tuple[Asked, Asked], rounds: int
) -> dict[str, Any]:
    """Return the row of a request; `workers` have the kernel written by hand and the generated one."""
    hand, generated = workers
    asked = {"open": signature(request), "layouts": layouts}
    if hand is generated:
        answers = hand.ask(**asked, kernels=[kernel, GENERATED])
    else:
        answers = {**hand.ask(**asked, kernels=[kernel]), **generated.ask(**asked, kernels=[GENERATED])}
    refused = {name: answer["refused"] for name, answer in answers.items() if "refused" in answer}
    if refused:
        return {"refused": refused}
    times = in_turns(
        lambda: hand.ask(time=kernel, budget_us=BUDGET_US),
        lambda: generated.ask(time=GENERATED, budget_us=BUDGET_US),
        rounds,
    )
    moved = moved_bytes(request)
    return {
        "generated": answers[GENERATED]["kernel"], "moved_bytes": moved,
        "hand_us": times.first, "generated_us": times.second,
        "hand_gb_s": moved / times.first / 1e3, "generated_gb_s": moved / times.second / 1e3,
        "ratio": times.ratio, "spread": times.spread, "rounds": times.rounds,
        "difference": difference(answers[kernel]["sample"], answers[GENERATED]["sample"]),
    }  # fmt: skip


def difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the largest relative L2 distance between two samples of the same outputs."""
    distances = [0.0]
    for a, b in zip(map(np.asarray, one), map(np.asarray, other), strict=True):
        distances.append(float(np.linalg.norm(a - b) / max(np.linalg.norm(a), np.finfo(np.float32).tiny)))
    return max(distances)


def by_kernel(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each measured kernel the median and the largest ratio of its requests, the largest first."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if "ratio" in row:
            ratios[row["name"].partition(" ")[0]].append(row["ratio"])
    about = [
        {"name": name, "requests": len(held), "ratio": statistics.median(held), "largest_ratio": max(held)}
        for name, held in ratios.items()
    ]
    return sorted(about, key=lambda row: -row["largest_ratio"])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="checkout of the kernels written by hand (default: this one)")
    parser.add_argument("--only", nargs="*", default=[], metavar="KERNEL", help="rows whose name holds one of these")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="begin no row later")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS)
    parser.add_argument("--plan-only", action="store_true", help="choose the requests anew, and measure nothing")
    parser.add_argument("--again", action="store_true", help="measure also the rows that are there")
    arguments = parser.parse_args()
    began = time.monotonic()
    requests = {} if arguments.plan_only else chosen_before()
    kept = results(NAME, again=arguments.again, requests=requests or plan_requests())
    every = launches_of(kept.more["requests"])
    launches = {name: launch for name, launch in every.items() if is_generated(launch[1])}
    print(f"{len(kept.more['requests'])} requests; a kernel can be generated for {len(launches)} of {len(every)} rows")
    if arguments.plan_only:
        write(NAME, list(kept.rows.values()), **kept.more)
        return
    need_gpu("--plan-only chooses the requests without one")
    names = [name for name in launches if not arguments.only or any(word in name for word in arguments.only)]
    names = [name for name in names if not kept.done(name)]
    kernels = sorted({launches[name][0] for name in names})
    with ExitStack() as stack:
        baseline = arguments.baseline
        hand = stack.enter_context(Worker((*WORKER, *kernels), baseline or ROOT, LIMIT_S))
        generated = stack.enter_context(Worker(WORKER, ROOT, LIMIT_S)) if baseline else hand
        generated.ask(expect=[signature(launches[name][1]) for name in names])
        for name in names:
            if time.monotonic() - began > arguments.seconds:
                break
            kept.put(attempt(partial(row_of, *launches[name], (hand, generated), arguments.rounds), name))
            show([kept.rows[name]], COLUMNS)
    kept.more["kernels"] = by_kernel(kept.rows.values())
    kept.arrange(list(launches))
    show(kept.more["kernels"], ("name", "requests", "ratio", "largest_ratio"))


if __name__ == "__main__":
    start(main)
