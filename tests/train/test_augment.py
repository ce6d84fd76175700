"""Trainings on images of bytes: equal when resumed, divided among ranks or into micro-batches, and read from files."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan, compile_plans
from mbc.errors import MbcError
from mbc.ir.types import DType, Layout
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.plan.prefetch import prefetch_bytes
from mbc.plan.verify import verify_plan
from mbc.runtime.module import Module
from mbc.source import Source
from mbc.train.accuracy import inputs_of
from mbc.train.data import ArrayData, open_data
from mbc.train.job import Job
from mbc.train.loop import train
from mbc.train.schedule import Schedule
from tests.train.threads import run_ranks

BATCH = 10  # of three ranks the first has four rows, the others three
SOURCE = """network photos(batch = 10) {
  input photo[batch, 12, 10, 3] : uint8
  input label[batch] : class
  x = photo |> augment(crop=8, flip=true, order=hwc, brightness=0.4, saturation=0.2, mean=(0.5,), std=(0.25,)%s)
  x = x |> conv(6, 3, pad=1) |> relu |> conv(4, 3, pad=1, stride=2, bias=true) |> relu
  logits = x |> flatten |> linear(4)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""


@functools.cache
def plans(size: int = 1, precision: str = "fp64", more: str = "", micro_batch: int = 0) -> tuple[Plan, ...]:
    source, settings = Source("net.mbc", SOURCE % more), (("train.precision", precision),)
    options = Options(gpu="h200", gpus=size, settings=settings, micro_batch=micro_batch)
    return compile_plans(source, options) if size > 1 else (compile_plan(source, options),)


def rows(count: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(count)
    return draws.integers(0, 256, (count, 12, 10, 3), np.uint8), draws.integers(0, 4, count)


def losses(plan: Plan, seed: int = 3, steps: int = 4) -> list[float]:
    with Module(plan, seed=seed, device="cpu") as net:
        return [float(net.step(*rows(), lr=0.05)) for _ in range(steps)]


@pytest.mark.parametrize("more", ["", ", scale=(0.3, 1)"])
def test_the_seed_decides_the_draws(more: str) -> None:
    plan = plans(more=more)[0]
    history = losses(plan)
    assert history == losses(plan) and history != losses(plan, seed=4)
    with Module(plan, seed=3, device="cpu") as net:
        # The same images and weights: what differs from step to step is drawn.
        assert len({float(net.step(*rows(), lr=1e-12)) for _ in range(4)}) == 4


def test_a_training_is_resumed_with_the_images_that_it_would_have_seen(tmp_path: Path) -> None:
    plan, file = plans(precision="fp32")[0], tmp_path / "w.safetensors"
    job = Job(plan.graph, ArrayData(rows(40)), Schedule(0.05, 2), checkpoint=file, seed=5)
    with Module(plan, seed=5, device="cpu") as net:
        whole = train(net, job)
        states = net.state_dict()
    taken: list[int] = []
    with Module(plan, seed=5, device="cpu") as net, pytest.raises(KeyboardInterrupt):
        train(net, replace(job, stop=lambda: len(taken) == 6), on_step=lambda now: taken.append(now.steps))
    with Module(plan, seed=9, device="cpu") as net:
        resumed = train(net, replace(job, resume=file))
        assert resumed[-1].loss == whole[-1].loss
        for name, array in net.state_dict().items():
            np.testing.assert_array_equal(array, states[name])


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_see_the_images_that_one_would(size: int) -> None:
    def body(member):
        (plan,) = (p for p in plans(size) if p.graph.ranks is not None and member.rank in p.graph.ranks.members)
        ranks = plan.graph.ranks
        assert ranks is not None
        first = ranks.first_row(member.rank)
        own = tuple(array[first : first + ranks.rows[member.rank]] for array in rows())
        with Module(plan, seed=3, device="cpu", ranks=member) as net:
            return [float(net.step(*own, lr=0.05)) for _ in range(4)]

    expected = losses(plans()[0])
    for rank_losses in run_ranks(size, body):
        assert rank_losses == pytest.approx(expected, rel=1e-12)


def test_micro_batches_see_them_too() -> None:
    divided = plans(micro_batch=4)[0]
    verify_plan(divided)
    assert losses(divided) == pytest.approx(losses(plans()[0]), rel=1e-12)


def test_inference_is_of_the_centre_and_the_same_every_time() -> None:
    image, _ = rows()
    with Module(plans()[0], seed=3, device="cpu") as net:
        outputs = np.asarray(net.forward(image))
        np.testing.assert_array_equal(outputs, net.forward(image))
        around = image.copy()
        around[:, :2], around[:, 10:], around[:, :, :1], around[:, :, 9:] = 0, 0, 0, 0
        np.testing.assert_array_equal(outputs, net.forward(around))
        np.testing.assert_array_equal(outputs[:3], net.forward(image[:3]))


def test_bytes_are_counted_as_bytes() -> None:
    plan = plans(precision="bf16")[0]
    photos = {(b.dtype, b.layout, b.size_bytes) for b in plan.buffers if b.value == "photo"}
    assert photos == {(DType.UINT8, Layout.CHANNELS_FIRST, BATCH * 12 * 10 * 3)}
    assert prefetch_bytes(plan) == 3840 + 256  # 3,600 and 40, each up to a multiple of 256
    used = {op.kind for op in plan.graph.infer}
    assert "centre_crop" in used and "augment" not in used
    assert sum(op.kind == "augment" for op in plan.graph.train) == 1


def test_requirements_on_the_input(tmp_path: Path) -> None:
    plan, (image, label) = plans()[0], rows()
    with Module(plan, seed=3, device="cpu") as net:
        for wrong, code, message in (
            (image.astype(np.float32) / 255, "MBC148", "input 'photo' must hold bytes, got float32"),
            (image.astype(np.int64), "MBC148", "input 'photo' must hold bytes, got int64"),
            (np.moveaxis(image, -1, 1), "MBC146", "input 'photo' must have the shape"),
        ):
            with pytest.raises(MbcError, match=message) as no:
                net.step(wrong, label, lr=0.1)
            assert no.value.code == code
    inputs = inputs_of(plan.graph)
    for wrong, code, message, remedy in (
        (image.astype(np.float32), "MBC176", "float32, but input 'photo' needs bytes", "give pixels from 0 to 255"),
        (np.moveaxis(image, -1, 1), "MBC175", "input 'photo' needs rows of the shape", "write augment(order=chw, …)"),
    ):
        np.savez(tmp_path / "d.npz", images=wrong, labels=label)
        with pytest.raises(MbcError, match=message) as no:
            open_data(str(tmp_path / "d.npz"), inputs)
        assert no.value.code == code and remedy in no.value.remedy
    np.savez(tmp_path / "d.npz", images=image, labels=label)
    assert open_data(str(tmp_path / "d.npz"), inputs).rows == BATCH
