"""Gradients of every operation and every example network, on the interpreter and on the GPU, against float64.

The reference is PyTorch in float64 on equal states and inputs. Beside each error stands the error of PyTorch in the
precision of the test. These limits hold for the relative L2 error of each parameter:

* Operations in fp64: 1e-8; in fp32: 1e-5. In tf32, bf16 and fp16 with unit roundoff u (2^-11, 2^-8, 2^-11): 8 u, or 3
  sqrt(u) if ReLU or max pooling chooses, because rounding changes about the share u of the choices.
* Networks in fp64: 1e-8. In fp32 the median over parameters is at most twice PyTorch's; of several draws of inputs the
  middle one counts.

    python benchmarks/gradients.py [--devices cpu,cuda] [--precisions fp64,fp32,tf32,bf16,fp16] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from modules import (
    Built,
    Job,
    build_all,
    errors,
    examples,
    median,
    module_gradients,
    open_module,
    random_inputs,
    set_states,
    small,
    with_full_norms,
    with_momentum,
)
from operations import CASES, case_of, source
from record import attempt, current_rows, show, write
from torch_twin import Mode, Result, Twin

from mbc.ir.types import Precision
from mbc.runtime.initial_states import initial
from mbc.source import Source

OPERATION_LIMIT = 1e-5
EXACT_LIMIT = 1e-8
TIMES_TORCH = 2.0
# One ReLU whose input rounds to the other side of zero moves the gradients of a deep network by a thousand times the
# rounding error, for mbc and for PyTorch alike: the rule is held against the middle of several draws.
DRAWS = 3
SMALL_BATCH = 4
NORM_VALUES = 32  # that a batch norm has a channel, at least
UNIT_ROUNDOFF = {"tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}
SMOOTH_ROUNDOFFS = 8.0
CHOICE_ROUNDOFFS = 3.0
MORE = (("resnet", "depth", "50"),)  # further depths of one example


def jobs(
    only: Sequence[str], kinds: Sequence[str], norm_values: int = NORM_VALUES, batch: int = SMALL_BATCH
) -> list[tuple[str, Job]]:
    """Return ("operation" | "network", job) for all that `only` names; all operations together are one job."""
    items: list[tuple[str, Job]] = []
    cases = [case for case in CASES if not only or case.name in only]
    if cases:
        items.append(("operation", Job("operations", Source("operations", source("operations", cases)))))
    for job in examples():
        deeper = [(name + value, job.with_settings((key, value))) for name, key, value in MORE if job.name == name]
        for name, one in ((job.name, job), *deeper):
            if not only or name in only:
                named = Job(name, one.source, one.settings, one.network)
                items.append(("network", with_full_norms(with_momentum(small(named, batch)), norm_values)))
    return [(kind, job) for kind, job in items if kind in kinds]


def twin_mode(precision: str, device: str) -> Mode:
    """Return how PyTorch computes in this precision."""
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    return Mode(device, dtype, autocast)


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in PyTorch."""
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed


def torch_gradients(
    job: Job,
    states: Mapping[str, np.ndarray],
    inputs: Sequence[Any],
    precision: str,
    device: str,
    dropout: tuple[int, int],
) -> Result:
    """Return PyTorch's loss, gradients and statistics of one step."""
    allow_tf32(precision == "tf32")
    mode = twin_mode(precision, device)
    scale = 65536.0 if precision == "fp16" else 1.0
    while True:
        # A new twin each time: a forward pass moves the running statistics.
        result = Twin(job.lowered().network, states, mode).gradients(inputs, *dropout, loss_scale=scale)
        if scale == 1.0 or all(np.isfinite(gradient).all() for gradient in result.gradients.values()):
            return result
        scale /= 2  # as dynamic loss scaling does after an overflow


@dataclass(frozen=True)
class Draw:
    """Errors of one draw of the inputs: per parameter (mbc's, PyTorch's), per statistic, and of the loss."""

    ours: Mapping[str, float]
    peer: Mapping[str, float]
    statistics: Mapping[str, float]
    loss: float


def compare(
    kind: str, job: Job, precision: str, device: str, where: Any, reference_device: str, network_draws: int = DRAWS
) -> list[dict[str, Any]]:
    """Return a row for each case of operations, or one for the network.

    `where` is a package's folder, or a plan to interpret.
    """
    lowered = job.lowered()
    network = lowered.network
    states = {
        s.value: initial(s.value, network.values[s.value].type, s.initializer, 0).astype(np.float64)
        for s in network.states
    }
    draws: list[Draw] = []
    module = open_module(where, device)
    for number in range(network_draws if kind == "network" and precision != "fp64" else 1):
        inputs = random_inputs(network, number)
        set_states(module, states)
        loss, gradients, statistics = module_gradients(module, network, lowered.optimizer, inputs)
        dropout = (module.control["seed"], module.control["step"])
        exact = torch_gradients(job, states, inputs, "fp64", reference_device, dropout)
        same = precision == "fp64" and device == reference_device
        theirs = exact if same else torch_gradients(job, states, inputs, precision, device, dropout)
        draws.append(
            Draw(
                errors(gradients, dict(exact.gradients)),
                errors(dict(theirs.gradients), dict(exact.gradients)),
                errors(statistics, dict(exact.statistics)),
                abs(loss - exact.loss) / abs(exact.loss),
            )
        )
    module.close()

    def row(name: str, mine: Callable[[str], bool]) -> dict[str, Any]:
        ours = [[e for n, e in draw.ours.items() if mine(n)] for draw in draws]
        peer = [[e for n, e in draw.peer.items() if mine(n)] for draw in draws]
        created = {
            "name": name,
            "kind": kind,
            "device": device,
            "precision": precision,
            "parameters": len(ours[0]),
            "medians": [median(result) for result in ours],
            "torch_medians": [median(result) for result in peer],
            "median": median(median(result) for result in ours),
            "torch_median": median(median(result) for result in peer),
            "worst": max(max(result) for result in ours),
            "torch_worst": max(max(result) for result in peer),
            "loss_error": max(draw.loss for draw in draws),
            "statistics": max((e for draw in draws for n, e in draw.statistics.items() if mine(n)), default=0.0),
        }
        return {**created, "passed": passed(created)}

    if kind == "network":
        return [row(job.name, lambda parameter: True)]
    cases = dict.fromkeys(case_of(name) for name in draws[0].ours)
    return [row(case, lambda parameter, case=case: case_of(parameter) == case) for case in cases]


def run(
    kind: str, job: Job, precision: str, device: str, place: Built | None, reference: str, network_draws: int
) -> list[dict[str, Any]]:
    """Run `compare` on the built package, or on the interpreted plan if there is no package."""
    if place is not None and place.failed:
        raise RuntimeError(place.failed)
    where = job.plan() if place is None else place.folder
    return compare(kind, job, precision, device, where, reference, network_draws)


def passed(row: Mapping[str, Any]) -> bool | None:
    """Return whether the row keeps its limit, or None for networks in tf32, bf16 and fp16, which have no limit."""
    precision = row["precision"]
    if precision == "fp64":
        return bool(row["worst"] <= EXACT_LIMIT)
    if row["kind"] == "operation":
        return bool(row["worst"] <= operation_limit(row["name"], precision))
    return bool(row["median"] <= TIMES_TORCH * row["torch_median"]) if precision == "fp32" else None


def operation_limit(name: str, precision: str) -> float:
    """Return the largest error that a case of operations may have in this precision."""
    if precision == "fp32":
        return OPERATION_LIMIT
    u = UNIT_ROUNDOFF[precision]
    chooses = next(case.chooses for case in CASES if case.name == name)
    return CHOICE_ROUNDOFFS * math.sqrt(u) if chooses else SMOOTH_ROUNDOFFS * u


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--devices", default="cpu,cuda" if here == "cuda" else "cpu")
    parser.add_argument("--precisions", default="fp64,fp32,tf32,bf16,fp16", help="of operations")
    parser.add_argument("--network-precisions", default="fp64,fp32")
    parser.add_argument("--kinds", default="operation,network")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of inputs, of a network; an odd number")
    parser.add_argument("--norm-values", type=int, default=NORM_VALUES, help="that every batch norm has a channel")
    parser.add_argument(
        "--batch", type=int, default=SMALL_BATCH, help="of a network, before its batch norms ask for more"
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="what is not begun by then is left out, and said")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--resume", action="store_true", help="keep the rows that today's code made before")
    parser.add_argument("--name", default="", help="of the results file; gradients_<devices> by default")
    options = parser.parse_args()
    wanted = jobs(options.only, options.kinds.split(","), options.norm_values, options.batch)
    precisions = {"operation": options.precisions.split(","), "network": options.network_precisions.split(",")}
    rows: list[dict[str, Any]] = []
    name = options.name or "gradients_" + options.devices.replace(",", "_")
    names_seen: set[tuple[str, ...]] = set()
    if options.resume:
        rows = [row for row in current_rows(name) if "failed" not in row]
        # The cases of operations are one job, and their rows are written together.
        names_seen = {(r["device"], r["precision"], "" if r["kind"] == "operation" else r["name"]) for r in rows}
    started = time.monotonic()
    for device in options.devices.split(","):
        todo = [
            (kind, job.with_settings(("train.precision", p)), p)
            for kind, job in wanted
            for p in precisions[kind]
            if (device == "cpu" or p != Precision.FP64.value)
            and (device, p, "" if kind == "operation" else job.name) not in names_seen
        ]
        with tempfile.TemporaryDirectory() as folder:
            places: list[Any] = [None] * len(todo)
            if device == "cuda":
                pairs = [(job, Path(folder) / f"{job.name}_{p}") for _, job, p in todo]
                places = build_all(pairs, os.cpu_count() or 2)
            for (kind, job, precision), place in zip(todo, places, strict=True):
                if time.monotonic() - started > options.seconds:
                    rows.append({"name": job.name, "device": device, "precision": precision, "failed": "no time left"})
                    continue
                work = partial(run, kind, job, precision, device, place, here, options.draws)
                result = attempt(lambda work=work: {"rows": work()}, job.name)
                new = result.get("rows") or [{"kind": kind, "device": device, "precision": precision, **result}]
                rows += new
                write(name, rows)  # each time, so that an interrupted run leaves its results
                worst = max((r["worst"] for r in new if "worst" in r), default=None)
                print("failed" if worst is None else f"{worst:.1e}", device, precision, job.name, flush=True)
    show(
        rows, ["name", "device", "precision", "median", "worst", "torch_median", "torch_worst", "loss_error", "passed"]
    )
    bad = [r for r in rows if "failed" in r or r.get("passed") is False]
    print(f"{len(rows) - len(bad)} of {len(rows)} rows keep their rule or have none; {len(bad)} do not; {name}.json")


if __name__ == "__main__":
    main()
