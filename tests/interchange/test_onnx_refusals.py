"""ONNX files that cannot be imported: missing parts, other forms, damage, and malicious files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.interchange.from_onnx import package
from mbc.interchange.importing import import_model
from tests.interchange import archives
from tests.interchange.onnx_files import model, node, numbers, onnx, written

WEIGHT = {"c.weight": np.ones((4, 3, 1, 1), np.float32)}


def conv(output: str = "y", **attributes: Any) -> Any:
    return node("Conv", ["x", "c.weight"], [output], **attributes)


def refusal(path: Path, onnx_model: Any, code: str) -> str:
    with pytest.raises(MbcError) as caught:
        import_model(written(path, onnx_model), "net", "mse")
    assert caught.value.code == code
    return str(caught.value)


def test_all_is_listed_with_node_operator_and_remedy(tmp_path: Path) -> None:
    nodes = [
        conv("h"), node("Det", ["h"], ["d"], name="odd"), node("Scan", ["h"], ["s"], name="loop"),
        node("Hardmax", ["h"], ["p"], name="most"), node("If", ["h"], ["i"], name="branch"),
        node("Strange", ["h"], ["o"], name="own", domain="com.own"), node("Sum", ["d", "s", "p", "i", "o"], ["y"]),
    ]  # fmt: skip
    message = refusal(tmp_path, model(nodes, WEIGHT), "MBC303")
    assert "the model has 5 things that mbc cannot import" in message
    assert "node 'odd': Det: the language has no such operation" in message
    assert "node 'loop': Scan" in message
    assert "node 'most': Hardmax" in message and "node 'branch': If" in message and "node 'own': Strange" in message


@pytest.mark.parametrize(
    "last, words",
    [
        (node("Resize", ["h", "", "", "size"], ["y"], mode="odd"), "its mode is odd"),
        (node("Pow", ["two", "h"], ["y"]), "its exponent is no constant number"),
        (node("Softmax", ["h"], ["y"], axis=0), "it works along dimension 0, the samples"),
        (node("Transpose", ["h"], ["y"], perm=[1, 0, 2, 3]), "it permutes"),
        (node("Transpose", ["h"], ["y"], perm=[0, 0, 2, 9]), "it permutes 4 dimensions by"),
        (node("Cast", ["h"], ["y"], to=10), "it changes the type of its tensor"),
        (node("Erf", ["h"], ["y"]), "it is no part of a GELU"),
        (node("Tile", ["h", "size"], ["y"]), "it repeats dimension 0, the samples"),
        (node("AveragePool", ["h"], ["y"], kernel_shape=[2, 2], dilations=[2, 2]), "its windows are dilated"),
        (node("MaxPool", ["h"], ["y"], kernel_shape=[2, 2], strides=[1]), "its 'strides' has 1 numbers for 2"),
        (node("LRN", ["h"], ["y"], size=4), "its window has an even size"),
        (node("Gemm", ["h", "c.weight"], ["y"], transA=1), "it transposes its first operand, the samples with it"),
        (node("Dropout", ["h", "two"], ["y"]), "its probability is 2"),
        (node("Relu", ["h"], ["y"], domain="com.own"), "the language has no such operation"),
    ],
)
def test_limits_of_single_operators(last: Any, words: str, tmp_path: Path) -> None:
    held = WEIGHT | {"size": np.array([2, 4, 3, 3]), "two": np.float32(2)}
    assert words in refusal(tmp_path, model([conv("h"), last], held), "MBC303")


def test_types_and_sizes_that_are_open(tmp_path: Path) -> None:
    half = {"c.weight": np.ones((4, 3, 1, 1), np.float16)}
    message = refusal(tmp_path, model([conv()], half, kind=onnx.TensorProto.FLOAT16), "MBC303")
    assert "'x': the program: this input is float16" in message and "its parameters are float16" in message
    message = refusal(tmp_path, model([conv()], WEIGHT, shape=(2, 3, "height", 8)), "MBC303")
    assert "'x': the program: its size 2 is dynamic (height)" in message


@pytest.mark.parametrize("opset", [9, 99])
def test_other_opsets(opset: int, tmp_path: Path) -> None:
    message = refusal(tmp_path, model([conv()], WEIGHT, opset=opset), "MBC352")
    assert (
        f"its opset is {opset}, but only opsets 11 to " in message
        and "export it again with opset_version=20" in message
    )


def test_functions_of_the_files_own(tmp_path: Path) -> None:
    onnx_model = model([conv()], WEIGHT)
    onnx_model.functions.add(name="twice", domain="com.own")
    assert "it has functions of its own, such as 'twice'" in refusal(tmp_path, onnx_model, "MBC352")


def _cut(tmp_path: Path) -> list[tuple[bytes, str]]:
    whole = model([conv()], WEIGHT).SerializeToString()
    return [(whole[:-20], "cannot read"), (b"", "it holds no graph"), (b"\x00\xff" * 40, "cannot read")]


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    for data, words in _cut(tmp_path):
        assert words in refusal(tmp_path, data, "MBC350")
    with pytest.raises(MbcError, match=r"MBC350: cannot read .*none.onnx': No such file"):
        import_model(tmp_path / "none.onnx", "net")


def test_graphs_that_run_in_circles_or_lack_a_part(tmp_path: Path) -> None:
    circle = [node("Add", ["x", "b"], ["a"], name="first"), node("Relu", ["a"], ["b"])]
    message = refusal(tmp_path, model(circle, output="b"), "MBC350")
    assert "node 'first' reads 'b', which nothing before it gives: a cycle" in message
    assert "'y' is given twice" in refusal(tmp_path, model([conv(), conv()], WEIGHT), "MBC350")
    bare = model([conv()], WEIGHT)
    bare.graph.input[0].type.tensor_type.ClearField("shape")
    assert "its input 'x' is no tensor, or has no shape" in refusal(tmp_path, bare, "MBC350")
    assert "nothing gives its output 'z'" in refusal(tmp_path, model([conv()], WEIGHT, output="z"), "MBC350")


def test_sizes_that_would_fill_the_memory(tmp_path: Path) -> None:
    nodes = [
        node("ConstantOfShape", ["huge"], ["big"]), node("Expand", ["one", "huge"], ["wide"]),
        node("Add", ["big", "wide"], ["sum"]), conv("h"), node("Add", ["h", "sum"], ["y"], name="last"),
    ]  # fmt: skip
    held = WEIGHT | {"huge": np.array([1 << 20, 1 << 20, 8, 8]), "one": np.float32(1)}
    assert "ConstantOfShape" in refusal(tmp_path, model(nodes, held), "MBC303")
    onnx_model = model([conv()], WEIGHT)
    onnx_model.graph.initializer[0].dims[0] = 1 << 40
    assert "'c.weight' [1099511627776, 3, 1, 1] takes" in refusal(tmp_path, onnx_model, "MBC351")
    onnx_model.graph.initializer[0].dims[0] = -4
    assert "'c.weight' has the shape [-4, 3, 1, 1]" in refusal(tmp_path, onnx_model, "MBC351")


def test_sizes_that_no_tensor_has_are_not_calculated_with(tmp_path: Path) -> None:
    """Such a part must be refused before onnx infers shapes, because there a negative size ends the process."""
    held = WEIGHT | {"pads": np.array([0, 0, -(1 << 40), (1 << 40) - 1, 0, 0, 0, 0]), "two": np.array([2])}
    nodes = [conv("h"), node("Pad", ["h", "pads"], ["p"]), node("Slice", ["p", "two", "two", "two"], ["y"])]
    assert "node 'the_Pad': Pad: one of its shapes depends on data or on a dynamic size" in refusal(
        tmp_path, model(nodes, held), "MBC303"
    )


def test_an_output_that_does_not_depend_on_the_input(tmp_path: Path) -> None:
    message = refusal(tmp_path, model([conv("h"), node("Shape", ["h"], ["y"])], WEIGHT), "MBC303")
    assert "'y': the program: it returns no tensor that the network computes" in message


def test_an_output_from_within_a_layer_takes_it_apart(tmp_path: Path) -> None:
    nodes = [conv("h"), node("Sigmoid", ["h"], ["s"]), node("Mul", ["h", "s"], ["y"])]
    onnx_model = model(nodes, WEIGHT)
    assert "silu" in import_model(written(tmp_path, onnx_model), "net", "mse").source
    onnx_model.graph.output.add(name="s").type.tensor_type.elem_type = 1
    assert "silu" not in import_model(written(tmp_path, onnx_model), "net", "mse").source


def _outside(location: str, **more: int) -> Any:
    onnx_model = model([conv()], WEIGHT)
    tensor = onnx_model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return onnx_model


def test_weights_beside_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    array = np.arange(12, dtype=np.float32)
    (folder / "inner" / "w.bin").write_bytes(b"1234" + array.tobytes())
    imported = import_model(written(folder, _outside("inner/w.bin", offset=4, length=48)), "net", "mse")
    assert np.array_equal(imported.network.arrays["c.weight"].reshape(-1), array)
    assert "'w.bin', which cannot be read: No such file" in refusal(folder, _outside("w.bin"), "MBC351")
    assert "takes 48 B from byte 8 of 'inner/w.bin', which has 52 B" in refusal(
        folder, _outside("inner/w.bin", offset=8), "MBC351"
    )
    assert "is in 'inner', which cannot be read: it is a folder" in refusal(folder, _outside("inner"), "MBC351")


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../secret", "C:\\secret", "", "link", "a\x00b"])
def test_paths_that_leave_the_folder(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(48))
    (folder / "link").symlink_to(tmp_path / "secret")
    message = refusal(folder, _outside(location), "MBC351")
    assert "outside of the model's folder" in message or "which is no file of its folder" in message


def test_weights_that_are_damaged(tmp_path: Path) -> None:
    onnx_model = model([conv()], WEIGHT)
    onnx_model.graph.initializer[0].raw_data = b"1234"
    assert "'c.weight' [4, 3, 1, 1] takes 48 B, and has 4 B" in refusal(tmp_path, onnx_model, "MBC351")
    onnx_model.graph.initializer[0].ClearField("raw_data")
    onnx_model.graph.initializer[0].float_data.extend([1.0] * 3)
    assert "'c.weight' [4, 3, 1, 1] has 3 numbers" in refusal(tmp_path, onnx_model, "MBC351")
    onnx_model.graph.initializer[0].data_type = onnx.TensorProto.COMPLEX64
    assert "'c.weight' is of the type complex64" in refusal(tmp_path, onnx_model, "MBC351")
    twice = model([conv()], WEIGHT)
    twice.graph.initializer.append(numbers.from_array(np.ones(1, np.float32), "c.weight"))
    assert "several weights of the name 'c.weight'" in refusal(tmp_path, twice, "MBC350")


def test_names_that_a_terminal_would_act_on(tmp_path: Path) -> None:
    message = refusal(tmp_path, model([conv("h"), node("Det", ["h"], ["y"], name="\x1b[2Jodd")], WEIGHT), "MBC303")
    assert "node '?[2Jodd': Det" in message


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'")

    package.onnx.cache_clear()
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MbcError, match="MBC349: ONNX files need the package onnx") as caught:
        import_model(tmp_path / "model.onnx", "net")
    assert "pip install 'mbc-compiler[onnx]'" in str(caught.value)


def test_a_batch_for_a_program_of_torch(tmp_path: Path) -> None:
    with pytest.raises(MbcError, match="MBC353: --batch 3 is given"):
        import_model(archives.write(tmp_path), "net", batch=3)
