"""State dicts: copies of weights by name, loaded whole or not at all; also on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mbc.errors import MbcError
from mbc.runtime.module import Module
from tests.runtime.nets import batch, package, small_plan

WEIGHTS = (
    "first.weight", "bn0.weight", "bn0.bias", "bn0.running_mean", "bn0.running_var", "second.weight", "second.bias",
    "head.weight", "head.bias",
)  # fmt: skip


def module(kind: str, folder: Path, seed: int = 0) -> Module:
    if kind == "cpu":
        return Module(small_plan(), seed=seed, device="cpu")
    return Module(package(folder, small_plan()), seed=seed, device="cuda")


@pytest.fixture(params=["cpu", "cuda"])
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Module:
    """Return a module after one step."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    opened = module(request.param, tmp_path, 1)
    opened.step(*batch(), lr=0.1)
    return opened


def states(net: Module) -> dict[str, np.ndarray]:
    return {name: net.state(name) for name in net.states}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_names_shapes_and_types_are_those_of_the_source(net: Module):
    state_arrays = net.state_dict()
    assert tuple(state_arrays) == WEIGHTS
    assert {name: array.shape for name, array in state_arrays.items()} == {name: net.states[name] for name in WEIGHTS}
    assert {array.dtype for array in state_arrays.values()} == {np.dtype(np.float32)}
    assert Module(small_plan("fp64"), device="cpu").state_dict()["head.bias"].dtype == np.float64
    assert Module(small_plan("bf16"), device="cpu").state_dict()["head.bias"].dtype == np.float32
    assert list(net.state_dict(optimizer=True)) == list(net.states)


def test_arrays_are_copies(net: Module):
    net.state_dict()["head.bias"][:] = 7
    assert not (net.state("head.bias") == 7).any()


def test_weights_alone_leave_the_optimizer_as_it_is(net: Module, tmp_path: Path):
    before = states(net)
    other = Module(small_plan("fp16", 2), seed=5, device="cpu")
    net.load_state_dict(other.state_dict())
    assert_same(net.state_dict(), other.state_dict())
    assert_same({name: net.state(name) for name in before if name not in WEIGHTS}, {
        name: array for name, array in before.items() if name not in WEIGHTS
    })  # fmt: skip
    assert net.control["step"] == 1


def test_all_states_go_from_one_module_to_another(net: Module, tmp_path: Path):
    other = module(net.device, tmp_path, 9)
    other.step(*batch(3), lr=0.3)
    other.load_state_dict(net.state_dict(optimizer=True))
    assert_same(states(other), states(net))
    np.testing.assert_array_equal(other.forward(batch(1)[0]), net.forward(batch(1)[0]))


def test_every_name_that_does_not_fit_is_listed_and_nothing_is_loaded(net: Module):
    before = states(net)
    given: dict[str, Any] = {name: array + 1 for name, array in net.state_dict().items()}
    del given["first.weight"]
    given |= {"head.weight": given["head.weight"][:2], "head.bias": np.arange(5), "another.weight": np.zeros(3)}
    with pytest.raises(MbcError) as caught:
        net.load_state_dict(given)
    assert caught.value.code == "MBC164"
    assert caught.value.message == (
        "the state dict does not fit the network (4 names):\n"
        "  missing     first.weight [4, 2, 3, 3]\n"
        "  unexpected  another.weight [3]\n"
        "  mismatched  head.weight: the network has [5, 36], the dict [2, 36]\n"
        "  mismatched  head.bias: the network has floating-point numbers, the dict I64"
    )
    assert_same(states(net), before)


def test_a_part_of_the_optimizer_s_state_is_none(net: Module):
    given = net.state_dict() | {"head.bias.momentum": np.zeros(5, np.float32)}
    with pytest.raises(MbcError, match=r"missing     head.weight.momentum \[5, 36\]") as caught:
        net.load_state_dict(given)
    assert caught.value.code == "MBC164" and "(6 names)" in caught.value.message


@pytest.mark.parametrize("given", [None, 3, [("head.bias", 1)], "w"])
def test_files_that_are_no_state_dict(given: Any):
    with pytest.raises(MbcError, match="is not a mapping of names to arrays\nhelp: pass what state_dict") as caught:
        Module(small_plan(), device="cpu").load_state_dict(given)
    assert caught.value.code == "MBC164"


def test_tensors_of_pytorch_are_taken(net: Module):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    given = {name: torch.full(array.shape, 0.5, dtype=torch.float64) for name, array in net.state_dict().items()}
    net.load_state_dict(given)
    assert all((array == 0.5).all() for array in net.state_dict().values())


@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9)", "adamw()", "sgd()"])
def test_a_file_s_weights_alone(tmp_path: Path, optimizer: str):
    """The file is a checkpoint of any optimizer, or has weights only."""
    source = Module(small_plan("fp32", 0, optimizer), seed=4, device="cpu")
    source.step(*batch(), lr=0.1)
    source.save(tmp_path / "w")
    save_file(source.state_dict(), tmp_path / "plain")
    for file in ("w", "plain"):
        net = Module(small_plan(), seed=1, device="cpu")
        net.load(tmp_path / file, weights_only=True)
        assert_same(net.state_dict(), source.state_dict())
        assert net.control["step"] == 0 and not net.state("head.weight.momentum").any()


def test_a_file_that_lacks_a_weight(tmp_path: Path):
    net = Module(small_plan(), seed=1, device="cpu")
    arrays = net.state_dict() | {"other.weight": np.zeros(2, np.float32)}
    del arrays["bn0.running_var"]
    save_file(arrays, tmp_path / "w")
    with pytest.raises(MbcError) as caught:
        net.load(tmp_path / "w", weights_only=True)
    assert caught.value.code == "MBC164" and "does not fit the network (2 names)" in caught.value.message
    assert "missing     bn0.running_var [4]\n  unexpected  other.weight [2]" in caught.value.message
