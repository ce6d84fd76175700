"""The benchmark of volumes. Tested are its rows, what follows from given figures, and PyTorch's networks and loss."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

torch = pytest.importorskip("torch", reason="the loops are PyTorch's, which is not installed")

import record  # noqa: E402
import volume_step  # noqa: E402
from volume_networks import VolumeNetwork, supervised_loss  # noqa: E402

SETTINGS: dict[str, Any] = {
    "channels": 2, "classes": 3, "features": (4, 6, 8), "kernels": ((1, 3, 3), (3, 3, 3), (3, 3, 3)),
    "strides": ((1, 1, 1), (1, 2, 2), (2, 2, 2)),
}  # fmt: skip


def step(ms: float, taken_bytes: int = 0) -> dict[str, Any]:
    return {"ms": ms, "taken_bytes": taken_bytes}


def test_rows_are_named_by_network_and_budget() -> None:
    rows = volume_step.requests(Namespace(only=[], device="cuda", precision="fp16", set=[], measure_for=120.0))
    assert {"plain compile last", "resenc mbc fp16 in 6GB", "plain workspace fp16 in 64MiB", "plain gradients"} <= {
        *rows
    }
    assert rows["plain workspace fp16 in 64MiB"].memory == "64MiB"
    assert rows["large mbc fp16 in 40GB"].memory == "40GB" and "large eager first" not in rows
    assert len({request.folder for request in rows.values()}) == len(rows)


def test_plans_are_compared_with_the_fastest_of_pytorchs_steps() -> None:
    rows = {
        "plain eager first": step(60.0, 50), "plain compile last": step(45.0, 100), "plain compile first": {},
        "plain mbc fp16": step(20.0, 90), "plain mbc fp16 in 3.4GB": step(22.5, 60), "resenc mbc fp16": step(9.0, 1),
    }  # fmt: skip
    assert volume_step.compared("plain", rows, "fp16") == {
        "speedup": 2.25, "memory_ratio": 0.9,
        "speedup in 3.4GB": 2.0, "memory_ratio in 3.4GB": 0.6, "overhead in 3.4GB": 0.125,
    }  # fmt: skip
    assert volume_step.compared("resenc", rows, "fp16") == {}
    assert volume_step.compared("plain", {"plain gradients": {"ratio": 1.3}}, "fp16") == {"gradient_ratio": 1.3}


def test_a_run_that_is_cut_off_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    def row(script: Path, request: volume_step.Request, limit_s: float) -> dict[str, Any]:
        ran.append(request.memory)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return step(1.0)

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(volume_step, "in_own_process", row)
    words = ["--device", "cpu", "--only", "plain", "mbc"]
    with pytest.raises(KeyboardInterrupt):
        volume_step.main(words)
    volume_step.main(words)
    assert ran == ["", "3.4GB", "3.4GB", "2.9GB", "2.4GB"]


@pytest.mark.parametrize("blocks", [None, (1, 2, 1)])
def test_pytorchs_networks_have_logits_of_each_resolution(blocks: tuple[int, ...] | None) -> None:
    model = VolumeNetwork(SETTINGS | ({"blocks": blocks} if blocks else {}))
    image, target = torch.randn(2, 2, 4, 8, 8), torch.randint(0, 3, (2, 4, 8, 8))
    logits = model(image)
    assert [tuple(x.shape) for x in logits] == [(2, 3, 4, 8, 8)]
    right = 10.0 * torch.nn.functional.one_hot(target, 3).movedim(-1, 1).float()
    assert 0 < float(supervised_loss([right, right], [target, target])) < 1e-3
    supervised_loss(logits, [target]).backward()
    assert all(p.grad is not None for name, p in model.named_parameters())
