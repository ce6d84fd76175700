"""Copies, pickles, forked processes and threads: an independent module, or a refusal with a remedy."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.runtime.launch_order import Transfers
from mbc.runtime.module import Module
from mbc.runtime.output import DeviceOutput
from tests.optimize.remat.test_apply_decisions import everything_at_once
from tests.runtime.fake_pycuda import FakeLibrary, Gpu
from tests.runtime.nets import batch, package, small_plan
from tests.runtime.test_not_finite import inputs


def contents(net: Module) -> dict[str, Any]:
    return {**{name: net.state(name) for name in net.states}, **net.control}


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def refused(call: Callable[[], object], code: str = "MBC234") -> MbcError:
    with pytest.raises(MbcError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def in_a_fork(call: Callable[[], object]) -> str:
    """Return the result of `call` in a forked process as text, or the code and message of its error."""
    end, start = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of this may end up in pytest
        try:
            text = str(call())
        except MbcError as error:
            text = f"{error.code}: {error.message}; {error.remedy}"
        except BaseException as error:
            text = repr(error)
        os.write(start, text.encode())
        os._exit(0)
    os.close(start)
    with os.fdopen(end, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


# ------------------------------------------------------------------------------------------------------- on the CPU


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_deep_copy_trains_on_its_own(precision: str):
    net = Module(small_plan(precision), seed=4, device="cpu")
    for seed in range(3):
        net.step(*batch(seed), lr=0.05)
    alike = Module(small_plan(precision), seed=4, device="cpu")
    for seed in range(3):
        alike.step(*batch(seed), lr=0.05)
    before = contents(net)
    other = copy.deepcopy(net)
    assert_equal(contents(other), before)
    assert other.metrics == net.metrics and other.device == "cpu" and other.memory == net.memory
    for seed in range(3, 7):  # dropout and the loss scale go on as they would have in the original
        assert float(other.step(*batch(seed), lr=0.05)) == float(alike.step(*batch(seed), lr=0.05))
    assert_equal(contents(net), before)
    assert_equal(contents(other), contents(alike))
    for seed in range(3, 7):
        net.step(*batch(seed), lr=0.05)
    assert_equal(contents(net), contents(other))
    np.testing.assert_array_equal(net.forward(batch(9)[0]), other.forward(batch(9)[0]))


def test_a_deep_copy_of_fp16_has_its_own_loss_scale():
    net = Module(small_plan("fp16"), device="cpu")
    other = copy.deepcopy(net)
    other.set_state("head.weight", other.state("head.weight") * 1000)  # gradients beyond what fp16 holds
    other.step(*batch(), lr=0.1)
    assert other.control["skipped"] == 1 and other.control["loss_scale"] == net.control["loss_scale"] / 2
    assert net.control["skipped"] == net.control["step"] == 0


@pytest.mark.parametrize("transfers", list(Transfers))
def test_a_deep_copy_has_host_memory_of_its_own(transfers: Transfers):
    plan = everything_at_once("residual")
    assert plan.predictions.host_bytes
    net, alike = (Module(plan, device="cpu", transfers=transfers) for _ in range(2))
    for module in (net, alike):
        module.step(*inputs(plan, 1), lr=0.1)
    other = copy.deepcopy(net)
    for seed in (2, 3):
        assert float(other.step(*inputs(plan, seed), lr=0.1)) == float(alike.step(*inputs(plan, seed), lr=0.1))
    net.step(*inputs(plan, 5), lr=0.1)
    assert_equal(contents(other), contents(alike))


def test_a_deep_copy_of_a_list_keeps_one_module_one():
    net = Module(small_plan(), device="cpu")
    first, second = copy.deepcopy([net, net])
    assert first is second and first is not net


def test_closing_a_copy_leaves_the_original():
    net = Module(small_plan(), device="cpu")
    other = copy.deepcopy(net)
    other.close()
    float(net.step(*batch(), lr=0.1))
    refused(lambda: copy.deepcopy(other), "MBC230")


def test_other_copies_are_refused():
    net = Module(small_plan(), device="cpu")
    error = refused(lambda: copy.copy(net))
    assert error.code == "MBC234" and error.message == "a module cannot be copied or pickled"
    assert "copy.deepcopy" in error.remedy
    error = refused(lambda: pickle.dumps(net))
    assert "save a checkpoint, open a Module where it is needed" in error.remedy


def test_losses_can_be_copied_and_pickled():
    net = Module(small_plan(), device="cpu")
    loss = net.step(*batch(), lr=0.1)
    for again in (copy.copy(loss), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert float(again) == float(loss) and again.accuracy == loss.accuracy


def test_a_forked_process_has_a_module_of_its_own():
    net, alike = Module(small_plan(), device="cpu"), Module(small_plan(), device="cpu")
    loss = net.step(*batch(), lr=0.1)
    assert float(alike.step(*batch(), lr=0.1)) == float(loss)
    before = contents(net)
    expected = repr(alike.step(*batch(1), lr=0.1))
    assert in_a_fork(lambda: net.step(*batch(1), lr=0.1)) == expected
    assert in_a_fork(lambda: loss) == repr(loss)
    assert_equal(contents(net), before)
    assert repr(net.step(*batch(1), lr=0.1)) == expected


def test_a_process_forks_between_two_calls():
    """A fork in the middle of a step would give the child a half step, and a lock that nobody releases."""
    net = Module(small_plan(), device="cpu")
    started, go_on = threading.Event(), threading.Event()
    train = net._machine.train

    def slow(control: bytes) -> Any:
        started.set()
        assert go_on.wait(60)
        return train(control)

    net._opened_machine.train = slow
    thread = threading.Thread(target=lambda: net.step(*batch(), lr=0.1))
    thread.start()
    assert started.wait(60)
    threading.Timer(0.2, go_on.set).start()
    assert in_a_fork(lambda: net.control["updates"]) == "1"
    thread.join()


def test_calls_of_several_threads_run_one_after_the_other():
    plan = small_plan()
    net, alike = Module(plan, device="cpu"), Module(plan, device="cpu")
    image, target = batch()
    steps, threads = 20, 3
    losses: list[float] = []
    expected = [float(alike.step(image, target, lr=0.05)) for _ in range(steps * threads)]
    predicted: list[Any] = []

    def work() -> None:
        for _ in range(steps):
            losses.append(float(net.step(image, target, lr=0.05)))
            shown = net.forward(image, copy=False)
            predicted.append((shown, np.array(shown)))
            assert contents(net).keys()

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert sorted(losses) == sorted(expected)
    assert_equal(contents(net), contents(alike))
    for shown, then in predicted:  # no step of another thread has changed it
        np.testing.assert_array_equal(shown, then)


@pytest.mark.parametrize("what", ["step", "load", "set_state"])
def test_a_call_that_was_broken_off_leaves_nothing_to_go_on_with(tmp_path: Path, what: str):
    net, alike = Module(small_plan(), device="cpu"), Module(small_plan(), device="cpu")
    for module in (net, alike):
        module.step(*batch(), lr=0.1)
    net.save(tmp_path / "w")
    machine = net._opened_machine
    whole = machine.train, machine.write

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    machine.train = machine.write = interrupt  # pyright: ignore[reportAttributeAccessIssue]
    name = next(iter(net.states))
    weights = net.state(name)
    with pytest.raises(KeyboardInterrupt):
        {
            "step": lambda: net.step(*batch(1), lr=0.1),
            "load": lambda: net.load(tmp_path / "w"),
            "set_state": lambda: net.set_state(name, weights),
        }[what]()
    machine.train, machine.write = whole
    for call in (
        lambda: net.step(*batch(1), lr=0.1), lambda: net.forward(batch()[0]), lambda: net.save(tmp_path / "v"),
        lambda: net.control, lambda: net.state(name), lambda: copy.deepcopy(net),
        lambda: net.load(tmp_path / "w", strict=False),
    ):  # fmt: skip
        error = refused(call, "MBC236")
        assert "was interrupted: some states have changed" in error.message and "load a checkpoint" in error.remedy
    net.load(tmp_path / "w")
    assert float(net.step(*batch(1), lr=0.1)) == float(alike.step(*batch(1), lr=0.1))
    assert_equal(contents(net), contents(alike))


# -------------------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def there(gpu: Gpu, tmp_path: Path) -> Module:
    return Module(package(tmp_path, small_plan()), device="cuda")


def test_a_module_on_a_gpu_is_not_copied(there: Module):
    error = refused(lambda: copy.deepcopy(there))
    assert error.message == "a module on a GPU cannot be copied or pickled"
    assert error.remedy.startswith("a second arena would break the memory budget: save a checkpoint")
    refused(lambda: copy.copy(there))
    refused(lambda: pickle.dumps(there))
    float(there.step(*batch(), lr=0.1))


def test_losses_of_a_gpu_do_not_change_later(there: Module):
    here = Module(small_plan(), device="cpu")
    losses = [(there.step(*batch(s), lr=0.1), here.step(*batch(s), lr=0.1)) for s in range(3)]
    copies = [copy.deepcopy(mine) for mine, _ in losses]
    pickled = pickle.dumps(losses[0][0])
    for seed in range(3, 40):  # their pinned memory is used again
        there.step(*batch(seed), lr=0.1)
    for again, (_, expected) in zip(copies, losses, strict=True):
        assert float(again) == float(expected) and again.accuracy == expected.accuracy
    assert float(pickle.loads(pickled)) == float(losses[0][1])


def test_outputs_left_on_a_gpu_are_not_copied(there: Module):
    shown: Any = there.forward(batch()[0], copy=False)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        error = refused(lambda call=call: call(shown))
        assert "an output that was left on the GPU cannot be copied" in error.message
        assert "output.numpy()" in error.remedy
    there.close()
    error = refused(shown.numpy, "MBC179")
    assert "or close freed it" in error.message


def everything_of(net: Module, shown: Any, loss: Any, folder: Path) -> dict[str, Callable[[], object]]:
    """Return every call of a module that uses the GPU."""
    name = next(iter(net.states))
    return {
        "step": lambda: net.step(*batch(), lr=0.1), "forward": lambda: net.forward(batch()[0]),
        "state": lambda: net.state(name), "set_state": lambda: net.set_state(name, np.zeros(net.states[name])),
        "save": lambda: net.save(folder / "w"), "load": lambda: net.load(folder / "good"),
        "control": lambda: net.control, "canaries": net.check_canaries, "copy": lambda: copy.deepcopy(net),
        "numpy": shown.numpy, "dlpack": shown.__dlpack__, "interface": lambda: shown.__cuda_array_interface__,
        "loss": lambda: float(loss), "accuracy": lambda: loss.accuracy, "metrics": lambda: net.metrics,
    }  # fmt: skip


def test_a_forked_process_does_not_use_the_gpu(gpu: Gpu, there: Module, tmp_path: Path):
    there.save(tmp_path / "good")
    loss, shown = there.step(*batch(), lr=0.1), there.forward(batch()[0], copy=False)
    assert isinstance(shown, DeviceOutput)
    for use, call in everything_of(there, shown, loss, tmp_path).items():
        text = in_a_fork(call)
        assert text.startswith("MBC235: the module was opened on a GPU by process"), (use, text)
        assert "CUDA does not work in a forked process; start the process with" in text
    assert in_a_fork(there.close) == "None"

    def closed_at_exit() -> list[object]:
        there._opened_machine._closed()  # pyright: ignore[reportAttributeAccessIssue]
        return [FakeLibrary.instances[0].calls[-1], any(memory.freed for memory in gpu.allocations)]

    assert in_a_fork(closed_at_exit) == "['infer captured', False]"
    assert repr(there) == in_a_fork(lambda: repr(there))
    assert np.isfinite(float(loss)) and np.isfinite(shown.numpy()).all()


def test_another_thread_does_not_use_the_gpu(there: Module, tmp_path: Path):
    there.save(tmp_path / "good")
    loss, shown = there.step(*batch(), lr=0.1), there.forward(batch()[0], copy=False)
    assert isinstance(shown, DeviceOutput)
    errors: dict[str, Exception] = {}

    def use_all() -> None:
        for use, call in (*everything_of(there, shown, loss, tmp_path).items(), ("close", there.close)):
            try:
                call()
            except Exception as error:
                errors[use] = error

    thread = threading.Thread(target=use_all)
    thread.start()
    thread.join()
    assert len(errors) == 16
    for use, error in errors.items():
        assert isinstance(error, MbcError) and error.code == "MBC235", (use, error)
        assert "by another thread, whose CUDA context this thread does not have" in error.message
        assert "open it in the thread that uses it" in error.remedy
    assert np.isfinite(float(loss)) and np.isfinite(shown.numpy()).all()
