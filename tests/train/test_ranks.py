"""Training on several ranks: which rows each takes, and that together they train as one does."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.compiler import compile_plans
from mbc.errors import MbcError
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from mbc.runtime.step_loss import Loss
from mbc.source import Source
from mbc.train.accuracy import inputs_of
from mbc.train.data import ArrayData, Data, open_data
from mbc.train.epoch import Epoch
from mbc.train.job import Job
from mbc.train.loader import IterableData
from mbc.train.loop import train
from mbc.train.schedule import Schedule
from mbc.train.share import Share, share_of, step_share_of, whole_batch
from mbc.train.training_checkpoint import read_progress
from tests.train.epochs import timeless
from tests.train.threads import ThreadRank, run_ranks

BATCH, CLASSES, ROWS = 8, 3, 45  # five mini-batches and five rows that are left over
SOURCE = """\
network tiny(batch = 8, classes = 3) {{
  input image[batch, 1, 6, 6] : float
  input target[batch] : class
  logits = image |> conv(4, 3, pad=1){norm} |> relu |> global_avgpool |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}}
"""


@cache
def plans_of(size: int, norm: bool = False) -> tuple[Plan, ...]:
    text = SOURCE.format(norm=" |> bn" if norm else "")
    return compile_plans(Source("tiny.mbc", text), Options(gpus=size, settings=(("train.precision", "fp64"),)))


def plan_of(size: int, rank: int, norm: bool = False) -> Plan:
    (rank_plan,) = (p for p in plans_of(size, norm) if p.graph.ranks is None or rank in p.graph.ranks.members)
    return rank_plan


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(5)
    labels = draws.integers(0, CLASSES, ROWS)
    images = draws.normal(0, 1, (ROWS, 1, 6, 6))
    images[:, 0, 0, 0] += 4 * labels
    return images, labels


States = dict[str, np.ndarray]


class Recorded(Module):
    """A module that records the images of each step."""

    fed: list[np.ndarray]

    def step(self, *inputs: Any, lr: float, **named: object) -> Loss:
        self.fed.append(inputs[0].copy())
        return super().step(*inputs, lr=lr, **named)


def trained(
    size: int, data: Data, epochs: int, *, norm: bool = False, test: Data | None = None,
    checkpoint: Path | None = None, resume: Path | None = None, fed: dict[int, list[np.ndarray]] | None = None,
    stop_after: int | None = None, schedule: Schedule | None = None, target: tuple[str, float] | None = None,
) -> list[tuple[tuple[Epoch, ...], States]]:  # fmt: skip
    """Return epochs and states of each rank. `fed` gets the images of each step.

    Rank 0 stops after `stop_after` steps.
    """

    def body(member: ThreadRank) -> tuple[tuple[Epoch, ...], States]:
        ranks = member if size > 1 else None
        net = Recorded(plan_of(size, member.rank, norm), seed=3, device="cpu", ranks=ranks)
        with net:
            net.fed = [] if fed is None else fed.setdefault(member.rank, [])
            job = Job(
                net.plan.graph, data, schedule or Schedule(0.2, epochs), test, 3,
                checkpoint if member.rank == 0 else None, resume, ranks,
                stop=lambda: member.rank == 0 and len(net.fed) == stop_after, target=target,
            )  # fmt: skip
            history = train(net, job)
            return history, {name: net.state(name) for name in net.states}

    return list(run_ranks(size, body))


def assert_same(one: States, other: States, tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("size", [2, 3])  # 4 + 4 and 3 + 3 + 2 rows
def test_ranks_take_the_rows_of_the_mini_batches_of_one(arrays, size):
    shares = [share_of(plan_of(size, rank).graph, rank) for rank in range(size)]
    assert [share.rows for share in shares] == {2: [4, 4], 3: [3, 3, 2]}[size]
    data = ArrayData(arrays)
    for epoch in (0, 1):
        alone = [*data.shuffled(whole_batch(BATCH), 7, epoch)]
        together = [[*data.shuffled(share, 7, epoch)] for share in shares]
        assert [part.whole for part in alone] == [True] * 5 + [False]
        for whole, *parts in zip(alone, *together, strict=True):
            assert {(part.rows, part.whole) for part in parts} == {(whole.rows, whole.whole)}
            for i, array in enumerate(whole.arrays):
                np.testing.assert_array_equal(np.concatenate([part.arrays[i] for part in parts]), array)


def test_each_row_is_tested_by_one_rank(arrays):
    shares = [share_of(plan_of(3, rank).graph, rank) for rank in range(3)]
    seen = [array for share in shares for _, array in ArrayData(arrays).in_order(share)]
    assert sorted(np.concatenate(seen)) == sorted(arrays[1]) and all(1 <= len(part) <= 3 for part in seen)


def test_a_rank_reads_its_own_rows_only(tmp_path):
    class Counted(np.ndarray):
        read = 0

        def __getitem__(self, chosen):  # pyright: ignore[reportIncompatibleMethodOverride]
            chosen_rows = super().__getitem__(chosen)
            Counted.read += len(np.atleast_1d(chosen_rows))
            return chosen_rows

    rows = np.arange(64.0).reshape(64, 1).view(Counted)
    assert len([*ArrayData((rows,)).shuffled(Share(16, 4, 6, 2, 8), 0, 0)]) == 4
    assert Counted.read == 8


@pytest.mark.parametrize(("size", "then"), [(1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)])
def test_several_ranks_train_as_one_and_go_on_on_another_number(arrays, tmp_path, size, then):
    data, file = ArrayData(arrays), tmp_path / "c"
    fed_alone, fed, fed_later = {}, {}, {}
    ((alone, states),) = trained(1, data, 2, test=data, fed=fed_alone)
    first = trained(size, data, 1, test=data, checkpoint=file, fed=fed)
    assert read_progress(file).batch == BATCH and read_progress(file).epochs == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    second = trained(then, data, 2, test=data, resume=file, fed=fed_later)
    # The global mini-batches are those of one rank, row by row.
    batches = [np.concatenate(parts) for part in (fed, fed_later) for parts in zip(*_in_order(part), strict=True)]
    np.testing.assert_array_equal(batches, fed_alone[0])
    for (one, _), (other, after) in itertools.product(first, second):
        for epoch, expected in zip((*one, *other), alone, strict=True):
            assert (epoch.rows, epoch.steps, epoch.dropped_rows) == (40, 5, 5)
            assert epoch.loss == pytest.approx(expected.loss, rel=1e-12)
            assert epoch.accuracy == expected.accuracy and epoch.test_accuracy == expected.test_accuracy
        assert_same(states, after, 1e-12)


class Counting(ThreadRank):
    """A group that counts how often ranks meet."""

    sums = 0

    def sum_on_host(self, array: np.ndarray) -> np.ndarray:
        self.sums += 1
        return super().sum_on_host(array)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_accumulate_meet_once_a_step(arrays, size):
    settings = (
        ("train.precision", "fp64"),
        ("train.accumulate", "2"),
        ("train.clip_norm", "0.1"),
        ("train.ema", "0.9"),
    )
    plans = {
        n: compile_plans(Source("tiny.mbc", SOURCE.format(norm="")), Options(gpus=n, settings=settings))
        for n in (1, size)
    }
    met: dict[int, int] = {}

    def body(member: ThreadRank) -> tuple[float, States]:
        counting = Counting(member.rank, member.size, member._barrier, member._parts)
        plan = next(p for p in plans[member.size] if p.graph.ranks is None or member.rank in p.graph.ranks.members)
        share = step_share_of(plan.graph, member.rank)
        with Module(plan, seed=3, device="cpu", ranks=counting if member.size > 1 else None) as net:
            assert share.rows == net.step_batch and share.batch == 2 * BATCH
            loss = 0.0
            for step in range(2):
                rows = slice(step * share.batch + share.first, step * share.batch + share.stop)
                loss = float(net.step(*(array[rows] for array in arrays), lr=0.2))
            met[member.rank] = counting.sums
            return loss, {name: net.state(name) for name in net.states}

    ((loss, states),) = run_ranks(1, body)
    for other, after in run_ranks(size, body):
        assert other == pytest.approx(loss, rel=1e-12)
        assert_same(states, after, 1e-12)
    parameters, figures = 3, 2  # loss and accuracy
    assert met == dict.fromkeys(range(size), 2 * (parameters + figures))


def _in_order(fed: dict[int, list[np.ndarray]]) -> list[list[np.ndarray]]:
    return [fed[rank] for rank in sorted(fed)]


def test_two_ranks_with_batch_norm_give_the_same_bits_at_once_and_resumed(arrays, tmp_path):
    data, file = ArrayData(arrays), tmp_path / "c"
    whole = trained(2, data, 2, norm=True, test=data)
    trained(2, data, 1, norm=True, checkpoint=file)
    resumed = trained(2, data, 2, norm=True, test=data, resume=file)
    for (history, states), (other, after) in zip(whole, resumed, strict=True):
        assert_same(states, after)
        assert history[1].loss == other[0].loss
    # Statistics, too: those of rank 0, which the checkpoint has, are everybody's after an epoch.
    assert any("mean" in name for name in whole[0][1])
    assert_same(whole[0][1], whole[1][1])
    ((_, one),) = trained(1, data, 2, norm=True)
    assert max(float(np.abs(one[name] - whole[0][1][name]).max()) for name in one) > 1e-6  # normalised by rank


@pytest.mark.parametrize("of_function", [False, True])
def test_two_ranks_that_were_stopped_within_an_epoch_end_with_the_same_bits(arrays, tmp_path, of_function):
    data, file = iterable(arrays) if of_function else ArrayData(arrays), tmp_path / "c"
    whole = trained(2, data, 2, norm=True, test=data)
    with pytest.raises(KeyboardInterrupt):
        trained(2, data, 2, norm=True, test=data, checkpoint=file, stop_after=7)
    running = read_progress(file).running
    assert running is not None and running.steps == 2
    resumed = trained(2, data, 2, norm=True, test=data, resume=file)
    for (history, states), (other, after) in zip(whole, resumed, strict=True):
        assert_same(states, after)
        assert timeless(history[1]) == timeless(other[0])


def test_all_ranks_come_to_a_plateau_after_the_same_epoch(arrays):
    data = ArrayData(arrays)
    schedule = Schedule(1e-5, 4, "plateau", patience=0, factor=0.5, metric="test-accuracy")
    ((alone, _),) = trained(1, data, 4, test=data, schedule=schedule)
    rates = [epoch.learning_rate for epoch in alone]
    assert rates[0] > rates[-1]
    for history, _ in trained(2, data, 4, test=data, schedule=schedule):
        assert [epoch.learning_rate for epoch in history] == rates


def test_all_ranks_end_at_a_target_after_the_same_epoch(arrays, tmp_path):
    data = ArrayData(arrays)
    (whole, _), _ = trained(2, data, 4, test=data)
    assert whole[0].loss > whole[1].loss
    aim = ("loss", whole[1].loss)
    for history, _ in trained(2, data, 4, test=data, target=aim, checkpoint=tmp_path / "c"):
        assert [timeless(epoch) for epoch in history] == [timeless(epoch) for epoch in whole[:2]]
    assert all(history == () for history, _ in trained(2, data, 4, test=data, target=aim, resume=tmp_path / "c"))


def iterable(arrays, size=2, **options):
    """Return data of a function that yields the rows in batches of 7, unless `options` has another function."""
    images, labels = arrays

    def batches(epoch):
        for start in range(0, ROWS, 7):
            yield images[start : start + 7], labels[start : start + 7]

    return IterableData(options.get("function", batches), inputs_of(plan_of(size, 0).graph), "test")


def test_functions_that_yield_the_rows_of_all(arrays):
    data = iterable(arrays)
    assert data.common
    ((alone, states),) = trained(1, data, 1, test=data)
    for history, of_rank in trained(2, data, 1, test=data):
        assert_same(states, of_rank, 1e-12)
        assert (history[0].steps, history[0].dropped_rows) == (5, 5)
        assert history[0].test_accuracy == alone[0].test_accuracy


def test_functions_that_yield_the_rows_of_a_rank(arrays):
    images, labels = arrays

    def batches(rank, ranks):  # the last mini-batch of rank 0 is whole, but that of rank 1 is not
        chosen = [row for row in range(ROWS - 2) if row % BATCH // 4 == rank]
        assert ranks in (1, 2)
        yield images[chosen], labels[chosen]

    data = iterable(arrays, function=batches)
    assert not data.common
    whole = ArrayData((images[:40], labels[:40]))
    shares = [share_of(plan_of(2, rank).graph, rank) for rank in range(2)]
    parts = [[*data.shuffled(share, 0, 0)] for share in shares]
    assert [[part.rows for part in of_rank] for of_rank in parts] == [[4] * 5 + [3], [4] * 5]
    for history, _ in trained(2, data, 1, test=data):
        assert (history[0].steps, history[0].dropped_rows) == (5, 3)
    assert sum(len(array) for share in shares for _, array in data.in_order(share)) == ROWS - 2
    for expected, *of_ranks in zip(whole.in_order(whole_batch(BATCH)), *parts, strict=False):
        np.testing.assert_array_equal(np.concatenate([part.arrays[0] for part in of_ranks]), expected[0])


def test_functions_that_yield_other_rows_on_another_rank(arrays, monkeypatch):
    images, labels = arrays
    turn = iter(range(100))

    def shuffled():  # every call yields another order
        order = np.random.default_rng(next(turn)).permutation(ROWS)
        yield images[order], labels[order]

    with pytest.raises(MbcError, match="mini-batch 1 of the epoch differs between ranks") as caught:
        trained(2, iterable(arrays, function=shuffled), 1)
    assert caught.value.code == "MBC283" and "take `rank` and `ranks`" in caught.value.remedy


def test_functions_that_yield_fewer_rows_on_another_rank(arrays):
    images, labels = arrays
    lengths = iter((24, 16))

    def shorter():
        rows = next(lengths)
        yield images[:rows], labels[:rows]

    with pytest.raises(
        MbcError, match=r"the ranks' data differ in their number of rows: in mini-batch 3 rank . has (8|0), rank . has"
    ) as caught:
        trained(2, iterable(arrays, function=shorter), 1)
    assert caught.value.code == "MBC282"


def test_too_few_rows_for_all(arrays):
    data = ArrayData((arrays[0][:7], arrays[1][:7]))
    with pytest.raises(MbcError, match="the data hold 7 rows, fewer than one mini-batch of 8") as caught:
        trained(2, data, 1)
    assert caught.value.code == "MBC177"


@pytest.mark.parametrize("norm", [False, True])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(arrays, norm):
    images, labels = (array.copy() for array in arrays)
    images[3] = np.inf
    (first, states), (second, others) = trained(2, ArrayData((images, labels)), 2, norm=norm)
    for one, other in zip(first, second, strict=True):
        assert timeless(one) == timeless(other)
        assert (one.bad_steps, one.overflowed_steps) == (1 if one.first_bad_step else 0, 0)
    assert sum(epoch.bad_steps for epoch in first) >= 1
    assert_same(states, others)


def test_all_ranks_find_that_a_training_has_diverged(arrays):
    images, labels = (array.copy() for array in arrays)
    images[::9] = np.inf

    def body(member: ThreadRank) -> str:
        with Module(plan_of(2, member.rank), device="cpu", ranks=member) as net, pytest.raises(MbcError) as caught:
            train(net, Job(net.plan.graph, ArrayData((images, labels)), Schedule(0.2, 3), group=member))
        return str(caught.value)

    one, other = run_ranks(2, body)
    assert one == other and "MBC231: the training diverged in epoch 1: " in one


def test_divergence_is_everybodys(arrays):
    images, labels = arrays
    with pytest.raises(MbcError, match="no loss of epoch 1 is finite") as caught:
        trained(2, ArrayData((np.full_like(images, np.nan), labels)), 1)
    assert caught.value.code == "MBC178"


def test_a_plan_for_another_number_of_ranks_is_refused(arrays):
    for size, planned, words in (
        (2, 1, "the plan is for one GPU, but 2 processes were started"),
        (3, 2, "the plan is for 2 GPUs that share each mini-batch, but 3 processes were started"),
    ):
        with pytest.raises(MbcError, match=words) as caught:
            run_ranks(size, lambda member, planned=planned: Module(plan_of(planned, 0), device="cpu", ranks=member))
        assert caught.value.code == "MBC281"


def test_a_folder_is_read_as_needed(arrays, tmp_path):
    np.save(tmp_path / "images.npy", arrays[0])
    np.save(tmp_path / "labels.npy", arrays[1])
    data = open_data(str(tmp_path), inputs_of(plan_of(2, 0).graph))
    assert isinstance(data, ArrayData) and all(isinstance(array, np.memmap) for array in data.arrays)
    assert_same(trained(2, data, 1)[1][1], trained(2, ArrayData(arrays), 1)[0][1])


# Wide enough for its optimizer states to be sharded.
WIDE = SOURCE.replace("conv(4, 3, pad=1){norm}", "conv(70, 3, pad=1) |> conv(64, 3, pad=1)") + (
    "train {{ optimizer = adamw  shard_optimizer = true }}"
)


@cache
def sharded_plan(size: int) -> Plan:
    settings = (("train.precision", "fp64"), ("batch", "6"))
    (plan,) = compile_plans(Source("wide.mbc", WIDE.format()), Options(gpus=size, settings=settings))
    return plan


def sharded(
    size: int, data: Data, checkpoint: Path, resume: Path | None = None, stop_after: int | None = None
) -> list[tuple[tuple[Epoch, ...] | None, States]]:
    """Return epochs and states of each rank after two epochs, or after rank 0 has stopped them."""

    def body(member: ThreadRank) -> tuple[tuple[Epoch, ...] | None, States]:
        ranks = member if size > 1 else None
        with Recorded(sharded_plan(size), seed=3, device="cpu", ranks=ranks) as net:
            net.fed = []
            job = Job(
                net.plan.graph, data, Schedule(0.01, 2), None, 3, checkpoint if member.rank == 0 else None, resume,
                ranks, checkpoint_every=4, best=checkpoint.with_suffix(".best") if member.rank == 0 else None,
                stop=lambda: len(net.fed) == stop_after,  # the same on all ranks
            )  # fmt: skip
            assert job.is_sharded is (size > 1)
            try:
                history = train(net, job)
            except KeyboardInterrupt:
                history = None
            return history, {name: net.state(name) for name in net.states}

    return list(run_ranks(size, body))


def test_sharded_states_are_saved_whole_and_go_on(arrays, tmp_path):
    data = ArrayData(arrays)
    whole = sharded(2, data, tmp_path / "whole")
    assert all(history is not None and len(history) == 2 for history, _ in whole)
    assert (tmp_path / "whole.best").exists()
    for _, states in whole[1:]:
        assert_same(whole[0][1], states)
    stopped = sharded(2, data, tmp_path / "stopped", stop_after=9)
    assert [history for history, _ in stopped] == [None, None]
    assert read_progress(tmp_path / "stopped").steps_in_all == 9
    for size in (1, 2, 3):
        resumed = sharded(size, data, tmp_path / "resumed", resume=tmp_path / "stopped")
        assert_same(whole[0][1], resumed[0][1], 0.0 if size == 2 else 1e-9)
