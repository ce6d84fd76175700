"""All data of the page of a plan: sizes in bytes, times in microseconds, launches by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mbc.optimize.bounds.measured_floor import Floor
from mbc.optimize.schedule.contention import COPY_WAIT_US
from mbc.optimize.schedule.step_time import samples_per_s
from mbc.plan.live import Kind
from mbc.plan.model import Plan
from mbc.plan.prefetch import prefetch_bytes
from mbc.report.collectives import ranks_text
from mbc.report.html.facts import Facts
from mbc.report.html.head import slowest
from mbc.report.html.packed_rows import Texts
from mbc.report.html.program_data import lanes_data, program_data


def plan_data(
    train: Facts, infer: Facts, floor: Floor | None = None, others: Sequence[Facts] = ()
) -> dict[str, Any]:  # fmt: skip
    """Return the data of both programs of a plan.

    Args:
        train: Facts of the training step.
        infer: Facts of the inference program.
        floor: Floor of the training step; None if it was not computed.
        others: Facts of the training steps of the ranks that do not run this plan.
    """
    texts = Texts()
    programs = {"train": program_data(train, texts), "infer": program_data(infer, texts)}
    plan, ceilings = train.plan, train.ceilings
    graph = plan.graph
    return {
        "plan": {
            "network": graph.name,
            "batch": graph.global_batch,
            "precision": str(graph.precision),
            "version": plan.version,
            "target": asdict(plan.target),
            "budget_bytes": plan.budget_bytes,
            "host_limit_bytes": plan.host_limit_bytes,
            "prefetch_bytes": prefetch_bytes(plan),
            "copy_wait_us": COPY_WAIT_US,
            "samples_per_s": samples_per_s(slowest(plan, [other.plan for other in others])),
            "ranks": _ranks(plan),
        },
        "predictions": asdict(plan.predictions),
        "bounds": {**asdict(plan.bounds), "least_us": plan.bounds.least_us},
        "ceilings": None if ceilings is None else asdict(ceilings),
        "floor": None if floor is None else {**asdict(floor), "total_us": floor.total_us},
        "kinds": [str(kind) for kind in Kind],
        "programs": programs,
        "others": [
            {"ranks": _ranks(other.plan), "gpu": other.plan.target.gpu, **lanes_data(other, texts)} for other in others
        ],
        "texts": texts.all,
    }


def _ranks(plan: Plan) -> str:
    """Format the ranks of a plan, such as `ranks 1 and 2`; empty for one GPU."""
    return "" if plan.graph.ranks is None else ranks_text(plan.graph.ranks.members)
