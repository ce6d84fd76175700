"""Tables and pictures of invented results under a memory budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from memory_pages import memory_pages

CASE = {"name": "vdnn vgg16 256", "batch": 256, "cap_gb": 12.0, "predicted_ms": 318.0, "loss": 0.08, "most_loss": 0.05,
        "over_bound": 0.01, "free_batch": 256, "passed": False}  # fmt: skip


def wrote(folder: Path, name: str, rows: list[dict[str, Any]], gpu: str | None = None) -> None:
    result = {
        "date": "2026-11-21T10:00:00",
        "command": f"python {name}.py",
        "gpu": gpu,
        "driver": "580.1",
        "rows": rows,
    }
    (folder / f"{name}.json").write_text(json.dumps(result))


def test_nothing_there_is_no_page(tmp_path: Path) -> None:
    assert memory_pages(tmp_path) == ({}, [])


def test_predictions_stand_in_until_something_is_measured(tmp_path: Path) -> None:
    wrote(tmp_path, "capped_planned", [CASE, {"name": "x", "failed": "MBC204: too much"}])
    page = "\n".join(memory_pages(tmp_path)[1])
    assert "predicted by the plans, not run, 2026-11-21: `python capped_planned.py`" in page
    assert "| vdnn vgg16 256 | 256 | 12.00 | 318.0 | +8.0% | 5.0% | 1.0% | no |" in page
    assert "measured, ms" not in page and "x failed: MBC204: too much" in page
    wrote(tmp_path, "capped", [CASE | {"step_ms": 320.0, "free_ms": 300.0, "passed": True}], "NVIDIA H200")
    page = "\n".join(memory_pages(tmp_path)[1])
    assert "NVIDIA H200, driver 580.1" in page and "the plans, not run" not in page
    assert "| 318.0 | 320.0 | 300.0 | 256 | +8.0% |" in page
    assert page.rstrip().endswith("Not run, predicted only: x.")  # which the table has nonetheless
    assert "\n| x | - |" in page


def test_the_step_over_its_memory(tmp_path: Path) -> None:
    measured = {"name": "half", "budget": 0.5, "arena_gib": 5.99, "step_ms": 29.5, "torch_gib": 6.02, "torch_ms": 45.9}
    planned = {"name": "half", "budget": 0.5, "arena_gib": 5.9, "torch_gib": 6.0, "torch_ms": 45.0}
    wrote(
        tmp_path,
        "torch_memory_budget_planned",
        [planned, {"name": "all", "budget": 1, "torch_gib": 10.6, "torch_ms": 38.2}],
    )
    assert not any("over_budget" in name for name in memory_pages(tmp_path)[0])  # of mbc nothing was measured
    wrote(tmp_path, "torch_memory_budget", [measured], "NVIDIA H200")
    free = {"mbc": {"step_ms": 25.4, "peak_bytes": 8 << 30}, "contenders": []}
    (tmp_path / "bench_resnet50_256_bf16.json").write_text(json.dumps(free))
    pictures, page = memory_pages(tmp_path)
    picture = ElementTree.fromstring(pictures["step_over_budget_resnet50.svg"])
    shown = [title.text for title in picture.iter() if title.tag.endswith("title")][1:]
    assert shown == ["torch.compile, 6: 45.90", "mbc, 6: 29.50", "mbc, 8: 25.40"]
    assert any("(results/step_over_budget_resnet50.svg)" in line for line in page)
