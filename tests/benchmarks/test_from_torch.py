"""The benchmark of `from_torch`: what follows from its contenders, how plans at PyTorch's speed are looked for, and
fifty steps of a small network."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

torch = pytest.importorskip("torch", reason="the loops are PyTorch's, which is not installed")

import from_torch  # noqa: E402
import from_torch_contenders as contenders  # noqa: E402
import from_torch_draw  # noqa: E402
import from_torch_plans  # noqa: E402
import from_torch_steps  # noqa: E402

from mbc.hardware.spec import find_spec  # noqa: E402

GIB = 1 << 30


def peer(ms: float, losses: tuple[float, ...] = (2.0, 1.0)) -> dict[str, Any]:
    return {"ms": ms, "losses": list(losses), "reserved_bytes": 10 * GIB}


def mine(**other: Any) -> dict[str, Any]:
    return {"ms": 8.0, "losses": [2.0, 1.01], "drops": False, "first_step_s": 90.0, "taken_bytes": 12 * GIB} | other


def test_a_row_compares_with_the_fastest_of_pytorchs() -> None:
    found = {
        "eager": peer(20.0), "compile": peer(12.0, (2.0, 1.001)), "cuda_graph": {"failed": "no graph"}, "mbc": mine(),
        "mbc_at_speed": mine(ms=11.0, taken_bytes=6 * GIB, share=0.6, first_step_s=9.0),
    }  # fmt: skip
    row = from_torch.judged(found)
    assert row["best"] == "compile" and row["speedup"] == 1.5 and row["memory_ratio"] == 1.2
    assert row["least_memory_ratio"] == 0.6
    assert row["share"] == 0.6
    assert row["first_step_s"] == 90.0 and row["known_s"] == 9.0 and "cuda_graph_ms" not in row
    assert row["loss_error"] == pytest.approx(0.01) and row["torch_loss_error"] == pytest.approx(0.001)
    drawing = from_torch.judged({**found, "mbc": mine(drops=True), "mbc_at_speed": {"failed": "slower"}})
    assert "loss_error" not in drawing and drawing["memory_ratio"] == 1.2 and "failed" not in drawing
    slower = from_torch.judged({**found, "mbc": mine(ms=13.0), "mbc_at_speed": {"failed": "slower"}})
    assert "memory_ratio" not in slower and slower["speedup"] < 1.0


def test_a_row_without_mbc_or_without_pytorch_failed() -> None:
    torch_only = from_torch.judged({name: peer(9.0) for name in contenders.MODES} | {"mbc": {"failed": "MBC099"}})
    assert torch_only["failed"] == "mbc: MBC099" and torch_only["eager_ms"] == 9.0
    alone = from_torch.judged({name: {"failed": "none"} for name in contenders.MODES} | {"mbc": mine()})
    assert alone["failed"].startswith("eager: none; ")


def test_figures_are_of_all_drawn_networks_or_not_given() -> None:
    rows: list[dict[str, Any]] = [{"speedup": s, "memory_ratio": r} for s, r in ((1.2, 0.9), (1.4, 0.5), (0.9, 0.7))]
    found = from_torch.together(rows)
    assert found["median_speedup"] == 1.2 and found["least_speedup"] == 0.9 and found["median_memory_ratio"] == 0.7
    assert found["reached"] == {"median_speedup": False, "least_speedup": False, "median_memory_ratio": True}
    assert from_torch.together([*rows, {"failed": "no"}]) == {}


def test_the_least_share_that_is_predicted_to_be_fast_enough_is_taken() -> None:
    asked = contenders.Asked("", "", 2, 32, "cpu", 2, 0.0, None, step_ms=10.0, took_ms=6.0, predicted_ms=5.0)
    infinite = float("inf")
    assert contenders.first_fast(asked, [infinite, 9.0, 8.1, 7.0, 5.0]) == 2  # 1.2 times as long as predicted
    assert contenders.first_fast(asked, [infinite, 9.0]) == 2


def test_one_contender_that_crashes_or_hangs_is_said_to() -> None:
    asked = contenders.Asked("nobody", "timm/none", 2, 32, "cpu", 2, 0.0, None)
    run = from_torch.Run(60.0, False)
    assert "KeyError: 'nobody'" in run.contender(asked, "")["failed"]
    assert from_torch.Run(0.01, False).contender(asked, "")["failed"] == "it took more than 0 s"


def test_contenders_of_pytorch_wait_for_each_other_and_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def contender(_: Any, asked: contenders.Asked, profiles: str) -> dict[str, Any]:
        if asked.contender == "compile":
            return {"failed": "crashed before it was ready"}
        contenders.wait_for_turn(asked)
        events.append(f"{asked.contender} begins")
        time.sleep(0.2)
        events.append(f"{asked.contender} ends")
        return peer(1.0)

    monkeypatch.setattr(from_torch.Run, "contender", contender)
    asked = contenders.Asked("", "timm/none", 2, 32, "cuda", 2, 0.0, None)
    found = from_torch.Run(60.0, False).of_torch(asked, "")
    assert list(found) == list(contenders.MODES) and "failed" in found["compile"]
    assert events == ["eager begins", "eager ends", "cuda_graph begins", "cuda_graph ends"]


def test_one_that_hangs_does_not_take_those_with_it_that_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "from_torch_contenders.py"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "asked = json.load(sys.stdin)\n"
        "place = pathlib.Path(asked['turn'])\n"
        "time.sleep(60 if asked['contender'] == 'compile' else 0)\n"
        "(place / f\"{asked['contender']}.ready\").touch()\n"
        "while not (place / f\"{asked['contender']}.turn\").exists(): time.sleep(0.05)\n"
        "print('{\"ms\": 1.0}')\n"
    )
    monkeypatch.setattr(from_torch, "__file__", str(tmp_path / "from_torch.py"))
    asked = contenders.Asked("", "timm/none", 2, 32, "cuda", 2, 0.0, None)
    found = from_torch.Run(3.0, False).of_torch(asked, "")
    assert found == {"eager": {"ms": 1.0}, "compile": {"failed": "it took more than 3 s"}, "cuda_graph": {"ms": 1.0}}


def test_reasons_of_a_refusal_have_no_paths() -> None:
    refused = (
        "error MBC303: the model has 2 things that mbc cannot take:\n"
        "  'a.b' (Attention): aten.index.Tensor: it is computed\n      at /somewhere/timm/models/levit.py:314: x\n"
        "  'c' (Linear): aten.index.Tensor: it is computed\nhelp: change the model\n"
    )
    assert from_torch_draw.reasons(refused) == "aten.index.Tensor: it is computed"
    assert from_torch_draw.reasons("error MBC330: the model is odd\nhelp: x") == "error MBC330: the model is odd"


def test_fifty_steps_of_a_small_network_keep_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    nn = torch.nn

    def small(name: str) -> Any:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(8, 10),
        )  # fmt: skip

    monkeypatch.setattr(from_torch_steps, "built", small)
    row = from_torch_steps.compared("small", 6, 8, "cpu")
    assert row["passed"] and row["loss_error"] < 1e-5 and 0 < row["torch_median"] < 1e-4
    assert not from_torch_steps.keeps({**row, "loss_error": 1e-3})
    assert not from_torch_steps.keeps({**row, "evaluation_error": 1e-3})


def test_a_plan_is_compared_with_a_row_of_as_many_images_of_that_size(monkeypatch: pytest.MonkeyPatch) -> None:
    nn = torch.nn

    def made(asked: contenders.Asked) -> tuple[Any, Any, Any]:
        size = asked.size
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        return model.train(), torch.zeros(asked.batch, 3, size, size), torch.zeros(asked.batch, dtype=torch.long)

    monkeypatch.setattr(from_torch_plans, "made", made)
    monkeypatch.setattr(from_torch_plans, "SIZE", 16)
    asked = contenders.Asked("", "timm/none", 4, 16, "cpu", 2, 0.0, None)
    row = from_torch_plans.planned(asked, "h200", {"mbc_ms": 2.0, "batch": 4})
    assert row["batch"] == 4 and row["over_measured"] == row["predicted_ms"] / 2.0 > 0
    assert set(from_torch_plans.PLAN_COLUMNS) - {"name"} == row.keys()
    for other in ({}, {"mbc_ms": 2.0, "batch": 8}):
        assert "over_measured" not in from_torch_plans.planned(asked, "h200", other)


def test_rows_are_those_that_were_measured_on_such_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(from_torch_plans, "RESULTS", tmp_path)
    assert from_torch_plans.measured_on("h200") == {}
    # A row of an earlier run says on which GPU that was.
    rows = [{"name": "a"}, {"name": "b", "gpu": find_spec("h100").name}]
    held = {"gpu": find_spec("h200").name, "rows": rows}
    (tmp_path / "from_torch_cuda.json").write_text(json.dumps(held))
    assert list(from_torch_plans.measured_on("h200")) == ["a"] and list(from_torch_plans.measured_on("h100")) == ["b"]
