"""Checkpoints: any plan of a network reads those of any other plan, and no partial ones are left."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mbc.errors import MbcError
from mbc.runtime.checkpoint import Checkpoint, write_checkpoint
from mbc.runtime.module import Module
from tests.runtime.nets import batch, small_plan


def trained(precision: str = "fp32", micro_batch: int = 0, optimizer: str = "sgd(momentum=0.9)") -> Module:
    net = Module(small_plan(precision, micro_batch, optimizer), seed=1, device="cpu")
    for seed in range(3):
        net.step(*batch(seed), lr=0.05)
    return net


def failure(net: Module, path: Path) -> MbcError:
    with pytest.raises(MbcError) as caught:
        net.load(path)
    return caught.value


def test_training_goes_on_as_if_never_interrupted(tmp_path: Path):
    net = trained()
    net.save(tmp_path / "w.safetensors")
    again = Module(small_plan(), seed=9, device="cpu")
    again.load(str(tmp_path / "w.safetensors"))
    assert again.control == net.control
    for seed in range(3, 6):
        assert float(net.step(*batch(seed), lr=0.05)) == float(again.step(*batch(seed), lr=0.05))
    for name in net.states:
        np.testing.assert_array_equal(net.state(name), again.state(name))


@pytest.mark.parametrize(("precision", "micro_batch"), [("bf16", 0), ("fp16", 0), ("tf32", 2), ("fp64", 0)])
def test_other_plans_of_the_network_read_it(tmp_path: Path, precision: str, micro_batch: int):
    net = trained()
    net.save(tmp_path / "w")
    other = Module(small_plan(precision, micro_batch), device="cpu")
    other.load(tmp_path / "w")
    for name in net.states:
        np.testing.assert_array_equal(other.state(name), net.state(name))
    assert other.control["step"] == 3
    other.save(tmp_path / "back")
    net.load(tmp_path / "back")


def test_the_safetensors_package_reads_it(tmp_path: Path):
    net = trained()
    net.save(tmp_path / "w")
    arrays = load_file(tmp_path / "w")
    assert set(net.states) <= set(arrays)
    for name in net.states:
        assert arrays[name].dtype == np.float32
        np.testing.assert_array_equal(arrays[name], net.state(name))
    assert arrays["control.step"] == 3


def test_it_reads_files_of_the_safetensors_package(tmp_path: Path):
    net = trained()
    arrays = {name: net.state(name) + 1 for name in net.states}
    save_file(arrays, tmp_path / "w")
    net.load(tmp_path / "w", strict=False)
    for name, array in arrays.items():
        np.testing.assert_array_equal(net.state(name), array)


def test_metadata_of_the_user_stands_beside_that_of_the_module(tmp_path: Path):
    net = trained()
    net.save(tmp_path / "w", metadata={"note": "third run", "format": "own"})
    metadata = Checkpoint(tmp_path / "w").metadata
    assert metadata["note"] == "third run" and metadata["format"] == "mbc"
    net.load(tmp_path / "w")


def test_every_name_that_does_not_fit_is_listed(tmp_path: Path):
    net = trained()
    net.save(tmp_path / "w")
    whole = Checkpoint(tmp_path / "w")
    tensors = {name: whole.read(name) for name in whole.tensors}
    del tensors["first.weight"], tensors["control.seed"]
    tensors["head.weight"] = tensors["head.weight"][:2]
    tensors["another.weight"] = np.zeros(3, np.float32)
    write_checkpoint(tmp_path / "wrong", tensors.items(), {})
    before = net.state("second.weight")
    error = failure(net, tmp_path / "wrong")
    assert error.code == "MBC164"
    assert "does not fit the network (4 names)" in error.message
    for line in (
        "missing     first.weight [4, 2, 3, 3]",
        "missing     control.seed [1]",
        "unexpected  another.weight [3]",
        "mismatched  head.weight: the network has [5, 36], the file [2, 36]",
    ):
        assert line in error.message
    np.testing.assert_array_equal(net.state("second.weight"), before)


def test_weights_of_another_optimizer(tmp_path: Path):
    trained(optimizer="adamw()").save(tmp_path / "w")
    error = failure(trained(), tmp_path / "w")
    assert error.code == "MBC164" and "unexpected" in error.message and "missing" in error.message
    assert "mbc train --weights" in error.remedy


def damaged(path: Path, kind: str) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if kind == "cut":
        data = data[:-10]
    elif kind == "short":
        data = data[:5]
    elif kind == "long header":
        data = (1 << 40).to_bytes(8, "little") + data[8:]
    elif kind == "no json":
        data = data[:8] + b"x" * length + data[8 + length :]
    elif kind == "list":
        data = (2).to_bytes(8, "little") + b"[]"
    else:
        entry = header["first.weight"]
        entry[kind] = {"dtype": "F99", "shape": [1, -4], "data_offsets": [4, 0]}[kind]
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", ": incomplete metadata, file not fully covered"),
        ("short", ": header too small"),
        ("long header", ": header too large"),
        ("no json", ": invalid JSON in header: expected value"),
        ("list", ": invalid JSON in header: invalid type: sequence"),
        ("dtype", ": invalid JSON in header: unknown variant `F99`"),
        ("shape", ": invalid JSON in header: invalid value: integer `-4`"),
        ("data_offsets", ": invalid offset for tensor `first.weight`"),
    ],
)
def test_damaged_files(tmp_path: Path, kind: str, message: str):
    net = trained()
    net.save(tmp_path / "w")
    damaged(tmp_path / "w", kind)
    error = failure(net, tmp_path / "w")
    assert error.code == "MBC163" and message in error.message
    assert f"cannot read checkpoint '{tmp_path / 'w'}" in error.message


def test_files_that_are_not_there(tmp_path: Path):
    assert "No such file" in failure(trained(), tmp_path / "nothing").message


def test_places_that_cannot_be_written_stay_as_they_were(tmp_path: Path):
    net = trained()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    for path in (tmp_path / "folder", tmp_path / "absent" / "w"):
        with pytest.raises(MbcError, match="cannot write checkpoint") as caught:
            net.save(path)
        assert caught.value.code == "MBC162"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
