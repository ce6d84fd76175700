"""Unusual arguments of every call of a module: the call works or raises an MbcError, and never another exception."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.plan.file import load_plan
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from mbc.train.accuracy import inputs_of
from mbc.train.data import open_data
from tests.runtime.nets import batch, small_plan


class Contrary:
    """An object that raises an exception for every request."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"no {name}")

    def __repr__(self) -> str:
        raise ValueError("no text")


class WrongProtocol:
    def __dlpack_device__(self) -> object:
        return 5


class Capsule:
    def __dlpack_device__(self) -> object:
        return 1, 0

    def __dlpack__(self, **_: object) -> object:
        return "capsule"


class Interface:
    __array_interface__ = {"version": 3}  # noqa: RUF012


IMAGES = np.zeros((6, 2, 6, 6), np.float32)
IMAGE, TARGET = batch()
THINGS: tuple[Any, ...] = (
    None, 3, -1, 2**70, 10**400, 1.5, math.nan, math.inf, True, 1j, "", "a\0b", "/", "x" * 5000, "\ud800", b"x",
    [], [[1], [1, 2]], {}, {1: 2}, {"a": "\ud800"}, (), {1}, range(6), object(), Module, iter([1]), memoryview(b"abc"),
    Contrary(), WrongProtocol(), Capsule(), Interface(), Path("/proc/x"), Path("/dev/null"),
    np.array(None), np.array([None] * 6), np.zeros(0), IMAGES[:0], np.array("a"), np.zeros(6, "V4"),
    IMAGES.astype(complex), IMAGES.astype("M8[s]"), IMAGES.astype(bool), np.ma.masked_array(IMAGES, True), IMAGES[::-1],
    np.broadcast_to(np.float32(1), IMAGES.shape), IMAGES.astype(">f4"), IMAGES.astype(np.longdouble),
    IMAGES.astype([("a", "f4")]), IMAGES.astype(object), [["a"] * 6] * 6, np.arange(6), np.arange(6) - 2**62,
    np.arange(6, dtype=np.uint64) + 2**63, np.float32(3),
)  # fmt: skip


@pytest.fixture(scope="module")
def net() -> Module:
    return Module(small_plan(), device="cpu", shadow=False)


CALLS: dict[str, Callable[[Module, Plan, Path, Any], object]] = {
    "Module": lambda net, plan, folder, x: Module(x, device="cpu"),
    "seed": lambda net, plan, folder, x: Module(plan, seed=x, device="cpu"),
    "device": lambda net, plan, folder, x: Module(plan, device=x),
    "transfers": lambda net, plan, folder, x: Module(plan, device="cpu", transfers=x),
    "canaries": lambda net, plan, folder, x: Module(plan, device="cpu", canaries=x),
    "lr": lambda net, plan, folder, x: net.step(IMAGE, TARGET, lr=x),
    "image": lambda net, plan, folder, x: net.step(x, TARGET, lr=0.1),
    "target": lambda net, plan, folder, x: net.step(IMAGE, target=x, lr=0.1),
    "unknown": lambda net, plan, folder, x: net.step(IMAGE, TARGET, lr=0, y=x),
    "forward": lambda net, plan, folder, x: net.forward(x),
    "copy": lambda net, plan, folder, x: net.forward(IMAGE, copy=x),
    "state": lambda net, plan, folder, x: net.state(x),
    "load": lambda net, plan, folder, x: net.load(x),
    "set name": lambda net, plan, folder, x: net.set_state(x, IMAGE),
    "set array": lambda net, plan, folder, x: net.set_state("first.weight", x),
    "save": lambda net, plan, folder, x: net.save(x),
    "metadata": lambda net, plan, folder, x: net.save(folder / "w", metadata=x),
    "strict": lambda net, plan, folder, x: net.load(folder / "good", strict=x),
    "load_plan": lambda net, plan, folder, x: load_plan(x, "it"),
    "data": lambda net, plan, folder, x: open_data(x, inputs_of(plan.graph)),
}


@pytest.mark.parametrize("entry", list(CALLS))
def test_every_call_accepts_it_or_names_the_fault(net: Module, tmp_path: Path, entry: str, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    net.save(tmp_path / "good")
    call, plan = CALLS[entry], small_plan()
    refused = 0
    for thing in THINGS:
        before = {name: net.state(name) for name in net.states}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(net, plan, tmp_path, thing)
        except MbcError as error:
            refused += 1
            assert error.message and error.remedy and "\n\n" not in str(error) and len(error.message) < 6000
            for name, array in before.items():
                np.testing.assert_array_equal(array, net.state(name))
    assert refused > len(THINGS) * 0.8
    net.load(tmp_path / "good")


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        (lambda net: Module(None), "MBC166", "cannot read the plan: None is a NoneType, not a path"),  # pyright: ignore[reportArgumentType]
        (lambda net: Module(""), "MBC166", "cannot read the plan: '' is not a path"),
        (lambda net: Module(small_plan(), device=None), "MBC167", "unknown device None"),  # pyright: ignore[reportArgumentType]
        (lambda net: Module(small_plan(), device="cpu", transfers="x"), "MBC167", "unknown transfers 'x'"),
        (lambda net: Module(small_plan(), device="cpu", eager="no"), "MBC167", "eager is 'no', neither True nor False"),  # pyright: ignore[reportArgumentType]
        (lambda net: net.forward(IMAGES, copy=None), "MBC167", "copy is None, neither True nor False"),
        (lambda net: net.step(IMAGES, np.zeros(6, int), lr=10**400), "MBC169", "the learning rate is 1000000"),
        (lambda net: net.step(IMAGES.astype(object), np.zeros(6, int), lr=1), "MBC148", "must hold floating-point"),
        (lambda net: net.forward(np.ma.masked_array(IMAGES, True)), "MBC150", "input 'image' is a masked array"),
        (lambda net: net.forward(Capsule()), "MBC150", "input 'image' cannot be read: "),
        (lambda net: net.state(None), "MBC165", "there is no state None"),
        (lambda net: net.state(["a"]), "MBC165", "there is no state ['a']"),
        (lambda net: net.set_state("first.weight", [[1], [1, 2]]), "MBC165", "state 'first.weight' cannot be set: "),
        (lambda net: net.set_control(updates=-1), "MBC165", "the control block takes no 'updates' of -1"),
        (lambda net: net.save(3), "MBC162", "cannot write a checkpoint: 3 is an int, not a path"),
        (lambda net: net.save("/dev/null"), "MBC162", "checkpoint '/dev/null': it is not an ordinary file"),
        (lambda net: net.save("w", metadata={"a": 1}), "MBC162", "metadata {'a': 1} do not map text to text"),
        (lambda net: net.load(b"w"), "MBC163", "cannot read a checkpoint: b'w' is a bytes, not a path"),
        (lambda net: net.load("/"), "MBC163", "cannot read checkpoint '/': it is not a file"),
        (lambda net: net.load("/dev/null"), "MBC163", "cannot read checkpoint '/dev/null': it is not a file"),
        (lambda net: load_plan(None, "it"), "MBC110", "it is not text but a NoneType"),  # pyright: ignore[reportArgumentType]
    ],
)  # fmt: skip
def test_what_is_said(net: Module, call: Any, code: str, message: str):
    with pytest.raises(MbcError) as caught:
        call(net)
    assert caught.value.code == code and message in caught.value.message


def test_numbers_that_numpy_makes_are_numbers():
    plan = small_plan()
    net = Module(plan, seed=np.int64(3), device="cpu", shadow=np.bool_(False))  # pyright: ignore[reportArgumentType]
    image, target = batch()
    other = Module(plan, seed=3, device="cpu")
    assert float(net.step(image, target, lr=np.float32(0.5))) == float(other.step(image, target, lr=0.5))  # pyright: ignore[reportArgumentType]
    assert net.forward(image, copy=np.bool_(True)).shape == (6, 5)  # pyright: ignore[reportArgumentType, reportCallIssue]
