"""A module from the user's side: training, inference, states, figures, and every message."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.plan.file import dump_plan
from mbc.runtime.halves import Halves
from mbc.runtime.module import Module
from tests.runtime.nets import batch, same_shape_plan, small_plan


@pytest.fixture
def net() -> Module:
    return Module(small_plan(), device="cpu")


def code_of(call: Any, *arguments: Any, **named: Any) -> MbcError:
    with pytest.raises(MbcError) as caught:
        call(*arguments, **named)
    return caught.value


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9)", "adamw(weight_decay=0.01)"])
def test_steps_decrease_the_loss(precision: str, optimizer: str):
    net = Module(small_plan(precision, optimizer=optimizer), device="cpu")
    image, target = batch()
    losses = [float(net.step(image, target, lr=0.02)) for _ in range(30)]
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    assert net.control["step"] == 30
    assert net.control["updates"] + net.control["skipped"] == 30


def test_inputs_by_name(net: Module):
    image, target = batch()
    other = Module(small_plan(), device="cpu")
    assert float(net.step(image, target, lr=0.1)) == float(other.step(target=target, image=image, lr=0.1))


def test_the_loss_is_a_float(net: Module):
    loss = net.step(*batch(), lr=0.1)
    value = float(loss)
    assert math.isfinite(loss) and f"{loss:.3f}" == f"{value:.3f}" and repr(loss) == repr(value)
    assert loss == value and loss <= value and not loss < value and loss > value - 1
    assert (loss + 1, 1 + loss, loss - 1, 1 - loss) == (value + 1, 1 + value, value - 1, 1 - value)
    assert (loss * 2, 2 / loss, loss / 2, 2 * loss, -loss) == (value * 2, 2 / value, value / 2, 2 * value, -value)
    assert sum([loss, loss]) == 2 * value
    assert np.asarray(loss) == value and round(loss, 2) == round(value, 2) and abs(loss) == value
    assert max(loss, 0.0) is loss and hash(loss) == hash(value)


def test_figures_of_the_last_step(net: Module):
    assert net.metrics == {} and net.correct is None and net.accuracy is None
    image, target = batch()
    for _ in range(40):
        net.step(image, target, lr=0.02)
    assert net.metrics == {"accuracy": net.accuracy}
    assert net.accuracy is not None and net.accuracy >= 0.8
    assert net.correct == net.accuracy * 6


def test_forward_takes_fewer_rows(net: Module):
    image, _ = batch()
    whole = net.forward(image)
    assert isinstance(whole, np.ndarray) and whole.shape == (6, 5)
    for rows in (1, 4):
        part = net.forward(image[:rows])
        assert isinstance(part, np.ndarray) and part.shape == (rows, 5)
        np.testing.assert_allclose(part, whole[:rows], rtol=1e-5, atol=1e-6)


def test_forward_changes_no_state(net: Module):
    net.step(*batch(), lr=0.1)
    before = {name: net.state(name) for name in net.states}
    net.forward(batch(1)[0])
    for name, array in before.items():
        np.testing.assert_array_equal(array, net.state(name))


def test_states_can_be_set(net: Module):
    weight = np.arange(net.state("first.weight").size).reshape(net.states["first.weight"])
    net.set_state("first.weight", weight)
    np.testing.assert_array_equal(net.state("first.weight"), weight)


def test_a_modules_description(net: Module):
    text = repr(net)
    assert "small" in text and "batch 6, fp32, on cpu" in text and "image: fp32[6, 2, 6, 6]" in text
    assert net.memory.arena_taken == net.memory.arena_planned == small_plan().predictions.arena_bytes
    assert net.memory.overhead_taken is None
    assert net.batch == 6 and net.device == "cpu" and net.plan is small_plan()
    net.check_canaries()
    with net as same:
        assert same is net


def test_a_loss_that_is_not_finite_changes_nothing(net: Module):
    before = {name: net.state(name) for name in net.states}
    image, target = batch()
    image[0, 0, 0, 0] = np.nan
    assert math.isnan(net.step(image, target, lr=0.1))
    assert net.control["skipped"] == 1 and net.control["step"] == 1
    for name, array in before.items():
        np.testing.assert_array_equal(array, net.state(name))


def test_from_a_folder_and_from_a_file(tmp_path: Path):
    (tmp_path / "plan.json").write_text(dump_plan(small_plan()))
    image, target = batch()
    losses = [
        float(Module(subject, device="cpu").step(image, target, lr=0.1))
        for subject in (tmp_path, str(tmp_path / "plan.json"), small_plan())
    ]
    assert len(set(losses)) == 1


def test_auto_says_that_it_takes_the_cpu():
    with pytest.warns(RuntimeWarning, match="running on the CPU: a plan alone has no library") as caught:
        assert Module(small_plan()).device == "cpu"
        assert Halves(small_plan(optimizer="none")).device == "cpu"
    assert [warning.filename for warning in caught] == [__file__, __file__]


# ----------------------------------------------------------------------------------------------------- messages


def test_wrong_shapes(net: Module):
    image, target = batch()
    error = code_of(net.step, image[:, :, :5], target, lr=0.1)
    assert error.code == "MBC146"
    assert error.message == "input 'image' must have the shape [rows, 2, 6, 6], got [6, 2, 5, 6]"
    assert code_of(net.step, image, target[:, None], lr=0.1).code == "MBC146"
    assert "put the channels second" in code_of(net.step, image.transpose(0, 2, 3, 1), target, lr=0.1).remedy


def test_wrong_numbers_of_rows(net: Module):
    image, target = batch()
    error = code_of(net.step, image[:4], target[:4], lr=0.1)
    assert error.code == "MBC147" and error.message == "input 'image' has 4 rows, a step takes exactly 6"
    assert "--set batch=4" in error.remedy
    error = code_of(net.step, image, target[:4], lr=0.1)
    assert error.code == "MBC147" and "'image' has 6, 'target' has 4" in error.message
    error = code_of(net.forward, np.concatenate([image, image]))
    assert error.code == "MBC147" and "12 rows, forward takes 1 to 6" in error.message
    assert code_of(net.forward, image[:0]).code == "MBC147"


def test_wrong_types(net: Module):
    image, target = batch()
    error = code_of(net.step, (image * 9).astype(np.uint8), target, lr=0.1)
    assert error.code == "MBC148" and "'image' must hold floating-point numbers, got uint8" in error.message
    error = code_of(net.step, image, target.astype(float), lr=0.1)
    assert error.code == "MBC148" and "'target' must hold integers, got float64" in error.message
    float(net.step(image.astype(np.float64), target.astype(np.uint8), lr=0.1))


def test_labels_out_of_range(net: Module):
    image, target = batch()
    target[3] = 5
    error = code_of(net.step, image, target, lr=0.1)
    assert error.code == "MBC149" and error.message == "input 'target' has 5 at [3], outside of [0, 5)"
    assert error.remedy == "labels count from 0 to 4"
    target[3] = -1
    assert code_of(net.step, image, target, lr=0.1).code == "MBC149"


def test_what_is_not_an_array(net: Module):
    image, target = batch()
    error = code_of(net.step, image, "labels", lr=0.1)
    assert error.code == "MBC150" and "input 'target' is a str, which is not an array" in error.message
    float(net.step(image, target.tolist(), lr=0.1))


def test_arrays_on_a_gpu(net: Module):
    class Elsewhere:
        __cuda_array_interface__ = {"shape": (6, 2, 6, 6), "typestr": "<f4", "data": (1, False), "version": 3}  # noqa: RUF012

    error = code_of(net.step, Elsewhere(), batch()[1], lr=0.1)
    assert error.code == "MBC151" and "'image' is in the memory of a GPU" in error.message


def test_arrays_of_other_libraries(net: Module):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    image, target = batch()
    expected = float(Module(small_plan(), device="cpu").step(image, target, lr=0.1))
    assert float(net.step(torch.from_numpy(image), torch.from_numpy(target), lr=0.1)) == expected
    error = code_of(net.step, torch.from_numpy(image).requires_grad_(), target, lr=0.1)
    assert error.code == "MBC150" and "input 'image' cannot be read" in error.message


def test_arrays_that_are_not_contiguous_are_copied(net: Module):
    image, target = batch()
    strided = np.ascontiguousarray(image.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert float(net.step(strided, target, lr=0.1)) == float(
        Module(small_plan(), device="cpu").step(image, target, lr=0.1)
    )


def test_missing_and_unknown_inputs(net: Module):
    image, target = batch()
    for arguments, named, message in (
        ((image,), {}, "missing: target"),
        ((image, target, target), {}, "3 were passed by position"),
        ((image,), {"labels": target}, "missing: target; unknown: labels"),
        ((image, target), {"image": image}, "passed twice: image"),
    ):
        error = code_of(net.step, *arguments, lr=0.1, **named)
        assert error.code == "MBC167"
        assert error.message == f"the inputs are (image, target); {message}"


def test_unknown_devices_and_seeds():
    error = code_of(Module, small_plan(), device="tpu")
    assert error.code == "MBC167" and error.remedy == "choose one of auto, cuda, cpu"
    assert code_of(Module, small_plan(), seed=-1).code == "MBC167"
    error = code_of(Module, small_plan(), seed="x")
    assert error.code == "MBC167" and error.message == "the seed 'x' is not a whole number"
    assert Module(small_plan(), seed=np.int64(3), device="cpu").control["seed"] == 3  # pyright: ignore[reportArgumentType]


def test_learning_rates_that_are_no_numbers(net: Module):
    error = code_of(net.step, *batch(), lr=math.nan)
    assert error.code == "MBC169" and error.message == "the learning rate is nan"
    for rate, shown in (("0.1", "'0.1'"), (None, "None"), ([0.1], "[0.1]"), (-1, "-1")):
        assert code_of(net.step, *batch(), lr=rate).message == f"the learning rate is {shown}"


def test_a_closed_module_runs_nothing(net: Module):
    net.step(*batch(), lr=0.1)
    net.close()
    net.close()
    for call in (net.forward, lambda *_, **__: net.step(*batch(), lr=0.1), lambda *_: net.save("w")):
        error = code_of(call, batch()[0])
        assert error.code == "MBC230" and error.message == "the module is closed"
    assert code_of(net.state, "first.weight").code == "MBC230"
    assert net.device == "cpu" and net.memory.arena_taken


def test_states_that_do_not_exist_or_fit(net: Module):
    error = code_of(net.state, "first.weights")
    assert error.code == "MBC165" and error.remedy == "did you mean 'first.weight'?"
    error = code_of(net.set_state, "first.weight", np.zeros((2, 2)))
    assert error.code == "MBC165" and "has the shape [4, 2, 3, 3], got float64 [2, 2]" in error.message


def test_folders_without_a_plan(tmp_path: Path):
    error = code_of(Module, tmp_path, device="cpu")
    assert error.code == "MBC166" and "plan.json" in error.message and "mbc compile" in error.remedy


def test_a_plan_without_a_place_for_a_state():
    plan = small_plan()
    lacking = replace(plan, train=replace(plan.train, entry=plan.train.entry[1:]))
    error = code_of(Module, lacking, device="cpu")
    assert error.code == "MBC140" and "the plan has no buffer for" in error.message


def test_fp64_is_for_the_cpu(tmp_path: Path):
    error = code_of(Module, small_plan("fp64"), device="cuda")
    assert error.code == "MBC168" and "precision fp64 runs on the CPU only" in error.message
    with pytest.warns(RuntimeWarning, match="fp64"):
        assert Module(small_plan("fp64"), device="auto").device == "cpu"


def test_a_module_on_the_cpu_shows_the_predicted_step_of_a_gpu_except_in_fp64():
    assert "  step predicted " in repr(Module(small_plan(), device="cpu"))
    assert "  step for the CPU, 0 done" in repr(Module(small_plan("fp64"), device="cpu"))


def test_cuda_needs_a_built_package(tmp_path: Path):
    (tmp_path / "plan.json").write_text(dump_plan(small_plan()))
    error = code_of(Module, tmp_path, device="cuda")
    assert error.code == "MBC157" and "has no libmodule.so: it was not built for a GPU" in error.message


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_outputs_without_a_copy(precision: str):
    net = Module(small_plan(precision), device="cpu")
    image = batch()[0][:3]
    expected = net.forward(image)
    shown = net.forward(image, copy=False)
    assert isinstance(shown, np.ndarray) and not shown.flags.writeable
    np.testing.assert_array_equal(shown, expected)
    net.step(*batch(1), lr=0.5)
    net.forward(batch(2)[0])
    np.testing.assert_array_equal(shown, expected)


def test_an_output_feeds_its_own_module():
    net = Module(same_shape_plan(), device="cpu")
    shown = net.forward(np.ones((6, 5), np.float32), copy=False)
    np.testing.assert_array_equal(net.forward(shown), net.forward(np.array(shown)))
