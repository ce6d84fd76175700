"""The benchmark of `from_torch`. Tested are its rows from given figures, and contenders that hang or wait."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

torch = pytest.importorskip("torch", reason="the loops are PyTorch's, which is not installed")

import from_torch  # noqa: E402
import from_torch_contenders as contenders  # noqa: E402

GIB = 1 << 30
REQUEST = contenders.Request("", "timm/none", 2, 16, "cpu", 2, 0.0, None)


def peer(ms: float, losses: tuple[float, ...] = (2.0, 1.0)) -> dict[str, Any]:
    return {"ms": ms, "losses": list(losses), "reserved_bytes": 10 * GIB}


def mine(**other: Any) -> dict[str, Any]:
    return {"ms": 8.0, "losses": [2.0, 1.01], "drops": False, "first_step_s": 90.0, "taken_bytes": 12 * GIB} | other


def test_a_row_compares_with_the_fastest_of_pytorchs() -> None:
    runs = {"eager": peer(20.0), "compile": peer(12.0, (2.0, 1.001)), "cuda_graph": {"failed": "no"}, "mbc": mine()}
    row = from_torch.judged(runs)
    assert row["best"] == "compile" and row["speedup"] == 1.5 and row["memory_ratio"] == 1.2
    assert row["first_step_s"] == 90.0 and "cuda_graph_ms" not in row
    assert row["loss_error"] == pytest.approx(0.01) and row["torch_loss_error"] == pytest.approx(0.001)
    assert "loss_error" not in from_torch.judged({**runs, "mbc": mine(drops=True)})
    slower = from_torch.judged({**runs, "mbc": mine(ms=13.0)})
    assert "memory_ratio" not in slower and slower["speedup"] < 1.0


def test_a_row_without_mbc_or_without_pytorch_failed() -> None:
    torch_only = from_torch.judged({name: peer(9.0) for name in contenders.MODES} | {"mbc": {"failed": "MBC099"}})
    assert torch_only["failed"] == "mbc: MBC099" and torch_only["eager_ms"] == 9.0
    module = from_torch.judged({name: peer(9.0) for name in contenders.MODES} | {"module": mine(call_us=400.0)})
    assert module["module_speedup"] == 1.125 and module["call_us"] == 400.0 and "speedup" not in module
    alone = from_torch.judged({name: {"failed": "none"} for name in contenders.MODES} | {"mbc": mine()})
    assert alone["failed"].startswith("eager: none; ")


def test_figures_are_of_all_drawn_networks_or_not_given() -> None:
    rows: list[dict[str, Any]] = [{"speedup": s, "memory_ratio": r} for s, r in ((1.2, 0.9), (1.4, 0.5), (0.9, 0.7))]
    figures = from_torch.together(rows)
    assert (figures["median_speedup"], figures["least_speedup"], figures["median_memory_ratio"]) == (1.2, 0.9, 0.7)
    assert figures["reached"] == {"median_speedup": False, "least_speedup": False, "median_memory_ratio": True}
    assert from_torch.together([*rows, {"failed": "no"}]) == {}
    modules = from_torch.modules_together([{"module_speedup": 1.3}, {"module_speedup": 0.96}, {"failed": "no"}])
    assert (modules["networks"], modules["least_module_speedup"]) == (2, 0.96)
    assert "reached" not in modules
    modules = from_torch.modules_together([{"module_speedup": 1.3}] * 14 + [{"module_speedup": 0.96}])
    assert modules["reached"] == {"median_module_speedup": True, "least_module_speedup": False}


def test_contenders_of_pytorch_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def contender(request: contenders.Request, limit_s: float) -> dict[str, Any]:
        if request.contender == "compile":
            return {"failed": "crashed before it was ready"}
        contenders.wait_for_turn(request)
        events.append(f"{request.contender} begins")
        time.sleep(0.2)
        events.append(f"{request.contender} ends")
        return peer(1.0)

    monkeypatch.setattr(from_torch, "run_contender", contender)
    networks = from_torch.run_torch([REQUEST, REQUEST], 60.0)
    assert all(list(runs) == list(contenders.MODES) and "failed" in runs["compile"] for runs in networks)
    assert events == ["eager begins", "eager ends", "cuda_graph begins", "cuda_graph ends"] * 2


def test_a_contender_that_hangs_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "from_torch_contenders.py"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "request = json.loads(sys.argv[1])\n"
        "place = pathlib.Path(request['turn'])\n"
        "time.sleep(60 if request['contender'] == 'compile' else 0)\n"
        "(place / f\"{request['contender']}.ready\").touch()\n"
        "while not (place / f\"{request['contender']}.turn\").exists(): time.sleep(0.05)\n"
        "print('{\"ms\": 1.0}')\n"
    )
    monkeypatch.setattr(from_torch, "__file__", str(tmp_path / "from_torch.py"))
    (runs,) = from_torch.run_torch([REQUEST], 3.0)
    assert runs == {"eager": {"ms": 1.0}, "compile": {"failed": "it took more than 3 s"}, "cuda_graph": {"ms": 1.0}}


def test_contenders_train_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    nn = torch.nn

    def small(name: str) -> Any:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000))

    monkeypatch.setattr(contenders, "built", small)
    eager = contenders.run_torch(replace(REQUEST, contender="eager"))
    ours = contenders.run_mbc(REQUEST)
    assert from_torch.distance(ours["losses"], eager["losses"]) < 1e-2
