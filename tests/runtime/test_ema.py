"""Moving averages: those of PyTorch over 50 steps, read, evaluated and saved, and files without averages."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.ir.averages import averages_of
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from mbc.source import Source
from tests.runtime.nets import SMALL, batch, small_plan

RULE = "optimizer = sgd(momentum=0.9, weight_decay=1e-3)"
DECAY = 0.9


@cache
def averaged_plan(entries: str = f"ema = {DECAY}", precision: str = "fp32") -> Plan:
    text = SMALL.replace(" |> dropout(0.2)", "").replace(RULE, f"{RULE} {entries}")
    return compile_plan(Source("small.mbc", text), Options(gpu="h200", settings=(("train.precision", precision),)))


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_fifty_steps_are_those_of_pytorch(precision: str):
    torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    from mbc.bench.torch_network import TorchNetwork

    plan = averaged_plan(f'ema = {DECAY} frozen = "second.*"', precision)
    text = SMALL.replace(" |> dropout(0.2)", "")
    network = lower(parse(Source("small.mbc", text))).network
    net = Module(plan, seed=3, device="cpu", shadow=False)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    theirs = TorchNetwork(network, net.state_dict(), dtype, "cpu", False)
    optimizer = theirs.optimizer(plan.graph.optimizer, 0.05)
    swa = torch.optim.swa_utils
    average = swa.AveragedModel(theirs, multi_avg_fn=swa.get_ema_multi_avg_fn(DECAY), use_buffers=True)
    for i in range(50):
        image, target = batch(i)
        net.step(image, target, lr=0.05)
        optimizer.zero_grad()
        theirs(theirs.place((image, target)))[0].backward()
        optimizer.step()
        average.update_parameters(theirs)
    limit = 1e-10 if precision == "fp64" else 1e-4
    ours, trained = net.state_dict(ema=True), net.state_dict()
    for name, wanted in average.module.states().items():
        np.testing.assert_allclose(ours[name], wanted, rtol=limit, atol=limit, err_msg=name)
        moved = not name.startswith("second.")
        assert np.array_equal(ours[name], trained[name]) is not moved, name


def test_averages_begin_as_the_weights_and_stand_in_their_place_when_asked():
    net = Module(averaged_plan(), seed=1, device="cpu")
    image, _ = batch()
    assert all(np.array_equal(net.state(w), net.state(a)) for w, a in averages_of(net.plan.graph).items())
    for i in range(3):
        net.step(*batch(i), lr=0.3)
    weights, averages, everything = net.state_dict(), net.state_dict(ema=True), net.state_dict(optimizer=True)
    trained = net.forward(image)
    with net.averaged():
        assert all(np.array_equal(net.state(name), averages[name]) for name in weights)
        outputs = net.forward(image)
    assert not np.array_equal(outputs, trained)
    np.testing.assert_array_equal(net.forward(image), trained)
    assert all(np.array_equal(array, everything[name]) for name, array in net.state_dict(optimizer=True).items())
    other = Module(averaged_plan(), seed=2, device="cpu")
    other.load_state_dict(averages)
    np.testing.assert_array_equal(other.forward(image), outputs)
    assert list(weights) == list(small_state_names()) == list(averages)


def small_state_names() -> tuple[str, ...]:
    return tuple(Module(small_plan(), device="cpu").state_dict())


def test_weights_that_are_loaded_alone_begin_their_averages(tmp_path: Path):
    net, other = (Module(averaged_plan(), seed=seed, device="cpu") for seed in (1, 2))
    net.step(*batch(), lr=0.3)
    net.save(tmp_path / "w")
    for load in (
        lambda: other.load(tmp_path / "w", weights_only=True),
        lambda: other.load_state_dict(net.state_dict()),
    ):
        other.step(*batch(1), lr=0.3)
        load()
        averages = other.state_dict(ema=True)
        assert all(np.array_equal(averages[name], array) for name, array in net.state_dict().items())


def test_a_checkpoint_has_both_and_goes_on_to_the_same_bits(tmp_path: Path):
    net, other = (Module(averaged_plan(), seed=seed, device="cpu") for seed in (1, 2))
    net.step(*batch(), lr=0.3)
    net.save(tmp_path / "w")
    net.save(tmp_path / "averages", ema=True)
    other.load(tmp_path / "w")
    for i in range(2):
        net.step(*batch(i), lr=0.3)
        other.step(*batch(i), lr=0.3)
    assert all(np.array_equal(net.state(name), other.state(name)) for name in net.states)
    plain = Module(small_plan(), device="cpu")
    plain.load(tmp_path / "averages", weights_only=True)
    plain.load(tmp_path / "w", weights_only=True)


def test_files_with_and_without_averages_are_distinguished(tmp_path: Path):
    net, plain = Module(averaged_plan(), device="cpu"), Module(small_plan(), device="cpu")
    net.save(tmp_path / "with")
    plain.save(tmp_path / "without")
    with pytest.raises(
        MbcError, match=r"lacks moving averages that the network keeps \(9 names, such as first"
    ) as caught:
        net.load(tmp_path / "without")
    assert caught.value.code == "MBC212" and "--set train.ema=none" in (caught.value.remedy or "")
    with pytest.raises(MbcError, match="has moving averages, but the network keeps none") as caught:
        plain.load(tmp_path / "with")
    assert caught.value.code == "MBC212"
    plain.load(tmp_path / "with", strict=False)
    net.load(tmp_path / "without", strict=False)
    assert np.array_equal(net.state("head.weight.ema"), net.state("head.weight"))


def test_a_network_without_averages_says_so(tmp_path: Path):
    net = Module(small_plan(), device="cpu")
    for ask in (lambda: net.state_dict(ema=True), lambda: net.save(tmp_path / "w", ema=True), net.averaged().__enter__):
        with pytest.raises(MbcError, match="keeps no moving averages of its weights") as caught:
            ask()
        assert caught.value.code == "MBC211" and "ema = 0.9999" in (caught.value.remedy or "")


def test_an_interrupt_between_weights_and_averages_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that was interrupted between both refuses to train, because a state may be lost."""
    net = Module(averaged_plan(), device="cpu")
    net.step(*batch(), lr=0.1)
    written = net._opened_machine.write
    count = iter(range(100))

    def interrupted(*arguments: Any) -> None:
        if next(count) == 1:
            raise KeyboardInterrupt
        written(*arguments)

    monkeypatch.setattr(net._opened_machine, "write", interrupted)
    with pytest.raises(KeyboardInterrupt), net.averaged():
        raise AssertionError("not reached")
    with pytest.raises(MbcError, match="MBC236"):
        net.step(*batch(), lr=0.1)
