"""Metrics that a source names: in steps, epochs, logs and tests, and equal for one rank and several."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan, compile_plans
from mbc.errors import MbcError
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.plan.verify_ranks import verify_ranks
from mbc.runtime.module import Module
from mbc.source import Source
from mbc.train.data import ArrayData
from mbc.train.evaluation import evaluate_on
from mbc.train.job import Job
from mbc.train.logs import Logs
from mbc.train.loop import train
from mbc.train.schedule import Schedule
from mbc.train.training_checkpoint import read_progress
from tests.train.threads import run_ranks

SOURCE = """network measured(batch = 6) {
  input x[batch, 5] : float
  input t[batch] : class
  h = x |> linear(8) |> relu
  logits = h |> linear(4)
  output logits
  smooth = (logits, t) |> softmax_cross_entropy(smoothing=0.1)
  loss smooth
  metric top2 = (logits, t) |> top_k(2)
  metric entropy = (logits, t) |> softmax_cross_entropy
  metric hidden = 0.5 * ((h, 0 * h) |> l1) + ((logits, t) |> top_k(1))
}
"""
PIXELS = """network pixels(batch = 6) {
  input x[batch, 3, 4, 4] : float
  input t[batch, 4, 4] : class
  logits = x |> conv(8, 3, pad=1) |> relu |> conv(4, 1)
  output logits
  loss (logits, t) |> softmax_cross_entropy(ignore_index=255, class_weights=(1, 2, 1, 0.5))
  loss (logits, t) |> dice(ignore_index=255)
  metric top2 = (logits, t) |> top_k(2, ignore_index=255)
  metric iou = (logits, t) |> mean_iou(ignore_index=255)
  metric dice = (logits, t) |> dice(ignore_index=255)
  metric batch = (logits, t) |> dice(ignore_index=255, batch=true)
  metric joined = (logits, t) |> dice(ignore_index=255, cross_entropy=2)
  metric entropy = (logits, t) |> softmax_cross_entropy(ignore_index=255, class_weights=(1, 2, 1, 0.5))
  metric good = 2 * ((logits, t) |> mean_iou(ignore_index=255)) - ((logits, t) |> dice(ignore_index=255))
}
"""


@functools.cache
def plans(gpus: int = 1, precision: str = "fp64", text: str = SOURCE) -> tuple[Plan, ...]:
    source, settings = Source("net.mbc", text), (("train.precision", precision),)
    if gpus == 1:
        return (compile_plan(source, Options(gpu="h200", settings=settings)),)
    return compile_plans(source, Options(gpu="h200", gpus=gpus, settings=settings))


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(count, 5)), random.integers(0, 4, count).astype(np.int32)


def entropy(logits: np.ndarray, t: np.ndarray) -> float:
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return float(-np.log(p[np.arange(len(t)), t]).mean())


def test_a_step_reports_them_by_name() -> None:
    x, t = rows(6)
    with Module(plans()[0], seed=1, device="cpu") as net:
        assert net.metrics == {}
        logits = net.forward(x)
        assert isinstance(logits, np.ndarray)
        loss = net.step(x, t, lr=0.1)
        assert list(net.metrics) == ["accuracy", "top2", "entropy", "hidden"]
        assert loss.metrics == net.metrics and loss.accuracy == net.accuracy == net.metrics["accuracy"]
        assert net.correct == net.metrics["accuracy"] * 6
        best = np.argsort(-logits, 1)
        assert net.metrics["top2"] == pytest.approx((best[:, :2] == t[:, None]).any(1).mean())
        assert net.metrics["entropy"] == pytest.approx(entropy(logits, t), rel=1e-12)
        weight, bias = (np.asarray(net.state(name)) for name in ("linear0.weight", "linear0.bias"))
        assert weight.shape == (8, 5) and bias.shape == (8,)


def test_training_tells_and_logs_them(tmp_path: Path) -> None:
    plan = plans()[0]
    data, test = ArrayData(rows(30)), ArrayData(rows(20))
    job = Job(plan.graph, data, Schedule(0.1, 2), test, checkpoint=tmp_path / "w.safetensors", interval=2)
    with Module(plan, seed=1, device="cpu") as net, Logs(tmp_path / "log.jsonl", tensorboard=None) as logs:
        history = train(net, job, on_epoch=logs.write, on_interval=logs.write)
        logits = np.concatenate([net.forward(rows(20)[0][i : i + 6]) for i in range(0, 20, 6)])
    last = history[-1]
    assert list(last.metrics) == ["top2", "entropy", "hidden"]
    assert last.metrics["entropy"] < history[0].metrics["entropy"]
    # `hidden` is of a value that is no output.
    assert list(last.test_metrics) == ["top2", "entropy"]
    assert last.test_metrics["entropy"] == pytest.approx(entropy(logits, rows(20)[1]), rel=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == [
        "interval",
        "interval",
        "epoch",
        "interval",
        "interval",
        "interval",
        "epoch",
    ]
    assert lines[-1]["test_top2"] == last.test_metrics["top2"] and lines[-1]["hidden"] == last.metrics["hidden"]
    assert all({"top2", "entropy", "hidden"} <= line.keys() for line in lines)


def test_an_epoch_that_was_broken_off_keeps_their_sums(tmp_path: Path) -> None:
    plan, file = plans()[0], tmp_path / "w.safetensors"
    job = Job(plan.graph, ArrayData(rows(30)), Schedule(0.1, 1), checkpoint=file)
    with Module(plan, seed=1, device="cpu") as net:
        whole = train(net, job)
    taken: list[int] = []
    with Module(plan, seed=1, device="cpu") as net, pytest.raises(KeyboardInterrupt):
        train(net, replace(job, stop=lambda: len(taken) == 2), on_step=lambda now: taken.append(now.steps))
    running = read_progress(file).running
    assert running is not None and set(running.metric_sums) == {"top2", "entropy", "hidden"}
    with Module(plan, seed=2, device="cpu") as net:
        resumed = train(net, replace(job, resume=file))
    assert resumed[0].metrics == whole[0].metrics


def test_ranks_report_those_of_the_whole_mini_batch() -> None:
    batch, together = rows(6), plans(3)
    verify_ranks(together)
    with Module(plans()[0], seed=1, device="cpu") as net:
        net.step(*batch, lr=0.1)
        alone, tested = net.metrics, evaluate_on(net, plans()[0].graph, ArrayData(rows(20)))

    def body(member):
        plan = together[0]
        with Module(plan, seed=1, device="cpu", ranks=member) as net:
            first = 2 * member.rank
            net.step(*(array[first : first + 2] for array in batch), lr=0.1)
            return net.metrics, evaluate_on(net, plan.graph, ArrayData(rows(20)), member)

    for metrics, on_test in run_ranks(3, body):
        assert metrics == pytest.approx(alone, rel=1e-12)
        assert on_test.accuracy == tested.accuracy
        assert on_test.metrics == pytest.approx(tested.metrics, rel=1e-6)


def pixels(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images and targets; the last image has only ignored positions, so that ranks count different numbers."""
    random = np.random.default_rng(1)
    target = random.choice([0, 1, 2, 3, 255], (count, 4, 4)).astype(np.int32)
    target[-1] = 255
    return random.normal(size=(count, 3, 4, 4)), target


def expected(logits: np.ndarray, t: np.ndarray) -> dict[str, float]:
    """Return the metrics over all positions at once."""
    counts, best = t != 255, logits.argmax(1)
    ranked = np.argsort(-logits, 1)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    weights = np.array((1, 2, 1, 0.5))[np.where(counts, t, 0)] * counts
    own = np.take_along_axis(p, np.where(counts, t, 0)[:, None], 1)[:, 0]
    iou, dice, batch = [], [], []
    for c in range(4):
        predicted, wanted = (best == c) & counts, t == c
        iou.append((predicted & wanted).sum() / (predicted | wanted).sum())
        share = p[:, c] * counts
        dice.append(1 - (2 * (share * wanted).sum((1, 2)) + 1) / (share.sum((1, 2)) + wanted.sum((1, 2)) + 1))
        batch.append(1 - (2 * (share * wanted).sum() + 1) / (share.sum() + wanted.sum() + 1))
    return {
        "batch": float(np.mean(batch)),
        "joined": float(np.mean(dice) - 2 * np.log(own[counts]).mean()),
        "top2": float((ranked[:, :2] == t[:, None]).any(1)[counts].mean()),
        "iou": float(np.mean(iou)),
        "dice": float(np.mean(dice)),
        "entropy": float(-(np.log(own) * weights).sum() / weights.sum()),
    }


@pytest.mark.parametrize("gpus", [1, 3])
def test_those_over_positions_that_count_are_of_the_whole_mini_batch_and_of_all_test_data(gpus: int) -> None:
    together, batch = plans(gpus, text=PIXELS), pixels(6)
    tested = ArrayData(pixels(20))
    if gpus > 1:
        verify_ranks(together)
    with Module(plans(text=PIXELS)[0], seed=1, device="cpu") as net:
        before = expected(np.asarray(net.forward(batch[0])), batch[1])
        net.step(*batch, lr=0.1)
        x, t = pixels(20)
        test = expected(np.concatenate([np.asarray(net.forward(x[i : i + 5])) for i in range(0, 20, 5)]), t)

    def body(member=None):
        with Module(together[0], seed=1, device="cpu", ranks=member) as net:
            first, rows = (0, 6) if member is None else (2 * member.rank, 2)
            net.step(*(array[first : first + rows] for array in batch), lr=0.1)
            return net.metrics, evaluate_on(net, together[0].graph, tested, member).metrics

    for metrics, on_test in [body()] if gpus == 1 else run_ranks(3, body):
        for name, value in before.items():
            assert metrics[name] == pytest.approx(value, rel=1e-12), name
        assert {name: on_test[name] for name in test} == pytest.approx(test, rel=1e-5)


def test_the_best_epoch_and_a_plateau_go_by_them(tmp_path: Path) -> None:
    plan, file = plans(text=PIXELS)[0], tmp_path / "w.safetensors"
    data = ArrayData(pixels(12))
    job = Job(plan.graph, data, Schedule(0.1, 3), data, checkpoint=file, best=tmp_path / "best")
    for name, rises in (("iou", True), ("test-iou", True), ("dice", False), ("test-entropy", False), ("good", True)):
        by = job.criterion(name)
        assert by.name == name and by.rises is rises
    with Module(plan, seed=1, device="cpu") as net:
        history = train(net, replace(job, best_metric="test-iou"))
    best = max(history, key=lambda epoch: epoch.test_metrics["iou"])
    kept = read_progress(tmp_path / "best")
    assert kept.best is not None and (kept.best.metric, kept.epochs) == ("test-iou", best.epoch)
    assert kept.best.value == best.test_metrics["iou"]
    schedule = Schedule(0.1, 4, "plateau", metric="dice", patience=0, factor=0.5)
    with Module(plan, seed=1, device="cpu") as net:
        history = train(net, replace(job, schedule=schedule, checkpoint=file))
    lowest, rates, rate = np.inf, [], 0.1
    for epoch in history:
        rates.append(rate)
        if epoch.metrics["dice"] >= lowest * (1 - 1e-4):
            rate *= 0.5
        lowest = min(lowest, epoch.metrics["dice"])
    assert [epoch.learning_rate for epoch in history] == pytest.approx(rates)
    assert read_progress(file).plateau.metric == "dice"


def test_a_metric_that_epochs_cannot_be_compared_by() -> None:
    plan = plans()[0]
    job = Job(plan.graph, ArrayData(rows(6)), Schedule(0.1, 1), ArrayData(rows(6)))
    for name, message in (
        ("hidden", "one part of the sum 'hidden' should rise and another should fall"),
        ("test-hidden", "'test-hidden' is not available: 'hidden' needs more than outputs and inputs"),
        (
            "top3",
            "'top3' is not available\nhelp: use one of loss, accuracy, test-accuracy, top2, entropy, hidden, test-to",
        ),
    ):
        with pytest.raises(MbcError, match=message) as no:
            job.criterion(name)
        assert no.value.code == "MBC237"
    with pytest.raises(MbcError, match="'test-top2' is not available: there are no test data") as no:
        replace(job, test=None).criterion("test-top2")
    assert no.value.code == "MBC237"
