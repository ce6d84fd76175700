"""Plans and steps under a cap on a GPU's memory.

A cap bounds the arena and what libraries and modules take beside it; the bare context, which every program has, is not
counted. While a step runs, the rest of the card is occupied, so that nothing beyond the cap can be used.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from modules import Job, build, errors, median, module_gradients, open_module, random_inputs
from record import RESULTS
from stepping import occupy, time_packages

from mbc.errors import BudgetError, MbcError
from mbc.plan.model import Plan

GB = 10**9
MIB = 1 << 20
UNLIMITED_BYTES = 1 << 60
# Of one H200, as `memory.py` measured it; on a machine with a GPU its own is measured.
BARE_CONTEXT_BYTES = 552_402_944
PLAIN = frozenset({"offload", "recompute", "split"})
PLAIN_WORKSPACE_BYTES = 512 * MIB
GRADIENT_TIMEOUT_S = 600.0
TIMES_TORCH = 2.0  # the rule for gradients: twice PyTorch's own error against float64


@dataclass(frozen=True)
class Card:
    """What plans are for. `context_bytes`: of the bare context."""

    gpu: str
    profile: str | None
    context_bytes: int = BARE_CONTEXT_BYTES

    def capped(self, job: Job, cap_bytes: int) -> Job:
        budget = cap_bytes + self.context_bytes
        return self._for(job).with_settings(("memory.device", f"{budget} B"))

    def unlimited(self, job: Job) -> Job:
        return self._for(job).with_settings(("memory.device", f"{UNLIMITED_BYTES} B"))

    def plain(self, job: Job) -> Job:
        """Liveness and placement only."""
        return self.unlimited(job).with_options(without=PLAIN, workspace_limit_bytes=PLAIN_WORKSPACE_BYTES)

    def whole(self, job: Job) -> Job:
        """As much as the card has."""
        return self._for(job)

    def counted_bytes(self, plan: Plan) -> int:
        """What a cap counts of a plan."""
        p = plan.predictions
        return p.arena_bytes + p.overhead_bytes - self.context_bytes

    def _for(self, job: Job) -> Job:
        return replace(job, gpu=self.gpu).with_options(profile=self.profile)


def this_card(gpu: str, profile: str | None, measure: bool) -> Card:
    """The card to plan for; its context measured where plans will run on it."""
    if not measure:
        return Card(gpu, profile)
    from memory import libraries

    return Card(gpu, profile, libraries()["context"])


def planned(card: Card, job: Job) -> dict[str, Any]:
    """Figures of a plan, or why there is none."""
    try:
        plan = job.plan()
    except MbcError as error:
        found: dict[str, Any] = {"failed": str(error).splitlines()[0]}
        if isinstance(error, BudgetError):
            found["needed_gb"] = (error.needed_bytes - card.context_bytes) / GB
        return found
    p = plan.predictions
    return {
        "batch": plan.graph.batch,
        "predicted_ms": p.train_us / 1e3,
        "images_s": plan.graph.batch * 1e6 / p.train_us,
        "counted_gb": card.counted_bytes(plan) / GB,
        "arena_bytes": p.arena_bytes,
        "host_gb": p.host_bytes / GB,
        "over_bound": p.train_us / plan.bounds.fastest_us - 1,
        "launches": len(plan.train.launches),
    }


def run(jobs: dict[str, tuple[Job, int]], steps: int) -> dict[str, dict[str, Any]]:
    """Build and time jobs by name, each under its cap (0: none). Packages are built one after another: each may be of
    thousands of operations."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for number, (what, (job, cap_bytes)) in enumerate(jobs.items()):
            built = build(job, Path(name) / f"p{number}")
            if built.failed or built.folder is None:
                found[what] = {"failed": built.failed}
                continue
            timed = time_packages({what: built.folder}, steps, cap_bytes=cap_bytes)[what]
            found[what] = timed | {"plan_s": built.plan_s, "build_s": built.build_s}
    return found


def gradient_distances(capped: Job, whole: Job, cap_bytes: int) -> dict[str, Any]:
    """Gradients of a first step under the cap, against those of the plan without one: relative L2 a parameter."""
    with tempfile.TemporaryDirectory() as name:
        found: list[dict[str, np.ndarray]] = []
        for number, (job, cap) in enumerate(((capped, cap_bytes), (whole, 0))):
            folder = Path(name) / f"g{number}"
            built = build(job, folder)
            if built.failed:
                return {"gradients_failed": built.failed}
            request = json.dumps([str(folder), cap, str(folder / "gradients.npz")])
            done = subprocess.run(
                [sys.executable, __file__, "--gradients", request],
                capture_output=True, text=True, timeout=GRADIENT_TIMEOUT_S,
            )  # fmt: skip
            if done.returncode:
                return {"gradients_failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
            with np.load(folder / "gradients.npz") as stored:
                found.append(dict(stored))
        distances = errors(found[0], found[1])
    made: dict[str, Any] = {"gradient_median": median(distances.values()), "gradient_worst": max(distances.values())}
    allowed = _torch_median(capped)
    if allowed is not None:
        made["gradients_passed"] = bool(made["gradient_median"] <= TIMES_TORCH * allowed)
    return made


def write_gradients(folder: str, cap_bytes: int, path: str) -> None:
    """In a process of its own: the gradients of one step of a package."""
    where = Path(folder)
    held = occupy(where, cap_bytes) if cap_bytes else None
    with open_module(where, "cuda") as module:
        graph = module.plan.graph
        arrays: Sequence[Any] = held.arrays if held else random_inputs(graph)
        _, gradients, _ = module_gradients(module, graph, graph.optimizer, tuple(arrays))
        np.savez(path, **gradients)  # pyright: ignore[reportArgumentType]


def _torch_median(job: Job) -> float | None:
    """PyTorch's own median error against float64 for this network, as `gradients.py` measured it."""
    path = RESULTS / "gradients_cuda.json"
    if not path.exists():
        return None
    settings = dict(job.settings)
    depth = settings.get("depth", "")
    names = (f"{job.name}{depth}", job.name)
    rows = {
        row["name"]: row["torch_median"]
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
        if row.get("kind") == "network" and row.get("precision") == settings.get("train.precision", "fp32")
    }
    return next((rows[name] for name in names if name in rows), None)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--gradients"]:
        raise SystemExit("cap.py is a part of other benchmarks")
    write_gradients(*json.loads(sys.argv[2]))
