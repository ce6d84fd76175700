"""Targets other than plain class numbers: ignored positions and probabilities, from the source to the accuracy."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from mbc.source import Source
from mbc.train.accuracy import inputs_of
from mbc.train.data import ArrayData, open_data
from mbc.train.evaluation import evaluate_on

PIXELS = """network pixels(batch = 4) {
  input image[batch, 3, 4, 4] : float
  input mask[batch, 4, 4] : class
  logits = image |> conv(3, 1)
  output logits
  loss (logits, mask) |> softmax_cross_entropy(ignore_index=255, class_weights=(1, 2, 0.5))
}
"""
MIXED = """network mixed(batch = 4) {
  input image[batch, 3] : float
  input target[batch, 5] : float
  logits = image |> linear(5)
  output logits
  loss (logits, target) |> softmax_cross_entropy(smoothing=0.1)
}
"""


@functools.cache
def plan(source: str, precision: str = "fp32") -> Plan:
    return compile_plan(Source("net.mbc", source), Options(gpu="h200", settings=(("train.precision", precision),)))


def pixels(rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    mask = random.integers(0, 3, (rows, 4, 4))
    mask[:, 1] = 255
    return random.normal(size=(rows, 3, 4, 4)).astype(np.float32), mask


def test_positions_that_are_ignored_count_nowhere() -> None:
    image, mask = pixels(6)
    with Module(plan(PIXELS), device="cpu") as net:
        logits = net.forward(image[:4])
        assert isinstance(logits, np.ndarray)
        right = logits.argmax(1) == mask[:4]
        loss = net.step(image[:4], mask[:4], lr=0.0)
        assert net.accuracy == pytest.approx(right.sum() / (mask[:4] != 255).sum())
        image[:4, :, 1] += 100
        other = net.step(image[:4], mask[:4], lr=0.0)
        assert float(loss) == float(other)
        tested = evaluate_on(net, plan(PIXELS).graph, ArrayData((image, mask))).accuracy
        right = np.concatenate([net.forward(image[:4]), net.forward(image[4:])]).argmax(1) == mask
        assert tested == right.sum() / (mask != 255).sum()


def test_a_step_in_which_no_position_counts_changes_nothing() -> None:
    image, mask = pixels(4)
    with Module(plan(PIXELS), device="cpu") as net:
        before = net.state_dict()
        assert np.isnan(float(net.step(image, np.full_like(mask, 255), lr=0.1)))
        assert net.control["skipped"] == 1
        for name, array in net.state_dict().items():
            np.testing.assert_array_equal(array, before[name])


def test_other_numbers_than_the_ignored_one_are_refused(tmp_path) -> None:
    image, mask = pixels(4)
    mask[2, 3, 1] = 3
    with Module(plan(PIXELS), device="cpu") as net, pytest.raises(MbcError) as error:
        net.step(image, mask, lr=0.1)
    assert (error.value.code, error.value.message) == (
        "MBC149", "input 'mask' has 3 at [2, 3, 1], outside of [0, 3)",
    )  # fmt: skip
    np.savez(tmp_path / "data.npz", image=image, mask=mask)
    with pytest.raises(MbcError, match=r"has class 3 at \[2, 3, 1\]: the network has 3 classes") as error:
        open_data(str(tmp_path / "data.npz"), inputs_of(plan(PIXELS).graph))
    assert error.value.code == "MBC232"
    mask[2, 3, 1] = 255
    np.savez(tmp_path / "data.npz", image=image, mask=mask)
    open_data(str(tmp_path / "data.npz"), inputs_of(plan(PIXELS).graph))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accuracy_with_probabilities_is_of_the_most_probable_class(precision: str) -> None:
    random = np.random.default_rng(1)
    image = random.normal(size=(8, 3)).astype(np.float32)
    target = random.dirichlet(np.ones(5), 8).astype(np.float32)
    mixed_plan = plan(MIXED, precision)
    with Module(mixed_plan, device="cpu") as net:
        logits = np.concatenate([net.forward(image[:4]), net.forward(image[4:])])
        right = logits.argmax(1) == target.argmax(1)
        net.step(image[:4], target[:4], lr=0.0)
        assert net.accuracy == right[:4].mean()
        assert evaluate_on(net, mixed_plan.graph, ArrayData((image, target))).accuracy == right.mean()
