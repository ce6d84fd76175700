"""The networks of volumes are nnU-Net's, with outputs, loss and gradients as PyTorch's, and learn drawn volumes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from mbc.cli import main
from mbc.ir.types import Precision
from mbc.passes.training_step import differentiate
from tests.frontend.reading import lower_file
from tests.frontend.test_examples import EXAMPLES
from tests.ir.execution import draw, execute, normalised, parameter_gradients, step, types_of

SETTINGS: dict[str, Any] = {
    "channels": 2, "classes": 3, "features": (4, 6, 8, 5), "kernels": ((1, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3)),
    "strides": ((1, 1, 1), (1, 2, 2), (2, 2, 2), (1, 2, 2)),
}  # fmt: skip


def _place(parameter: str) -> tuple[int, int]:
    """Return the place of a parameter among PyTorch's: it has the stages of a decoder by their part and resolution."""
    if not parameter.startswith("decoder."):
        return 0, 0
    _, turn, part, *_ = parameter.split(".")
    return 3 if part == "head" else 1 if part == "up" else 2, -int(turn)


@pytest.mark.parametrize(("name", "more"), [("nnunet", {}), ("nnunet_resenc", {"blocks": (1, 2, 1, 2)})])
def test_a_step_is_that_of_pytorch(name: str, more: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    from volume_networks import VolumeNetwork, supervised_loss

    settings = {**SETTINGS, **more, "batch": 2, "patch": (4, 16, 16)}
    lowered = lower_file(EXAMPLES / f"{name}.mbc", *(f"{k}={v}" for k, v in settings.items()), "train.precision=fp64")
    graph = differentiate(lowered.network, lowered.optimizer, Precision.FP64)
    start = draw(graph, np.random.default_rng(0))
    model = VolumeNetwork(settings).double()
    names = sorted((state.value for state in lowered.network.states), key=_place)
    for parameter, own in zip(model.parameters(), names, strict=True):
        parameter.data.copy_(torch.from_numpy(start[own]))
    image, target = (torch.from_numpy(start[own]) for own in graph.inputs)
    logits = model(image)
    targets = [torch.nn.functional.interpolate(target[:, None].double(), x.shape[2:])[:, 0].long() for x in logits]
    loss = supervised_loss(logits, targets)
    loss.backward()
    env = step(graph, start)
    (output,) = graph.infer_outputs
    inferred = execute(graph.infer, types_of(graph), start, graph.batch, Precision.FP64)[output]
    ours = {"output": inferred, "loss": env[graph.loss].reshape(1), **parameter_gradients(graph, env)}
    expected = {own: p.grad.numpy() for own, p in zip(names, model.parameters(), strict=True) if p.grad is not None}
    expected |= {"output": logits[0].detach().numpy(), "loss": np.array([loss.item()])}
    assert ours.keys() == expected.keys()
    assert max(normalised(ours[key], expected[key]) for key in expected) < 1e-10


def test_drawn_volumes_are_learned_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, weights = EXAMPLES / "02_volumes" / "prepare.py", str(tmp_path / "weights.safetensors")
    subprocess.run([sys.executable, str(prepare), str(tmp_path), "6", "2"], check=True)
    settings = ("patch=(16, 16, 16)", "features=(4, 8, 8)", "batch=2", "train.optimizer=sgd(momentum=0.9)")
    network = (str(EXAMPLES / "nnunet.mbc"), "--device", "cpu", *(word for s in settings for word in ("--set", s)))
    data = ("--data", str(tmp_path / "train"), "--epochs", "8", "--lr", "0.03", "--checkpoint", weights)
    assert main(["train", *network, *data]) == 0
    capsys.readouterr()
    test = ("--data", str(tmp_path / "test"), "--labels", str(tmp_path / "test"), "-o", str(tmp_path / "predicted"))
    assert main(["predict", *network, *test, "--weights", weights, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dice"][1] > 0.4
