"""The plans of the networks of `from_torch.py` without a GPU, beside what such a GPU took."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from from_torch_contenders import SIZE, Asked, made, sgd
from record import RESULTS

from mbc.compiler import compile_plan
from mbc.hardware.spec import find_spec
from mbc.options import Options
from mbc.pytorch.trainer import import_training
from mbc.source import Source
from mbc.stages import Stages

PLAN_COLUMNS = (
    "name", "batch", "predicted_ms", "measured_share", "over_measured", "arena_gib", "import_s", "plan_s", "operations",
    "lines",
)  # fmt: skip


def planned(asked: Asked, gpu: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The step of the network as it is planned for a GPU by the profile that is there, over that of its `measured`
    row."""
    began = time.perf_counter()
    model, images, _ = made(replace(asked, batch=1, device="cpu"))
    images = images.expand(asked.batch, -1, -1, -1)
    exported, text, _ = import_training(model, images, loss="softmax_cross_entropy", optimizer=sgd(model))
    network = exported.network
    imported_s, stages = time.perf_counter() - began, Stages()
    options = Options(gpu, (("train.precision", "bf16"),))
    plan = compile_plan(Source(f"{network.name}.mbc", text), options, stages)
    comparable = "mbc_ms" in measured and (measured["batch"], SIZE) == (asked.batch, asked.size)
    return {
        "batch": asked.batch, "predicted_ms": plan.predictions.train_us / 1e3,
        "arena_gib": plan.predictions.arena_bytes / 2**30, "measured_share": plan.predictions.measured_share,
        "import_s": imported_s, "plan_s": stages.planning_seconds, "operations": len(network.steps),
        "lines": text.count("\n"),
        **({"over_measured": plan.predictions.train_us / 1e3 / measured["mbc_ms"]} if comparable else {}),
    }  # fmt: skip


def measured_on(gpu: str) -> dict[str, dict[str, Any]]:
    """Rows that were measured on such a GPU, by name."""
    file = RESULTS / "from_torch_cuda.json"
    document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": []}
    of_gpu = find_spec(gpu).name
    return {row["name"]: row for row in document["rows"] if row.get("gpu", document["gpu"]) == of_gpu}
