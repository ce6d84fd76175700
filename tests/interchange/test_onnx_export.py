"""Networks as ONNX models: every rule against ONNX's own evaluator, and the way there and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.interchange.importing import import_model
from mbc.interchange.state_dict import write_weights
from mbc.interchange.to_onnx.export import RULES, build_model, export_onnx
from mbc.ir.graph import TrainingGraph
from mbc.ir.types import Precision
from mbc.ops.base import Array
from mbc.options import Options
from mbc.passes.training_step import differentiate
from mbc.runtime.checkpoint import write_checkpoint
from mbc.runtime.module import Module
from mbc.source import Source
from tests.interchange.bodies import BODIES, HEAD, TAIL
from tests.interchange.models import Model, Tensor, forward, lowered, nn, torch
from tests.interchange.onnx_files import evaluated, exported, onnx
from tests.ir.execution import execute, types_of


def _graph(body: str) -> TrainingGraph:
    lowered_model = lowered(f"{HEAD}{body}\n{TAIL}")
    return differentiate(lowered_model.network, lowered_model.optimizer, Precision.FP32)


def _states(graph: TrainingGraph) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {
        s.value: generator.uniform(0.5, 1.5, graph.values[s.value].type.shape).astype(np.float32) for s in graph.states
    }


@pytest.mark.parametrize("name", BODIES)
def test_models_compute_the_interpreters_results(name: str) -> None:
    graph = _graph(BODIES[name])
    states = _states(graph)
    onnx_model = build_model(graph, states)
    onnx.checker.check_model(onnx_model, full_check=True)
    assert onnx_model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    image = np.random.default_rng(1).normal(size=(3, 4, 8, 8)).astype(np.float32)
    env = execute(graph.infer, types_of(graph), {**states, "x": image}, 3, Precision.FP32)
    wanted = env[graph.infer_outputs[0]]
    for rows in (3, 2):  # the batch is open
        (output,) = evaluated(onnx_model, image[:rows])
        assert np.linalg.norm(output - wanted[:rows]) <= 1e-5 * np.linalg.norm(wanted[:rows])


def _drawn_pool(rng: np.random.Generator) -> tuple[str, tuple[int, int]]:
    """Return a source with one random pooling, and the size of its images."""
    height, width = (int(n) for n in rng.integers(3, 12, 2))
    kernel, stride = rng.integers(1, 5, 2), rng.integers(1, 5, 2)
    pad = [int(rng.integers(0, k // 2 + 1)) for k in (kernel[0], kernel[0], kernel[1], kernel[1])]
    kind, ceil = str(rng.choice(["maxpool", "avgpool"])), str(bool(rng.integers(2))).lower()
    if kind == "maxpool" and set(stride) == {1}:
        pad = [max(pad)] * 4 if min(kernel) > 2 * max(pad) else [0] * 4  # else ONNX's evaluator misreads the pads
    more = f", count_pad={str(bool(rng.integers(2))).lower()}" if kind == "avgpool" else ""
    window = f"({kernel[0]}, {kernel[1]}), stride=({stride[0]}, {stride[1]}), pad=({str(pad)[1:-1]})"
    pool = f"{kind}({window}, ceil={ceil}{more})"
    body = f"y = x * parameter(2) |> {pool}\n  output y\n  loss (y, 0 * y) |> mse"
    return f"network net(batch = 2) {{\n  input x[batch, 2, {height}, {width}] : float\n  {body}\n}}\n", (height, width)


def test_drawn_poolings_have_the_size_that_onnx_infers() -> None:
    rng = np.random.default_rng(0)
    count = 0
    while count < 80:
        source, size = _drawn_pool(rng)
        try:
            lowered_model = lowered(source)
        except MbcError:
            continue  # larger than the image
        graph = differentiate(lowered_model.network, lowered_model.optimizer, Precision.FP32)
        states, image = _states(graph), rng.normal(size=(2, 2, *size)).astype(np.float32)
        exported_model = build_model(graph, states)
        onnx.checker.check_model(exported_model, full_check=True)
        env = execute(graph.infer, types_of(graph), {**states, "x": image}, 2, Precision.FP32)
        (output,), wanted = evaluated(exported_model, image), env[graph.infer_outputs[0]]
        assert output.shape == wanted.shape and np.allclose(output, wanted, rtol=1e-4, atol=1e-5), source
        count += 1


def test_every_rule_is_tried() -> None:
    kinds = {op.kind for body in BODIES.values() for op in _graph(body).infer}
    assert kinds >= RULES.keys() - {"channel_slice", "lrn", "adaptive_max_pool"}  # the first only rewrites make; below


def test_response_normalisation_comes_back(tmp_path: Path) -> None:
    """ONNX's own evaluator deviates here from ONNX's definition."""
    graph = _graph("x = x |> lrn(3, alpha=0.5, beta=0.7, k=2.0)")
    file = tmp_path / "net.onnx"
    file.write_bytes(build_model(graph, _states(graph)).SerializeToString())
    assert "alpha=0.5, beta=0.7, k=2)" in import_model(file, "net", "mse", batch=3).source


def test_everything_that_onnx_cannot_express_is_listed() -> None:
    graph = _graph("x = x |> adaptive_maxpool(3) |> lrn(4) |> upsample(size=25) |> upsample(1.16)")
    with pytest.raises(MbcError) as caught:
        build_model(graph, _states(graph))
    assert caught.value.code == "MBC354" and "'net' has 3 operations that cannot be exported" in caught.value.message
    assert "adaptive_maxpool0: adaptive_max_pool: its windows differ in size" in caught.value.message
    assert "lrn0: lrn: its window has 4 channels" in caught.value.message
    assert "resize: its factors, rounded to float32, do not give the size 28 x 28" in caught.value.message


def _network(name: str) -> Model:
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 8, 3, padding=1, bias=False)
            self.norm, self.gate, self.head = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = torch.relu(self.norm(x))
            return self.head((x + y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))).mean((2, 3)))

    if name == "residual":
        return Residual()
    if name == "separable":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=0.2), nn.Hardswish(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 4, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 3)
    )


@pytest.mark.parametrize("name", ["residual", "separable", "plain"])
def test_twenty_steps_between_import_and_export(name: str, tmp_path: Path) -> None:
    """torch -> ONNX -> source -> 20 steps -> ONNX: evaluation agrees, and a second import gives the network again."""
    file = exported(tmp_path, _network(name), torch.randn(6, 1, 6, 6))
    imported = import_model(file, "net")
    weights, source = tmp_path / "net.safetensors", tmp_path / "net.mbc"
    write_weights(weights, imported.network)
    source.write_text(imported.source)
    net = Module(compile_plan(Source("net.mbc", imported.source), Options(gpu="h200")), device="cpu")
    net.load(weights, weights_only=True)
    generator = np.random.default_rng(0)
    images = generator.normal(size=(6, 1, 6, 6)).astype(np.float32)
    labels = generator.integers(0, 3, 6).astype(np.int32)
    losses = [net.step(images, labels, lr=0.01) for _ in range(20)]
    assert losses[-1] < losses[0]
    net.save(tmp_path / "trained.safetensors")
    count = export_onnx(tmp_path / "trained.safetensors", source, tmp_path / "trained.onnx")
    onnx_model = onnx.load(tmp_path / "trained.onnx")
    assert count == len(onnx_model.graph.node) and onnx_model.producer_name == "mbc"
    ours = net.forward(images)
    (theirs,) = evaluated(onnx_model, images)
    assert np.linalg.norm(theirs - ours) <= 1e-5 * np.linalg.norm(ours)
    again = import_model(tmp_path / "trained.onnx", "net", batch=6)
    (back,) = forward(again, images)
    assert np.linalg.norm(back - ours) <= 1e-5 * np.linalg.norm(ours)
    assert again.network.arrays.keys() == imported.network.arrays.keys()
    operations = [sorted((s.op, tuple(sorted(s.settings.items()))) for s in n.network.steps) for n in (again, imported)]
    assert operations[0] == operations[1]


def test_places_and_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "net.mbc", tmp_path / "w.safetensors"
    with pytest.raises(MbcError, match=r"MBC355: cannot read .*net.mbc"):
        export_onnx(checkpoint, source, tmp_path / "net.onnx")
    source.write_text(f"{HEAD}{TAIL}")
    write_checkpoint(checkpoint, [("head.weight", np.zeros((5, 256), np.float32))], {})
    with pytest.raises(MbcError, match="MBC164"):
        export_onnx(checkpoint, source, tmp_path / "net.onnx")
    arrays = [("head.weight", np.zeros((5, 256), np.float32)), ("head.bias", np.zeros(5, np.float32))]
    write_checkpoint(checkpoint, arrays, {})
    with pytest.raises(MbcError, match=r"MBC356: cannot write .*none/net.onnx"):
        export_onnx(checkpoint, source, tmp_path / "none" / "net.onnx")
    assert export_onnx(checkpoint, source, tmp_path / "net.onnx", (("batch", "7"),)) == 2
