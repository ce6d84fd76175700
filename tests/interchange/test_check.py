"""The check of `mbc import`: files of torch in training mode, ONNX files as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.interchange import check
from mbc.interchange.importing import ImportedModel, import_model
from mbc.interchange.steps import Step
from tests.interchange.models import exported, nn, stirred, torch

onnx = pytest.importorskip("onnx", reason="ONNX files need the package onnx")
check_file = pytest.importorskip("mbc.pytorch.check_model").check_file
check_onnx = pytest.importorskip("mbc.interchange.from_onnx.check_onnx").check_onnx
IMAGES = torch.randn(3, 3, 9, 9, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act, self.drop, self.fc = nn.ELU(), nn.Dropout(0.4), nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        y = self.act(self.norm(self.first(x)))
        y.mul_(0.5)
        with torch.no_grad():
            gate = self.drop(y).sigmoid()
        return self.fc(self.drop(y).mean((2, 3))), y * gate


def of_torch(path: Path) -> tuple[Path, ImportedModel]:
    file = exported(path, stirred(Net()), IMAGES)
    return file, import_model(file, "net", "mse")


def of_onnx(path: Path, training: bool = False) -> tuple[Path, ImportedModel]:
    make, rng = onnx.helper, np.random.default_rng(1)
    arrays = {
        "weight": rng.normal(size=(8, 3, 3, 3)), "scale": rng.uniform(0.5, 2, 8), "shift": rng.normal(size=8),
        "mean": rng.normal(size=8), "var": rng.uniform(0.5, 2, 8),
    }  # fmt: skip
    outputs = ["b", "next_mean", "next_var"] if training else ["b"]
    nodes = [
        make.make_node("Conv", ["x", "weight"], ["a"], pads=[1, 1, 1, 1]),
        make.make_node(
            "BatchNormalization", ["a", "scale", "shift", "mean", "var"], outputs, training_mode=int(training)
        ),
        make.make_node("Elu", ["b"], ["c"]),
        make.make_node("Sigmoid", ["c"], ["y"]),
    ]  # fmt: skip
    x, y = (
        make.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", [3, 3, 9, 9]), ("y", [3, 8, 9, 9]))
    )
    held = [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    graph = make.make_graph(nodes, "net", [x], [y], held)
    file = path / "net.onnx"
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=10), file)
    return file, import_model(file, "net", "mse")


def check_torch(file: Path, imported: ImportedModel) -> bool:
    return check_file(file, imported.network, imported.source, "mse")


def check_of_onnx(file: Path, imported: ImportedModel) -> bool:
    return check_onnx(file, None, imported.network, imported.source, True)


@pytest.mark.parametrize(
    ("make", "run"),
    [(of_torch, check_torch), (of_onnx, check_of_onnx), (lambda path: of_onnx(path, True), check_of_onnx)],
    ids=["torch", "onnx", "onnx in training mode"],
)
def test_correct_launches_pass(make: Any, run: Any, tmp_path: Path) -> None:
    assert run(*make(tmp_path))


def smooth(step: Step) -> Step:
    return replace(step, op="silu", settings={}) if step.op == "elu" else step


@pytest.mark.parametrize(
    ("make", "run", "words"),
    [
        (of_torch, check_torch, "aten.elu.default in 'act' (ELU) at "),
        (of_onnx, check_of_onnx, "; Elu is the first operation"),
    ],
    ids=["torch", "onnx"],
)
def test_a_deviation_names_the_first_operation_that_differs(
    make: Callable[[Path], tuple[Path, ImportedModel]], run: Any, words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    file, _ = make(tmp_path)
    own = check.translate

    def wrong(program: Any, name: str) -> Any:
        network = own(program, name)
        return replace(network, steps=tuple(smooth(step) for step in network.steps))

    monkeypatch.setattr("mbc.interchange.check.translate", wrong)
    monkeypatch.setattr("mbc.interchange.importing.translate", wrong)
    imported = import_model(file, "net", "mse")
    with pytest.raises(
        MbcError, match=r"MBC345: the imported network computes something else than the model: "
    ) as caught:
        run(file, imported)
    assert words in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([("Dropout", ["c", "half", "yes"], ["d"])], "its dropout draws random numbers"),
        (
            [("RandomUniformLike", ["c"], ["r"]), ("Mul", ["c", "r"], ["d"])],
            "its RandomUniformLike draws random numbers",
        ),
    ],
    ids=["dropout", "random numbers"],
)
def test_random_models_cannot_be_checked(nodes: Any, words: str, tmp_path: Path) -> None:
    file, imported = of_onnx(tmp_path)
    model = onnx.load(file)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "half"))
    model.graph.node[3].input[0] = "d"
    for number, (kind, inputs, outputs) in enumerate(nodes):
        model.graph.node.insert(3 + number, onnx.helper.make_node(kind, inputs, outputs))
    onnx.save(model, file)
    with pytest.raises(MbcError, match=f"MBC346: the import cannot be checked: {words}"):
        check_of_onnx(file, imported)
    assert not check_onnx(file, None, imported.network, imported.source, None)
