"""`mbc import` and `mbc export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mbc.cli.arguments import interchange
from mbc.interchange import write
from tests.interchange import archives


@pytest.fixture
def model(mbc) -> Path:
    """An exported program in the folder that the commands run in."""
    return archives.write(Path())


def test_help_names_the_losses_that_there_are():
    assert interchange.LOSSES == write.LOSSES


def test_a_model_becomes_a_source_and_weights(mbc, model: Path):
    result = mbc("import", "net.pt2", "-o", "stem.mbc")
    assert result.code == 0, result.err
    assert "note:" not in result.err and "checked" not in result.out
    assert "stem.mbc: 1 operation in 9 lines" in result.out
    assert "stem.safetensors: 15 numbers in 1 state, for 1 key of the state_dict" in result.out
    assert "train it: mbc train stem.mbc --data DATA --weights stem.safetensors" in result.out
    assert "network stem(batch = 2)" in Path("stem.mbc").read_text()
    assert mbc("show", "stem.mbc", "--gpu", "h200").code == 0
    back = mbc("export", "stem.safetensors", "--like", "stem.safetensors", "-o", "back.safetensors")
    assert back.code == 0 and "back.safetensors: a state_dict of 1 keys" in back.out
    assert load_file("back.safetensors")["stem.weight"].shape == (5, 3, 1, 1)


def test_figures_as_json_and_another_loss(mbc, model: Path):
    words = ("--loss", "mse", "--flat", "--name", "other", "--weights", "w.safetensors", "--json")
    result = mbc("import", "net.pt2", "-o", "net.mbc", *words)
    assert result.json == {
        "source": "net.mbc", "lines": 9, "weights": "w.safetensors", "operations": 1, "keys": 1, "states": 1,
        "numbers": 15, "frozen": [], "checked": False,
    }  # fmt: skip
    assert "network other(" in Path("net.mbc").read_text() and "|> mse" in Path("net.mbc").read_text()
    back = mbc("export", "w.safetensors", "--like", "w.safetensors", "-o", "back.safetensors", "--json")
    assert back.json == {"state_dict": "back.safetensors", "keys": 1}


def test_a_check_needs_torch(mbc, model: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("mbc.pytorch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = mbc("import", "net.pt2", "-o", "net.mbc", "--check")
    assert result.code == 1 and "error MBC346: the import cannot be checked: PyTorch cannot be imported" in result.err
    assert "help: install it: pip install torch" in result.err and not Path("net.mbc").exists()


def test_files_that_are_there_stay(mbc, model: Path):
    Path("net.mbc").write_text("mine")
    result = mbc("import", "net.pt2", "-o", "net.mbc")
    assert result.code == 1 and "error MBC305: 'net.mbc' exists already" in result.err
    assert Path("net.mbc").read_text() == "mine"
    assert mbc("import", "net.pt2", "-o", "net.mbc", "--force").code == 0
    assert Path("net.mbc").read_text().startswith("# Imported from net.pt2")
    again = mbc("export", "net.safetensors", "--like", "net.safetensors", "-o", "net.safetensors")
    assert again.code == 1 and "MBC305" in again.err


def test_places_that_cannot_be_written(mbc, model: Path):
    result = mbc("import", "net.pt2", "-o", "none/net.mbc", "--weights", "w.safetensors")
    assert result.code == 1 and "error MBC306: cannot write 'none/net.mbc'" in result.err


def test_a_file_that_is_no_model(mbc):
    result = mbc("import", "tiny.mbc", "-o", "net.mbc")
    assert result.code == 1 and "error MBC300: cannot read 'tiny.mbc'" in result.err
    assert not Path("net.mbc").exists()


def test_a_training_begins_with_given_weights(mbc, data: str):
    mbc("train", "tiny.mbc", "--data", data, "--epochs", "1", "--checkpoint", "w.safetensors", "--device", "cpu")
    quiet = ("--device", "cpu", "--epochs", "1", "--json")
    first = mbc("train", "tiny.mbc", "--data", data, *quiet).json["epochs"][0]["loss"]
    then = mbc("train", "tiny.mbc", "--data", data, "--weights", "w.safetensors", *quiet).json["epochs"][0]["loss"]
    assert then < first
    refused = mbc("train", "tiny.mbc", "--data", data, "--weights", "none.safetensors", *quiet)
    assert refused.code == 1 and "MBC163" in refused.err
    assert json.loads(json.dumps(then)) == then


@pytest.fixture
def onnx_model(mbc) -> Path:
    """A network of one convolution, whose number of rows is open, in the folder that the commands run in."""
    onnx = pytest.importorskip("onnx", reason="files of ONNX need the package onnx, an extra")
    make = onnx.helper
    nodes = [
        make.make_node("Conv", ["x", "stem.weight"], ["h"], name="/stem/Conv"),
        make.make_node("GlobalAveragePool", ["h"], ["g"], name="/pool/GlobalAveragePool"),
        make.make_node("Flatten", ["g"], ["y"], name="/flatten/Flatten"),
    ]
    weight = onnx.numpy_helper.from_array(np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3, 1, 1), "stem.weight")
    x, y = (
        make.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", ["rows", 3, 4, 4]), ("y", ["rows", 5]))
    )
    graph = make.make_graph(nodes, "net", [x], [y], [weight])
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=10), "net.onnx")
    return Path("net.onnx")


def test_an_onnx_model_is_trained_and_comes_back(mbc, onnx_model: Path):
    reference = pytest.importorskip("onnx.reference")
    opened = mbc("import", "net.onnx", "-o", "stem.mbc")
    assert opened.code == 1 and "error MBC353: 'net.onnx' leaves the size of a mini-batch open" in opened.err
    assert "help: state it: --batch 32" in opened.err and not Path("stem.mbc").exists()
    result = mbc("import", "net.onnx", "-o", "stem.mbc", "--batch", "4")
    assert result.code == 0, result.err
    assert "checked: it computes what the model does" in result.out
    assert "stem.safetensors: 15 numbers in 1 state, for 1 key of the state_dict" in result.out
    text = Path("stem.mbc").read_text()
    assert text.startswith("# Imported from net.onnx (ONNX, ?).") and "network stem(batch = 4)" in text
    generator = np.random.default_rng(0)
    images = generator.normal(size=(8, 3, 4, 4)).astype(np.float32)
    np.savez("data.npz", image=images, target=generator.integers(0, 5, 8))
    words = ("--weights", "stem.safetensors", "--checkpoint", "trained.safetensors", "--device", "cpu")
    trained = mbc("train", "stem.mbc", "--data", "data.npz", "--epochs", "1", *words)
    assert trained.code == 0, trained.err
    back = mbc("export", "trained.safetensors", "--like", "stem.mbc", "-o", "back.onnx", "--set", "batch=2")
    assert back.code == 0 and "back.onnx: an ONNX model of 3 nodes, in evaluation mode" in back.out, back.err
    weight = load_file("trained.safetensors")["stem.weight"].reshape(5, 3)
    assert np.abs(weight - np.linspace(-1, 1, 15).reshape(5, 3)).max() > 1e-4, "it was trained"
    (outputs,) = reference.ReferenceEvaluator("back.onnx").run(None, {"image": images})
    assert np.allclose(outputs, images.mean((2, 3)) @ weight.T, rtol=1e-5, atol=1e-6)


def test_refusals_of_an_onnx_export(mbc, onnx_model: Path):
    words = ("--like", "net.mbc", "-o", "back.onnx")
    figures = mbc("import", "net.onnx", "-o", "net.mbc", "--batch", "2", "--json").json
    assert figures["operations"] == 3 and figures["keys"] == 1
    twice = mbc("import", "net.pt2", "-o", "other.mbc", "--batch", "2")
    assert twice.code == 1 and "error MBC353: --batch 2 is given" in twice.err
    mbc("export", "net.safetensors", *words)
    again = mbc("export", "net.safetensors", *words)
    assert again.code == 1 and "error MBC305: 'back.onnx' exists already" in again.err
    assert mbc("export", "net.safetensors", *words, "--force", "--json").json == {"onnx": "back.onnx", "nodes": 3}
    none = mbc("export", "net.safetensors", "--like", "none.mbc", "-o", "none.onnx")
    assert none.code == 1 and "error MBC355: cannot read 'none.mbc'" in none.err
