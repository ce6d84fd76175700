"""Reading exported programs: valid files, and files that are cut short, damaged or malicious."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.interchange.importing import import_model
from mbc.interchange.pt2 import read_pt2
from tests.interchange import archives


def refused(path: Path, code: str, words: str) -> str:
    with pytest.raises(MbcError) as caught:
        read_pt2(path)
    assert caught.value.code == code and words in caught.value.message
    assert caught.value.message.isprintable()
    return caught.value.message


def test_a_whole_program(tmp_path: Path) -> None:
    program = read_pt2(archives.write(tmp_path))
    assert program.inputs == ("x",) and program.outputs == ("conv2d",) and program.writer == "torch 2.13.0"
    (array,) = program.arrays.values()
    assert np.array_equal(array, np.arange(15, dtype=np.float32).reshape(5, 3, 1, 1))
    assert [(call.path, call.name) for call in program.nodes[0].modules] == [("stem", "Conv2d")]
    source = import_model(tmp_path / "net.pt2", "net").source
    assert "conv(5, 1) @stem" in source and "input target[batch, 4, 4] : class" in source


def test_tensors_in_another_order_of_elements(tmp_path: Path) -> None:
    config = archives.weights()
    config["config"]["stem.weight"]["tensor_meta"]["strides"] = [{"as_int": n} for n in (1, 5, 1, 1)]
    (array,) = read_pt2(archives.write(tmp_path, config=config)).arrays.values()
    assert np.array_equal(array.reshape(5, 3), np.arange(15, dtype=np.float32).reshape(3, 5).T)


def test_no_file_and_no_archive(tmp_path: Path) -> None:
    refused(tmp_path / "none.pt2", "MBC300", "No such file")
    refused(tmp_path, "MBC300", "Is a directory")
    refused(Path("/dev/zero"), "MBC300", "it is not a regular file")
    (tmp_path / "text.pt2").write_text("not an archive")
    refused(tmp_path / "text.pt2", "MBC300", "not a zip file")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("a/b.txt", "c")
    refused(tmp_path / "other.pt2", "MBC300", "it holds no exported program")


def test_a_file_that_is_cut_short_anywhere(tmp_path: Path) -> None:
    whole = archives.write(tmp_path).read_bytes()
    for end in range(0, len(whole), 97):
        (tmp_path / "cut.pt2").write_bytes(whole[:end])
        with pytest.raises(MbcError, match=r"MBC30[02]: cannot read"):
            read_pt2(tmp_path / "cut.pt2")


def test_other_versions(tmp_path: Path) -> None:
    document = archives.graph() | {"schema_version": {"major": 9, "minor": 1}}
    message = refused(
        archives.write(tmp_path, document), "MBC301", "its graph has schema version 9, but only version 8 is supported"
    )
    assert message.startswith("cannot read '")
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
    refused(tmp_path / "old.pt2", "MBC301", "torch 2.7 or older wrote it")


def change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(entry: dict[str, Any]) -> None:
        target = entry if key in ("use_pickle", "path_name") else entry["tensor_meta"]
        target[key] = value

    return apply


@pytest.mark.parametrize(
    "harm, words",
    [
        (change("use_pickle", True), "'stem.weight' is pickled: reading it could run any code"),
        (change("path_name", "../../../etc/passwd"), "'stem.weight' is missing"),
        (change("sizes", [{"as_int": 1 << 40}, {"as_int": 3}]), "the shape (1099511627776, 3), but the graph states"),
        (change("strides", [{"as_int": 1 << 50}] * 4), "takes "),
        (change("strides", [{"as_int": -1}] * 4), "the layout of 'stem.weight' is damaged"),
        (change("storage_offset", {"as_int": 9}), "but its file has 60 B"),
        (change("dtype", 10), "is of the type complex64"),
    ],
)
def test_weights_unlike_their_header(harm: Callable[[dict[str, Any]], None], words: str, tmp_path: Path) -> None:
    config = archives.weights()
    harm(config["config"]["stem.weight"])
    refused(archives.write(tmp_path, config=config), "MBC302", words)


def test_weights_that_are_missing(tmp_path: Path) -> None:
    message = refused(archives.write(tmp_path, config={"config": {}}), "MBC302", "'stem.weight' is missing")
    assert message.startswith("cannot read the weights of '")


def node(document: dict[str, Any]) -> dict[str, Any]:
    return document["graph_module"]["graph"]["nodes"][0]


@pytest.mark.parametrize(
    "harm",
    [
        lambda d: d.pop("graph_module"),
        lambda d: d.update(graph_module=[]),
        lambda d: node(d).update(outputs=3),
        lambda d: node(d).update(inputs=[{"name": "input", "arg": {}}]),
        lambda d: node(d).pop("target"),
        lambda d: d["graph_module"]["graph"]["tensor_values"]["x"].update(sizes=[{"as_int": -1}]),
        lambda d: d["graph_module"]["graph"]["tensor_values"]["x"].update(sizes=[{"as_int": 1e30}]),
        lambda d: d["graph_module"]["graph"]["tensor_values"]["x"].pop("device"),
        lambda d: d["graph_module"]["signature"]["input_specs"].append({"token": {"arg": {"name": "t"}}}),
        lambda d: d["graph_module"]["signature"]["input_specs"].append({"user_input": {"arg": {"as_int": 3}}}),
        lambda d: d["graph_module"]["signature"].update(input_specs=None),
    ],
)
def test_graphs_that_are_damaged(harm: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    document = archives.graph()
    harm(document)
    with pytest.raises(MbcError, match="MBC300: cannot read"):
        read_pt2(archives.write(tmp_path, document))


def test_graphs_that_are_no_json_or_bottomless(tmp_path: Path) -> None:
    name = "net/models/model.json"
    refused(archives.write(tmp_path, files={name: b"{"}), "MBC300", "Expecting property name")
    refused(archives.write(tmp_path, files={name: b"[" * 100_000}), "MBC300", "nested too deeply")
    refused(archives.write(tmp_path, files={name: b"\xff\xfe\xfd"}), "MBC300", "can't decode")
    refused(archives.write(tmp_path, files={"net/models/two.json": b"{}"}), "MBC300", "it holds 2 programs")


def test_graphs_with_missing_references(tmp_path: Path) -> None:
    document = archives.graph()
    node(document)["inputs"][0]["arg"] = {"as_tensor": {"name": "nobody"}}
    with pytest.raises(MbcError, match=r"MBC30[03]"):
        import_model(archives.write(tmp_path, document), "net")
    document = archives.graph()
    document["graph_module"]["signature"]["output_specs"] = []
    with pytest.raises(MbcError, match="it returns no tensor"):
        import_model(archives.write(tmp_path, document), "net")


def test_nothing_of_a_file_reaches_the_terminal_or_the_source_as_it_is(tmp_path: Path) -> None:
    evil = "x\x1b[31m\u202e\n}"
    document: dict[str, Any] = {**archives.graph(), "torch_version": evil}
    node(document)["target"] = f"torch.ops.aten.{evil}.default"
    node(document)["metadata"]["nn_module_stack"] = f"a,,b;c,{evil},d.{evil}"
    node(document)["metadata"]["stack_trace"] = f'File "{evil}", line 3, in f\n  {evil}'
    with pytest.raises(MbcError) as caught:
        import_model(archives.write(tmp_path, document), "net")
    assert "\x1b" not in str(caught.value) and "\u202e" not in str(caught.value)
    document = {**archives.graph(), "torch_version": evil}
    document["graph_module"]["signature"]["input_specs"][0]["parameter"]["parameter_name"] = f"{evil}.weight"
    node(document)["metadata"]["nn_module_stack"] = f"a,,b;c,{evil},d.{evil}"
    config = {"config": {f"{evil}.weight": archives.weights()["config"]["stem.weight"]}}
    source = import_model(archives.write(tmp_path, document, config), "net").source
    assert "@x__31m___" in source and "\x1b" not in source and "\u202e" not in source
    assert json.dumps(source).count("\\u") == 0


def test_a_model_that_says_wrong_shapes_is_not_imported(tmp_path: Path) -> None:
    document = archives.graph()
    document["graph_module"]["graph"]["tensor_values"]["conv2d"] = archives.tensor((2, 5, 9, 9))
    with pytest.raises(MbcError, match="softmax_cross_entropy` cannot be applied"):
        import_model(archives.write(tmp_path, document), "net")
