"""Plans under a cap on a GPU's memory.

A cap bounds the sum of the arena and the memory of libraries and modules. The bare CUDA context is not counted, because
every program has it. While a step runs, `stepping.occupy` occupies the rest of the GPU's memory, so that the step
cannot use more than the cap.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modules import Job
from record import RESULTS

from mbc.errors import BudgetError, MbcError
from mbc.hardware.target import find_device
from mbc.options import UNLIMITED_BYTES
from mbc.plan.model import Plan

GB = 10**9
# Of one H200, as `memory.py` measured it. What a cap leaves free is measured where steps run.
BARE_CONTEXT_BYTES = 552_402_944
BATCHES = 8  # a smaller batch is a multiple of so many rows


@dataclass(frozen=True)
class Card:
    """The GPU that plans are made for; `context_bytes` is the memory of a bare CUDA context."""

    gpu: str
    profile: str | None
    context_bytes: int = BARE_CONTEXT_BYTES

    def capped(self, job: Job, cap_bytes: int) -> Job:
        """Return the job with a cap on memory."""
        budget = cap_bytes + self.context_bytes
        return self._for(job).with_settings(("memory.device", f"{budget} B"))

    def unlimited(self, job: Job) -> Job:
        """Return the job without a limit on memory."""
        return self._for(job).with_settings(("memory.device", f"{UNLIMITED_BYTES} B"))

    def counted_bytes(self, plan: Plan) -> int:
        """Return how many bytes of a plan count towards a cap."""
        p = plan.predictions
        return p.arena_bytes + p.overhead_bytes - self.context_bytes

    @property
    def room_gb(self) -> float:
        """Memory of the GPU without the bare context, in GB."""
        return (find_device(self.gpu).memory_bytes - self.context_bytes) / GB

    def holds(self, plan: Plan) -> bool:
        """Return whether the GPU has enough memory for the plan."""
        p = plan.predictions
        return p.arena_bytes + p.overhead_bytes <= find_device(self.gpu).memory_bytes

    def free_here(self, job: Job) -> Plan:
        """Return the plan without a limit at the largest batch that fits the GPU, but at most the job's own batch."""
        free = self.unlimited(job).plan()
        while not self.holds(free):
            states = sum(free.graph.values[state.value].type.size_bytes for state in free.graph.states)
            room = find_device(self.gpu).memory_bytes - free.predictions.overhead_bytes - states
            rows = free.graph.batch * room // max(1, free.predictions.arena_bytes - states)
            batch = min(free.graph.batch - 1, rows) // BATCHES * BATCHES
            if batch < 1:
                raise RuntimeError("the card holds no plan of this network without a limit")
            free = self.unlimited(job.with_settings(("batch", str(batch)))).plan()
        return free

    def _for(self, job: Job) -> Job:
        return replace(job, gpu=self.gpu).with_options(profile=self.profile)


def planned(card: Card, work: Callable[[], Plan]) -> tuple[dict[str, Any], Plan | None]:
    """Return the figures of a plan and the plan. If there is no plan, return the reason and None."""
    began = time.perf_counter()
    try:
        plan = work()
    except MbcError as error:
        result: dict[str, Any] = {"failed": str(error).splitlines()[0]}
        if isinstance(error, BudgetError):
            result["needed_gb"] = (error.needed_bytes - card.context_bytes) / GB
        return result, None
    return {**figures(card, plan), "plan_s": time.perf_counter() - began}, plan


def figures(card: Card, plan: Plan) -> dict[str, Any]:
    """Return the predictions of a plan that a row shows."""
    p = plan.predictions
    return {
        "batch": plan.graph.batch,
        "predicted_ms": p.train_us / 1e3,
        "images_s": plan.graph.global_batch * 1e6 / p.train_us,
        "counted_gb": card.counted_bytes(plan) / GB,
        "arena_bytes": p.arena_bytes,
        "host_gb": p.host_bytes / GB,
        "peer_gb": p.peer_bytes / GB,
        "over_bound": p.train_us / plan.bounds.least_us - 1,
        "beside": plan.bounds.critical_path_us > 0,  # which bound it is
        "over_fastest": p.train_us / plan.bounds.fastest_us - 1,
        "measured_share": p.measured_share,
        "launches": len(plan.train.launches),
    }


def stepped(row: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a measured step adds to the row of its plan."""
    if "failed" in step:
        return {"failed": step["failed"]}
    return {
        "step_ms": step["step_ms"],
        "spread_ms": step["spread_ms"],
        "images_s": row["batch"] * 1e3 / step["step_ms"],
        "arena_equal": step["arena_predicted"] == step["arena_taken"],
        "overhead_taken": step.get("overhead_taken"),
        "predicted_over_measured": row["predicted_ms"] / step["step_ms"],
    }


def torch_median(job: Job) -> float | None:
    """Return the median error of PyTorch against float64 for this network, as `gradients.py` measured it, if it did."""
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
